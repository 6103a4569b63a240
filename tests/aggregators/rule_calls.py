"""Building rules from their names, and calling them without TFF."""

import tensorflow as tf

from tff_bn.catalog import rules


def build(name, num_byzantine=0, *, num_clients=None):
  """Builds an aggregator such as `nnm+krum`, with the options' defaults."""
  inner = ()
  for part in reversed(rules.chain(name)):
    arguments = {option.argument: option.default for option in part.options}
    if 'num_byzantine' in arguments:
      arguments['num_byzantine'] = num_byzantine
    inner = (part.load()(*inner, **arguments, num_clients=num_clients),)
  return inner[0]


def traced(rule, dtype, num_columns):
  """Traces a rule for any number of rows and of dropped clients."""
  state = rule.initial_state(num_columns, tf.as_dtype(dtype))

  @tf.function(
      input_signature=[
          tf.TensorSpec([None, num_columns], dtype),
          tf.TensorSpec([], tf.int32),
      ]
  )
  def aggregate_rows(values, num_dropped):
    return rule.aggregate(values, num_dropped, state)[0]

  outputs = aggregate_rows.get_concrete_function().structured_outputs
  assert outputs.shape == [num_columns]
  return lambda values, num_dropped=0: aggregate_rows(
      values, num_dropped
  ).numpy()


def aggregate(rule, values, num_dropped=0, state=None):
  """Returns the aggregate as an array, and the rule's new state."""
  if state is None:
    state = rule.initial_state(values.shape[1], tf.as_dtype(values.dtype))
  result, state = rule.aggregate(
      tf.constant(values), tf.constant(num_dropped), state
  )
  return result.numpy(), state
