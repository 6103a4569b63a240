"""Aligns the units of two models, and interpolates between them.

"Optimal Transport for Model Fusion", appendix F.2 of Li et al., Federated
Learning with Position-Aware Neurons, CVPR 2022, after Singh and Jaggi, Model
Fusion via Optimal Transport, NeurIPS 2020. Both models have the same number of
units, all of the same mass, so an optimal transport plan is a permutation. This
is an assignment problem, which is solved exactly.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from scipy.spatial import distance

from tff_bn.keras_model import keras_copy
from tff_bn.layers import discovery
from tff_bn.layers.position_encoding import PositionEncoding
from tff_bn.papers.units import layer_outputs
from tff_bn.papers.units import matching
from tff_bn.position_aware import permutation
from tff_bn.position_aware import tied_units
from tff_bn.position_aware import unit_slots


def align(model_a: keras.Model, model_b: keras.Model, x: Any) -> keras.Model:
  """Permutes the hidden units of `model_b` to match the units of `model_a`.

  Each group of units (see `tied_units.unit_groups`) gets the permutation with
  the least sum of distances between the activations of units at the same
  position. The activations of a unit, for all examples and at all positions of
  an image, are the outputs of its layer's normalization, or of the dense or
  convolutional layer itself if no normalization follows. Units that are added
  to each other, as in residual blocks, are permuted together and have the
  activations of all their layers.

  The outputs of `model_b` don't change, unless it has position encodings, which
  stay where they are. The activations are computed before any permutation. If a
  model calls a layer several times, the last call counts.

  Args:
    model_a: A model that `tied_units.unit_groups` supports.
    model_b: A model of the same architecture.
    x: Examples for both models, `[examples, ...]`.

  Returns:
    A copy of `model_b` with its units permuted. It is not compiled.

  Raises:
    TypeError: If an argument is not a Keras model.
    ValueError: If a model is not supported, has no hidden units, or has several
      layers of one name in nested models; if the architectures differ; or if
      there are no examples, or activations are not finite.
  """
  models = model_a, model_b
  groups = [tied_units.unit_groups(model) for model in models]
  _check_same_architecture(model_a, model_b)
  if [_places(group) for group in groups[0]] != [
      _places(group) for group in groups[1]
  ]:
    raise ValueError(
        f'The models {model_a.name!r} and {model_b.name!r} have different'
        ' groups of hidden units; they must have the same architecture.'
    )
  if not groups[0]:
    raise ValueError(
        f'The model {model_a.name!r} has no hidden units that can be aligned.'
    )
  costs = _costs(models, groups, x)
  return permutation.permute_units(
      model_b,
      {
          group.name: matching.cheapest_assignment(cost)
          for group, cost in zip(groups[1], costs)
      },
  )


def interpolate(
    model_a: keras.Model, model_b: keras.Model, coefficient: float
) -> keras.Model:
  """Interpolates between the weights of two models, `(1 − μ) A + μ B`.

  Moving statistics are interpolated, too. Weights that are not floats, such as
  counters, personal phases of position encodings, and the layers' `trainable`
  flags are taken from `model_a`.

  Args:
    model_a: A functional or `Sequential` model.
    model_b: A model of the same architecture.
    coefficient: μ, from 0 for `model_a` to 1 for `model_b`.

  Returns:
    A new model of the same architecture. It is not compiled.

  Raises:
    ValueError: If the coefficient is not in [0, 1], or the architectures
      differ.
  """
  if not 0 <= coefficient <= 1:
    raise ValueError(f'coefficient={coefficient} must be between 0 and 1.')
  _check_same_architecture(model_a, model_b)
  phases = {
      id(layer.personal_phase)
      for layer in discovery.all_layers(model_a)
      if isinstance(layer, PositionEncoding)
  }
  weights = []
  for variable, a, b in zip(
      model_a.weights, model_a.get_weights(), model_b.get_weights()
  ):
    is_real = keras.backend.is_float_dtype(variable.dtype)
    if is_real and id(variable) not in phases:
      # In float64, so that equal numbers stay exactly equal.
      a, b, dtype = a.astype(np.float64), b.astype(np.float64), a.dtype
      a = ((1 - coefficient) * a + coefficient * b).astype(dtype)
    weights.append(a)
  copy = keras_copy.PlainCopy()
  model = copy.layer(model_a)
  # This sets the `trainable` flags.
  copy.set_state(model_a)
  model.set_weights(weights)
  return model


class _Source(NamedTuple):
  """A layer that computes units of a group.

  Attributes:
    layer_name: Its name.
    axis: The axis of the units in its outputs.
    positions: The positions of the units on that axis,
      `int64[units, positions per unit]`.
  """

  layer_name: str
  axis: int
  positions: np.ndarray


def _costs(
    models: Sequence[keras.Model],
    groups: Sequence[Sequence[unit_slots.UnitGroup]],
    x: Any,
) -> list[np.ndarray]:
  """Computes a matrix of distances between two models' units for each group."""
  sources = [
      [_sources(model, group) for group in of_model]
      for model, of_model in zip(models, groups)
  ]
  squares = [np.zeros((group.size, group.size)) for group in groups[0]]
  for part in layer_outputs.batches(x):
    activations = [
        _activations(model, of_model, x[part])
        for model, of_model in zip(models, sources)
    ]
    for square, *of_group in zip(squares, *activations):
      for a, b in zip(*of_group):
        square += distance.cdist(a, b, 'sqeuclidean')
  for group, square in zip(groups[1], squares):
    if not np.isfinite(square).all():
      raise ValueError(
          f'The activations of the units {group.name!r} are not finite.'
      )
  return [np.sqrt(square) for square in squares]


def _sources(model: keras.Model, group: unit_slots.UnitGroup) -> list[_Source]:
  """Finds the layers whose outputs are compared, in the order of weights."""
  layers = {
      id(weight): layer
      for layer in discovery.all_layers(model)
      if not keras_copy.is_functional(layer)
      for weight in layer.weights
  }
  linear: dict[str, _Source] = {}
  normalizations: dict[str, _Source] = {}
  for occurrence in group.occurrences:
    weight = model.weights[occurrence.weight]
    layer = layers[id(weight)]
    kernel = getattr(layer, 'kernel', None)
    if kernel is None:
      axes = np.ravel(layer.axis)
      found, axis = normalizations, int(axes[occurrence.axis])
    elif weight is kernel and occurrence.axis == len(kernel.shape) - 1:
      channels_first = getattr(layer, 'data_format', '') == 'channels_first'
      found, axis = linear, 1 if channels_first else -1
    else:
      # The inputs of a layer, or a bias.
      continue
    found[layer.name] = _Source(layer.name, axis, occurrence.positions)
  # Before a normalization, activations have any scale, so that units of
  # independently trained models match less well.
  return list((normalizations or linear).values())


def _activations(
    model: keras.Model, sources: Sequence[Sequence[_Source]], x: Any
) -> list[list[np.ndarray]]:
  """Computes `float64[units, activations]` for each group and source."""
  names = sorted({source.layer_name for group in sources for source in group})
  tensors, _ = layer_outputs.call(model, names, x)
  values = {name: value.numpy() for name, value in zip(names, tensors)}

  def rows(source: _Source) -> np.ndarray:
    name, axis, positions = source
    of_layer = layer_outputs.units_first(values[name], axis, name)
    return of_layer[positions].reshape(len(positions), -1).astype(np.float64)

  return [[rows(source) for source in of_group] for of_group in sources]


def _places(group: unit_slots.UnitGroup) -> list[tuple[int, int, list]]:
  """Returns the occurrences of a group's units in a form to compare."""
  return [(o.weight, o.axis, o.positions.tolist()) for o in group.occurrences]


def _check_same_architecture(
    model_a: keras.Model, model_b: keras.Model
) -> None:
  a, b = ([list(w.shape) for w in m.weights] for m in (model_a, model_b))
  if len(a) != len(b):
    raise ValueError(
        f'The model {model_a.name!r} has {len(a)} weights, but'
        f' {model_b.name!r} has {len(b)}; they must have the same architecture.'
    )
  for shape_a, shape_b, weight in zip(a, b, model_a.weights):
    if shape_a != shape_b:
      raise ValueError(
          f'The weight {weight.path!r} has the shape {shape_a} in the model'
          f' {model_a.name!r}, but {shape_b} in {model_b.name!r}; they must'
          ' have the same architecture.'
      )
