"""A Keras model as data: variables with their roles and initial values."""

from collections.abc import Callable, Mapping, Sequence, Set
import copy
import dataclasses
import functools
import math
from typing import Any, Optional, Self, TypeAlias

import keras
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import checks
from tff_bn.common import garbage
from tff_bn.keras_model import compiled
from tff_bn.keras_model import constraints
from tff_bn.keras_model import freezing
from tff_bn.keras_model import model_arguments
from tff_bn.keras_model import model_metrics
from tff_bn.keras_model import objective
from tff_bn.keras_model import outputs
from tff_bn.keras_model import training_writes
from tff_bn.keras_model.batch import Batch
from tff_bn.keras_model.partition import Role
from tff_bn.layers import discovery
from tff_bn.layers.hybrid_batch_normalization import HybridBatchNormalization
from tff_bn.layers.position_encoding import PositionEncoding

# TensorFlow adds and converts their values on every device.
_DTYPES = frozenset(
    [
        *(tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.bool),
        *(tf.int8, tf.int16, tf.int32, tf.int64),
        *(tf.uint8, tf.uint16, tf.uint32, tf.uint64),
    ]
)

ModelWeights: TypeAlias = tff.learning.models.ModelWeights


@dataclasses.dataclass(frozen=True)
class VariableInfo:
  """One variable of a model.

  Attributes:
    name: The role and the position in Keras's `model.weights`, such as
      `moving_mean_3`. Unlike Keras's names, it is unique in the model and the
      same in every process.
    role: The role in the layer.
    trainable: Whether the optimizer changes the variable.
    layer: Keras's name of the layer, for error messages.
    path: The names of the layers around the variable, from the model to its
      layer, with `/` between them: `backbone/conv1` in a nested model.
    batch_norm: The number of the variable's batch normalization layer, in the
      order of the variables; `None` for other layers.
    frozen: Whether this batch normalization layer has `trainable=False`. Keras
      runs it in inference mode, so its variables never change.
  """

  name: str
  role: Role
  trainable: bool
  layer: str
  path: str
  shape: tuple[int, ...]
  dtype: tf.DType
  batch_norm: Optional[int]
  frozen: bool

  @property
  def is_statistic(self) -> bool:
    """Whether the variable is a running statistic that training changes."""
    return not self.frozen and self.role in (
        Role.MOVING_MEAN,
        Role.MOVING_VARIANCE,
    )

  @property
  def num_bytes(self) -> int:
    """The size of the value in bytes."""
    return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.size


class BatchNormModel:
  """A Keras model as data, which the algorithms of this package train.

  The model is built once and kept as a blueprint that never changes. `to_keras`
  turns the weights that an algorithm returns into an ordinary Keras model.

  Layers may have one of Keras's mixed dtype policies. Their variables, the loss
  and the metrics are float32, and the loss is scaled if a layer computes in
  float16.

  Constraints of variables, such as `kernel_constraint`, are applied after each
  local step, as in Keras's `fit`. The mean of the clients' models satisfies
  convex constraints, too, up to rounding: `NonNeg`, `MaxNorm`, and the upper
  bound of `MinMaxNorm`. It does not satisfy others, such as `UnitNorm`. With
  another `server_optimizer` than the default, or a `model_aggregator` that is
  no mean, the server's model need not satisfy any constraint.

  Variables that training cannot change, see `constants`, have the values of
  `keras_model_fn`'s model throughout: clients do not send them, no aggregator
  gets them, and they are neither in the state of a process nor in checkpoints.

  Example:
  ```
  model = BatchNormModel(
      keras_model_fn,
      input_spec=dataset.element_spec,
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True),
      metrics_fn=lambda: [
          keras.metrics.SparseCategoricalAccuracy('accuracy')],
  )
  ```
  """

  @garbage.collected_rarely()
  def __init__(
      self,
      keras_model_fn: Callable[[], keras.Model],
      input_spec: Any,
      loss_fn: Callable[[], objective.Losses],
      metrics_fn: Optional[Callable[[], model_metrics.MetricLists]] = None,
      *,
      loss_weights: Optional[objective.LossWeights] = None,
      weighted_metrics_fn: Optional[
          Callable[[], model_metrics.MetricLists]
      ] = None,
      class_weight: Optional[Mapping[int, float]] = None,
  ):
    """Builds the model once, with its initial weights.

    Losses, metrics and weights are as in Keras's `compile` and `fit`. For a
    model with several outputs, `loss_fn`, `metrics_fn`, `weighted_metrics_fn`
    and `loss_weights` give a list with one entry for each output, or a
    dictionary by the names of the outputs, and the labels have this form, too.
    The names are the keys of a dictionary of outputs, the names of the layers
    that compute the outputs of a functional model, or `output_1`, `output_2`,
    ….

    Args:
      keras_model_fn: A function without arguments that returns a new
        `keras.Model` at each call, untrained or pretrained, which shares no
        variable that is trained with others. Functional, Sequential and
        subclassed models work, unless they override Keras's methods for
        training and evaluation, such as `train_step` or `compute_loss`. What a
        compiled model was compiled with is ignored, with a warning; see
        `from_compiled`. The function is called once; if its model is not built
        yet, twice.
      input_spec: The `element_spec` of a batched `tf.data.Dataset` of `(x, y)`
        or `(x, y, sample_weight)`. Each part is a tensor or a nested structure
        of tensors. `sample_weight` is a tensor of shape `[batch]`, of a shape
        that Keras's losses broadcast, or has such a tensor for each output.
      loss_fn: A function without arguments that returns a Keras loss, which
        averages over the batch. A single loss is the loss of each output.
        `None` in a list or dictionary is for an output without a loss. Unlike
        in Keras, y can be a single tensor for several outputs, or several
        tensors for one output: the loss and the metrics then get all of them.
      metrics_fn: A function without arguments that returns a list of Keras
        metrics with different names, which ignore `sample_weight`. Their
        variables must be sums over the examples, as in all metrics of Keras,
        because the server adds up those of the clients. A result may be a
        vector, as of `keras.metrics.F1Score(average=None)`, or a dictionary.
        Results of several outputs are named `OUTPUT_METRIC`, and their losses
        `OUTPUT_loss`. Default: none.
      loss_weights: The factor of each loss in their sum. Default: 1.
      weighted_metrics_fn: Like `metrics_fn`, for metrics that use
        `sample_weight`. Default: none.
      class_weight: The weight of each class, 0, 1, …, in the loss and the
        weighted metrics of training, but not of evaluation. For models with one
        output, labels of shape `[batch]`, `[batch, 1]` or one-hot, and batches
        `(x, y)`. Default: all examples count alike.

    Raises:
      TypeError: If an argument is not a function that returns what it should,
        such as a model, a loss or a list of metrics themselves.
      ValueError: If `input_spec` is not of a batched dataset of such elements,
        or does not fit the model's input, `keras_model_fn` returns a model or
        trained variables that existed before, the model has no trainable
        variable, one of an unusual dtype, or own methods for training, losses
        or metrics do not fit the outputs or the labels, a loss does not average
        over the batch, two metrics have the same name, or a metric cannot be
        computed or added up.
    """
    model_arguments.check_model_fn(keras_model_fn)
    self.input_spec = model_arguments.check_input_spec(input_spec)
    model_arguments.check_loss_fn(loss_fn)
    self.keras_model_fn = keras_model_fn
    self.loss_fn = loss_fn
    self.loss_weights = loss_weights
    self.metrics_fn = metrics_fn if metrics_fn is not None else list
    model_arguments.check_metrics_fn('metrics_fn', self.metrics_fn)
    self.weighted_metrics_fn = (
        weighted_metrics_fn if weighted_metrics_fn is not None else list
    )
    model_arguments.check_metrics_fn(
        'weighted_metrics_fn', self.weighted_metrics_fn
    )
    self._class_weights = None
    if class_weight is not None:
      self._class_weights = objective.check_class_weight(
          class_weight, self._specs
      )
    self.keras_model = self._new_keras_model()
    model_arguments.check_training(self.keras_model)
    if not self.keras_model.trainable_weights:
      raise ValueError('The model of keras_model_fn has no trainable variable.')
    self.variables = _describe_variables(self.keras_model)
    self._check_dtypes()
    position_of = {id(v): i for i, v in enumerate(self.keras_model.weights)}
    self._trainable_positions, self._non_trainable_positions = (
        [position_of[id(v)] for v in weights]
        for weights in (
            self.keras_model.trainable_weights,
            self.keras_model.non_trainable_weights,
        )
    )
    self._initial = [v.numpy() for v in self.keras_model.weights]
    self.constraints = constraints.Constraints(
        self.keras_model.trainable_weights
    )
    # Of the metrics' results, by name.
    self.metric_shapes = model_metrics.check(
        self.new_metrics(), self._training_specs
    )

  @classmethod
  def from_compiled(cls, keras_model: keras.Model, input_spec: Any) -> Self:
    """Builds the model from a compiled Keras model, with its weights.

    It takes the loss, `loss_weights`, metrics and `weighted_metrics` of
    `compile`. Clients train with the `client_optimizer` of the algorithm's
    builder instead of the optimizer of `compile`. The other arguments of
    `compile` have no effect.

    Example:
    ```
    keras_model.compile('sgd', 'mse', metrics=['mae'])
    model = BatchNormModel.from_compiled(keras_model, dataset.element_spec)
    ```

    Args:
      keras_model: A compiled model. It is copied, see `tff_bn.copy_model`.
      input_spec: The `element_spec` of a batched `tf.data.Dataset`.

    Raises:
      TypeError: If `keras_model` is not a Keras model.
      ValueError: If it is not compiled with a loss, or a metric cannot be
        copied. For the other errors, see the constructor.
    """
    return cls(input_spec=input_spec, **compiled.arguments(keras_model))

  def __repr__(self) -> str:
    layers = {v.batch_norm for v in self.variables} - {None}
    num_trainable, num_others = (
        sum(math.prod(v.shape) for v in self.variables if v.trainable == kind)
        for kind in (True, False)
    )
    parts = zip(
        Batch._fields,
        tf.nest.map_structure(
            lambda spec: f'{spec.dtype.name} {spec.shape}', self.input_spec
        ),
    )
    return (
        f'<BatchNormModel {self.keras_model.name!r}:'
        f' {num_trainable:,} trainable and {num_others:,} other parameters,'
        f' {len(layers)} batch normalization layers,'
        f' {", ".join(f"{name}: {part}" for name, part in parts)}>'
    )

  def _new_keras_model(self) -> keras.Model:
    model, created = model_arguments.call_model_fn(self.keras_model_fn)
    if not isinstance(model, keras.Model):
      raise TypeError(
          'keras_model_fn must return a keras.Model, but returned a'
          f' {type(model).__name__}.'
      )
    model_arguments.check_fits(self.input_spec, model)
    if model.built and model.weights:
      model_arguments.check_new_variables(_trained(model), created, model)
    else:
      sample = tf.nest.map_structure(
          lambda spec: tf.zeros([d or 1 for d in spec.shape], spec.dtype),
          self._specs.x,
      )
      model(sample, training=False)
      if not hasattr(self, 'keras_model'):
        model_arguments.check_new_layers(self.keras_model_fn, model)
    for variable in model.trainable_weights:
      # Trainable is Keras's default, but flags and counters have no gradient.
      variable.trainable = _has_gradient(variable)
    return model

  def without_constraints(self) -> 'BatchNormModel':
    """Returns the same model, but training ignores variables' constraints."""
    model = copy.copy(self)
    model.constraints = constraints.Constraints([])
    return model

  @property
  def _specs(self) -> Batch:
    """The specs of a batch."""
    return Batch(*self.input_spec)

  @property
  def _training_specs(self) -> Batch:
    """The specs of a batch in training, whose classes can have weights."""
    if self._class_weights is None:
      return self._specs
    return self._specs._replace(
        sample_weight=tf.TensorSpec(self._specs.y.shape[:1], tf.float32)
    )

  @functools.cached_property
  def _outputs(self) -> tuple[outputs.Output, ...]:
    return outputs.find(
        self.keras_model,
        model_metrics.output_spec(self.keras_model, self._specs.x),
        self._specs.y,
    )

  @functools.cached_property
  def batch_loss(self) -> objective.Objective:
    """The loss of a batch, a function of the labels and the model's output."""
    return objective.Objective(
        self.loss_fn(), self.loss_weights, self._outputs, self._training_specs
    )

  def new_metrics(self) -> model_metrics.Metrics:
    """Returns new metrics by their names, with all their variables."""
    return model_metrics.build(
        self.metrics_fn(),
        self.weighted_metrics_fn(),
        self.batch_loss,
        self._outputs,
        self._training_specs,
    )

  @property
  def has_sample_weights(self) -> bool:
    """Whether each training example has one weight, given or of its class."""
    weights = self._training_specs.sample_weight
    return weights is not None and not tf.nest.is_nested(weights)

  def training_batch(self, element: Any) -> Batch:
    """Returns the parts of a dataset's element, with the weights of classes."""
    batch = Batch(*element)
    if self._class_weights is None:
      return batch
    return batch._replace(
        sample_weight=objective.class_weights(batch.y, self._class_weights)
    )

  @property
  def has_batch_norm(self) -> bool:
    """Whether the model has a batch normalization layer."""
    return any(v.role is Role.MOVING_MEAN for v in self.variables)

  def _check_dtypes(self) -> None:
    """Raises a `ValueError` if clients cannot send a variable."""
    for position, v in enumerate(self.variables):
      # Constants are not sent. Finding them takes a trace, so it comes last.
      if v.dtype not in _DTYPES and position not in self.constants:
        raise ValueError(
            f'The variable {v.name} of the layer {v.layer!r} has the dtype'
            f' {v.dtype.name}; it must be one of'
            f' {", ".join(sorted(dtype.name for dtype in _DTYPES))}.'
        )

  @functools.cached_property
  def constants(self) -> Set[int]:
    """The positions in `variables` of variables that training cannot change.

    They are not trainable, and no call in training mode assigns them: the
    weights of frozen layers, also frozen moving statistics, and constants such
    as those of `keras.layers.Normalization`. Algorithms neither send nor
    aggregate them; they keep the values of `initial_weights`.
    """
    candidates = frozenset(
        position
        for position, info in enumerate(self.variables)
        # The server can move statistics that no call assigns, as in HBN.
        if not (
            info.trainable
            or info.is_statistic
            or info.role is Role.PERSONAL_PHASE
        )
    )
    if not candidates or training_writes.are_only_read(
        self.keras_model, candidates
    ):
      return candidates
    return candidates - training_writes.assigned_positions(
        self.keras_model, self._specs.x
    )

  @property
  def initial_weights(self) -> ModelWeights:
    """The weights of the untrained model, as lists of arrays."""
    return self.to_model_weights(self._initial)

  def to_model_weights(self, values: Sequence[Any]) -> ModelWeights:
    """Converts values from the order of `variables` to `ModelWeights`.

    Its lists are in the order of Keras's `model.trainable_weights` and
    `model.non_trainable_weights`.
    """
    values = list(values)
    return ModelWeights(
        trainable=[values[i] for i in self._trainable_positions],
        non_trainable=[values[i] for i in self._non_trainable_positions],
    )

  def from_model_weights(self, weights: ModelWeights) -> list[Any]:
    """Converts `ModelWeights` to a list in the order of `variables`.

    Raises:
      TypeError: If `weights` are not `ModelWeights`.
      ValueError: If the number of values is wrong.
    """
    if not isinstance(weights, tuple) or len(weights) != 2:
      raise TypeError(
          'weights must be ModelWeights, such as'
          ' process.get_model_weights(state), but is a'
          f' {type(weights).__name__}.'
      )
    trainable, non_trainable = list(weights[0]), list(weights[1])
    if (len(trainable), len(non_trainable)) != (
        len(self._trainable_positions),
        len(self._non_trainable_positions),
    ):
      raise ValueError(
          f'weights has {len(trainable)} trainable and {len(non_trainable)}'
          f' other values, but the model has {len(self._trainable_positions)}'
          f' and {len(self._non_trainable_positions)}.'
      )
    positions = [*self._trainable_positions, *self._non_trainable_positions]
    values = dict(zip(positions, [*trainable, *non_trainable]))
    return [values[position] for position in range(len(self.variables))]

  def check_types(self, values: Sequence[Any]) -> None:
    """Raises a `ValueError` if a value has another type than its variable.

    The values are in the order of `variables`.
    """
    for variable, value in zip(self.variables, values, strict=True):
      value = np.asarray(value)
      found = value.shape, value.dtype.name
      expected = variable.shape, variable.dtype.as_numpy_dtype().dtype.name
      if found != expected:
        raise ValueError(
            f'weights has a value of the shape and dtype {found} for the'
            f' variable {variable.name} of the layer {variable.layer!r}, which'
            f' has {expected}.'
        )

  def to_keras(self, weights: Optional[ModelWeights] = None) -> keras.Model:
    """Builds an ordinary Keras model with given weights.

    Args:
      weights: Weights, as `process.get_model_weights` returns them. Default:
        the initial weights.

    Returns:
      A new model of `keras_model_fn` with these weights. A model saved by
      `model.save` loads without this package, unless it uses layers of it.

    Raises:
      TypeError: If `weights` are not `ModelWeights`.
      ValueError: If the number of weights is wrong.
    """
    values = (
        self._initial if weights is None else self.from_model_weights(weights)
    )
    model = self._new_keras_model()
    model.set_weights([np.asarray(value) for value in values])
    return model

  def from_keras(self, keras_model: keras.Model) -> ModelWeights:
    """Returns the weights of a Keras model with the same architecture.

    Args:
      keras_model: A model with the same variables as the models of
        `keras_model_fn`, for example a pretrained one.

    Returns:
      Its weights, for `process.set_model_weights`. This refuses other values
      for variables that training cannot change; these must come from
      `keras_model_fn`, such as `lambda: tff_bn.copy_model(pretrained)`.

    Raises:
      TypeError: If it is no Keras model.
      ValueError: If the variables differ.
    """
    checks.check_type(
        'keras_model', keras_model, keras.Model, 'be a keras.Model'
    )
    found = [
        (info.role, info.trainable, info.shape)
        for info in _describe_variables(keras_model)
    ]
    expected = [(v.role, v.trainable, v.shape) for v in self.variables]
    if found != expected:
      if len(found) == len(expected):
        number, a, b = next(
            (number, a, b)
            for number, (a, b) in enumerate(zip(found, expected))
            if a != b
        )
        difference = (
            f'variable {number} is (role, trainable, shape) ='
            f' {(a[0].value, *a[1:])} instead of {(b[0].value, *b[1:])}.'
        )
      else:
        difference = f'{len(found)} variables instead of {len(expected)}.'
      raise ValueError(
          f'The variables of keras_model {keras_model.name!r} differ from the'
          f' model of keras_model_fn: {difference}'
      )
    return self.to_model_weights([v.numpy() for v in keras_model.weights])


def _describe_variables(model: keras.Model) -> tuple[VariableInfo, ...]:
  """Describes each of `model.weights`, in that order."""
  # Keyed by the `id` of variables or layers.
  roles: dict[int, tuple[Role, keras.layers.BatchNormalization]] = {}
  phases = set()
  for layer in discovery.all_layers(model):
    if discovery.is_batch_norm(layer):
      for variable, role in (
          (layer.gamma, Role.SCALE),
          (layer.beta, Role.SHIFT),
          (layer.moving_mean, Role.MOVING_MEAN),
          (layer.moving_variance, Role.MOVING_VARIANCE),
      ):
        if variable is not None:
          roles[id(variable)] = (role, layer)
      if isinstance(layer, HybridBatchNormalization):
        roles[id(layer.mixing)] = (Role.MIXING, layer)
    elif isinstance(layer, PositionEncoding):
      phases.add(id(layer.personal_phase))  # Can be `None`.
  # Layers inside of a layer come later, so the innermost one remains.
  paths = {
      id(variable): path
      for path, layer in freezing.layer_paths(model)
      for variable in layer.weights
  }
  trainable = {id(v) for v in model.trainable_weights if _has_gradient(v)}
  numbers: dict[int, int] = {}
  infos = []
  for position, variable in enumerate(model.weights):
    if id(variable) in phases:
      default = Role.PERSONAL_PHASE
    elif id(variable) in trainable:
      default = Role.KERNEL
    else:
      default = Role.OTHER_STATE
    role, layer = roles.get(id(variable), (default, None))
    if layer is not None:
      numbers.setdefault(id(layer), len(numbers))
    infos.append(
        VariableInfo(
            name=f'{role.value}_{position}',
            role=role,
            trainable=id(variable) in trainable,
            layer=layer.name if layer else _layer_name(variable),
            path=paths.get(id(variable)) or _layer_name(variable),
            shape=tuple(variable.shape),
            dtype=tf.as_dtype(variable.dtype),
            batch_norm=numbers.get(id(layer)),
            frozen=layer is not None and not layer.trainable,
        )
    )
  return tuple(infos)


def _has_gradient(variable: keras.Variable) -> bool:
  return tf.as_dtype(variable.dtype).is_floating


def _trained(model: keras.Model) -> list[keras.Variable]:
  """Returns the variables that training changes."""
  return [
      variable
      for variable, info in zip(model.weights, _describe_variables(model))
      if info.trainable or info.is_statistic
  ]


def _layer_name(variable: keras.Variable) -> str:
  """Returns the name of the layer that made a variable."""
  path = variable.path.split('/')
  return path[-2] if len(path) > 1 else variable.name
