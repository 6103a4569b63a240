"""Permutes the hidden units of models, and measures the effect on the outputs.

If hidden units trade places together with all their weights, the outputs of a
model don't change, but its average with another model does. Position encodings
(`tff_bn.layers.PositionEncoding`) don't move with the units, so the outputs of
a position-aware model do change: this is the shuffle test. Kernel normalization
drops values at fixed places during inference, so that its outputs change a
little, too.

Li, Xu, Song, Li, Wang, Shao, Federated Learning with Position-Aware Neurons,
CVPR 2022, sections 3 and 5.1, 5.2; appendix A.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Optional

import keras
from keras import tree
import numpy as np
import numpy.typing as npt

from tff_bn.common import seeding
from tff_bn.position_aware import tied_units
from tff_bn.position_aware import unit_slots


def random_permutation(
    num_units: int, shuffle_probability: float, rng: np.random.Generator
) -> np.ndarray:
  """Draws a random permutation (Generate-Permutation-Matrix of algorithm 1).

  From the first row of the identity matrix to the last, each row is swapped
  with a random row below it with probability `shuffle_probability`.

  Args:
    num_units: J, the number of units.
    shuffle_probability: P_sf.
    rng: The source of randomness.

  Returns:
    The matrix as an index vector p, `int64[num_units]`: row j has its one in
    column `p[j]`, so position j gets the old unit `p[j]`.

  Raises:
    ValueError: If `num_units` is less than 1, or the probability is not in
      [0, 1].
  """
  _check_shuffle(num_units, shuffle_probability)
  permutation = np.arange(num_units)
  rows = np.arange(num_units - 1)
  is_swapped = rng.random(num_units - 1) < shuffle_probability
  others = rng.integers(rows + 1, num_units)
  for row, other in zip(rows[is_swapped], others[is_swapped]):
    permutation[[row, other]] = permutation[[other, row]]
  return permutation


def random_permutations(
    groups: Iterable[unit_slots.UnitGroup],
    shuffle_probability: float,
    seed: int,
) -> dict[str, np.ndarray]:
  """Draws a random permutation for each group, by its name."""
  rng = seeding.generator(None, seed)
  return {
      group.name: random_permutation(group.size, shuffle_probability, rng)
      for group in groups
  }


def kept_share(permutation: npt.ArrayLike) -> float:
  """Computes the share of units that a permutation leaves where they are.

  Args:
    permutation: An index vector, see `random_permutation`.

  Returns:
    R_kept, the mean of the diagonal of the permutation matrix.

  Raises:
    ValueError: If it is not a permutation, or is empty.
  """
  return share_in_place(permutation, 'permutation')


def share_in_place(permutation: npt.ArrayLike, name: str) -> float:
  """Computes the share of `p[i] == i` in an index vector p named `name`."""
  indices = np.asarray(permutation)
  _check_permutation(indices, max(indices.size, 1), name)
  return float(np.mean(indices == np.arange(indices.size)))


def mean_kept_share(
    num_units: int,
    shuffle_probability: float,
    *,
    num_shuffles: Optional[float] = None,
    num_steps: Optional[int] = None,
    repeats: int = 10,
    seed: int = 0,
) -> float:
  """Estimates the mean share of units that random permutations keep in place.

  Without `num_steps`, each draw is one permutation. With `num_shuffles` and
  `num_steps`, it is the product of the permutations in a client's local
  training (algorithm 2), where each step permutes the units with probability
  `num_shuffles / num_steps`.

  Args:
    num_units: J, the number of units of a layer.
    shuffle_probability: P_sf.
    num_shuffles: N_sf, the mean number of permutations in local training.
    num_steps: The number of local steps.
    repeats: The number of draws.
    seed: The random seed.

  Returns:
    The mean of R_kept over the draws.

  Raises:
    ValueError: If an argument is not allowed. The message names it.
  """
  _check_shuffle(num_units, shuffle_probability)
  if repeats < 1:
    raise ValueError(f'repeats={repeats} must be at least 1.')
  if (num_shuffles is None) != (num_steps is None):
    raise ValueError(
        f'num_shuffles={num_shuffles} and num_steps={num_steps}: give both, or'
        ' neither for one permutation.'
    )
  if num_shuffles is None or num_steps is None:
    num_shuffles = num_steps = 1
  if num_steps < 1:
    raise ValueError(f'num_steps={num_steps} must be at least 1.')
  if not 0 <= num_shuffles <= num_steps:
    raise ValueError(
        f'num_shuffles={num_shuffles} must be between 0 and'
        f' num_steps={num_steps}: a step permutes the units at most once.'
    )
  rng = seeding.generator(None, seed)
  shares = []
  for _ in range(repeats):
    permutation = np.arange(num_units)
    for _ in range(np.sum(rng.random(num_steps) < num_shuffles / num_steps)):
      # The newest matrix times the product of all before.
      newest = random_permutation(num_units, shuffle_probability, rng)
      permutation = permutation[newest]
    shares.append(kept_share(permutation))
  return float(np.mean(shares))


def permute_units(
    model: keras.Model, permutations: Mapping[str, npt.ArrayLike]
) -> keras.Model:
  """Copies a model with its hidden units permuted.

  A unit moves with all its weights: in the kernels that compute and use it,
  biases, scales, shifts and moving statistics. Position encodings stay where
  they are.

  Args:
    model: A model that `unit_groups` supports.
    permutations: The permutation p for each group's name: position j gets the
      old unit `p[j]`. Groups that are left out are not permuted.

  Returns:
    The new model, which shares no weights with `model`. It is not compiled.

  Raises:
    TypeError: If `model` is not a Keras model.
    ValueError: If the model is not supported, a group does not exist, or a
      vector is not a permutation of the group's units.
  """
  return _permuted(model, tied_units.unit_groups(model), permutations)


def _permuted(
    model: keras.Model,
    groups: Iterable[unit_slots.UnitGroup],
    permutations: Mapping[str, npt.ArrayLike],
) -> keras.Model:
  """Implements `permute_units` for a model with these groups."""
  by_name = {group.name: group for group in groups}
  weights = model.get_weights()
  for name, values in permutations.items():
    if name not in by_name:
      raise ValueError(
          f'permutations has the group {name!r}, but the model {model.name!r}'
          f' has the groups {", ".join(map(repr, by_name)) or "none"}.'
      )
    permutation = np.asarray(values)
    _check_permutation(
        permutation, by_name[name].size, f'permutations[{name!r}]'
    )
    for occurrence in by_name[name].occurrences:
      weight, axis = weights[occurrence.weight], occurrence.axis
      sources = np.arange(weight.shape[axis])
      sources[occurrence.positions] = occurrence.positions[permutation]
      weights[occurrence.weight] = np.take(weight, sources, axis)
  copy = keras.models.clone_model(model)
  copy.set_weights(weights)
  return copy


def shuffle_units(
    model: keras.Model, shuffle_probability: float, seed: int
) -> keras.Model:
  """Copies a model with its hidden units permuted at random (algorithm 1).

  Args:
    model: A model that `unit_groups` supports.
    shuffle_probability: P_sf, see `random_permutation`.
    seed: The random seed of the permutations; each group has another one.

  Returns:
    The new model, see `permute_units`.

  Raises:
    TypeError: If `model` is not a Keras model.
    ValueError: If the model is not supported, has no units to permute, or the
      probability is not in [0, 1].
  """
  groups = tied_units.unit_groups(model)
  if not groups:
    raise ValueError(
        f'The model {model.name!r} has no hidden units that can be permuted.'
    )
  permutations = random_permutations(groups, shuffle_probability, seed)
  return _permuted(model, groups, permutations)


def shuffle_error(
    model: keras.Model,
    x: Any,
    shuffle_probability: float,
    seed: int,
) -> float:
  """Measures how much permuting the hidden units changes the outputs.

  The error of an example is `‖h_sf - h‖₂ / J` (equation 8), with the J outputs
  h of the model and h_sf of `shuffle_units`, both in inference mode. It is 0,
  up to rounding, if the model has no position encodings.

  Args:
    model: A model with one output that `unit_groups` supports.
    x: A batch of examples, `[examples, ...]`.
    shuffle_probability: P_sf, see `random_permutation`.
    seed: The random seed of the permutations.

  Returns:
    The mean error over the examples.

  Raises:
    TypeError: If `model` is not a Keras model.
    ValueError: If the model is not supported, has several outputs or no units
      to permute, or the probability is not in [0, 1].
  """
  shuffled = shuffle_units(model, shuffle_probability, seed)
  return output_change(*(outputs(m, x) for m in (model, shuffled)))


def outputs(model: keras.Model, x: Any) -> np.ndarray:
  """Returns the output of a model in inference mode, `float64[examples, J]`.

  A model with several outputs raises a `ValueError`.
  """
  found = tree.flatten(model(x, training=False))
  if len(found) != 1:
    raise ValueError(
        f'The model {model.name!r} has {len(found)} outputs; the shuffle error'
        ' is defined for one.'
    )
  values = keras.ops.convert_to_numpy(keras.ops.cast(found[0], 'float64'))
  return values.reshape(len(values), -1)


def output_change(before: np.ndarray, after: np.ndarray) -> float:
  """Returns the mean of `‖after - before‖₂ / J` over examples (equation 8).

  The arrays are the `outputs` of two models.
  """
  errors = np.linalg.norm(after - before, axis=1) / before.shape[1]
  return float(np.mean(errors))


def _check_shuffle(num_units: int, shuffle_probability: float) -> None:
  if num_units < 1:
    raise ValueError(f'num_units={num_units} must be at least 1.')
  if not 0 <= shuffle_probability <= 1:
    raise ValueError(
        f'shuffle_probability={shuffle_probability} must be between 0 and 1.'
    )


def _check_permutation(permutation: np.ndarray, size: int, name: str) -> None:
  if (
      permutation.dtype.kind not in 'iu'
      or permutation.shape != (size,)
      or not np.array_equal(np.sort(permutation), np.arange(size))
  ):
    raise ValueError(
        f'{name} must have each of the numbers 0 to {size - 1} once, but is'
        f' {permutation.tolist()}.'
    )
