"""Matches the units of two models by what they compute.

"Matching via Optimal Assignment", section 5.2 of Li et al., Federated Learning
with Position-Aware Neurons, CVPR 2022: if the units of a client's model are
best matched with units at other positions of the server's model, then training
has moved them, and averaging by positions mixes different units.
"""

from typing import Any, NamedTuple

import keras
import numpy as np
from scipy import optimize
from scipy.spatial import distance

from tff_bn.position_aware import layer_outputs

# The share of the largest distance by which a match on the diagonal is
# preferred: more than the rounding of float64, less than that of activations.
_PREFERENCE = 1e-12


class Match(NamedTuple):
  """How the units of two models are matched.

  Attributes:
    assignment: An index vector q: unit i of the first model is matched with
      unit q[i] of the second.
    diagonal_share: The share of units that are matched with the one at the same
      position.
  """

  assignment: np.ndarray
  diagonal_share: float


def layer_activations(
    model: keras.Model, layer_name: str, x: Any, axis: int = -1
) -> np.ndarray:
  """What the units of a layer compute, in inference mode.

  Of a convolutional layer, a unit's activations at all positions are taken.
  (The paper has one number for an example, but does not say how it is made; in
  their mean, channels that see different patterns can be the same.)

  Args:
    model: The model.
    layer_name: The name of the layer; nested models are searched. To have what
      comes after a normalization or an activation function, name that layer. Of
      a layer that is called several times, the last call counts.
    x: Examples, `[examples, ...]`.
    axis: The axis of the layer's units or channels.

  Returns:
    The activations, `[units, examples * positions]`.

  Raises:
    ValueError: If there is no such layer or several, no examples, or no such
      axis.
  """
  activations = []
  for part in layer_outputs.batches(x):
    (values,), _ = layer_outputs.call(model, [layer_name], x[part])
    activations.append(
        layer_outputs.units_first(values.numpy(), axis, layer_name)
    )
  return np.concatenate(activations, axis=1)


def optimal_assignment(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Finds the best matching of units.

  It is the permutation q that minimizes `Σ_i ‖a_i − b_q(i)‖₂`. Units that
  compute the same, such as those that are never active, can be matched in
  several equally good ways; of these it is one that leaves as many as possible
  where they are.

  Args:
    a: Activations, `[units, m]`.
    b: Others' activations, of the same shape.

  Returns:
    An index vector q: unit i of `a` is matched with unit q[i] of `b`.

  Raises:
    ValueError: If the arrays are no matrices of the same shape, or have numbers
      in them that are not finite.
  """
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  if a.ndim != 2 or a.shape != b.shape or not a.size:
    raise ValueError(
        'a and b must be matrices of the same units and examples, but have the'
        f' shapes {a.shape} and {b.shape}.'
    )
  for name, value in (('a', a), ('b', b)):
    if not np.isfinite(value).all():
      raise ValueError(f'{name} has activations that are not finite.')
  return cheapest_assignment(distance.cdist(a, b))


def cheapest_assignment(costs: np.ndarray) -> np.ndarray:
  """Finds the permutation q that minimizes `Σ_i costs[i, q(i)]`.

  Args:
    costs: A square matrix of numbers that are at least 0.

  Returns:
    The index vector q; of several equally good ones, one with as many units as
    possible on the diagonal.
  """
  preferred = np.diag(np.full(len(costs), _PREFERENCE * costs.max()))
  # The row indices are those of all units, in order.
  _, assignment = optimize.linear_sum_assignment(costs - preferred)
  return assignment


def diagonal_share(assignment: np.ndarray) -> float:
  """The share of units that are matched with the one at the same position.

  Args:
    assignment: The index vector of `optimal_assignment`.

  Returns:
    The share of ones on the diagonal of the permutation matrix.

  Raises:
    ValueError: If `assignment` is no permutation of the indices of units.
  """
  assignment = np.asarray(assignment)
  positions = np.arange(assignment.size)
  if (
      assignment.ndim != 1
      or not assignment.size
      or not np.array_equal(np.sort(assignment), positions)
  ):
    raise ValueError(
        'assignment must be a permutation of the indices of units, but is'
        f' {assignment}.'
    )
  return float(np.mean(assignment == positions))


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
    model_b: Another one of the same architecture, such as a client's.
    layer_name: The name of the layer in both; see `layer_activations`.
    x: Examples that both are given; 500 in the paper.
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
