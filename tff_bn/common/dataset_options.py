"""Clients' datasets without tf.data's optimizer.

For each iterator, that is for each client in each round, tf.data exports the
dataset as a graph, rewrites it and starts threads that tune it. For small
batches in memory, this takes longer than the rest of the round.
"""

import tensorflow as tf

# The optimizer tunes how many calls of a function run in parallel while the
# dataset is read. In a few batches there is nothing to gain.
_MAX_FEW_BATCHES = 16


def without_optimizer(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """Returns a dataset without options with tf.data's optimizer turned off."""
  options = tf.data.Options()
  options.experimental_optimization.apply_default_optimizations = False
  options.autotune.enabled = False
  return dataset.with_options(options)


def without_useless_optimizer(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """Turns off tf.data's optimizer where it costs more than it gains.

  Returns the dataset itself if its options already configure the optimizer, or
  if it calls functions, which the optimizer may run in parallel, and doesn't
  have at most 16 elements for certain.
  """
  options = dataset.options()
  is_chosen = (
      options.experimental_optimization.apply_default_optimizations is not None
      or options.autotune.enabled is not None
  )
  if is_chosen or (_calls_functions(dataset) and not _is_short(dataset)):
    return dataset
  return without_optimizer(dataset)


def _is_short(dataset: tf.data.Dataset) -> bool:
  # The cardinality is negative if it is infinite or unknown.
  return 0 <= dataset.cardinality().numpy() <= _MAX_FEW_BATCHES


def _calls_functions(dataset: tf.data.Dataset) -> bool:
  return bool(dataset._functions()) or any(
      map(_calls_functions, dataset._inputs())
  )
