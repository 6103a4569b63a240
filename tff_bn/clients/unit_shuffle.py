"""Random permutations of hidden units during local training.

Li, Xu, Song, Li, Wang, Shao, Federated Learning with Position-Aware Neurons,
CVPR 2022, section 5.2 and algorithms 1 and 2: how much does it cost that the
clients' units are not aligned?
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_bn.common import seeding
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.position_aware import tied_units


class UnitShuffle:
  """Permutes the hidden units of a client's model after some of its steps.

  In a round of r steps, each step permutes the units with probability N_sf / r.
  A permutation moves a unit with all its weights, so it does not change what
  the model computes, unless the model has position encodings. It also moves the
  unit's part of the optimizer's state, such as the momentum, which the paper
  does not mention: training then goes on as without the permutation, and only
  the mean over the clients shows it.

  Units with weights that training cannot change, such as those of a frozen
  layer, keep their places.
  """

  def __init__(
      self, model: BatchNormModel, shuffle_times: float, probability: float
  ):
    """Finds the units.

    Args:
      model: The model.
      shuffle_times: N_sf, the mean number of permutations in a round.
      probability: P_sf, the probability that a permutation swaps a unit with a
        random one after it.

    Raises:
      ValueError: If the model's units cannot be permuted.
    """
    keras_model = model.keras_model
    try:
      self._groups = [
          group
          for group in tied_units.unit_groups(keras_model)
          if not any(o.weight in model.constants for o in group.occurrences)
      ]
      if not self._groups:
        raise ValueError(
            f'The model {keras_model.name!r} has no hidden units that can be'
            ' permuted. (Units of frozen layers keep their places.)'
        )
    except ValueError as error:
      raise ValueError(
          f'shuffle_times={shuffle_times:g} is impossible: {error}'
      ) from error
    self._times = shuffle_times
    self._probability = probability
    self._weights = keras_model.weights
    position_of = {id(v): i for i, v in enumerate(self._weights)}
    self._trainable = [
        position_of[id(v)] for v in keras_model.trainable_weights
    ]

  def after_step(
      self,
      optimizer_state: Any,
      seed: tf.Tensor,
      step: tf.Tensor,
      num_steps: tf.Tensor,
  ) -> Any:
    """Permutes the model's units, or leaves them as they are.

    Args:
      optimizer_state: The optimizer's state.
      seed: An int64 vector of 2 elements, different for each client and round.
      step: int64 scalar, the number of the step in the round, from 0.
      num_steps: int64 scalar, the number of steps of the round.

    Returns:
      The optimizer's new state. The model's variables are assigned.
    """
    step_seed = tf.random.experimental.stateless_fold_in(
        tf.stack([seed[0], seed[1] + seeding.Stream.SHUFFLED_UNITS]), step
    )
    share = tf.constant(self._times, tf.float64) / tf.cast(
        num_steps, tf.float64
    )
    draw = tf.random.stateless_uniform([], step_seed, dtype=tf.float64)
    return tf.cond(
        draw < share,
        lambda: self._shuffle(optimizer_state, step_seed),
        lambda: tf.nest.map_structure(tf.identity, optimizer_state),
    )

  def _shuffle(self, optimizer_state: Any, step_seed: tf.Tensor) -> Any:
    """Permutes the units of every group (algorithm 1)."""
    # For each axis of a weight: where its new values come from.
    sources: dict[int, list[tuple[int, tf.Tensor]]] = collections.defaultdict(
        list
    )
    for number, group in enumerate(self._groups, start=1):
      permutation = random_permutation(
          group.size,
          self._probability,
          tf.random.experimental.stateless_fold_in(step_seed, number),
      )
      for occurrence in group.occurrences:
        size = self._weights[occurrence.weight].shape[occurrence.axis]
        positions = tf.constant(occurrence.positions)
        moved = tf.tensor_scatter_nd_update(
            tf.range(size, dtype=tf.int64),
            tf.reshape(positions, [-1, 1]),
            tf.reshape(tf.gather(positions, permutation), [-1]),
        )
        sources[occurrence.weight].append((occurrence.axis, moved))

    def permuted(number, value):
      for axis, moved in sources.get(number, ()):
        value = tf.gather(value, moved, axis=axis)
      return value

    for number in sources:
      weight = self._weights[number]
      weight.assign(permuted(number, tf.convert_to_tensor(weight)))

    def permuted_state(state):
      if isinstance(state, Mapping):
        return collections.OrderedDict(
            (name, permuted_state(value)) for name, value in state.items()
        )
      if isinstance(state, Sequence):  # One value for each trainable weight.
        return tuple(map(permuted, self._trainable, state))
      return tf.identity(state)  # A hyperparameter or a counter.

    return permuted_state(optimizer_state)


def random_permutation(
    num_units: int, probability: float, seed: tf.Tensor
) -> tf.Tensor:
  """Draws what `tff_bn.position_aware.random_permutation` draws, in a graph.

  Args:
    num_units: J, the number of units.
    probability: P_sf.
    seed: A vector of 2 integers.

  Returns:
    The permutation as an index vector, `int64[num_units]`.
  """
  swap_seed, other_seed = tf.unstack(
      tf.random.experimental.stateless_split(seed)
  )
  rows = np.arange(num_units - 1)
  is_swapped = (
      tf.random.stateless_uniform(rows.shape, swap_seed, dtype=tf.float64)
      < probability
  )
  others = (
      rows
      + 1
      + tf.cast(
          tf.random.stateless_uniform(rows.shape, other_seed, dtype=tf.float64)
          * (num_units - 1 - rows),
          tf.int64,
      )
  )
  swapped = tf.boolean_mask(tf.constant(rows), is_swapped)
  others = tf.boolean_mask(others, is_swapped)

  def swap(number, permutation):
    pair = tf.stack([swapped[number], others[number]])
    values = tf.reverse(tf.gather(permutation, pair), [0])
    return number + 1, tf.tensor_scatter_nd_update(
        permutation, pair[:, tf.newaxis], values
    )

  _, permutation = tf.while_loop(
      lambda number, _: number < tf.size(swapped),
      swap,
      (tf.constant(0), tf.range(num_units, dtype=tf.int64)),
  )
  return permutation
