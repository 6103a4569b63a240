"""Which units of a Keras model are one unit, to be moved together only."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any, NamedTuple, Optional

import keras
from keras import tree
import numpy as np
import tensorflow as tf

from tff_bn.keras_model import keras_copy
from tff_bn.keras_model import keras_graph
from tff_bn.layers import discovery
from tff_bn.layers.federated_batch_normalization import (
    FederatedBatchNormalization,
)
from tff_bn.layers.position_encoding import PositionEncoding

_layers = keras.layers
_BATCH_NORMS = (*discovery.BATCH_NORM_CLASSES, FederatedBatchNormalization)
# They compute the same for each unit, or depend on all units alike, as the
# softmax does; and they have no weights.
_WITHOUT_WEIGHTS = (
    PositionEncoding,
    _layers.ReLU,
    _layers.LeakyReLU,
    _layers.ELU,
    _layers.Softmax,
    _layers.Dropout,
    _layers.SpatialDropout2D,
    _layers.AlphaDropout,
    _layers.GaussianDropout,
    _layers.GaussianNoise,
    _layers.Identity,
    _layers.ActivityRegularization,
    _layers.UnitNormalization,
)
_MERGES = (
    _layers.Add,
    _layers.Subtract,
    _layers.Multiply,
    _layers.Average,
    _layers.Maximum,
    _layers.Minimum,
)
_POOLINGS = (_layers.MaxPooling2D, _layers.AveragePooling2D)
_GLOBAL_POOLINGS = (_layers.GlobalMaxPooling2D, _layers.GlobalAveragePooling2D)
# Each is either elementwise, or a kind of softmax.
_ACTIVATION_NAMES = (
    *('celu', 'elu', 'exponential', 'gelu', 'hard_shrink', 'hard_sigmoid'),
    *('hard_silu', 'hard_tanh', 'leaky_relu', 'linear', 'log_sigmoid'),
    *('log_softmax', 'mish', 'relu', 'relu6', 'selu', 'sigmoid', 'silu'),
    *('soft_shrink', 'softmax', 'softplus', 'softsign', 'sparse_plus'),
    *('sparse_sigmoid', 'sparsemax', 'squareplus', 'tanh', 'tanh_shrink'),
    'threshold',
)
_ACTIVATIONS = (
    None,
    *(
        getattr(module, name)
        for module in (keras.activations, keras.ops, tf.nn)
        for name in _ACTIVATION_NAMES
        if hasattr(module, name)
    ),
)
# Functions of `keras.ops` in the graph of a model, by the names of their
# classes, which are not public. These have one tensor, and are elementwise or a
# kind of softmax.
_UNARY_OPERATIONS = (
    *('Absolute', 'Cast', 'Celu', 'Cos', 'Elu', 'Exp', 'Expm1', 'Gelu'),
    *('HardShrink', 'HardSigmoid', 'HardSilu', 'HardTanh', 'LeakyRelu', 'Log'),
    *('Log1p', 'LogSigmoid', 'LogSoftmax', 'Negative', 'ReLU', 'Reciprocal'),
    *('Relu', 'Relu6', 'Rsqrt', 'Selu', 'Sigmoid', 'Sign', 'Silu', 'Sin'),
    *('SoftShrink', 'Softmax', 'Softplus', 'Softsign', 'SparsePlus'),
    *('SparseSigmoid', 'Sparsemax', 'Sqrt', 'Square', 'Squareplus'),
    *('StopGradient', 'Tanh', 'TanhShrink', 'Threshold'),
)
# These have two tensors, or a tensor and a number, and are elementwise.
_BINARY_OPERATIONS = (
    *('Add', 'Divide', 'Maximum', 'Minimum', 'Multiply', 'Power'),
    *('Subtract', 'TrueDivide'),
)
_SUPPORTED = (
    "Supported are Dense, Conv2D, BatchNormalization (Keras's and"
    ' FederatedBatchNormalization), GroupNormalization, LayerNormalization,'
    ' activations of Keras, PositionEncoding, Add and other elementwise merging'
    ' layers, Flatten, ZeroPadding2D, 2-D pooling and global pooling, dropout,'
    ' functional models of them, operators such as +, and elementwise functions'
    ' of keras.ops; not subclasses of these layers.'
)
_Shape = tuple[Optional[int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class UnitOccurrence:
  """Where the units of a group occur in a weight.

  Attributes:
    weight: The weight's index in `model.weights`.
    axis: An axis of that weight.
    positions: Row i has the positions, on that axis, that belong to unit i of
      the group, as `int64[size, positions of each unit]`. A unit has several
      where a `Flatten` comes in between: one for each pixel.
  """

  weight: int
  axis: int
  positions: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class UnitGroup:
  """Hidden units of a model that can be permuted among each other.

  Attributes:
    name: The first layer whose outputs they are. Where several groups share
      that layer, its name is followed by the group's number, as in `conv[0]`.
    size: How many units there are.
    occurrences: Where they occur, one for each axis of each weight.
  """

  name: str
  size: int
  occurrences: tuple[UnitOccurrence, ...]


def unit_groups(model: keras.Model) -> list[UnitGroup]:
  """Finds which hidden units can be permuted without changing the outputs.

  But for position encodings, which are taken as if they were off.

  Units that are added to each other, as in a residual block, are one. So the
  units of a residual network's stage are one group, and where the next stage
  pads them with zeros, the units added to the zeros are another. Inputs and
  outputs of the model are in no group; nor is a unit without any other that it
  could trade places with.

  The units of a `GroupNormalization` with several groups are permuted within
  those only. (Whole groups could trade places too, but that is left out.)

  Args:
    model: A functional Keras model, or a `Sequential` that begins with an
      `Input`; other such models may be nested in it.

  Returns:
    The groups, in the order of the layers that they are named after.

  Raises:
    TypeError: If `model` is not a Keras model.
    ValueError: If the model is none of those, or has a layer that is not
      supported. The message names it.
  """
  if not isinstance(model, keras.Model):
    raise TypeError(
        f'model must be a keras.Model, but is a {type(model).__name__}.'
    )
  if not keras_copy.is_functional(model) or not getattr(model, 'outputs', None):
    raise ValueError(
        f'The model {model.name!r} ({type(model).__name__}) is no functional'
        ' model that is connected to an input, so its units can not be'
        ' followed. Build it as keras.Model(inputs, outputs).'
    )
  ties = _Ties({id(w): index for index, w in enumerate(model.weights)})
  for outputs in ties.follow(model, [None] * len(model.inputs)):
    if outputs is not None:
      ties.fix(outputs.units)
  return ties.groups()


class _Units(NamedTuple):
  """The units of a tensor.

  Attributes:
    axis: The axis of the tensor that has them, with the batch as axis 0.
    units: For each index on that axis, which slot of `_Ties` it is; all
      different.
  """

  axis: int
  units: np.ndarray


# Which units a tensor has, or None if it depends on no hidden unit.
_Tensor = Optional[_Units]


class _Ties:
  """Which indices of which weights move together when units are permuted.

  A slot is one index on one axis of a weight, or of a tensor where no weight
  has such an axis. Slots that stand for the same unit are tied. So a
  permutation is allowed if it takes each slot to one on the same axis, and
  slots with a tie to slots with the same tie. What hangs together by ties is
  one unit. Two units may trade places if they look the same: with the slots of
  each counted from 0 on every axis, both have the same slots on the same axes,
  and the same ties between them.
  """

  def __init__(self, weight_indices: Mapping[int, int]):
    """Begins without any slot.

    Args:
      weight_indices: By the `id` of a weight, its index in the model.
    """
    self._weight_indices = weight_indices
    # First slots of the axes, and where the next one's will be.
    self._starts = [0]
    # Pairs of vectors of slots; one tie each.
    self._ties: list[tuple[np.ndarray, np.ndarray]] = []
    self._fixed: list[np.ndarray] = []
    # By a key that names an axis of a layer: the slots.
    self._layer_slots: dict[Any, np.ndarray] = {}
    # By the number of an axis: the weights that have it, as (index, axis).
    self._weights: dict[int, list[tuple[int, int]]] = {}
    # By the number of an axis of outputs: the layer that computes them.
    self._output_layers: dict[int, str] = {}
    # The `id`s of layers that were called with inputs of the model.
    self._after_inputs: set[int] = set()
    self._rules = {
        _layers.InputLayer: self._keep,
        _layers.Activation: self._activation,
        _layers.Dense: self._dense,
        _layers.Conv2D: self._convolution,
        _layers.Flatten: self._flatten,
        _layers.ZeroPadding2D: self._zero_padding,
        _layers.GroupNormalization: self._group_normalization,
        _layers.LayerNormalization: self._layer_normalization,
        **dict.fromkeys(_WITHOUT_WEIGHTS, self._keep),
        **dict.fromkeys(_POOLINGS, self._pooling),
        **dict.fromkeys(_GLOBAL_POOLINGS, self._global_pooling),
        **dict.fromkeys(_BATCH_NORMS, self._batch_normalization),
    }

  def follow(
      self, model: keras.Model, inputs: Sequence[_Tensor]
  ) -> list[_Tensor]:
    """Follows the units through a functional model.

    Args:
      model: The model.
      inputs: What its inputs are.

    Returns:
      What its outputs are.
    """
    tensors = {
        id(tensor): units
        for tensor, units in zip(model.inputs, inputs, strict=True)
    }
    for call in keras_graph.calls(model):
      arguments = [tensors[id(tensor)] for tensor in call.inputs]
      for tensor, units in zip(
          call.outputs, self._call(call, arguments), strict=True
      ):
        tensors[id(tensor)] = units
    return [tensors[id(tensor)] for tensor in model.outputs]

  def fix(self, slots: np.ndarray) -> None:
    """Says that these units stay where they are."""
    self._fixed.append(slots)

  def groups(self) -> list[UnitGroup]:
    """Finds the units that can trade places."""
    axes, units, ranks = self._find_units()
    looks = self._looks(axes, units, ranks)
    members: dict[Any, list[int]] = {}
    for unit, look in looks.items():
      members.setdefault(look, []).append(unit)
    slots_of = _positions_by_value(units)
    found = []
    for same in members.values():
      # Each row has the slots of one unit; each column is on one axis.
      slots = np.stack([slots_of[unit] for unit in same])
      columns = axes[slots[0]]
      outputs = [axis for axis in columns if axis in self._output_layers]
      if len(same) > 1 and outputs:
        first = np.argmax(columns == outputs[0])
        slots = slots[np.argsort(slots[:, first])]
        found.append((slots[0, first], outputs[0], columns, slots))
    # By the first layer; several groups of a layer by their first units.
    found.sort(key=lambda group: group[0])
    named = []
    for output, of_layer in itertools.groupby(found, key=lambda x: x[1]):
      of_layer = list(of_layer)
      for number, (_, _, columns, slots) in enumerate(of_layer):
        suffix = f'[{number}]' if len(of_layer) > 1 else ''
        named.append(
            UnitGroup(
                self._output_layers[output] + suffix,
                len(slots),
                self._occurrences(columns, slots),
            )
        )
    return named

  def _find_units(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns for each slot its axis, its unit, and which of the unit's it is.

    The last one is counted on each axis from 0.
    """
    num_slots = self._starts[-1]
    axes = np.repeat(np.arange(len(self._starts) - 1), np.diff(self._starts))
    # The unit's smallest slot stands for it.
    units = np.arange(num_slots)
    if self._ties:
      left, right = (np.concatenate(x) for x in zip(*self._ties))
      while True:
        smallest = np.minimum(units[left], units[right])
        smaller = units.copy()
        np.minimum.at(smaller, left, smallest)
        np.minimum.at(smaller, right, smallest)
        smaller = smaller[smaller]
        if np.array_equal(smaller, units):
          break
        units = smaller
    ranks = np.zeros(num_slots, np.int64)
    counts: dict[tuple[int, int], int] = {}
    for slot, key in enumerate(zip(axes.tolist(), units.tolist())):
      ranks[slot] = counts.get(key, 0)
      counts[key] = ranks[slot] + 1
    return axes, units, ranks

  def _looks(
      self, axes: np.ndarray, units: np.ndarray, ranks: np.ndarray
  ) -> dict[int, Any]:
    """Returns what is the same for units that may trade places."""
    for key in self._after_inputs:
      for (layer, _), slots in self._layer_slots.items():
        if layer == key:
          self.fix(slots)
    fixed = {unit for slots in self._fixed for unit in units[slots].tolist()}
    names = list(zip(axes.tolist(), ranks.tolist()))
    looks: dict[int, list[Any]] = {}
    for unit, name in zip(units.tolist(), names):
      if unit not in fixed:
        looks.setdefault(unit, []).append(name)
    for number, (left, right) in enumerate(self._ties):
      for unit, a, b in zip(
          units[left].tolist(), left.tolist(), right.tolist()
      ):
        if unit not in fixed:
          looks[unit].append((number, *names[a], *names[b]))
    return {unit: tuple(sorted(look)) for unit, look in looks.items()}

  def _occurrences(
      self, columns: np.ndarray, slots: np.ndarray
  ) -> tuple[UnitOccurrence, ...]:
    found = []
    for axis in np.unique(columns):
      positions = slots[:, columns == axis] - self._starts[axis]
      for weight, weight_axis in self._weights.get(axis, []):
        found.append(UnitOccurrence(weight, weight_axis, positions))
    return tuple(sorted(found, key=lambda x: (x.weight, x.axis)))

  def _new_axis(self, size: int) -> np.ndarray:
    start = self._starts[-1]
    self._starts.append(start + size)
    return np.arange(start, start + size)

  def _weight_axis(
      self,
      key: Any,
      weights: Iterable[tuple[keras.Variable, int]],
      size: int,
      output_layer: Optional[str] = None,
  ) -> np.ndarray:
    """The slots of an axis that weights of a layer have in common.

    Args:
      key: Names the axis. A layer that is called again has the same.
      weights: The weights, and which of their axes it is.
      size: The axis's size.
      output_layer: The layer's name, if the slots are its outputs.

    Returns:
      The slots.
    """
    if key not in self._layer_slots:
      axis = len(self._starts) - 1
      self._layer_slots[key] = self._new_axis(size)
      self._weights[axis] = [
          (self._weight_indices[id(weight)], weight_axis)
          for weight, weight_axis in weights
      ]
      if output_layer is not None:
        self._output_layers[axis] = output_layer
    return self._layer_slots[key]

  def _tie(self, left: np.ndarray, right: np.ndarray) -> None:
    self._ties.append((left, right))

  def _call(
      self, call: keras_graph.Call, inputs: Sequence[_Tensor]
  ) -> list[_Tensor]:
    """What one call of a layer returns."""
    layer = call.layer
    if keras_copy.is_functional(layer):
      return self.follow(layer, inputs)
    shapes = [tensor.shape for tensor in call.inputs]
    if _is_operation(layer, _UNARY_OPERATIONS):
      return [inputs[0]]
    is_binary = _is_operation(layer, _BINARY_OPERATIONS)
    if is_binary or type(layer) in _MERGES:
      # A number is the same for all units.
      if any(not is_binary or np.ndim(x) for x in _constants(call)):
        raise _error(layer, 'it is called with a constant')
      return [self._merge(layer, shapes, inputs)]
    if type(layer) not in self._rules:
      raise _error(layer, 'what it does to units is not known')
    if len(inputs) != 1:
      raise _error(layer, f'it is called with {len(inputs)} tensors')
    return [self._rules[type(layer)](layer, shapes[0], inputs[0])]

  def _keep(self, layer: Any, shape: _Shape, x: _Tensor) -> _Tensor:
    del layer, shape
    return x

  def _activation(self, layer: Any, shape: _Shape, x: _Tensor) -> _Tensor:
    del shape
    if not any(layer.activation is known for known in _ACTIVATIONS):
      raise _error(layer, f'its activation {layer.activation} is none of Keras')
    return x

  def _dense(self, layer: Any, shape: _Shape, x: _Tensor) -> _Tensor:
    return self._linear(layer, shape, x, len(shape) - 1)

  def _convolution(self, layer: Any, shape: _Shape, x: _Tensor) -> _Tensor:
    if layer.groups != 1:
      raise _error(layer, f'it has groups={layer.groups}')
    return self._linear(layer, shape, x, _channel_axis(layer, shape))

  def _linear(
      self, layer: Any, shape: _Shape, x: _Tensor, axis: int
  ) -> _Tensor:
    """A layer with a kernel that ends with the axes of inputs and outputs."""
    self._activation(layer, shape, x)
    _check_axis(layer, x, axis)
    kernel = layer.kernel
    if {id(w) for w in layer.weights} - {id(kernel), id(layer.bias)}:
      raise _error(
          layer,
          'it has other weights than a kernel and a bias, as after enable_lora'
          ' or quantize',
      )
    last = len(kernel.shape) - 1
    self._tie_weights(layer, [kernel], last - 1, x)
    outputs = [(kernel, last)]
    if layer.use_bias:
      outputs.append((layer.bias, 0))
    return _Units(
        axis,
        self._weight_axis(
            ('outputs', id(layer)),
            outputs,
            kernel.shape[last],
            layer.name,
        ),
    )

  def _tie_weights(
      self,
      layer: Any,
      weights: Iterable[keras.Variable],
      axis: int,
      x: _Tensor,
  ) -> None:
    """Ties an axis of a layer's weights to the units of its input."""
    if x is None:
      self._after_inputs.add(id(layer))
      return
    slots = self._weight_axis(
        (id(layer), axis), [(w, axis) for w in weights], len(x.units)
    )
    self._tie(slots, x.units)

  def _batch_normalization(
      self, layer: Any, shape: _Shape, x: _Tensor
  ) -> _Tensor:
    # Along another axis all units are treated alike.
    if x is None or layer.axis % len(shape) == x.axis:
      self._tie_weights(layer, layer.weights, 0, x)
    return x

  def _layer_normalization(
      self, layer: Any, shape: _Shape, x: _Tensor
  ) -> _Tensor:
    axes = [axis % len(shape) for axis in layer.axis]
    if x is None:
      self._tie_weights(layer, layer.weights, 0, x)
    elif axes != sorted(axes):
      # Keras reshapes the scale to sorted axes, which mixes its elements.
      raise _error(layer, f'its axis={axes} are not in ascending order')
    elif x.axis in axes:
      self._tie_weights(layer, layer.weights, axes.index(x.axis), x)
    return x

  def _group_normalization(
      self, layer: Any, shape: _Shape, x: _Tensor
  ) -> _Tensor:
    if x is None or layer.axis % len(shape) == x.axis:
      self._tie_weights(layer, layer.weights, 0, x)
      # Groups of one channel, or of all, don't tell units from each other.
      if x is not None and 1 < layer.groups < len(x.units):
        for group in np.split(x.units, layer.groups):
          self._tie(group, group)
    return x

  def _flatten(self, layer: Any, shape: _Shape, x: _Tensor) -> _Tensor:
    if x is None:
      return None
    sizes = shape[1:]
    if None in sizes:
      raise _error(layer, f'its input of shape {shape} has an unknown size')
    order = list(range(len(sizes)))
    if layer.data_format == 'channels_first':
      order = order[1:] + order[:1]
    slots = self._new_axis(math.prod(sizes))
    pixels = np.moveaxis(
        slots.reshape([sizes[axis] for axis in order]),
        order.index(x.axis - 1),
        -1,
    )
    # A tie each, so that a pixel is not mistaken for another.
    for pixel in pixels.reshape(-1, len(x.units)):
      self._tie(pixel, x.units)
    return _Units(1, slots)

  def _zero_padding(self, layer: Any, shape: _Shape, x: _Tensor) -> _Tensor:
    del shape
    if x is None:
      return None
    padded = x.axis - (2 if layer.data_format == 'channels_first' else 1)
    if padded not in (0, 1):
      return x
    before, after = layer.padding[padded]
    zeros = self._new_axis(before + after)
    return x._replace(
        units=np.concatenate([zeros[:before], x.units, zeros[before:]])
    )

  def _pooling(self, layer: Any, shape: _Shape, x: _Tensor) -> _Tensor:
    _check_axis(layer, x, _channel_axis(layer, shape))
    return x

  def _global_pooling(self, layer: Any, shape: _Shape, x: _Tensor) -> _Tensor:
    _check_axis(layer, x, _channel_axis(layer, shape))
    return x if x is None or layer.keepdims else x._replace(axis=1)

  def _merge(
      self,
      layer: Any,
      shapes: Sequence[_Shape],
      inputs: Sequence[_Tensor],
  ) -> _Tensor:
    hidden = [x for x in inputs if x is not None]
    if not hidden:
      return None
    first = hidden[0]
    for x in hidden:
      if (x.axis, len(x.units)) != (first.axis, len(first.units)) or any(
          len(shape) != len(shapes[0]) for shape in shapes
      ):
        raise _error(
            layer, f'its inputs have different shapes, {shapes[0]} and others'
        )
      self._tie(x.units, first.units)
    if len(hidden) < len(inputs):
      self.fix(first.units)
    return first


def _positions_by_value(values: np.ndarray) -> dict[int, np.ndarray]:
  """For each number in a vector, where it is."""
  order = np.argsort(values, kind='stable')
  found, starts = np.unique(values[order], return_index=True)
  return dict(zip(found.tolist(), np.split(order, starts[1:])))


def _is_operation(layer: Any, names: Sequence[str]) -> bool:
  """Whether a call in a graph is one of these functions of `keras.ops`."""
  kind = type(layer)
  return (
      not isinstance(layer, keras.Layer)
      and kind.__module__.partition('.')[0] == 'keras'
      and kind.__name__ in names
  )


def _constants(call: keras_graph.Call) -> list[Any]:
  """The arguments that are no tensors of the model."""
  tensors = {id(tensor) for tensor in call.inputs}
  arguments = [*call.args, *call.kwargs.values()]
  if isinstance(call.layer, keras.Layer):
    arguments = tree.flatten(arguments)
  return [x for x in arguments if id(x) not in tensors and x is not None]


def _channel_axis(layer: Any, shape: _Shape) -> int:
  return 1 if layer.data_format == 'channels_first' else len(shape) - 1


def _check_axis(layer: Any, x: _Tensor, axis: int) -> None:
  if x is not None and x.axis != axis:
    raise _error(
        layer,
        f'it takes axis {axis} for the units of its input, but they are on'
        f' axis {x.axis}',
    )


def _error(layer: keras.Operation, reason: str) -> ValueError:
  kind = 'layer' if isinstance(layer, keras.Layer) else 'operation'
  return ValueError(
      f'The hidden units at the {kind} {layer.name!r} ({type(layer).__name__})'
      f' can not be followed: {reason}. {_SUPPORTED}'
  )
