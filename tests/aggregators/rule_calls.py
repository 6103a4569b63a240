"""Calls of robust rules without TFF."""

import tensorflow as tf


def aggregate(rule, values, num_dropped=0, state=None):
  """Returns the aggregate as an array, and the rule's new state."""
  if state is None:
    state = rule.initial_state(values.shape[1], tf.as_dtype(values.dtype))
  result, state = rule.aggregate(
      tf.constant(values), tf.constant(num_dropped), state
  )
  return result.numpy(), state
