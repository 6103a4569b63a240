"""The messages of hand-written computations."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import analysis

_DOWN, _UP = analysis.Direction.DOWN, analysis.Direction.UP


def _tensor(dtype, *shape):
  return tff.TensorType(dtype, shape)


_WEIGHTS = _tensor(np.float32, 10)
_STATISTIC = _tensor(np.float64, 3)
_COUNTS = _tensor(np.int32, 100)
_VALUES = _tensor(np.float32, 100)
_SCALAR = _tensor(np.float32)


def _function(result_type, *parameter_types):
  """Returns a computation of zeros; only its types matter."""

  def zeros():
    return tf.zeros(result_type.shape, result_type.dtype.type)

  if not parameter_types:
    return tff.tensorflow.computation(zeros)
  return tff.tensorflow.computation(
      lambda _: zeros(),
      parameter_types[0]
      if len(parameter_types) == 1
      else tff.to_type(parameter_types),
  )


def _map(result_type, *values):
  """Maps federated values of one placement to zeros of a type."""
  function = _function(result_type, *(v.type_signature.member for v in values))
  return tff.federated_map(function, values[0] if len(values) == 1 else values)


def _next(function, state_type, data_type):
  """Returns the `next` of a process; `function` returns state and metrics."""

  @tff.federated_computation(
      tff.FederatedType(state_type, tff.SERVER),
      tff.FederatedType(data_type, tff.CLIENTS),
  )
  def next_fn(state, data):
    return tff.learning.templates.LearningProcessOutput(*function(state, data))

  return next_fn


def _sum(result_type, *values):
  return tff.federated_sum(_map(result_type, *values))


def test_exchanges_that_build_on_each_other():
  def next_fn(state, data):
    at_clients = tff.federated_broadcast(state)
    first = _sum(_STATISTIC, at_clients, data)
    second = _sum(_WEIGHTS, at_clients, tff.federated_broadcast(first), data)
    third = _sum(_COUNTS, tff.federated_broadcast(second), data)
    return second, third

  computation = _next(next_fn, _WEIGHTS, _SCALAR)

  assert analysis.messages(computation) == [
      analysis.Message(1, _DOWN, tf.float32, (10,), metrics_only=False),
      analysis.Message(1, _UP, tf.float64, (3,), metrics_only=False),
      analysis.Message(2, _DOWN, tf.float64, (3,), metrics_only=False),
      analysis.Message(2, _UP, tf.float32, (10,), metrics_only=False),
      analysis.Message(3, _DOWN, tf.float32, (10,), metrics_only=True),
      analysis.Message(3, _UP, tf.int32, (100,), metrics_only=True),
  ]
  # The server sends the state once, although clients use it twice.
  assert analysis.computation_traffic(computation) == analysis.Traffic(
      exchanges=2, download_bytes=40 + 24, upload_bytes=24 + 40
  )


def test_names_are_places_in_the_structures_of_the_senders():
  state_type = tff.to_type(
      collections.OrderedDict(weights=[_WEIGHTS, _WEIGHTS], rate=_SCALAR)
  )

  @tff.tensorflow.computation(state_type, _VALUES)
  def train(state, values):
    del state
    mean = tf.zeros(3, tf.float64)
    return collections.OrderedDict(
        update=dict(mean=mean), sums=[values, values]
    )

  def next_fn(state, data):
    sent = tff.federated_map(train, (tff.federated_broadcast(state), data))
    return state, tff.federated_sum(sent)

  messages = analysis.messages(_next(next_fn, state_type, _VALUES))

  assert [m.name for m in messages if m.direction is _DOWN] == [
      'weights[0]',
      'weights[1]',
      'rate',
  ]
  assert [m.name for m in messages if m.direction is _UP] == [
      'update.mean',
      'sums[0]',
      'sums[1]',
  ]


def test_metrics_that_need_a_value_before_the_state_does():
  def next_fn(state, data):
    at_clients = tff.federated_broadcast(state)
    metrics = _sum(_COUNTS, at_clients)
    first = _sum(_STATISTIC, data)
    second = _sum(_WEIGHTS, at_clients, tff.federated_broadcast(first))
    return second, metrics

  computation = _next(next_fn, _WEIGHTS, _SCALAR)

  assert analysis.messages(computation)[0] == analysis.Message(
      1, _DOWN, tf.float32, (10,), metrics_only=False
  )
  assert analysis.computation_traffic(computation) == analysis.Traffic(
      exchanges=2, download_bytes=40 + 24, upload_bytes=24 + 40
  )


def test_value_in_two_exchanges():
  def next_fn(state, data):
    first = tff.federated_sum(data)
    in_same_exchange = tff.federated_max(data)
    is_small = tff.federated_broadcast(_map(_STATISTIC, first))
    again = tff.federated_mean(data, weight=_map(_SCALAR, is_small))
    del state
    return _map(_WEIGHTS, in_same_exchange, first, again), first

  computation = _next(next_fn, _WEIGHTS, _VALUES)

  traffic = analysis.computation_traffic(computation)

  assert traffic.exchanges == 2
  assert traffic.download_bytes == 24
  assert traffic.upload_bytes == 2 * 400


def test_value_that_metrics_and_then_the_state_need():
  def next_fn(state, data):
    del state
    total = tff.federated_broadcast(_sum(_STATISTIC, data))
    both = tff.federated_sum(
        tff.federated_zip((data, _map(_WEIGHTS, total, data)))
    )
    return _map(_WEIGHTS, both), tff.federated_sum(data)

  messages = analysis.messages(_next(next_fn, _WEIGHTS, _VALUES))

  assert [
      (m.exchange, m.metrics_only) for m in messages if m.shape == (100,)
  ] == [(1, True), (2, False)]


def test_clients_send_back_a_received_value():
  computation = _next(
      lambda state, data: (
          tff.federated_sum(tff.federated_broadcast(state)),
          tff.federated_sum(data),
      ),
      _WEIGHTS,
      _COUNTS,
  )

  assert analysis.computation_traffic(computation) == analysis.Traffic(
      1, 40, 40
  )


def test_client_states_from_the_server_are_counted():
  @tff.federated_computation(
      tff.FederatedType(_WEIGHTS, tff.SERVER),
      tff.FederatedType(_STATISTIC, tff.CLIENTS),
      tff.FederatedType(_SCALAR, tff.CLIENTS),
  )
  def next_fn(state, client_states, data):
    total = tff.federated_sum(client_states)
    return collections.OrderedDict(
        state=state,
        client_states=tff.federated_broadcast(total),
        metrics=tff.federated_sum(data),
    )

  assert analysis.computation_traffic(next_fn) == analysis.Traffic(1, 24, 24)


@pytest.mark.parametrize(
    ('type_spec', 'shape'),
    [
        (tff.TensorType(np.float32, [None, 3]), r'\(None, 3\)'),
        (tff.TensorType(np.str_), r'string and shape \(\)'),
    ],
    ids=['unknown size', 'string'],
)
def test_unknown_number_of_bytes(type_spec, shape):
  zero = _function(_SCALAR)
  add = _function(_SCALAR, _SCALAR, type_spec)
  same = _function(_SCALAR, _SCALAR)

  def count(value):
    return tff.federated_aggregate(value, zero(), add, add_totals, same)

  add_totals = _function(_SCALAR, _SCALAR, _SCALAR)
  for_state = _next(
      lambda state, data: (_map(_WEIGHTS, state, count(data)), state),
      _WEIGHTS,
      type_spec,
  )
  for_metrics = _next(
      lambda state, data: (state, count(data)),
      _WEIGHTS,
      type_spec,
  )

  with pytest.raises(ValueError, match=shape):
    analysis.computation_traffic(for_state)
  assert analysis.computation_traffic(for_metrics) == analysis.Traffic(0, 0, 0)
  # `messages` still lists the tensor.
  (message,) = analysis.messages(for_state)
  assert message.direction is _UP and not message.is_scalar
