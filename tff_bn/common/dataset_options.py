"""Clients' datasets without tf.data's optimizer.

For each iterator, that is for each client in each round, tf.data exports the
dataset as a graph, rewrites it and starts threads that tune it. For small
batches in memory, this takes longer than the rest of the round.
"""

import tensorflow as tf


def without_optimizer(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """Returns a dataset without options with tf.data's optimizer turned off."""
  options = tf.data.Options()
  options.experimental_optimization.apply_default_optimizations = False
  options.autotune.enabled = False
  return dataset.with_options(options)


def without_useless_optimizer(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """Turns off tf.data's optimizer where it cannot make a dataset faster.

  Args:
    dataset: A dataset.

  Returns:
    The dataset itself if it calls functions, which the optimizer may run in
    parallel, or if its options already configure the optimizer. Otherwise a
    dataset with the same elements, see `without_optimizer`.
  """
  options = dataset.options()
  is_chosen = (
      options.experimental_optimization.apply_default_optimizations is not None
      or options.autotune.enabled is not None
  )
  if is_chosen or _calls_functions(dataset):
    return dataset
  return without_optimizer(dataset)


def _calls_functions(dataset: tf.data.Dataset) -> bool:
  return bool(dataset._functions()) or any(
      map(_calls_functions, dataset._inputs())
  )
