"""Preference vectors: the contributions of units to the classes.

"Visualizing Neurons via Preference Vectors", section 5.2 of Li et al.,
Federated Learning with Position-Aware Neurons, CVPR 2022, after Yu et al.,
Fed2: Feature-Aligned Federated Learning, KDD 2021. If a unit of a client's
model and the unit at the same position of the server's model prefer different
classes, then averaging by position mixes different units.
"""

from collections.abc import Sequence
import functools
from typing import Any, Optional

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tff_bn.papers.units import layer_outputs


def preference_vectors(
    model: keras.Model,
    layer_name: str,
    x: Any,
    y: Optional[np.ndarray] = None,
    axis: int = -1,
) -> np.ndarray:
  """Computes the contribution of each unit of a layer to each class.

  The preference of a unit for class c is `Σ_b act_b · ∂Z_c/∂act_b`, with the
  activations act_b of the unit for the examples b and the logits Z_c, in
  inference mode. Convolutional layers are summed over all positions.

  Args:
    model: A model whose output is logits, `[examples, classes]`.
    layer_name: The name of the layer; nested models are searched. If the model
      calls a layer several times, the last call counts.
    x: Examples, `[examples, ...]`.
    y: Labels, `int[examples]`. Only examples of class c then count for class c,
      as in the paper. Default: all examples count for all classes.
    axis: The axis of the layer's units or channels.

  Returns:
    The preferences, `float64[units, classes]`.

  Raises:
    ValueError: If there is no such layer or several, no examples, or no such
      axis of units; the labels don't fit the examples or classes; or the logits
      don't depend on the layer.
  """
  by_layer = preference_vectors_by_layer(model, [layer_name], x, y, axis)
  return by_layer[layer_name]


def preference_vectors_by_layer(
    model: keras.Model,
    layer_names: Sequence[str],
    x: Any,
    y: Optional[np.ndarray] = None,
    axis: int = -1,
) -> dict[str, np.ndarray]:
  """Computes `preference_vectors` of several layers at once, which is faster.

  Args:
    model: See `preference_vectors`.
    layer_names: The names of the layers.
    x: See `preference_vectors`.
    y: See `preference_vectors`.
    axis: The axis of the units or channels, the same for all layers.

  Returns:
    The preferences, `float64[units, classes]`, by the layers' names.

  Raises:
    ValueError: See `preference_vectors`.
  """
  if y is not None:
    y = np.asarray(y)
    if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer):
      raise ValueError(
          f'y must have {len(x)} whole numbers, a label for each example, but'
          f' has the dtype {y.dtype} and the shape {y.shape}.'
      )
  batches = [
      _vectors_of_batch(
          model, layer_names, x[part], None if y is None else y[part], axis
      )
      for part in layer_outputs.batches(x)
  ]
  # One after the other, so that the order of the sum doesn't change.
  vectors = [functools.reduce(np.add, of_layer) for of_layer in zip(*batches)]
  return dict(zip(layer_names, vectors, strict=True))


def preferred_classes(vectors: npt.ArrayLike) -> np.ndarray:
  """Finds the class to which each unit contributes most.

  Args:
    vectors: The preferences, `[units, classes]`.

  Returns:
    The classes, `int64[units]`. The first one wins a tie, so a unit that is
    never active prefers class 0.

  Raises:
    ValueError: If `vectors` is not a non-empty matrix, or has a NaN.
  """
  matrix = np.asarray(vectors)
  if matrix.ndim != 2 or not matrix.size:
    raise ValueError(
        'vectors must be a matrix [units, classes], but has the shape'
        f' {matrix.shape}.'
    )
  if np.isnan(matrix).any():
    raise ValueError('vectors must not have a NaN.')
  return matrix.argmax(axis=1)


def agreeing_share(classes_a: npt.ArrayLike, classes_b: npt.ArrayLike) -> float:
  """Computes the share of units that prefer the same class in two models.

  Args:
    classes_a: The classes that the units of one model prefer, `[units]`.
    classes_b: The classes that the units of the other model prefer, `[units]`.

  Returns:
    The share of positions at which the classes are equal.

  Raises:
    ValueError: If there are no units, or the numbers of units differ.
  """
  a, b = np.asarray(classes_a), np.asarray(classes_b)
  if a.ndim != 1 or a.shape != b.shape or not a.size:
    raise ValueError(
        'classes_a and classes_b must be vectors of the same units, but have'
        f' the shapes {a.shape} and {b.shape}.'
    )
  return float(np.mean(a == b))


def _vectors_of_batch(
    model: keras.Model,
    layer_names: Sequence[str],
    x: Any,
    y: Optional[np.ndarray],
    axis: int,
) -> list[np.ndarray]:
  x = tf.convert_to_tensor(x)
  with tf.GradientTape(persistent=True) as tape:
    # Without this, the tape records only operations that depend on weights.
    if x.dtype.is_floating:
      tape.watch(x)
    activations, logits = layer_outputs.call(model, layer_names, x)
    # The gradient of the sum over examples has the gradient of each example,
    # because examples are independent.
    logits = _masked(model, logits, y)
    scores = tf.unstack(tf.reduce_sum(logits, axis=0))
  # A row for each class, with a gradient for each layer.
  gradients = [tape.gradient(score, activations) for score in scores]
  vectors = []
  for name, values, of_layer in zip(
      layer_names, activations, zip(*gradients), strict=True
  ):
    if any(gradient is None for gradient in of_layer):
      raise ValueError(
          f'The logits of the model {model.name!r} do not depend on the'
          f' (differentiable) outputs of layer_name={name!r}.'
      )
    preferences = []
    for gradient in of_layer:
      product = layer_outputs.units_first(
          values.numpy() * gradient.numpy().astype(np.float64), axis, name
      )
      preferences.append(product.sum(axis=1))
    vectors.append(np.stack(preferences, axis=1))
  return vectors


def _masked(
    model: keras.Model, logits: Any, y: Optional[np.ndarray]
) -> tf.Tensor:
  """Returns the logits; with labels, 0 for all but the examples' classes."""
  if not tf.is_tensor(logits) or logits.shape.rank != 2:
    raise ValueError(
        f'The output of the model {model.name!r} must be one tensor of logits'
        f' [examples, classes], but is {logits}.'
    )
  if y is None:
    return logits
  num_classes = logits.shape[1]
  if not 0 <= y.min() <= y.max() < num_classes:
    raise ValueError(
        f'y has labels from {y.min()} to {y.max()}, but the model'
        f' {model.name!r} has {num_classes} classes, numbered from 0.'
    )
  return tf.where(tf.one_hot(y, num_classes) > 0, logits, 0)
