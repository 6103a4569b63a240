"""Finds the hidden units of a Keras model that can be permuted.

The units of every tensor are followed from the inputs to the outputs. Weights
that compute or use the same unit are tied, see `unit_slots`.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any, NamedTuple, Optional

import keras
from keras import tree
import numpy as np
import tensorflow as tf

from tff_bn.keras_model import keras_copy
from tff_bn.keras_model import keras_graph
from tff_bn.layers import discovery
from tff_bn.layers.batch_renormalization import BatchRenormalization
from tff_bn.layers.feature_normalization import FeatureNormalization
from tff_bn.layers.federated_batch_normalization import (
    FederatedBatchNormalization,
)
from tff_bn.layers.hybrid_batch_normalization import HybridBatchNormalization
from tff_bn.layers.kernel_normalization import KernelNormalization
from tff_bn.layers.position_encoding import PositionEncoding
from tff_bn.layers.scalars import ScalarBias
from tff_bn.layers.scalars import ScalarMultiplier
from tff_bn.layers.static_batch_normalization import StaticBatchNormalization
from tff_bn.layers.weight_standardization import WeightStandardizedConv2D
from tff_bn.layers.weight_standardization import WeightStandardizedDense
from tff_bn.position_aware.unit_slots import Slots
from tff_bn.position_aware.unit_slots import UnitGroup
from tff_bn.position_aware.unit_slots import WeightAxis

_layers = keras.layers
_BATCH_NORMS = (
    *discovery.BATCH_NORM_CLASSES,
    BatchRenormalization,
    FederatedBatchNormalization,
    HybridBatchNormalization,
    StaticBatchNormalization,
)
# Layers without weights of single units that compute the same function for each
# unit, or treat all units alike, such as the softmax.
_WITHOUT_WEIGHTS = (
    FeatureNormalization,
    KernelNormalization,
    PositionEncoding,
    ScalarBias,
    ScalarMultiplier,
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
# Elementwise functions and kinds of softmax.
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
# Functions of `keras.ops` by the names of their classes, which are not public.
# These take one tensor, and are elementwise or a kind of softmax.
_UNARY_OPERATIONS = (
    *('Absolute', 'Cast', 'Celu', 'Cos', 'Elu', 'Exp', 'Expm1', 'Gelu'),
    *('HardShrink', 'HardSigmoid', 'HardSilu', 'HardTanh', 'LeakyRelu', 'Log'),
    *('Log1p', 'LogSigmoid', 'LogSoftmax', 'Negative', 'ReLU', 'Reciprocal'),
    *('Relu', 'Relu6', 'Rsqrt', 'Selu', 'Sigmoid', 'Sign', 'Silu', 'Sin'),
    *('SoftShrink', 'Softmax', 'Softplus', 'Softsign', 'SparsePlus'),
    *('SparseSigmoid', 'Sparsemax', 'Sqrt', 'Square', 'Squareplus'),
    *('StopGradient', 'Tanh', 'TanhShrink', 'Threshold'),
)
# These are elementwise and take two tensors, or a tensor and a number.
_BINARY_OPERATIONS = (
    *('Add', 'Divide', 'Maximum', 'Minimum', 'Multiply', 'Power'),
    *('Subtract', 'TrueDivide'),
)
_SUPPORTED = (
    "Supported are Dense, Conv2D, Keras's batch, group and layer normalization,"
    " the layers of tff_bn, Keras's activations, Add and other elementwise"
    ' merging layers, Flatten, ZeroPadding2D, 2-D pooling and global pooling,'
    ' dropout, nested functional models, operators such as +, and elementwise'
    ' functions of keras.ops, but not subclasses of these layers.'
)
_Shape = tuple[Optional[int], ...]


class _Units(NamedTuple):
  """The units of a tensor.

  Attributes:
    axis: The axis of the units in the tensor; the batch is axis 0.
    slots: The slots of the units, all different, `int64[units]`.
  """

  axis: int
  slots: np.ndarray


# The units of a tensor; None if it depends on no hidden unit.
_Tensor = Optional[_Units]


def unit_groups(model: keras.Model) -> list[UnitGroup]:
  """Finds hidden units that can be permuted without changing the outputs.

  Position encodings, whose outputs do change, are treated as if they were off.

  Units that are added to each other, as in a residual block, count as one. So
  the units of a stage of a residual network are one group. If the next stage
  pads them with zeros, the units that are added to the zeros are another group.
  The model's inputs and outputs are in no group.

  Units of a `GroupNormalization` with several groups are permuted only within
  these groups. (Whole groups could trade places, too; this is not supported.)

  Args:
    model: A functional Keras model, or a `Sequential` that begins with an
      `Input`; other such models may be nested in it.

  Returns:
    The groups of at least two units, in the order of their layers.

  Raises:
    TypeError: If `model` is not a Keras model.
    ValueError: If the model is not functional, or has a layer that is not
      supported. The message names it.
  """
  if not isinstance(model, keras.Model):
    raise TypeError(
        f'model must be a keras.Model, but is a {type(model).__name__}.'
    )
  if not keras_copy.is_functional(model) or not getattr(model, 'outputs', None):
    raise ValueError(
        f'The model {model.name!r} ({type(model).__name__}) is not a functional'
        ' model with inputs, so its hidden units cannot be found. Build it as'
        ' keras.Model(inputs, outputs).'
    )
  return _UnitTracer(model).groups()


class _UnitTracer:
  """Follows units through the calls of a model, and ties their slots."""

  def __init__(self, model: keras.Model):
    self._model = model
    self._slots = Slots()
    self._weight_indices = {id(w): i for i, w in enumerate(model.weights)}
    # By the `id` of a layer: the slots of its outputs.
    self._output_slots: dict[int, np.ndarray] = {}
    # By the `id` of a layer and an axis of its weights: the slots of its input.
    self._input_slots: dict[tuple[int, int], np.ndarray] = {}
    # The `id`s of layers that were called with inputs of the model.
    self._after_inputs: set[int] = set()
    self._rules: dict[type, Callable[[Any, _Shape, _Tensor], _Tensor]] = {
        _layers.InputLayer: self._keep,
        _layers.Activation: self._activation,
        _layers.Dense: self._dense,
        WeightStandardizedDense: self._dense,
        _layers.Conv2D: self._convolution,
        WeightStandardizedConv2D: self._convolution,
        _layers.Flatten: self._flatten,
        _layers.ZeroPadding2D: self._zero_padding,
        _layers.GroupNormalization: self._group_normalization,
        _layers.LayerNormalization: self._layer_normalization,
        **dict.fromkeys(_WITHOUT_WEIGHTS, self._keep),
        **dict.fromkeys(_POOLINGS, self._pooling),
        **dict.fromkeys(_GLOBAL_POOLINGS, self._global_pooling),
        **dict.fromkeys(_BATCH_NORMS, self._batch_normalization),
    }

  def groups(self) -> list[UnitGroup]:
    """Returns the groups of units of the model."""
    outputs = self._follow(self._model, [None] * len(self._model.inputs))
    for units in outputs:
      if units is not None:
        self._slots.fix(units.slots)
    # Units that a layer takes in the place of inputs of the model stay.
    for (layer_id, _), slots in self._input_slots.items():
      if layer_id in self._after_inputs:
        self._slots.fix(slots)
    return self._slots.groups()

  def _follow(
      self, model: keras.Model, inputs: Sequence[_Tensor]
  ) -> list[_Tensor]:
    """Returns the units of the outputs of a functional model."""
    tensors = {
        id(tensor): units
        for tensor, units in zip(model.inputs, inputs, strict=True)
    }
    for call in keras_graph.calls(model):
      arguments = [tensors[id(tensor)] for tensor in call.inputs]
      outputs = self._call(call, arguments)
      for tensor, units in zip(call.outputs, outputs, strict=True):
        tensors[id(tensor)] = units
    return [tensors[id(tensor)] for tensor in model.outputs]

  def _call(
      self, call: keras_graph.Call, inputs: Sequence[_Tensor]
  ) -> list[_Tensor]:
    """Returns the units of the outputs of a layer's call."""
    layer = call.layer
    if keras_copy.is_functional(layer):
      return self._follow(layer, inputs)
    shapes = [tensor.shape for tensor in call.inputs]
    if _is_operation(layer, _UNARY_OPERATIONS):
      return [inputs[0]]
    is_binary = _is_operation(layer, _BINARY_OPERATIONS)
    if is_binary or type(layer) in _MERGES:
      # A single number treats all units alike.
      if any(not is_binary or np.ndim(x) for x in _constants(call)):
        raise _error(layer, 'it is called with a constant')
      return [self._merge(layer, shapes, inputs)]
    if type(layer) not in self._rules:
      raise _error(layer, 'its effect on units is not known')
    if len(inputs) != 1:
      raise _error(layer, f'it is called with {len(inputs)} tensors')
    return [self._rules[type(layer)](layer, shapes[0], inputs[0])]

  def _keep(self, layer: keras.Layer, shape: _Shape, x: _Tensor) -> _Tensor:
    del layer, shape
    return x

  def _activation(
      self,
      layer: keras.layers.Activation | keras.layers.Dense | keras.layers.Conv2D,
      shape: _Shape,
      x: _Tensor,
  ) -> _Tensor:
    del shape
    if not any(layer.activation is known for known in _ACTIVATIONS):
      raise _error(
          layer, f"its activation {layer.activation} is none of Keras's"
      )
    return x

  def _dense(
      self, layer: keras.layers.Dense, shape: _Shape, x: _Tensor
  ) -> _Tensor:
    return self._linear(layer, shape, x, len(shape) - 1)

  def _convolution(
      self, layer: keras.layers.Conv2D, shape: _Shape, x: _Tensor
  ) -> _Tensor:
    if layer.groups != 1:
      raise _error(layer, f'it has groups={layer.groups}')
    return self._linear(layer, shape, x, _channel_axis(layer, shape))

  def _linear(
      self,
      layer: keras.layers.Dense | keras.layers.Conv2D,
      shape: _Shape,
      x: _Tensor,
      axis: int,
  ) -> _Tensor:
    """A layer with a kernel `[..., inputs, outputs]`."""
    self._activation(layer, shape, x)
    _check_axis(layer, x, axis)
    kernel = layer.kernel
    gain = getattr(layer, 'gain', None)  # Of standardized weights.
    of_outputs = [w for w in (layer.bias, gain) if w is not None]
    if {id(w) for w in layer.weights} - {id(w) for w in (kernel, *of_outputs)}:
      raise _error(
          layer,
          'it has other weights than a kernel and a bias, as after enable_lora'
          ' or quantize',
      )
    last = len(kernel.shape) - 1
    self._tie_weights(layer, [kernel], last - 1, x)
    if id(layer) not in self._output_slots:
      weights = self._weight_axes([kernel], last)
      weights += self._weight_axes(of_outputs, 0)
      self._output_slots[id(layer)] = self._slots.new_axis(
          kernel.shape[last], weights, layer.name
      )
    return _Units(axis, self._output_slots[id(layer)])

  def _tie_weights(
      self,
      layer: keras.Layer,
      weights: Sequence[keras.Variable],
      axis: int,
      x: _Tensor,
  ) -> None:
    """Ties an axis of a layer's weights to the units of its input."""
    if x is None:
      self._after_inputs.add(id(layer))
      return
    key = id(layer), axis
    if key not in self._input_slots:
      self._input_slots[key] = self._slots.new_axis(
          len(x.slots), self._weight_axes(weights, axis)
      )
    self._slots.tie(self._input_slots[key], x.slots)

  def _weight_axes(
      self, weights: Sequence[keras.Variable], axis: int
  ) -> list[WeightAxis]:
    return [WeightAxis(self._weight_indices[id(w)], axis) for w in weights]

  def _batch_normalization(
      self, layer: keras.Layer, shape: _Shape, x: _Tensor
  ) -> _Tensor:
    # Along another axis, all units are treated alike.
    if x is None or layer.axis % len(shape) == x.axis:
      self._tie_weights(layer, layer.weights, 0, x)
    return x

  def _layer_normalization(
      self, layer: keras.layers.LayerNormalization, shape: _Shape, x: _Tensor
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
      self, layer: keras.layers.GroupNormalization, shape: _Shape, x: _Tensor
  ) -> _Tensor:
    if x is None or layer.axis % len(shape) == x.axis:
      self._tie_weights(layer, layer.weights, 0, x)
      # Groups of one channel, or of all, treat all units alike.
      if x is not None and 1 < layer.groups < len(x.slots):
        for group in np.split(x.slots, layer.groups):
          self._slots.tie(group, group)
    return x

  def _flatten(
      self, layer: keras.layers.Flatten, shape: _Shape, x: _Tensor
  ) -> _Tensor:
    if x is None:
      return None
    sizes = [size for size in shape[1:] if size is not None]
    if len(sizes) < len(shape) - 1:
      raise _error(layer, f'its input of shape {shape} has an unknown size')
    order = list(range(len(sizes)))
    if layer.data_format == 'channels_first':
      order = order[1:] + order[:1]
    slots = self._slots.new_axis(math.prod(sizes))
    pixels = np.moveaxis(
        slots.reshape([sizes[axis] for axis in order]),
        order.index(x.axis - 1),
        -1,
    )
    # One tie for each pixel, so that pixels cannot trade places.
    for pixel in pixels.reshape(-1, len(x.slots)):
      self._slots.tie(pixel, x.slots)
    return _Units(1, slots)

  def _zero_padding(
      self, layer: keras.layers.ZeroPadding2D, shape: _Shape, x: _Tensor
  ) -> _Tensor:
    del shape
    if x is None:
      return None
    padded = x.axis - (2 if layer.data_format == 'channels_first' else 1)
    if padded not in (0, 1):
      return x
    before, after = layer.padding[padded]
    zeros = self._slots.new_axis(before + after)
    return x._replace(
        slots=np.concatenate([zeros[:before], x.slots, zeros[before:]])
    )

  def _pooling(self, layer: keras.Layer, shape: _Shape, x: _Tensor) -> _Tensor:
    _check_axis(layer, x, _channel_axis(layer, shape))
    return x

  def _global_pooling(
      self, layer: keras.Layer, shape: _Shape, x: _Tensor
  ) -> _Tensor:
    _check_axis(layer, x, _channel_axis(layer, shape))
    return x if x is None or layer.keepdims else x._replace(axis=1)

  def _merge(
      self,
      layer: keras.Operation,
      shapes: Sequence[_Shape],
      inputs: Sequence[_Tensor],
  ) -> _Tensor:
    hidden = [x for x in inputs if x is not None]
    if not hidden:
      return None
    first = hidden[0]
    same_rank = all(len(shape) == len(shapes[0]) for shape in shapes)
    for x in hidden:
      if not same_rank or (
          (x.axis, len(x.slots)) != (first.axis, len(first.slots))
      ):
        raise _error(layer, f'its inputs have the different shapes {shapes}')
      self._slots.tie(x.slots, first.slots)
    if len(hidden) < len(inputs):
      self._slots.fix(first.slots)
    return first


def _is_operation(layer: keras.Operation, names: Sequence[str]) -> bool:
  """Whether a call in a graph is one of these functions of `keras.ops`."""
  kind = type(layer)
  return (
      not isinstance(layer, keras.Layer)
      and kind.__module__.partition('.')[0] == 'keras'
      and kind.__name__ in names
  )


def _constants(call: keras_graph.Call) -> list[Any]:
  """Returns the arguments of a call that are no tensors of the model."""
  tensors = {id(tensor) for tensor in call.inputs}
  arguments = [*call.args, *call.kwargs.values()]
  if isinstance(call.layer, keras.Layer):
    arguments = tree.flatten(arguments)
  return [x for x in arguments if id(x) not in tensors and x is not None]


def _channel_axis(layer: keras.Layer, shape: _Shape) -> int:
  return 1 if layer.data_format == 'channels_first' else len(shape) - 1


def _check_axis(layer: keras.Layer, x: _Tensor, axis: int) -> None:
  if x is not None and x.axis != axis:
    raise _error(
        layer,
        f'it expects the units of its input on axis {axis}, but they are on'
        f' axis {x.axis}',
    )


def _error(layer: keras.Operation, reason: str) -> ValueError:
  kind = 'layer' if isinstance(layer, keras.Layer) else 'operation'
  return ValueError(
      f'Hidden units cannot be followed through the {kind} {layer.name!r}'
      f' ({type(layer).__name__}): {reason}. {_SUPPORTED}'
  )
