"""How the in-process runtime computes: order, memory, errors, threads."""

import asyncio
import concurrent.futures
import gc
import json
import subprocess
import sys
import threading
import time
import weakref

import in_process_example
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import xla_example

from tff_bn import runtime
from tff_bn.runtime import imported_graph
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import plan_stage

_INT = tff.TensorType(np.int32)
_INTS = tff.SequenceType(tff.TensorType(np.int64))


def _clients(member):
  return tff.FederatedType(member, tff.CLIENTS)


@pytest.fixture(params=[1, 2], ids='{}_at_a_time'.format)
def context(request):
  context = runtime.InProcessContext(max_concurrent_clients=request.param)
  yield context
  context.close()


@pytest.fixture(scope='module')
def example():
  """What the example has measured."""
  done = subprocess.run(
      [sys.executable, in_process_example.__file__],
      capture_output=True,
      text=True,
      check=False,
      timeout=300,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def test_same_bits_for_any_number_of_clients_at_a_time():
  comp = in_process_example.build_round()
  digests = set()
  for number in (1, 2, 4):
    context = runtime.InProcessContext(max_concurrent_clients=number)
    digests |= {in_process_example.digest(context, comp) for _ in range(3)}
    context.close()
  assert len(digests) == 1


def test_same_bits_on_several_devices(example, in_process_context):
  expected = in_process_example.digest(
      in_process_context, in_process_example.build_round()
  )
  assert set(example['digests']) == {expected}


def test_clients_are_spread_over_the_devices(example):
  assert example['devices'] == [
      [1, 1, 1, 1],
      [0, 1, 0, 1],
      [1, 1, 1, 1],
      [0, 1, 0, 1],
      [0, 1, 0, 1],
  ]


def test_memory_does_not_grow_with_the_number_of_clients(example):
  peaks = example['peaks']
  # 72 clients with 8 MB each have 576 MB.
  assert peaks['80'] - peaks['8'] < 80


def test_compiled_functions_go_with_their_runtime(example):
  before, after = example['runtimes']
  assert after - before < 50  # 7 of them have 90 MB.


def test_variables_and_tables_are_freed(example):
  before, after = example['variables']
  assert after - before < 40  # 300 variables have 1200 MB.


class _Dataset(runtime.ClientDataset):
  """The numbers 0, 1, 2; remembers who was built."""

  element_spec = tf.TensorSpec([], tf.int64)

  def __init__(self, number, built, fail=False):
    self._number = number
    self._built = built
    self._fail = fail

  def build(self):
    self._built.append(self._number)
    if self._fail:
      raise KeyError('no such data')
    return tf.data.experimental.to_variant(tf.data.Dataset.range(3))


@tff.tensorflow.computation(_INTS)
def _total(numbers):
  return numbers.reduce(np.int64(0), lambda a, b: a + b)


@tff.tensorflow.computation(np.int64, np.int64)
def _add(x, y):
  return x + y


@tff.federated_computation(_clients(_INTS))
def _sum_of_totals(data):
  return tff.federated_sum(tff.federated_map(_total, data))


def test_client_datasets_are_built_once(context):
  """Although a later exchange needs them again."""

  @tff.federated_computation(_clients(_INTS))
  def comp(data):
    total = tff.federated_sum(tff.federated_map(_total, data))
    again = tff.federated_map(_total, data)
    return tff.federated_map(_add, (again, tff.federated_broadcast(total)))

  built = []
  result = context.invoke(comp, [_Dataset(i, built) for i in range(9)])
  assert result == [30] * 9
  assert sorted(built) == list(range(9))


def test_client_datasets_are_built_when_their_turn_comes():
  """One client after the other is built, computed and added."""
  events = []
  graphs = []

  def note(name):
    # TensorFlow forgets the Python function with the graph that calls it.
    graphs.append(tf.compat.v1.get_default_graph())
    return tf.py_function(lambda: events.append(name), [], [])

  @tff.tensorflow.computation(_INTS)
  def work(numbers):
    total = numbers.reduce(np.int64(0), lambda a, b: a + b)
    with (
        tf.control_dependencies([total]),
        tf.control_dependencies([note('computed')]),
    ):
      return tf.identity(total)

  @tff.tensorflow.computation(np.int64, np.int64)
  def add(x, y):
    with tf.control_dependencies([note('added')]):
      return x + y

  @tff.tensorflow.computation(np.int64)
  def report(x):
    return x

  @tff.federated_computation(_clients(_INTS))
  def comp(data):
    values = tff.federated_map(work, data)
    zero = tff.tensorflow.computation(lambda: np.int64(0))()
    return tff.federated_aggregate(values, zero, add, add, report)

  context = runtime.InProcessContext(max_concurrent_clients=1)
  assert context.invoke(comp, [_Dataset('built', events)] * 4) == 12
  assert events == ['built', 'computed', 'added'] * 4


def test_few_clients_are_built_ahead():
  """While the first one takes its time."""
  built = []
  others = threading.Event()

  class Slow(_Dataset):

    def build(self):
      others.wait(timeout=1)
      return super().build()

  class Watching(_Dataset):

    def build(self):
      if len(built) > 10:
        others.set()
      return super().build()

  context = runtime.InProcessContext(max_concurrent_clients=2)
  data = [Slow(0, built), *(Watching(i, built) for i in range(1, 50))]
  assert context.invoke(_sum_of_totals, data) == 150
  context.close()
  assert built.index(0) <= 10


def test_an_error_of_a_client_ends_the_round(context):
  built = []
  data = [_Dataset(i, built, fail=i == 4) for i in range(200)]
  with pytest.raises(KeyError, match='no such data'):
    context.invoke(_sum_of_totals, data)
  assert len(built) < 30
  # The context works on.
  num_built = len(built)
  assert context.invoke(_sum_of_totals, data[:4]) == 12
  assert len(built) == num_built + 4


def test_clients_that_wait_are_not_begun_after_an_error():
  built = []
  both = threading.Barrier(2)

  class First(_Dataset):
    """Two that begin together; then one fails, and one takes its time."""

    def build(self):
      both.wait(timeout=60)
      if not self._fail:
        time.sleep(0.5)
      return super().build()

  class Waiting(_Dataset):

    def build(self):
      time.sleep(0.5)
      return super().build()

  context = runtime.InProcessContext(max_concurrent_clients=2)
  data = [First(0, built, fail=True), First(1, built)]
  data += [Waiting(i, built) for i in (2, 3)]
  with pytest.raises(KeyError, match='no such data'):
    context.invoke(_sum_of_totals, data)
  context.close()
  time.sleep(0.6)
  assert 3 not in built


def test_a_failed_assertion_ends_the_round(context):
  @tff.tensorflow.computation(_INT)
  def check(x):
    with tf.control_dependencies([tf.debugging.assert_positive(x, 'not > 0')]):
      return tf.identity(x)

  @tff.federated_computation(_clients(_INT))
  def comp(x):
    return tff.federated_sum(tff.federated_map(check, x))

  assert context.invoke(comp, [1, 2, 3]) == 6
  with pytest.raises(tf.errors.InvalidArgumentError, match='not > 0'):
    context.invoke(comp, [1, 2, 0, 3, 4, 5])
  assert context.invoke(comp, [1, 2, 3]) == 6


def test_results_are_the_callers(in_process_context):
  """To change one changes no other."""

  @tff.federated_computation(_clients(_INT))
  def comp(x):
    array = tff.federated_value(np.zeros([2]), tff.CLIENTS)
    return array, tff.federated_zip((x, array))

  same, pairs = in_process_context.invoke(comp, [1, 2])
  arrays = [same, *(array for _, array in pairs)]
  for array in arrays:
    array += 1
  np.testing.assert_array_equal(arrays, np.ones([3, 2]))
  np.testing.assert_array_equal(
      in_process_context.invoke(comp, [1, 2])[0], [0, 0]
  )


class TestPlans:

  @pytest.fixture
  def counts(self, monkeypatch):
    """How many graphs are imported, and functions traced."""
    counts = dict(imported=0, traced=0)

    def count(module, name, key):
      function = getattr(module, name)

      def counting(*args, **kwargs):
        counts[key] += 1
        return function(*args, **kwargs)

      monkeypatch.setattr(module, name, counting)

    count(imported_graph, 'import_graph', 'imported')
    count(plan_stage.Stage, '_trace', 'traced')
    return counts

  def _comp(self, constant=1):
    @tff.tensorflow.computation(np.int64)
    def shift(x):
      return x + constant

    @tff.federated_computation(_clients(_INTS))
    def comp(data):
      totals = tff.federated_map(shift, tff.federated_map(_total, data))
      return tff.federated_sum(tff.federated_map(shift, totals))

    return comp

  def test_are_made_once(self, counts, context):
    comp = self._comp()
    tf.data.Dataset.range(1)
    counts.update(imported=0, traced=0)
    data = [tf.data.Dataset.range(i) for i in range(5)]
    assert context.invoke(comp, data) == 20
    first = dict(counts)
    assert 0 < first['imported'] <= 6
    assert 0 < first['traced'] <= 4

    assert context.invoke(comp, data[:2]) == 4
    assert context.invoke(comp, [*data, [7, 8]]) == 37
    assert context.invoke(comp, []) == 0
    assert counts == first

  def test_share_a_graph(self, counts, context):
    first, second = self._comp(), self._comp()
    assert first is not second
    assert context.invoke(first, [[5]]) == 7
    imported = counts['imported']
    assert context.invoke(second, [[5]]) == 7
    assert counts['imported'] == imported

  def test_end_with_their_computation(self, context):
    comp = self._comp()
    context.invoke(comp, [[1]])
    gc.collect()
    plans = [
        weakref.ref(o) for o in gc.get_objects() if type(o) is plan_lib.Plan
    ]
    computation = weakref.ref(comp)

    del comp
    gc.collect()

    assert computation() is None
    assert [p() for p in plans].count(None) == 1

  def test_of_another_computation_are_not_mistaken(self, context):
    """A new computation may get the address of a deleted one."""
    for constant in range(10):
      comp = self._comp(constant)
      assert context.invoke(comp, [[0, 1], [2]]) == 3 + 4 * constant
      del comp


class TestCallers:

  def test_inside_of_a_graph(self, in_process_context):
    with tf.Graph().as_default():
      result = in_process_context.invoke(_sum_of_totals, [[1, 2], [3]])
    assert result == 6
    assert isinstance(result, np.int64)

    values = []

    @tf.function(autograph=False)
    def trace(x):
      values.append(in_process_context.invoke(_sum_of_totals, [[1, 2], [3]]))
      return x

    trace(1)
    assert values == [6]

  def test_several_threads(self, context):
    """They meet in tracing, and in the threads of the clients."""
    computations = [TestPlans()._comp(constant) for constant in range(3)]

    def call(number):
      constant = number % 3
      num_clients = 1 + number % 5
      data = [[i, i + 1] for i in range(num_clients)]
      expected = num_clients * (num_clients + 2 * constant)
      return context.invoke(computations[constant], data) == expected

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
      assert all(pool.map(call, range(40)))

  def test_default_context_is_restored(self):
    stack = tff.framework.get_context_stack()
    before = stack.current
    with runtime.in_process_runtime() as context:
      assert stack.current is context
      assert _sum_of_totals([[1], [2, 3]]) == 6
      with runtime.in_process_runtime(max_concurrent_clients=1) as inner:
        assert stack.current is inner
      assert stack.current is context
    assert stack.current is before
    with pytest.raises(ZeroDivisionError), runtime.in_process_runtime():
      raise ZeroDivisionError
    assert stack.current is before

  def test_set_default_context(self):
    stack = tff.framework.get_context_stack()
    before = stack.current
    try:
      context = runtime.set_default_in_process_context(max_concurrent_clients=1)
      assert stack.current is context
      assert _sum_of_totals([[1], [2, 3]]) == 6
    finally:
      tff.framework.set_default_context(before)

  def test_closed_context_ends_its_threads(self):
    before = set(threading.enumerate())
    context = runtime.InProcessContext(max_concurrent_clients=3)
    assert context.invoke(_sum_of_totals, [[1]] * 9) == 9
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    context.close()
    for thread in threads:
      thread.join(timeout=60)
      assert not thread.is_alive()


@pytest.fixture
def async_context():
  context = runtime.AsyncInProcessContext(max_concurrent_clients=2)
  before = tff.framework.get_context_stack().current
  yield context
  tff.framework.set_default_context(before)
  context.close()


class TestAsync:

  def test_two_at_the_same_time(self, async_context):
    tff.framework.set_default_context(async_context)
    comp = TestPlans()._comp(5)

    async def run():
      return await asyncio.gather(
          _sum_of_totals([[1], [2]]), comp([[1], [2]]), comp([[7]])
      )

    assert asyncio.run(run()) == [3, 23, 17]

  def test_argument_to_wait_for(self, async_context):
    async def argument():
      return [[1], [2, 3]]

    result = async_context.invoke(_sum_of_totals, argument())
    assert asyncio.run(result) == 6

  def test_error(self, async_context):
    tff.framework.set_default_context(async_context)
    with pytest.raises(TypeError, match='must be a list'):
      asyncio.run(_sum_of_totals(1))

  def test_native_federated_context(self, async_context):
    """That is what TFF's federated programs use."""
    tff.framework.set_default_context(
        tff.program.NativeFederatedContext(async_context)
    )

    @tff.federated_computation(
        tff.FederatedType(np.int64, tff.SERVER), _clients(_INTS)
    )
    def step(state, data):
      total = tff.federated_sum(tff.federated_map(_total, data))
      new_state = tff.federated_map(_add, tff.federated_zip((state, total)))
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
    member = _clients(np.int64)
    intrinsic = tff.framework.Intrinsic(
        'federated_magic', tff.FunctionType(member, member)
    )
    x = tff.framework.Reference('x', member)
    comp = tff.framework.ConcreteComputation.from_building_block(
        tff.framework.Lambda('x', member, tff.framework.Call(intrinsic, x))
    )
    with pytest.raises(NotImplementedError, match="'federated_magic' can not"):
      in_process_context.invoke(comp, [1])


def test_runtime_that_was_left():
  @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
  def comp(values):
    return tff.federated_sum(values)

  with runtime.in_process_runtime() as context:
    pass
  with pytest.raises(tf.errors.UnavailableError, match='was left'):
    context.invoke(comp, [1, 2, 3])
