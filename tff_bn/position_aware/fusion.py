"""Aligns the units of two models, and interpolates between them.

"Optimal Transport for Model Fusion", appendix F.2 of Li et al., Federated
Learning with Position-Aware Neurons, CVPR 2022, after Singh and Jaggi, Model
Fusion via Optimal Transport, NeurIPS 2020. All units have the same mass, and
both models as many of them, so that an optimal transport plan is a permutation:
an assignment problem, which is solved exactly.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from scipy.spatial import distance

from tff_bn.keras_model import keras_copy
from tff_bn.layers import discovery
from tff_bn.layers.position_encoding import PositionEncoding
from tff_bn.position_aware import layer_outputs
from tff_bn.position_aware import matching
from tff_bn.position_aware import permutation
from tff_bn.position_aware import tied_units


def align(model_a: keras.Model, model_b: keras.Model, x: Any) -> keras.Model:
  """Permutes the hidden units of a model so that they fit those of another.

  Each group of units (see `tied_units.unit_groups`) is permuted so that the
  sum of the distances between the activations of units at the same positions is
  the smallest one. The activations of a unit, for all examples and at all
  positions of an image, are the outputs of the normalization of its layer; if
  it has none, of the dense or convolutional layer itself. Units that are added
  to each other, as in residual blocks, are permuted together and have the
  activations of all of their layers.

  What `model_b` computes stays the same, unless it has position encodings,
  which stay where they are; its activations are taken before any permutation.
  Of a layer that is called several times, the last call counts.

  Args:
    model_a: A model that `tied_units.unit_groups` understands.
    model_b: Another one of the same architecture.
    x: Examples that both are given.

  Returns:
    A copy of `model_b`, with units permuted. It is not compiled.

  Raises:
    TypeError: If one is not a Keras model.
    ValueError: If one is not supported, or has several layers of a name in
      nested models; their architectures differ; there are no hidden units, or
      no examples; or activations are not finite.
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
        f'The model {model_a.name!r} has no hidden units that could be aligned.'
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
  """Builds the model between two others.

  Its weights, moving statistics too, are `(1 − μ) A + μ B`. Those that are not
  real numbers, such as the states of random generators, are those of `model_a`;
  so are the phases of position encodings that are a client's own, between which
  there is nothing, and the layers' `trainable` flags, which should be the same
  in both.

  Args:
    model_a: A functional or `Sequential` model.
    model_b: Another one of the same architecture.
    coefficient: μ, from 0 for `model_a` to 1 for `model_b`.

  Returns:
    A model of the same architecture, with weights of its own. It is not
    compiled.

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
      # In float64, so that between equal numbers there is no other one.
      a, b, dtype = a.astype(np.float64), b.astype(np.float64), a.dtype
      a = ((1 - coefficient) * a + coefficient * b).astype(dtype)
    weights.append(a)
  copy = keras_copy.PlainCopy()
  model = copy.layer(model_a)
  # With the `trainable` flags.
  copy.set_state(model_a)
  model.set_weights(weights)
  return model


class _Source(NamedTuple):
  """A layer that computes units of a group.

  Attributes:
    layer_name: Its name.
    axis: The axis of the units in its outputs.
    positions: Row i has the positions on that axis that belong to unit i.
  """

  layer_name: str
  axis: int
  positions: np.ndarray


def _costs(
    models: Sequence[keras.Model],
    groups: Sequence[Sequence[tied_units.UnitGroup]],
    x: Any,
) -> list[np.ndarray]:
  """The distances of two models' units, a matrix for each group."""
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


def _sources(model: keras.Model, group: tied_units.UnitGroup) -> list[_Source]:
  """The layers whose outputs are compared, in the order of their weights."""
  layers = {
      id(weight): layer
      for layer in discovery.all_layers(model)
      if not keras_copy.is_functional(layer)
      for weight in layer.weights
  }
  linear, normalizations = {}, {}
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
      # Inputs of the layer, or its bias.
      continue
    found[layer.name] = _Source(layer.name, axis, occurrence.positions)
  # What comes before a normalization can be of any scale: independently trained
  # models fit each other less well by it.
  return list((normalizations or linear).values())


def _activations(
    model: keras.Model, sources: Sequence[Sequence[_Source]], x: Any
) -> list[list[np.ndarray]]:
  """For each group, of each source, a row of activations for each unit."""
  names = {source.layer_name for of_group in sources for source in of_group}
  names = sorted(names)
  tensors, _ = layer_outputs.call(model, names, x)
  values = {name: value.numpy() for name, value in zip(names, tensors)}
  activations = []
  for of_group in sources:
    activations.append([])
    for name, axis, positions in of_group:
      of_layer = layer_outputs.units_first(values[name], axis, name)
      rows = of_layer[positions].reshape(len(positions), -1)
      activations[-1].append(rows.astype(np.float64))
  return activations


def _places(group: tied_units.UnitGroup) -> list[tuple[int, int, list]]:
  """Where the units of a group occur, to be compared."""
  return [(o.weight, o.axis, o.positions.tolist()) for o in group.occurrences]


def _check_same_architecture(
    model_a: keras.Model, model_b: keras.Model
) -> None:
  a, b = ([list(w.shape) for w in m.weights] for m in (model_a, model_b))
  if len(a) != len(b):
    raise ValueError(
        f'The model {model_a.name!r} has {len(a)} weights, but'
        f' {model_b.name!r} {len(b)}; they must have the same architecture.'
    )
  for shape_a, shape_b, weight in zip(a, b, model_a.weights):
    if shape_a != shape_b:
      raise ValueError(
          f'The weight {weight.path!r} of the model {model_a.name!r} has the'
          f' shape {shape_a}, but that of {model_b.name!r} {shape_b}; they must'
          ' have the same architecture.'
      )
