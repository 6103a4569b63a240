"""Finds the variables of a Keras model that a training call assigns."""

from collections.abc import Set
from typing import Any

import keras
import tensorflow as tf

# TensorFlow has no public name for this module, by which it orders the
# operations of a graph. It knows the writes in loops, conditions and functions.
from tensorflow.python.framework import auto_control_deps_utils

from tff_bn.keras_model import keras_copy
from tff_bn.layers import discovery

_read_only_inputs = (
    auto_control_deps_utils.get_read_only_resource_input_indices_graph
)

# A call of these layers assigns none of the variables below, except for moving
# statistics of a layer that is not frozen. Their subclasses may differ.
READING_LAYERS = frozenset(
    getattr(keras.layers, name)
    for name in (
        # With weights.
        'BatchNormalization',
        'Conv1D',
        'Conv2D',
        'Dense',
        'DepthwiseConv2D',
        'Embedding',
        'GroupNormalization',
        'LayerNormalization',
        'Normalization',
        'SeparableConv2D',
        # Without weights.
        'Activation',
        'Add',
        'AveragePooling2D',
        'Concatenate',
        'Cropping2D',
        'Dropout',
        'Flatten',
        'GlobalAveragePooling1D',
        'GlobalAveragePooling2D',
        'GlobalMaxPooling2D',
        'InputLayer',
        'MaxPooling1D',
        'MaxPooling2D',
        'Multiply',
        'ReLU',
        'Rescaling',
        'Reshape',
        'Softmax',
        'UpSampling2D',
        'ZeroPadding2D',
    )
)
# A call can assign other variables, which belong to options such as `renorm`.
_READ_VARIABLES = frozenset(
    [
        'beta',
        'bias',
        'count',
        'depthwise_kernel',
        'embeddings',
        'gamma',
        'kernel',
        'mean',
        'moving_mean',
        'moving_variance',
        'pointwise_kernel',
        'variance',
    ]
)


def are_only_read(keras_model: keras.Model, positions: Set[int]) -> bool:
  """Returns whether the layers are known to assign none of the variables.

  Then a trace, which takes seconds for a deep model, is not needed.

  Args:
    keras_model: The model.
    positions: The positions of the variables in `keras_model.weights`. None is
      trainable. Moving statistics are of frozen layers only.
  """
  return all(
      type(layer) in READING_LAYERS or keras_copy.is_functional(layer)
      for layer in discovery.all_layers(keras_model)
  ) and _READ_VARIABLES.issuperset(
      keras_model.weights[position].name for position in positions
  )


def assigned_positions(keras_model: keras.Model, x: Any) -> Set[int]:
  """Traces a step without an optimizer and finds what it may assign.

  Args:
    keras_model: The model.
    x: The `tf.TypeSpec`s of the model's input, a nested structure.

  Returns:
    Positions in `keras_model.weights`.
  """

  @tf.autograph.experimental.do_not_convert
  def step(x):
    # A scope, because graphs allow fewer names at their root than Keras does.
    with tf.name_scope('step'), tf.GradientTape() as tape:
      outputs = keras_model(x, training=True)
      targets = [
          tensor
          for tensor in tf.nest.flatten(
              [outputs, keras_model.losses], expand_composites=True
          )
          if tf.as_dtype(tensor.dtype).is_floating
      ]
    # The gradient of a user's function can assign variables, too.
    tape.gradient(targets, [v.value for v in keras_model.trainable_weights])

  graph = tf.function(step).get_concrete_function(x).graph
  read_only = {id(graph.inputs[number]) for number in _read_only_inputs(graph)}
  assigned = {
      id(captured)
      for captured, placeholder in graph.captures
      if id(placeholder) not in read_only
  }
  return frozenset(
      position
      for position, variable in enumerate(keras_model.weights)
      if id(variable.handle) in assigned
  )
