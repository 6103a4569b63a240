"""Tests of plans and their stages."""

import concurrent.futures
import itertools
import threading
import time

import cases
import pytest
import tensorflow as tf
from tensorflow.python.eager import execute
import tensorflow_federated as tff

from tff_bn.runtime import imported_graph
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import plan_stage
from tff_bn.runtime import symbols


def _plan(comp, graphs=None):
  return plan_lib.Plan(comp, graphs or imported_graph.GraphCache())


def _stage(work):
  """Returns a stage that computes one float from another one."""
  leaves = [symbols.Leaf(None, cases.FLOAT) for _ in range(2)]
  return plan_stage.Stage(
      leaves[:1], leaves[1:], lambda tensors: [work(*tensors)]
  )


def _has_work(stage):
  return bool(stage.outputs)


def test_federated_averaging_is_one_pass():
  """A second pass contains only the server's last step."""

  @tff.federated_computation(
      tff.FederatedType(cases.FLOAT, tff.SERVER),
      cases.clients(cases.FLOAT),
      cases.clients(cases.FLOAT),
  )
  def comp(state, data, weights):
    model = tff.federated_broadcast(tff.federated_map(cases.double, state))
    update = tff.federated_map(cases.add, (model, data))
    mean = tff.federated_mean(update, weights)
    new_state = tff.federated_map(cases.add, (state, mean))
    return new_state, tff.federated_sum(weights), tff.federated_sum(data)

  plan = _plan(comp)
  round_, end = plan.passes
  assert _has_work(round_.server)
  assert _has_work(round_.clients)
  assert _has_work(round_.fold)
  assert not round_.kept
  assert _has_work(end.server)
  assert not _has_work(end.clients)
  assert not _has_work(end.fold)
  assert len(plan.server_inputs) == 1
  assert len(plan.client_inputs) == 2


def test_passes_are_as_few_as_possible():
  @tff.federated_computation(cases.clients(cases.FLOAT))
  def comp(x):
    # Two sums that don't depend on each other, and two that do.
    first = tff.federated_sum(x)
    second = tff.federated_sum(tff.federated_map(cases.double, x))
    shifted = tff.federated_map(cases.add, (x, tff.federated_broadcast(first)))
    third = tff.federated_sum(shifted)
    return first, second, third

  first, second = _plan(comp).passes
  assert len(first.totals) == 2
  assert len(second.totals) == 1
  # x alone is needed in the second pass.
  assert len(first.kept) == 1
  assert not second.kept


def test_unused_values_are_not_computed():
  @tff.federated_computation(cases.clients(cases.FLOAT), cases.FLOAT)
  def comp(x, y):
    tff.federated_sum(tff.federated_map(cases.double, x))
    return tff.federated_map(cases.double, x), y

  (only,) = _plan(comp).passes
  assert not only.totals
  assert not _has_work(only.server)
  assert len(only.clients.outputs) == 1


def test_server_computes_broadcast_values_once():
  """Neither the server nor the clients repeat the computation."""
  calls = []

  class Cache(imported_graph.GraphCache):

    def get(self, computation):
      graph = super().get(computation)

      def call(arguments):
        calls.append(graph)
        return graph(arguments)

      return call

  @tff.federated_computation(
      tff.FederatedType(cases.FLOAT, tff.SERVER), cases.clients(cases.FLOAT)
  )
  def comp(x, y):
    at_clients = tff.federated_broadcast(tff.federated_map(cases.double, x))
    return (
        tff.federated_map(cases.add, (at_clients, y)),
        tff.federated_map(cases.add, (y, at_clients)),
    )

  plan = _plan(comp, Cache())
  (only,) = plan.passes
  assert len(only.server.outputs) == 1
  (doubled,) = only.server([tf.constant(3.0)], '/device:CPU:0')
  assert doubled == 6
  assert len(calls) == 1
  inputs = {plan.client_inputs[0]: tf.constant(1.0)}
  inputs[only.server.outputs[0]] = doubled
  outputs = only.clients(
      [inputs[leaf] for leaf in only.clients.inputs], '/device:CPU:0'
  )
  assert [float(o) for o in outputs] == [7, 7]
  assert len(calls) == 3


def test_names_are_local_to_their_block():
  """TFF's compiler makes names unique; an uncompiled block can reuse them."""
  framework = tff.framework
  x = framework.Reference('x', cases.FLOAT)
  doubled = framework.Call(cases.double.to_building_block(), x)
  inner = framework.Block([('x', doubled), ('x', doubled)], x)
  block = framework.Lambda('x', cases.FLOAT, framework.Struct([x, inner, x]))

  plan = _plan(framework.ConcreteComputation.from_building_block(block))
  first, four_times, last = plan.results
  assert first is last
  (only,) = plan.passes
  assert only.server.outputs == (four_times,)
  assert only.server([tf.constant(3.0)], '/device:CPU:0')[0] == 12


def test_first_call_runs_alone_and_later_calls_concurrently():
  """TensorFlow would compile the function for each concurrent first call."""
  numbers = itertools.count()
  inside = []
  inside_at_first = []
  barrier = threading.Barrier(2)

  def work(x):
    number = next(numbers)
    inside.append(number)
    if number == 0:
      # Give other calls the time to enter, if they can.
      time.sleep(0.5)
      inside_at_first.extend(inside)
    else:
      # This fails unless two calls run concurrently.
      barrier.wait(timeout=60)
    return x + 1

  stage = _stage(lambda x: tf.numpy_function(work, [x], tf.float32))

  def call(value):
    (output,) = stage([tf.constant(value)], '/device:CPU:0')
    return output.numpy()

  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    # Two calls wait for the first one; then two later calls.
    assert list(pool.map(call, [1.0, 2.0, 3.0])) == [2.0, 3.0, 4.0]
    assert list(pool.map(call, [1.0, 2.0])) == [2.0, 3.0]
  assert inside_at_first == [0]


def test_functions_are_not_optimized(monkeypatch):
  """On a CPU, Grappler takes more time than it saves."""
  configs = []
  call = execute.execute_with_cancellation

  def recorded_call(name, num_outputs, inputs, attributes, *others):
    options = dict(zip(attributes[::2], attributes[1::2]))
    configs.append(tf.compat.v1.ConfigProto.FromString(options['config_proto']))
    return call(name, num_outputs, inputs, attributes, *others)

  monkeypatch.setattr(execute, 'execute_with_cancellation', recorded_call)

  @tf.function
  def up_to_five(x):
    return tf.while_loop(lambda x: x < 5, lambda x: x + 1, [x])[0]

  stage = _stage(up_to_five)
  for _ in range(2):
    assert stage([tf.constant(2.0)], '/device:CPU:0')[0] == 5

  off = [
      c.graph_options.rewrite_options.disable_meta_optimizer for c in configs
  ]
  assert off == [True, True]


class TestErrorsAndCancellation:
  """TensorFlow cancels what shares a manager with a call that failed."""

  @staticmethod
  def _add_one_if_positive(x):
    with tf.control_dependencies([tf.debugging.assert_positive(x)]):
      return x + 1

  def test_calls_after_an_error(self):
    stage = _stage(self._add_one_if_positive)
    for cancellation in (plan_stage.NEVER, plan_stage.Cancellation()):
      with pytest.raises(tf.errors.InvalidArgumentError):
        stage([tf.constant(-1.0)], '/device:CPU:0', cancellation)
      assert stage([tf.constant(1.0)], '/device:CPU:0', cancellation) == [2]

  def test_calls_after_a_cancellation(self):
    stage = _stage(self._add_one_if_positive)
    cancellation = plan_stage.Cancellation()
    cancellation.start()
    with pytest.raises(tf.errors.CancelledError):
      stage([tf.constant(1.0)], '/device:CPU:0', cancellation)
    assert stage([tf.constant(1.0)], '/device:CPU:0') == [2]
