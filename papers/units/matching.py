"""Matches the units of two models by their activations.

"Matching via Optimal Assignment", section 5.2 of Li et al., Federated Learning
with Position-Aware Neurons, CVPR 2022. If the units of a client's model match
units at other positions of the server's model, then training has moved them,
and averaging by position mixes different units.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
from scipy import optimize
from scipy.spatial import distance

from tff_bn.papers.units import layer_outputs
from tff_bn.position_aware import permutation

# Matches on the diagonal are preferred by this share of the largest distance:
# more than the rounding error of float64, less than that of activations.
_PREFERENCE = 1e-12


class Match(NamedTuple):
  """Matched units of two models.

  Attributes:
    assignment: An index vector q, `int64[units]`: unit i of the first model is
      matched with unit q[i] of the second.
    diagonal_share: The share of units that are matched with the unit at the
      same position.
  """

  assignment: np.ndarray
  diagonal_share: float


def layer_activations(
    model: keras.Model, layer_name: str, x: Any, axis: int = -1
) -> np.ndarray:
  """Computes the activations of a layer's units, in inference mode.

  The activations of a convolutional channel at all positions count. (The paper
  has one number for each example, but does not say how it is computed. Channels
  that see different patterns can have the same mean over positions.)

  Args:
    model: The model.
    layer_name: The name of the layer; nested models are searched. For the
      activations after a normalization or an activation function, name that
      layer. If the model calls a layer several times, the last call counts.
    x: Examples, `[examples, ...]`.
    axis: The axis of the layer's units or channels.

  Returns:
    The activations, `[units, examples * positions]`.

  Raises:
    ValueError: If there is no such layer or several, no examples, or no such
      axis of units.
  """
  activations = []
  for part in layer_outputs.batches(x):
    (values,), _ = layer_outputs.call(model, [layer_name], x[part])
    activations.append(
        layer_outputs.units_first(values.numpy(), axis, layer_name)
    )
  return np.concatenate(activations, axis=1)


def optimal_assignment(a: npt.ArrayLike, b: npt.ArrayLike) -> np.ndarray:
  """Finds the permutation q of units that minimizes `Σ_i ‖a_i − b_q(i)‖₂`.

  Among equally good permutations, as of units that are never active, it prefers
  one that leaves most units where they are.

  Args:
    a: Activations, `[units, m]`.
    b: Activations of the other units, of the same shape.

  Returns:
    An index vector q: unit i of `a` is matched with unit q[i] of `b`.

  Raises:
    ValueError: If the arrays are not matrices of the same shape, or have values
      that are not finite.
  """
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  if a.ndim != 2 or a.shape != b.shape or not a.size:
    raise ValueError(
        'a and b must be matrices of the same shape [units, m], but have the'
        f' shapes {a.shape} and {b.shape}.'
    )
  for name, value in (('a', a), ('b', b)):
    if not np.isfinite(value).all():
      raise ValueError(f'{name} has activations that are not finite.')
  return cheapest_assignment(distance.cdist(a, b))


def cheapest_assignment(costs: np.ndarray) -> np.ndarray:
  """Finds the permutation q that minimizes `Σ_i costs[i, q(i)]`.

  Args:
    costs: A square matrix of numbers of at least 0.

  Returns:
    The index vector q; among equally good ones, one with most units on the
    diagonal.
  """
  preferred = np.diag(np.full(len(costs), _PREFERENCE * costs.max()))
  # The row indices are 0, 1, ….
  _, assignment = optimize.linear_sum_assignment(costs - preferred)
  return assignment


def diagonal_share(assignment: npt.ArrayLike) -> float:
  """Computes the share of units that are matched with their own position.

  Args:
    assignment: The index vector of `optimal_assignment`.

  Returns:
    The share of ones on the diagonal of the permutation matrix.

  Raises:
    ValueError: If `assignment` is not a permutation of 0, 1, ….
  """
  return permutation.share_in_place(assignment, 'assignment')


def match_layers(
    model_a: keras.Model,
    model_b: keras.Model,
    layer_name: str,
    x: Any,
    axis: int = -1,
) -> Match:
  """Matches the units of a layer of two models.

  Args:
    model_a: A model, such as the server's.
    model_b: A model of the same architecture, such as a client's.
    layer_name: The name of the layer in both models; see `layer_activations`.
    x: Examples for both models, `[examples, ...]`; 500 in the paper. A channel
      is represented by its activations at all positions of all examples; the
      paper has one value for each example.
    axis: The axis of the layer's units or channels.

  Returns:
    The assignment, and the share of units on its diagonal.

  Raises:
    ValueError: If a model has no such layer or several, the layers differ in
      size, there are no examples, or activations are not finite.
  """
  assignment = optimal_assignment(
      *(layer_activations(m, layer_name, x, axis) for m in (model_a, model_b))
  )
  return Match(assignment, diagonal_share(assignment))
