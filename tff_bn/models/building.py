"""Builds models by name and checks them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import inspect
from typing import Any, Optional

import keras
import numpy as np

from tff_bn.catalog import datasets
from tff_bn.catalog import models
from tff_bn.catalog import tasks
from tff_bn.catalog import value_types
from tff_bn.common import checks
from tff_bn.common import spelling
from tff_bn.common import user_functions
from tff_bn.keras_model import freezing
from tff_bn.layers import discovery
from tff_bn.models import projection_head
from tff_bn.position_aware import position_encodings


def build_model_fn(
    name: str,
    input_shape: tuple[int, ...],
    num_outputs: int,
    normalization: str = 'batch',
    precision: str = 'float32',
    batch_norm_momentum: Optional[float] = None,
    pan: str = 'off',
    pan_amplitude: Optional[float] = None,
    pan_period: float = 1.0,
    pan_personal_share: float = 0.0,
    moon_projection: Optional[int] = None,
    frozen_layers: Optional[str] = None,
    *,
    task: str = tasks.CLASSIFICATION,
    category_counts: Optional[Mapping[int, int]] = None,
) -> Callable[[], keras.Model]:
  """Returns a function that builds untrained models.

  A model is built here once to find errors early.

  Args:
    name: A key of `tff_bn.catalog.models.MODELS`, or `package.module:NAME` for
      your own: a function, or a `tff_bn.catalog.models.Model`. The function is
      called as `function(input_shape, num_outputs)`, and with
      `normalization=...` if it has such a parameter, and returns a model with
      logits as output, or plain numbers for a regression.
    input_shape: The shape of one sample.
    num_outputs: The number of outputs: of classes, labels or targets, or 1 for
      a binary task. In a segmentation, each pixel has as many.
    normalization: A key of `tff_bn.catalog.models.NORMALIZATIONS`, or
      `group<N>`. A user's function may accept other values.
    precision: A key of `tff_bn.catalog.models.PRECISIONS`: the default dtype
      policy of the layers.
    batch_norm_momentum: The momentum of the running statistics of all batch
      normalization layers. Default: the model's momentum.
    pan: `'add'` or `'multiply'` for position encodings in all hidden layers
      (see `tff_bn.add_position_encodings`), `'off'` for none.
    pan_amplitude: The amplitude of the encodings. Default: 0.05 to add, 0.1 to
      multiply.
    pan_period: The period of the encodings.
    pan_personal_share: The share of the units of each hidden layer with
      personal encodings; see `tff_bn.layers.PositionEncoding`.
    moon_projection: The number of outputs of MOON's projection head, two dense
      layers before the last layer. Default: no head.
    frozen_layers: A regular expression for layers that are not trained, see
      `tff_bn.freeze_layers`. Default: all layers are trained.
    task: A key of `tff_bn.catalog.tasks.TASKS`. It decides the shape of the
      model's output.
    category_counts: The position of each feature of a sample that is the number
      of a category, and how many categories it has: `category_counts` of a
      dataset's `table`. Default: there are none.

  Returns:
    A function without arguments that returns a new `keras.Model`.

  Raises:
    TypeError: If `name` is no text, or `input_shape` no shape.
    ValueError: If the model is unknown or does not fit the data or another
      argument.
  """
  checks.check_type('name', name, str, 'be the name of a model')
  checks.check_type(
      'input_shape',
      input_shape,
      Sequence,
      'be the shape of an example, such as (28, 28, 1)',
  )
  for size in input_shape:
    value_types.POSITIVE_INTEGER.check('a size in input_shape', size)
  value_types.POSITIVE_INTEGER.check('num_outputs', num_outputs)
  check_task(task)
  # Keras takes no integers of NumPy.
  input_shape = tuple(int(size) for size in input_shape)
  num_outputs = int(num_outputs)
  build = _builder(
      name, input_shape, num_outputs, normalization, task, category_counts
  )
  subject = f'model={name}'
  for option, value in (
      (models.PRECISION, precision),
      (models.BATCH_NORM_MOMENTUM, batch_norm_momentum),
      (models.PAN, pan),
      (models.PAN_AMPLITUDE, pan_amplitude),
      (models.PAN_PERIOD, pan_period),
      (models.PAN_PERSONAL_SHARE, pan_personal_share),
      (models.MOON_PROJECTION, moon_projection),
      (models.FROZEN_LAYERS, frozen_layers),
  ):
    if value is not None:
      option.check(value)

  def model_fn() -> keras.Model:
    with _dtype_policy(precision):
      model = build()
      if isinstance(model, keras.Model) and not model.built:
        # Some models create layers in `build`, at their first call.
        _call_once(model, input_shape)
      if moon_projection is not None:
        with _named_errors(f'moon_projection={moon_projection}', subject):
          model = projection_head.add_projection_head(model, moon_projection)
    if pan != models.NO_ENCODINGS:
      with _named_errors(f'pan={pan}', subject):
        model = position_encodings.add_position_encodings(
            model,
            pan,
            pan_amplitude,
            pan_period,
            personal_share=pan_personal_share,
        )
    adapt(subject, model, batch_norm_momentum, frozen_layers)
    return model

  if name not in models.MODELS:
    with _dtype_policy(precision):
      model = _user_model(name, build, input_shape, num_outputs, task)
    if not model.trainable_variables:
      raise ValueError(f'{subject}: the model has no trainable variables.')
    is_changed = (
        batch_norm_momentum is not None
        or pan != models.NO_ENCODINGS
        or moon_projection is not None
        or frozen_layers is not None
    )
    if not is_changed:
      return model_fn
  # This also checks whether groups divide the channels.
  model_fn()
  return model_fn


def check_task(task: str) -> None:
  """Raises a `ValueError` if a task is unknown."""
  if task not in tasks.TASKS:
    raise ValueError(
        f'task={task!r} must be one of {", ".join(tasks.TASKS)}.'
        f'{spelling.suggestion(str(task), tasks.TASKS)}'
    )


def adapt(
    subject: str,
    model: keras.Model,
    batch_norm_momentum: Optional[float],
    frozen_layers: Optional[str],
) -> None:
  """Sets the momentum of a model's running statistics and freezes layers.

  `subject` names the model in errors, such as `model=mlp3`.
  """
  if batch_norm_momentum is not None:
    norms = discovery.batch_norm_layers(model)
    if not norms:
      raise ValueError(
          f'batch_norm_momentum={batch_norm_momentum} has no effect:'
          f' {subject} has no batch normalization layer.'
      )
    for layer in norms:
      layer.momentum = batch_norm_momentum
  if frozen_layers is not None:
    with _named_errors(f'frozen_layers={frozen_layers}', subject):
      freezing.freeze_layers(model, frozen_layers)


def _builder(
    name: str,
    input_shape: tuple[int, ...],
    num_outputs: int,
    normalization: str,
    task: str,
    category_counts: Optional[Mapping[int, int]],
) -> Callable[[], keras.Model]:
  """Returns a function that builds the model in float32, without encodings."""
  models.MODEL.check(name)
  try:
    model = models.MODELS[name]
    build = model.load()
  except ValueError as error:
    raise ValueError(f'model={name}: {error}') from error
  if name in models.MODELS:
    models.NORMALIZATION.check(normalization)
    if normalization == models.FIXUP and not model.has_residual_blocks:
      raise ValueError(
          f'normalization=fixup is impossible with model={name}; it initializes'
          f' residual blocks, so use model={" or ".join(models.FIXUP_MODELS)}.'
      )
    arguments: dict[str, Any] = {'normalization': normalization}
    needed = models.needed_outputs(task)
    if model.outputs != needed:
      raise ValueError(
          f'model={name} has {models.OUTPUTS[model.outputs]}, but task={task}'
          f' needs {models.OUTPUTS[needed]}'
          f'{_advice(input_shape, task)}.'
      )
  else:
    arguments = _normalization_argument(name, build, normalization)
  if category_counts:
    models.check_embeds_categories(name)
    arguments['category_counts'] = dict(category_counts)
  _check_input_shape(model, input_shape, task)
  return functools.partial(build, input_shape, num_outputs, **arguments)


@contextlib.contextmanager
def _named_errors(setting: str, subject: str) -> Iterator[None]:
  """Names the setting and the model in a `ValueError`."""
  try:
    yield
  except ValueError as error:
    raise ValueError(
        f'{setting} is impossible with {subject}: {error}'
    ) from error


@contextlib.contextmanager
def _dtype_policy(name: str) -> Iterator[None]:
  """Sets Keras's default dtype policy in a `with` block."""
  previous = keras.config.dtype_policy()
  keras.config.set_dtype_policy(name)
  try:
    yield
  finally:
    keras.config.set_dtype_policy(previous)


def _call_once(model: keras.Model, input_shape: tuple[int, ...]) -> Any:
  """Calls a model with a batch of two samples."""
  zeros = keras.ops.zeros((1, *input_shape))
  return model(
      keras.ops.concatenate([zeros, zeros + 1], axis=0), training=False
  )


def _advice(input_shape: tuple[int, ...], task: str, *others: str) -> str:
  """Returns what to do, as the end of an error without its point.

  These are the models that fit, if there are any, and other advice.
  """
  fitting = models.fitting(input_shape, task)
  advice = [f'use model={spelling.name_some(fitting)}'] if fitting else []
  advice += others
  return f'; {", or ".join(advice)}' if advice else ''


def _check_input_shape(
    model: models.Model, input_shape: tuple[int, ...], task: str
) -> None:
  """Checks that a model accepts samples of this shape."""
  if model.takes(input_shape):
    return
  assert model.samples is not None  # It takes some samples only.
  axes = models.AXES[model.samples]
  others = []
  if len(input_shape) == len(axes):  # Images that are too small.
    others = ['resize by `image_size`']
  raise ValueError(
      f'model={model.name} needs {model.describe_samples()} as'
      f' [{", ".join(axes)}], but the samples have the shape {input_shape}'
      f'{_advice(input_shape, task, *others)}.'
  )


def _normalization_argument(
    name: str, function: Callable[..., Any], normalization: str
) -> dict[str, str]:
  """Returns the argument `normalization` if the user's function has it."""
  parameters = inspect.signature(function).parameters.values()
  if any(
      parameter.kind is parameter.VAR_KEYWORD
      or parameter.name == 'normalization'
      for parameter in parameters
  ):
    return {'normalization': normalization}
  if normalization != models.NORMALIZATION.default:
    raise ValueError(
        f'normalization={normalization} has no effect on model={name}: its'
        ' function has no parameter `normalization`.'
    )
  return {}


def _series_advice(error: BaseException, input_shape: tuple[int, ...]) -> str:
  """Returns what to do if grey images are in fact series."""
  # Layers refuse inputs with too many axes by a ValueError.
  is_shape_error = isinstance(error, ValueError)
  if not is_shape_error or len(input_shape) != 3 or input_shape[-1] != 1:
    return ''
  steps, features, _ = input_shape
  return (
      f' Samples of shape {input_shape} are grey images. If the data are series'
      f' of {steps} steps with {features} features, load them as'
      f' {datasets.SERIES.prefix}PATH.'
  )


def _user_model(
    name: str,
    model_fn: Callable[[], Any],
    input_shape: tuple[int, ...],
    num_outputs: int,
    task: str,
) -> keras.Model:
  """Builds a model by a user's function and checks that it fits the data."""
  call = f'its function, called with {input_shape} and {num_outputs},'
  try:
    model = model_fn()
  # The user's function may raise anything, or end the program.
  except (Exception, SystemExit) as error:
    raise ValueError(
        f'model={name}: {call} failed ({user_functions.brief(error)}).'
        f'{_series_advice(error, input_shape)}'
    ) from error
  if not isinstance(model, keras.Model):
    raise ValueError(
        f'model={name}: {call} returned {type(model).__name__}, not a'
        ' keras.Model.'
    )
  check_outputs(f'model={name}', model, input_shape, num_outputs, task)
  return model


def check_outputs(
    subject: str,
    model: keras.Model,
    input_shape: tuple[int, ...],
    num_outputs: int,
    task: str,
) -> None:
  """Checks that a model takes such samples and has the outputs of a task.

  It calls the model, because a subclassed model has no output shape before.

  Args:
    subject: Names the model in errors, such as `model=mlp3`.
    model: The model, not built if it is subclassed.
    input_shape: The shape of one sample.
    num_outputs: The number of outputs, for each pixel of a segmentation.
    task: A key of `tff_bn.catalog.tasks.TASKS`.

  Raises:
    ValueError: If the model does not fit.
  """
  try:
    outputs = _call_once(model, input_shape)
  except Exception as error:
    raise ValueError(
        f'{subject}: the model does not take batches of samples of shape'
        f' {input_shape} ({user_functions.brief(error)}).'
        f'{_series_advice(error, input_shape)}'
    ) from error
  shape = getattr(outputs, 'shape', None)
  expected = tasks.output_shape(task, input_shape, num_outputs)
  if shape is None or tuple(shape) != (2, *expected):
    given = (
        'several outputs'
        if shape is None
        else f'the shape {tuple(shape)[1:]} for each sample'
    )
    raise ValueError(
        f'{subject}: the output of the model has {given}; it must have the'
        f' shape {expected} for task={task}'
        f'{", one logit for each class" if task in tasks.EXCLUSIVE else ""}.'
    )
  if task != tasks.REGRESSION:
    _check_logits(subject, model, outputs, task)


def _check_logits(
    subject: str, model: keras.Model, outputs: Any, task: str
) -> None:
  """Raises a `ValueError` if a model has probabilities instead of logits."""
  values = keras.ops.convert_to_numpy(outputs).astype(np.float64)
  if (
      task in tasks.EXCLUSIVE
      and values.shape[-1] > 1
      and (values >= 0).all()
      and np.allclose(values.sum(axis=-1), 1, atol=1e-2)
  ):
    raise ValueError(
        f'{subject}: the outputs of the model are probabilities, whose sum is'
        ' 1, but the loss takes logits; remove the softmax at the end of the'
        ' model.'
    )
  # Only models with known outputs have their layers in the order of calls.
  if not getattr(model, 'outputs', None):
    return
  last = model.layers[-1]
  activation = getattr(last, 'activation', None)
  if isinstance(last, keras.layers.Softmax):
    activation = keras.activations.softmax
  for name in ('sigmoid', 'softmax'):
    if activation is getattr(keras.activations, name):
      raise ValueError(
          f'{subject}: the model ends in a {name}, but the loss takes logits;'
          f' remove the {name} at the end of the model.'
      )
