"""Which classes the units of a model stand for.

"Visualizing Neurons via Preference Vectors", section 5.2 of Li et al.,
Federated Learning with Position-Aware Neurons, CVPR 2022, after Yu et al.,
Fed2: Feature-Aligned Federated Learning, KDD 2021. If a unit of a client's
model prefers another class than the unit at the same position of the server's
model, then averaging by positions mixes different units.
"""

from collections.abc import Sequence
from typing import Any, Optional

import keras
import numpy as np
import tensorflow as tf

from tff_bn.position_aware import layer_outputs


def preference_vectors(
    model: keras.Model,
    layer_name: str,
    x: Any,
    y: Optional[np.ndarray] = None,
    axis: int = -1,
) -> np.ndarray:
  """How much each unit of a layer contributes to each class.

  A unit's preference of class c is `Σ_b act_b · ∂Z_c/∂act_b` with its
  activations act_b for the examples b and their logits Z_c, in inference mode.
  Of a convolutional layer, it is the sum over all positions.

  Args:
    model: A model whose output is logits, `[examples, classes]`.
    layer_name: The name of the layer; nested models are searched. Of a layer
      that is called several times, the last call counts.
    x: Examples, `[examples, ...]`.
    y: Their labels, `[examples]`. With them, only the examples of class c count
      for class c, as in the paper. Default: all examples count for all classes.
    axis: The axis of the layer's units or channels.

  Returns:
    The preferences, `[units, classes]`, in float64.

  Raises:
    ValueError: If there is no such layer or several, no examples, or no such
      axis; labels and examples don't fit; or the logits don't depend on the
      layer.
  """
  return preference_vectors_by_layer(model, [layer_name], x, y, axis)[
      layer_name
  ]


def preference_vectors_by_layer(
    model: keras.Model,
    layer_names: Sequence[str],
    x: Any,
    y: Optional[np.ndarray] = None,
    axis: int = -1,
) -> dict[str, np.ndarray]:
  """As `preference_vectors`, of several layers, in less time than one by one.

  Args:
    model: See `preference_vectors`.
    layer_names: The names of the layers.
    x: See `preference_vectors`.
    y: See `preference_vectors`.
    axis: The axis of the units or channels of all layers.

  Returns:
    The preferences, `[units, classes]`, in float64, by the layers' names.

  Raises:
    ValueError: As `preference_vectors`.
  """
  if y is not None:
    y = np.asarray(y)
    if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer):
      raise ValueError(
          f'y must be {len(x)} whole numbers, a label for each example, but'
          f' is of dtype {y.dtype} and shape {y.shape}.'
      )
  vectors = [0.0] * len(layer_names)
  for part in layer_outputs.batches(x):
    labels = None if y is None else y[part]
    of_batch = _vectors_of_batch(model, layer_names, x[part], labels, axis)
    vectors = [a + b for a, b in zip(vectors, of_batch, strict=True)]
  return dict(zip(layer_names, vectors, strict=True))


def preferred_classes(vectors: np.ndarray) -> np.ndarray:
  """The class that each unit contributes to most.

  Args:
    vectors: The preferences, `[units, classes]`.

  Returns:
    The classes, `[units]`; the first of those that are equal, so that it is 0
    for a unit that is never active.

  Raises:
    ValueError: If `vectors` is not such a matrix, or has a NaN in it.
  """
  vectors = np.asarray(vectors)
  if vectors.ndim != 2 or not vectors.size:
    raise ValueError(
        'vectors must be a matrix of units and classes, but has the shape'
        f' {vectors.shape}.'
    )
  if np.isnan(vectors).any():
    raise ValueError('vectors has preferences that are not numbers.')
  return vectors.argmax(axis=1)


def agreeing_share(classes_a: np.ndarray, classes_b: np.ndarray) -> float:
  """The share of units that prefer the same class in two models.

  Args:
    classes_a: The classes that one model's units prefer, `[units]`.
    classes_b: The classes that another model's units prefer, `[units]`.

  Returns:
    The share of units, by position.

  Raises:
    ValueError: If there are no units, or different numbers of them.
  """
  classes_a, classes_b = np.asarray(classes_a), np.asarray(classes_b)
  if (
      classes_a.ndim != 1
      or classes_a.shape != classes_b.shape
      or not classes_a.size
  ):
    raise ValueError(
        'classes_a and classes_b must be vectors of the same units, but have'
        f' the shapes {classes_a.shape} and {classes_b.shape}.'
    )
  return float(np.mean(classes_a == classes_b))


def _vectors_of_batch(
    model: keras.Model,
    layer_names: Sequence[str],
    x: Any,
    y: Optional[np.ndarray],
    axis: int,
) -> list[np.ndarray]:
  x = tf.convert_to_tensor(x)
  with tf.GradientTape(persistent=True) as tape:
    # Without it, the tape follows only what depends on weights.
    if x.dtype.is_floating:
      tape.watch(x)
    activations, logits = layer_outputs.call(model, layer_names, x)
    # Examples are independent, so the gradient of a sum over them has the
    # gradients of all.
    logits = _masked(model, logits, y)
    scores = tf.unstack(tf.reduce_sum(logits, axis=0))
  # A row for each class, in it a gradient for each layer.
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
  """The logits; with labels only those of the examples' own classes."""
  if not tf.is_tensor(logits) or logits.shape.rank != 2:
    raise ValueError(
        f'The output of the model {model.name!r} must be one tensor of logits,'
        f' [examples, classes], but is {logits}.'
    )
  if y is None:
    return logits
  num_classes = logits.shape[1]
  if not 0 <= y.min() <= y.max() < num_classes:
    raise ValueError(
        f'y has labels from {y.min()} to {y.max()}, but the model'
        f' {model.name!r} {num_classes} classes, from 0.'
    )
  return tf.where(tf.one_hot(y, num_classes) > 0, logits, 0)
