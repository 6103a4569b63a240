"""The shuffle test: what permuting a model's hidden units does to its outputs.

Hidden units that trade places, with all weights that belong to them, leave what
a model computes as it is, and what is averaged with another model's weights
not. Position encodings (`tff_bn.layers.PositionEncoding`) stay where they are,
so a model that has them computes something else afterwards.

Li, Xu, Song, Li, Wang, Shao, Federated Learning with Position-Aware Neurons,
CVPR 2022, sections 3 and 5.1, 5.2; appendix A.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

import keras
from keras import tree
import numpy as np

from tff_bn.common import seeding
from tff_bn.position_aware import tied_units


def random_permutation(
    num_units: int, shuffle_probability: float, rng: np.random.Generator
) -> np.ndarray:
  """Draws a permutation (Generate-Permutation-Matrix of algorithm 1).

  From the first row of the identity matrix to the last, each is swapped with
  a random one of those below it with probability `shuffle_probability`.

  Args:
    num_units: J, the number of units.
    shuffle_probability: P_sf.
    rng: The source of randomness.

  Returns:
    The matrix as a vector p of `int64`: row j has its one in column `p[j]`. So
    unit j becomes what unit `p[j]` was.

  Raises:
    ValueError: If there is no unit, or the probability is not in [0, 1].
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
    groups: Iterable[tied_units.UnitGroup],
    shuffle_probability: float,
    seed: int,
) -> dict[str, np.ndarray]:
  """Draws a permutation for each group of units.

  Args:
    groups: The groups, see `unit_groups`.
    shuffle_probability: P_sf, see `random_permutation`.
    seed: The seed of the draws.

  Returns:
    The permutations by the groups' names, for `permute_units`.

  Raises:
    ValueError: If the probability is not in [0, 1].
  """
  rng = seeding.generator(None, seed)
  return {
      group.name: random_permutation(group.size, shuffle_probability, rng)
      for group in groups
  }


def kept_share(permutation: Sequence[int]) -> float:
  """Returns the share of units that a permutation leaves where they are.

  Args:
    permutation: The vector of a permutation, see `random_permutation`.

  Returns:
    R_kept, the mean of the diagonal of the permutation's matrix.

  Raises:
    ValueError: If it is not a permutation, or has no element.
  """
  permutation = np.asarray(permutation)
  _check_permutation(permutation, max(permutation.size, 1), 'permutation')
  return float(np.mean(permutation == np.arange(permutation.size)))


def mean_kept_share(
    num_units: int,
    shuffle_probability: float,
    *,
    num_shuffles: Optional[float] = None,
    num_steps: Optional[int] = None,
    repeats: int = 10,
    seed: int = 0,
) -> float:
  """Returns how many units stay in place, in the mean over random draws.

  Of one permutation; or, with `num_shuffles` and `num_steps`, of those of a
  client's local training (algorithm 2): in each local step the units are
  permuted with probability `num_shuffles / num_steps`, one time after another.

  Args:
    num_units: J, the number of units of a layer.
    shuffle_probability: P_sf.
    num_shuffles: N_sf, how often the units are permuted on average.
    num_steps: The number of local steps.
    repeats: Over how many draws to take the mean.
    seed: The seed of the draws.

  Returns:
    The mean of R_kept.

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
  if num_steps is None:
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
      # The newest one's matrix times that of all before.
      newest = random_permutation(num_units, shuffle_probability, rng)
      permutation = permutation[newest]
    shares.append(kept_share(permutation))
  return float(np.mean(shares))


def permute_units(
    model: keras.Model, permutations: Mapping[str, Sequence[int]]
) -> keras.Model:
  """Copies a model, with hidden units permuted.

  All weights of a unit go with it: in kernels of its own and of the layers
  after it, biases, scales and shifts, moving statistics. Position encodings
  stay where they are.

  Args:
    model: A model that `unit_groups` understands.
    permutations: For names of groups the permutation p of their units: unit j
      becomes what unit `p[j]` was. Groups that are left out stay as they are.

  Returns:
    The new model, with weights of its own. It is not compiled.

  Raises:
    TypeError: If `model` is not a Keras model.
    ValueError: If the model is not supported; a group does not exist; or what
      is given for it is no permutation of its units.
  """
  groups = {group.name: group for group in tied_units.unit_groups(model)}
  unknown = [name for name in permutations if name not in groups]
  if unknown:
    raise ValueError(
        f'The model {model.name!r} has no group of units {unknown[0]!r}; its'
        f' groups are {", ".join(map(repr, groups)) or "none"}.'
    )
  weights = model.get_weights()
  for name, permutation in permutations.items():
    permutation = np.asarray(permutation)
    _check_permutation(
        permutation, groups[name].size, f'The permutation of {name!r}'
    )
    for occurrence in groups[name].occurrences:
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
  """Copies a model, with its hidden units permuted at random (algorithm 1).

  Args:
    model: A model that `unit_groups` understands.
    shuffle_probability: P_sf, see `random_permutation`.
    seed: The seed of the permutations, of which each group has its own.

  Returns:
    The new model, see `permute_units`.

  Raises:
    TypeError: If `model` is not a Keras model.
    ValueError: If the model is not supported, or has no units to permute; or
      if the probability is not in [0, 1].
  """
  groups = tied_units.unit_groups(model)
  if not groups:
    raise ValueError(
        f'The model {model.name!r} has no hidden units that could be permuted.'
    )
  return permute_units(
      model, random_permutations(groups, shuffle_probability, seed)
  )


def shuffle_error(
    model: keras.Model,
    x: Any,
    shuffle_probability: float,
    seed: int,
) -> float:
  """Measures how much permuting the hidden units changes the outputs.

  That is `‖h_sf - h‖₂ / J` (equation 8), with h a sample's J outputs of the
  model and h_sf those of `shuffle_units`, both in inference mode. It is 0, up
  to rounding, where units don't know their positions.

  Args:
    model: A model that `unit_groups` understands, with one output.
    x: A batch of inputs.
    shuffle_probability: P_sf, see `random_permutation`.
    seed: The seed of the permutations.

  Returns:
    The mean over the samples.

  Raises:
    TypeError: If `model` is not a Keras model.
    ValueError: If the model is not supported, or has several outputs or no
      units to permute; or if the probability is not in [0, 1].
  """
  shuffled = shuffle_units(model, shuffle_probability, seed)
  return output_change(*(outputs(m, x) for m in (model, shuffled)))


def outputs(model: keras.Model, x: Any) -> np.ndarray:
  """Computes the one output of a model, in inference mode.

  Args:
    model: A model with one output.
    x: A batch of inputs.

  Returns:
    The output in float64, `[samples, outputs]`.

  Raises:
    ValueError: If the model has several outputs.
  """
  found = tree.flatten(model(x, training=False))
  if len(found) != 1:
    raise ValueError(
        f'The model {model.name!r} has {len(found)} outputs; the shuffle error'
        ' is for models with one.'
    )
  values = keras.ops.convert_to_numpy(keras.ops.cast(found[0], 'float64'))
  return values.reshape(len(values), -1)


def output_change(before: np.ndarray, after: np.ndarray) -> float:
  """The mean over samples of `‖after - before‖₂ / J` (equation 8).

  Args:
    before: What `outputs` returned, `[samples, J]`.
    after: Another model's, of the same shape.

  Returns:
    The mean.
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
        f' {permutation}.'
    )
