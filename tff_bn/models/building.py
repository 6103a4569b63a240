"""Builds models by name and checks them."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import inspect
from typing import Any, Optional

import keras
import numpy as np

from tff_bn.catalog import datasets
from tff_bn.catalog import models
from tff_bn.catalog import value_types
from tff_bn.common import checks
from tff_bn.common import user_functions
from tff_bn.layers import discovery
from tff_bn.models import projection_head
from tff_bn.position_aware import position_encodings

# The model that errors recommend for other samples than images.
_ANY_SHAPE = 'mlp3'


def build_model_fn(
    name: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    normalization: str = 'batch',
    precision: str = 'float32',
    batch_norm_momentum: Optional[float] = None,
    pan: str = 'off',
    pan_amplitude: Optional[float] = None,
    pan_period: float = 1.0,
    pan_personal_share: float = 0.0,
    moon_projection: Optional[int] = None,
) -> Callable[[], keras.Model]:
  """Returns a function that builds untrained models.

  A model is built here once to find errors early.

  Args:
    name: A key of `tff_bn.catalog.models.MODELS`, or `package.module:NAME` for
      your own: a function, or a `tff_bn.catalog.models.Model`. The function is
      called as `function(input_shape, num_classes)`, and with
      `normalization=...` if it has such a parameter, and returns a model with
      logits as output.
    input_shape: The shape of one sample.
    num_classes: Number of classes.
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
  value_types.POSITIVE_INTEGER.check('num_classes', num_classes)
  # Keras takes no integers of NumPy.
  input_shape = tuple(int(size) for size in input_shape)
  num_classes = int(num_classes)
  build = _builder(name, input_shape, num_classes, normalization)
  for option, value in (
      (models.PRECISION, precision),
      (models.BATCH_NORM_MOMENTUM, batch_norm_momentum),
      (models.PAN, pan),
      (models.PAN_AMPLITUDE, pan_amplitude),
      (models.PAN_PERIOD, pan_period),
      (models.PAN_PERSONAL_SHARE, pan_personal_share),
      (models.MOON_PROJECTION, moon_projection),
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
        with _named_errors(f'moon_projection={moon_projection}', name):
          model = projection_head.add_projection_head(model, moon_projection)
    if batch_norm_momentum is not None:
      _set_momentum(name, model, batch_norm_momentum)
    if pan != models.NO_ENCODINGS:
      with _named_errors(f'pan={pan}', name):
        model = position_encodings.add_position_encodings(
            model,
            pan,
            pan_amplitude,
            pan_period,
            personal_share=pan_personal_share,
        )
    return model

  if name in models.MODELS:
    # This checks whether groups divide the channels.
    model_fn()
  else:
    with _dtype_policy(precision):
      _check_user_model(name, build, input_shape, num_classes)
    if (
        batch_norm_momentum is not None
        or pan != models.NO_ENCODINGS
        or moon_projection is not None
    ):
      model_fn()
  return model_fn


def _builder(
    name: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    normalization: str,
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
    arguments = {'normalization': normalization}
  else:
    arguments = _normalization_argument(name, build, normalization)
  _check_input_shape(name, input_shape, model.smallest)
  return functools.partial(build, input_shape, num_classes, **arguments)


@contextlib.contextmanager
def _named_errors(setting: str, name: str) -> Iterator[None]:
  """Names the setting and the model in a `ValueError`."""
  try:
    yield
  except ValueError as error:
    raise ValueError(
        f'{setting} is impossible with model={name}: {error}'
    ) from error


def _set_momentum(name: str, model: keras.Model, momentum: float) -> None:
  layers = discovery.batch_norm_layers(model)
  if not layers:
    raise ValueError(
        f'batch_norm_momentum={momentum} has no effect: model={name} has no'
        ' batch normalization layer.'
    )
  for layer in layers:
    layer.momentum = momentum


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
  return model(keras.ops.zeros((2, *input_shape)), training=False)


def _check_input_shape(
    name: str, input_shape: tuple[int, ...], smallest: Optional[int]
) -> None:
  """Checks that a model accepts samples of this shape."""
  if smallest is None:
    return
  if len(input_shape) != 3 or min(input_shape[:2]) < smallest:
    raise ValueError(
        f'model={name} needs images of at least {smallest}x{smallest} pixels'
        ' as [height, width, channels], but the samples have the shape'
        f' {input_shape}; use model={_ANY_SHAPE}, which takes samples of any'
        ' shape'
        + ('.' if len(input_shape) != 3 else ', or resize by `image_size`.')
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


def _check_user_model(
    name: str,
    model_fn: Callable[[], Any],
    input_shape: tuple[int, ...],
    num_classes: int,
) -> None:
  """Checks that a user's function returns a model for this data."""
  call = f'its function, called with {input_shape} and {num_classes},'
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
  try:
    # A subclassed model has no output shape before it is called.
    logits = _call_once(model, input_shape)
  except Exception as error:
    raise ValueError(
        f'model={name}: the model does not take batches of samples of shape'
        f' {input_shape} ({user_functions.brief(error)}).'
        f'{_series_advice(error, input_shape)}'
    ) from error
  shape = getattr(logits, 'shape', None)
  if shape != (2, num_classes):
    given = 'several outputs' if shape is None else f'the shape {shape[1:]}'
    raise ValueError(
        f'model={name}: the output of the model has {given} for each sample;'
        f' it must be {num_classes} logits, one for each class.'
    )
  if not model.trainable_variables:
    raise ValueError(f'model={name}: the model has no trainable variables.')
  values = keras.ops.convert_to_numpy(logits).astype(np.float64)
  if (values >= 0).all() and np.allclose(values.sum(axis=1), 1, atol=1e-2):
    raise ValueError(
        f'model={name}: the outputs of the model are probabilities, whose sum'
        ' is 1, but the loss takes logits; remove the softmax at the end of the'
        ' model.'
    )
  # Only models with known outputs have their layers in the order of calls.
  if getattr(model, 'outputs', None):
    activation = getattr(model.layers[-1], 'activation', None)
    if activation is keras.activations.sigmoid:
      raise ValueError(
          f'model={name}: the model ends in a sigmoid, but the loss takes'
          ' logits; remove the sigmoid at the end of the model.'
      )
