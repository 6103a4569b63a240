"""Tests of the in-process contexts: callers, threads and errors."""

import asyncio
import concurrent.futures
import threading

import cases
import contexts
import numpy as np
import pytest
import sums
import tensorflow as tf
import tensorflow_federated as tff
import xla_example

from tff_bn import runtime


class TestCallers:

  def test_inside_of_a_graph(self, in_process_context):
    with tf.Graph().as_default():
      result = in_process_context.invoke(sums.sum_of_totals, [[1, 2], [3]])
    assert result == 6
    assert isinstance(result, np.int64)

    values = []

    @tf.function(autograph=False)
    def trace(x):
      values.append(
          in_process_context.invoke(sums.sum_of_totals, [[1, 2], [3]])
      )
      return x

    trace(1)
    assert values == [6]

  def test_several_threads(self, in_process_context):
    """The calls trace and compute clients concurrently."""
    computations = [sums.build_shifted_sum(constant) for constant in range(3)]

    def call(number):
      constant = number % 3
      num_clients = 1 + number % 5
      data = [[i, i + 1] for i in range(num_clients)]
      expected = num_clients * (num_clients + 2 * constant)
      return in_process_context.invoke(computations[constant], data) == expected

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
      assert all(pool.map(call, range(40)))

  def test_default_context_is_restored(self):
    stack = tff.framework.get_context_stack()
    before = stack.current
    with runtime.in_process_runtime() as context:
      assert stack.current is context
      assert sums.sum_of_totals([[1], [2, 3]]) == 6
      with runtime.in_process_runtime(max_concurrent_clients=1) as inner:
        assert stack.current is inner
      assert stack.current is context
    assert stack.current is before
    with pytest.raises(ZeroDivisionError), runtime.in_process_runtime():
      raise ZeroDivisionError
    assert stack.current is before

  def test_set_default_context(self):
    stack = tff.framework.get_context_stack()
    with contexts.default(stack.current):  # Restores it afterwards.
      context = runtime.set_default_in_process_context(max_concurrent_clients=1)
      assert stack.current is context
      assert sums.sum_of_totals([[1], [2, 3]]) == 6

  def test_closed_context_ends_its_threads(self):
    before = set(threading.enumerate())
    context = runtime.InProcessContext(max_concurrent_clients=3)
    assert context.invoke(sums.sum_of_totals, [[1]] * 9) == 9
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    context.close()
    for thread in threads:
      thread.join(timeout=60)
      assert not thread.is_alive()


@pytest.fixture
def async_context():
  context = runtime.AsyncInProcessContext(max_concurrent_clients=2)
  with contexts.default(context):
    yield context
  context.close()


class TestAsync:

  @pytest.mark.usefixtures('async_context')
  def test_concurrent_computations(self):
    comp = sums.build_shifted_sum(5)

    async def run():
      return await asyncio.gather(
          sums.sum_of_totals([[1], [2]]), comp([[1], [2]]), comp([[7]])
      )

    assert asyncio.run(run()) == [3, 23, 17]

  def test_awaitable_argument(self, async_context):
    async def argument():
      return [[1], [2, 3]]

    result = async_context.invoke(sums.sum_of_totals, argument())
    assert asyncio.run(result) == 6

  @pytest.mark.usefixtures('async_context')
  def test_error(self):
    with pytest.raises(TypeError, match='must be a list'):
      asyncio.run(sums.sum_of_totals(1))

  def test_native_federated_context(self, async_context):
    """TFF's federated programs use this context."""
    tff.framework.set_default_context(
        tff.program.NativeFederatedContext(async_context)
    )

    @tff.federated_computation(
        tff.FederatedType(np.int64, tff.SERVER), cases.clients(sums.INTS)
    )
    def step(state, data):
      total = tff.federated_sum(tff.federated_map(sums.total, data))
      new_state = tff.federated_map(sums.add, tff.federated_zip((state, total)))
      return new_state, total

    async def run():
      state, total = step(np.int64(100), [[1], [2]])
      state, total = step(state, [[3], [4, 5]])
      return await tff.program.materialize_value((state, total))

    assert asyncio.run(run()) == (115, 12)


class TestUnsupported:

  def test_computation_of_another_kind(self, in_process_context):
    comp = xla_example.build_xla_computation()
    with pytest.raises(NotImplementedError, match="kind 'xla' can not run"):
      in_process_context.invoke(comp, 1.0)

  def test_unknown_intrinsic(self, in_process_context):
    member = cases.clients(np.int64)
    intrinsic = tff.framework.Intrinsic(
        'federated_magic', tff.FunctionType(member, member)
    )
    x = tff.framework.Reference('x', member)
    comp = tff.framework.ConcreteComputation.from_building_block(
        tff.framework.Lambda('x', member, tff.framework.Call(intrinsic, x))
    )
    with pytest.raises(NotImplementedError, match="'federated_magic' can not"):
      in_process_context.invoke(comp, [1])


def test_computation_after_the_end_is_an_error():
  with runtime.in_process_runtime() as context:
    pass
  with pytest.raises(tf.errors.UnavailableError, match='runtime is closed'):
    context.invoke(sums.sum_of_totals, [[1], [2], [3]])
