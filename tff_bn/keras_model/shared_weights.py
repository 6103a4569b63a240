"""The weights that server and clients share, and their updates."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import numerics
from tff_bn.common import spelling
from tff_bn.keras_model import partition as partition_lib
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.batch_norm_model import VariableInfo
from tff_bn.keras_model.partition import HBN
from tff_bn.keras_model.partition import Partition
from tff_bn.keras_model.partition import Role
from tff_bn.layers.batch_moments import Moments

# The running mean and variance of a layer.
Statistics = tuple[tf.Tensor, tf.Tensor]
# Computes new running statistics from the number of the layer, the old running
# statistics and the aggregated moments.
MoveStatistics = Callable[[int, Statistics, Moments], Statistics]


class SharedWeights:
  """Splits a model's variables into shared ones, local ones and constants.

  Constants, see `BatchNormModel.constants`, and variables that the partition
  fixes are neither shared nor local: a client has their values from the model.

  If no variable is local, the shared weights are `ModelWeights` of lists in
  Keras's order, as everywhere in TFF. Otherwise they are `ModelWeights` of
  `OrderedDict`s keyed by the variables' names, so that a type signature names
  the shared variables.
  """

  # The names of the parts of an update.
  PARTS = frozenset({'trainable', 'statistics', 'other_state'})

  def __init__(self, model: BatchNormModel, partition: Partition):
    """Splits the variables.

    It raises a `ValueError` if the model has no variable with a local role that
    training changes, or in a layer that the partition names, shares nothing
    although the partition does not keep all roles local, or has a hybrid batch
    normalization layer, which only HBN can train.
    """
    self._model = model
    variables = model.variables
    if partition.local and not partition.is_local(Role.KERNEL):
      self._check_roles(partition)
    hybrid = [
        v.layer for v in variables if v.role is Role.MIXING and not v.frozen
    ]
    if (
        hybrid
        and partition.local != HBN.local
        and not partition.is_local(Role.KERNEL)
    ):
      raise ValueError(
          'Only HBN (tff_bn.algorithms.build_hbn) computes the statistics of'
          f' HybridBatchNormalization layers, such as {hybrid[0]!r} of the'
          f' model {model.keras_model.name!r}. For other algorithms, replace'
          " them by tff_bn.convert_batch_norm(model, to='batch')."
      )
    initial = model.from_model_weights(model.initial_weights)
    positions = range(len(variables))
    fixed = {
        p for p, v in enumerate(variables) if partition.is_fixed(v.role, v.path)
    }
    self._constants = {
        p: _read_only(initial[p]) for p in sorted(model.constants | fixed)
    }
    order = model.to_model_weights(positions)
    is_local = [partition.is_local(v.role, v.path) for v in variables]
    self._local = [
        p for p in positions if is_local[p] and p not in self._constants
    ]
    self._trainable = [
        p for p in order.trainable if not (is_local[p] or p in self._constants)
    ]
    self._non_trainable = [
        p
        for p in order.non_trainable
        if not (is_local[p] or p in self._constants)
    ]
    self._statistics = _statistics_pairs(variables, self._non_trainable)
    if partition.layers:
      self._check_layers(partition)
    in_statistics = {p for pair in self._statistics for p in pair}
    self._other_state = [
        p for p in self._non_trainable if p not in in_statistics
    ]

  def _check_roles(self, partition: Partition) -> None:
    """Raises a `ValueError` if training changes no variable of a local role."""
    found = {
        position: v
        for position, v in enumerate(self._model.variables)
        if v.role in partition.local
    }
    if found.keys() - self._model.constants:
      return
    name = f'the model {self._model.keras_model.name!r}'
    if found:
      layers = spelling.name_some(sorted({v.layer for v in found.values()}))
      problem = (
          f'training changes none of them in {name}: its batch normalization'
          f' layers are frozen ({layers}). Use layers that are trained, or'
          ' fedavg.'
      )
    else:
      layers = ', '.join(sorted({v.layer for v in self._model.variables}))
      problem = (
          f'{name} has none of them (its layers with variables: {layers}). Use'
          ' a model with batch normalization, or fedavg.'
      )
    raise ValueError(
        f'{partition.name} keeps the variables'
        f' {sorted(role.value for role in partition.local)} of the batch'
        f' normalization layers with the clients, but {problem}'
    )

  def _check_layers(self, partition: Partition) -> None:
    """Raises a `ValueError` if layers are not in the model, or all of them."""
    for argument, pattern in partition.layers.items():
      check_layers(self._model, argument, pattern)
    if self._trainable or self._non_trainable:
      return
    given = ', '.join(f'{name}={p!r}' for name, p in partition.layers.items())
    raise ValueError(
        f'{given} leaves no variable of the model'
        f' {self._model.keras_model.name!r} that clients share in'
        f' {partition.name}. Choose fewer layers; in single, each client trains'
        ' alone.'
    )

  def _structured(
      self, positions: Sequence[int], values: Sequence[Any] | Mapping[int, Any]
  ) -> Any:
    if not self._local:
      return [values[p] for p in positions]
    return self._named(positions, values)

  def _named(
      self, positions: Sequence[int], values: Sequence[Any] | Mapping[int, Any]
  ) -> collections.OrderedDict[str, Any]:
    return collections.OrderedDict(
        (self._model.variables[p].name, values[p]) for p in positions
    )

  def shared(self, values: Sequence[Any]) -> ModelWeights:
    """Selects the shared values from values in the order of `variables`."""
    return ModelWeights(
        trainable=self._structured(self._trainable, values),
        non_trainable=self._structured(self._non_trainable, values),
    )

  def local(self, values: Sequence[Any]) -> collections.OrderedDict[str, Any]:
    """Selects the local values, keyed by the variables' names."""
    return self._named(self._local, values)

  def merge(self, shared: ModelWeights, local: Mapping[str, Any]) -> list[Any]:
    """Puts shared and local values into the order of `model.variables`.

    Constants are the model's own arrays. Other entries of `local` than local
    variables are ignored.
    """
    values = self._placed(shared)
    for position in self._local:
      values[position] = local[self._model.variables[position].name]
    for position, value in self._constants.items():
      values[position] = value
    return values

  def merged_tensors(
      self, shared: ModelWeights, local: Mapping[str, Any]
  ) -> list[tf.Tensor]:
    """Returns the values of `merge` as tensors, for a client's computation.

    Each call makes the constants a part of the computation, so a computation
    should call it once.
    """
    return [tf.convert_to_tensor(v) for v in self.merge(shared, local)]

  def select(
      self, condition: tf.Tensor, new: Sequence[Any], old: Sequence[Any]
  ) -> list[Any]:
    """Selects the values `new` if the condition is true, else `old`.

    The values are in the order of `model.variables`. Constants come from `old`.
    """
    chosen = iter(
        numerics.where(
            condition, self.without_constants(new), self.without_constants(old)
        )
    )
    return [
        before if p in self._constants else next(chosen)
        for p, before in enumerate(old)
    ]

  def without_constants(self, values: Sequence[Any]) -> list[Any]:
    """Returns the values of the other variables, in their order."""
    return [v for p, v in enumerate(values) if p not in self._constants]

  def check_constants(self, values: Sequence[Any]) -> None:
    """Raises a `ValueError` if values of constants are not the model's."""
    changed = [
        self._model.variables[position]
        for position, constant in self._constants.items()
        if not _has_equal_bits(values[position], constant)
    ]
    if changed:
      layers = ', '.join(dict.fromkeys(repr(v.layer) for v in changed))
      raise ValueError(
          f"weights has other values for {len(changed)} of the model's"
          f' {len(self._constants)} variables that training cannot change (in'
          f' the layers {layers}). A process has their values from'
          ' keras_model_fn. Build the process from a model with these weights:'
          ' BatchNormModel(lambda: model.to_keras(weights), ...).'
      )

  def _placed(self, shared: ModelWeights) -> list[Any]:
    """Returns the shared values at their positions, `None` at all others."""
    values: list[Any] = [None] * len(self._model.variables)
    for positions, part in (
        (self._trainable, shared.trainable),
        (self._non_trainable, shared.non_trainable),
    ):
      for position, value in zip(positions, part_values(part), strict=True):
        values[position] = value
    return values

  def update(
      self,
      before: Sequence[tf.Tensor],
      after: Sequence[tf.Tensor],
      statistics: Sequence[Moments],
  ) -> collections.OrderedDict[str, Any]:
    """Computes a client's update, see `tff_bn.aggregators.model_update`.

    Args:
      before: The values before local training, in the order of
        `model.variables`.
      after: The values after local training, in the same order.
      statistics: The client's moments, one entry for each pair of shared
        running statistics.

    Returns:
      The parts `trainable`, `statistics` and `other_state` that are not empty.
    """
    differences = [
        None if p in self._constants else _difference(b, a)
        for p, (b, a) in enumerate(zip(before, after, strict=True))
    ]
    parts: collections.OrderedDict[str, Any] = collections.OrderedDict()
    if self._trainable:
      parts['trainable'] = self._structured(self._trainable, differences)
    if self._statistics:
      parts['statistics'] = list(statistics)
    if self._other_state:
      parts['other_state'] = [differences[p] for p in self._other_state]
    return parts

  @property
  def statistics(self) -> Sequence[tuple[int, int]]:
    """The positions of the shared running means and variances, in pairs."""
    return self._statistics

  @property
  def local_statistics(self) -> Sequence[tuple[int, int]]:
    """The positions of the local running means and variances, in pairs."""
    return _statistics_pairs(self._model.variables, self._local)

  @property
  def layers_with_counters(self) -> Sequence[str]:
    """The layers of shared variables of integers or bools."""
    variables = [self._model.variables[p] for p in self._other_state]
    return [v.layer for v in variables if not v.dtype.is_floating]

  @property
  def positions(self) -> Sequence[int]:
    """The positions of the shared variables in `model.variables`."""
    return sorted([*self._trainable, *self._non_trainable])

  @property
  def constants(self) -> Sequence[int]:
    """The positions of the constants in `model.variables`."""
    return list(self._constants)

  @property
  def trainable(self) -> Sequence[int]:
    """The positions of the shared trainable variables."""
    return self._trainable

  def trainable_part(self, values: Sequence[Any]) -> Any:
    """Returns values in the form of the part `trainable` of an update.

    Args:
      values: A value for each of `trainable`.
    """
    return self._structured(
        self._trainable, dict(zip(self._trainable, values, strict=True))
    )

  def trainable_specs(self) -> Any:
    """Returns the `tf.TensorSpec`s of the shared trainable variables."""
    specs = [tf.TensorSpec(v.shape, v.dtype) for v in self._model.variables]
    return self._structured(self._trainable, specs)

  def apply(
      self,
      weights: ModelWeights,
      trainable: Any,
      update: Mapping[str, Any],
      move_statistics: Optional[MoveStatistics] = None,
  ) -> ModelWeights:
    """Computes the shared weights after a round.

    Statistics are assigned, because the server optimizer could make a variance
    negative.

    Args:
      weights: The shared weights before the round.
      trainable: The new trainable weights.
      update: The aggregated update.
      move_statistics: Computes the new running statistics. Default: the
        aggregated means and variances.
    """
    old = self._placed(weights)
    new = list(old)
    for position, value in zip(
        self._trainable, part_values(trainable), strict=True
    ):
      new[position] = value
    self._assign_statistics(new, update.get('statistics', ()), move_statistics)
    for position, difference in zip(
        self._other_state, update.get('other_state', ()), strict=True
    ):
      new[position] = _moved(old[position], difference)
    return self.shared(new)

  def moved(
      self, weights: ModelWeights, update: Mapping[str, Any]
  ) -> ModelWeights:
    """Returns the shared weights after an update, as one client's."""
    before = part_values(weights.trainable)
    differences = part_values(update.get('trainable', ()))
    trainable = self.trainable_part(
        [b - d for b, d in zip(before, differences, strict=True)]
    )
    return self.apply(weights, trainable, update)

  def running_statistics(self, weights: ModelWeights) -> list[Statistics]:
    """Returns the running means and variances among the shared weights."""
    values = self._placed(weights)
    return [(values[mean], values[var]) for mean, var in self._statistics]

  def with_statistics(
      self,
      weights: ModelWeights,
      statistics: Sequence[Moments],
      move_statistics: Optional[MoveStatistics] = None,
  ) -> ModelWeights:
    """Returns the shared weights with new running statistics, see `apply`."""
    values = self._placed(weights)
    self._assign_statistics(values, statistics, move_statistics)
    return self.shared(values)

  def _assign_statistics(
      self,
      values: list[Any],
      statistics: Sequence[Any],
      move_statistics: Optional[MoveStatistics],
  ) -> None:
    """Replaces the running statistics in a list of all values."""
    for number, (positions, moments) in enumerate(
        zip(self._statistics, statistics, strict=True)
    ):
      # A user's aggregator may return them in another container.
      moments = Moments(*part_values(moments))
      mean, variance = positions
      before = values[mean], values[variance]
      moved: Statistics = moments.mean, moments.variance
      if move_statistics is not None:
        moved = move_statistics(number, before, moments)
      # The count is 0 if no client took part.
      found = moments.count > 0
      values[mean], values[variance] = (
          tf.where(found, new, old) for new, old in zip(moved, before)
      )

  @property
  def has_local_predictions(self) -> bool:
    """Whether local variables change a model's predictions.

    The share of the batch in hybrid batch normalization has no effect on them.
    """
    roles = {self._model.variables[p].role for p in self._local}
    return bool(roles - {Role.MIXING})

  def shared_dtypes(self) -> ModelWeights:
    """Returns the dtypes of the shared weights."""
    return self.shared([v.dtype for v in self._model.variables])

  def weights_type(self) -> tff.Type:
    """Returns the TFF type of the shared weights."""
    return tff.to_type(self.shared(_types(self._model)))

  def whole_type(self) -> tff.Type:
    """Returns the TFF type of the weights of the whole model, as lists."""
    return tff.to_type(self._model.to_model_weights(_types(self._model)))


def check_layers(model: BatchNormModel, argument: str, pattern: str) -> None:
  """Raises a `ValueError` if a regular expression names no trained layer.

  Args:
    model: The model.
    argument: The name of the argument, for the message.
    pattern: The regular expression, see `Partition`.
  """
  paths = list(
      dict.fromkeys(
          v.path
          for position, v in enumerate(model.variables)
          if position not in model.constants
      )
  )
  if not any(partition_lib.matches(pattern, path) for path in paths):
    raise ValueError(
        f'{argument}={pattern!r} matches the name or path of no layer that'
        f' training changes; the model {model.keras_model.name!r} has'
        f' {spelling.name_some(paths)}.'
    )


def _statistics_pairs(
    variables: Sequence[VariableInfo], positions: Sequence[int]
) -> list[tuple[int, int]]:
  """Returns the positions of each layer's running mean and variance."""
  return [
      (mean, variance)
      for mean in positions
      for variance in positions
      if variables[mean].is_statistic
      and variables[mean].role is Role.MOVING_MEAN
      and variables[variance].role is Role.MOVING_VARIANCE
      and variables[mean].batch_norm == variables[variance].batch_norm
  ]


def _types(model: BatchNormModel) -> list[tff.Type]:
  return [
      tff.TensorType(v.dtype.as_numpy_dtype, v.shape) for v in model.variables
  ]


def _read_only(value: Any) -> np.ndarray:
  # Callers get it as a part of a model's weights, which they may change.
  view = np.asarray(value).view()
  view.flags.writeable = False
  return view


def _has_equal_bits(value: Any, constant: np.ndarray) -> bool:
  if value is constant:
    return True
  value = np.asarray(value)
  return (
      value.shape == constant.shape
      and value.astype(constant.dtype).tobytes() == constant.tobytes()
  )


def _difference(before: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
  """Returns how much smaller a value became, as a float.

  Integers, such as counters, are averaged as float64, and so are booleans.
  """
  if after.dtype.is_floating:
    return before - after
  # Exact, also for large integers and if an unsigned one has grown.
  before, after = tf.cast(before, tf.int64), tf.cast(after, tf.int64)
  return tf.cast(before - after, tf.float64)


def _moved(value: tf.Tensor, difference: tf.Tensor) -> tf.Tensor:
  """Returns a value after an averaged `_difference`.

  A boolean becomes the value of the majority. Where the clients are evenly
  divided, it stays.
  """
  dtype = value.dtype
  if dtype.is_floating:
    return value - tf.cast(difference, dtype)
  moved = tf.cast(value, tf.int64) - tf.cast(tf.round(difference), tf.int64)
  if dtype == tf.bool:
    return moved > 0
  # An aggregator may leave the range of small integers.
  return (
      tf.cast(moved, dtype)
      if dtype.size == 8
      else tf.saturate_cast(moved, dtype)
  )


def part_values(part: Any) -> list[Any]:
  """Returns the values of a list, or of a mapping in its order."""
  # `tf.nest.flatten` would sort by key.
  return list(part.values() if isinstance(part, Mapping) else part)
