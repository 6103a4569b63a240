"""Tests of the in-process runtime: order, memory, errors and plans."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import cases
import in_process_example
import numpy as np
import pytest
import sums
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import runtime
from tff_bn.common import aligned_arrays
from tff_bn.common import interruptible
from tff_bn.runtime import imported_graph
from tff_bn.runtime import plan as plan_lib
from tff_bn.runtime import plan_stage


@pytest.fixture(params=[1, 2], ids='{}_at_a_time'.format)
def context(request):
  context = runtime.InProcessContext(max_concurrent_clients=request.param)
  yield context
  context.close()


@pytest.fixture(scope='module')
def example():
  """The measurements of the example."""
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
    digests |= {in_process_example.digest(context, comp) for _ in range(2)}
    context.close()
  assert len(digests) == 1


@pytest.mark.slow
def test_several_devices_compute_the_same_bits(example, in_process_context):
  expected = in_process_example.digest(
      in_process_context, in_process_example.build_round()
  )
  assert set(example['digests']) == {expected}
  assert example['devices'] == [
      [1, 1, 1, 1],
      [0, 1, 0, 1],
      [1, 1, 1, 1],
      [0, 1, 0, 1],
      [0, 1, 0, 1],
  ]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_clients(example):
  peaks = example['peaks']
  # 72 clients with 8 MB each have 576 MB.
  assert peaks['80'] - peaks['8'] < 80


@pytest.mark.slow
def test_closed_runtime_frees_compiled_functions(example):
  before, after = example['runtimes']
  assert after - before < 25  # 3 of them have 40 MB.


@pytest.mark.slow
def test_variables_and_tables_are_freed(example):
  before, after = example['variables']
  assert after - before < 40  # 300 variables have 1200 MB.


class _Dataset(runtime.ClientDataset):
  """A dataset of 0, 1 and 2 that records when it is built."""

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


def test_client_datasets_are_built_once(context):
  """A later exchange needs them again."""

  @tff.federated_computation(cases.clients(sums.INTS))
  def comp(data):
    total = tff.federated_sum(tff.federated_map(sums.total, data))
    again = tff.federated_map(sums.total, data)
    return tff.federated_map(sums.add, (again, tff.federated_broadcast(total)))

  built = []
  result = context.invoke(comp, [_Dataset(i, built) for i in range(9)])
  assert result == [30] * 9
  assert sorted(built) == list(range(9))


def test_client_datasets_are_built_when_their_turn_comes():
  """Each client is built, computed and added before the next is built."""
  events = []
  graphs = []

  def note(name):
    # TensorFlow deletes the Python function with the graph that calls it.
    graphs.append(tf.compat.v1.get_default_graph())
    return tf.py_function(lambda: events.append(name), [], [])

  @tff.tensorflow.computation(sums.INTS)
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

  @tff.federated_computation(cases.clients(sums.INTS))
  def comp(data):
    values = tff.federated_map(work, data)
    zero = tff.tensorflow.computation(lambda: np.int64(0))()
    return tff.federated_aggregate(values, zero, add, add, report)

  context = runtime.InProcessContext(max_concurrent_clients=1)
  assert context.invoke(comp, [_Dataset('built', events)] * 4) == 12
  assert events == ['built', 'computed', 'added'] * 4


def test_few_clients_are_built_ahead():
  """A slow first client limits the number of clients built after it."""
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
  assert context.invoke(sums.sum_of_totals, data) == 150
  context.close()
  assert built.index(0) <= 10


def test_an_error_of_a_client_ends_the_round(context):
  built = []
  data = [_Dataset(i, built, fail=i == 4) for i in range(200)]
  with pytest.raises(KeyError, match='no such data'):
    context.invoke(sums.sum_of_totals, data)
  assert len(built) < 30
  # The context still works.
  num_built = len(built)
  assert context.invoke(sums.sum_of_totals, data[:4]) == 12
  assert len(built) == num_built + 4


def test_waiting_clients_do_not_begin_after_an_error():
  built = []
  both = threading.Barrier(2)

  class First(_Dataset):
    """Two clients begin together; one fails, and one takes half a second."""

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
    context.invoke(sums.sum_of_totals, data)
  context.close()
  time.sleep(0.6)
  assert 3 not in built


def test_a_failed_assertion_ends_the_round(context):
  @tff.tensorflow.computation(np.int32)
  def check(x):
    with tf.control_dependencies([tf.debugging.assert_positive(x, 'not > 0')]):
      return tf.identity(x)

  @tff.federated_computation(cases.clients(np.int32))
  def comp(x):
    return tff.federated_sum(tff.federated_map(check, x))

  assert context.invoke(comp, [1, 2, 3]) == 6
  with pytest.raises(tf.errors.InvalidArgumentError, match='not > 0'):
    context.invoke(comp, [1, 2, 0, 3, 4, 5])
  assert context.invoke(comp, [1, 2, 3]) == 6


def _loop(number):
  """Computes something for `number` times some seconds."""
  return tf.while_loop(
      lambda i, total: i < number * 5 * 10**5,
      lambda i, total: (i + 1, total + i),
      [np.int64(0), np.int64(0)],
  )[1]


def _reduce(number):
  numbers = tf.data.Dataset.range(number * 5 * 10**6)
  return numbers.reduce(np.int64(0), lambda total, i: total + i)


@pytest.mark.parametrize('num_clients', [1, 3])
@pytest.mark.parametrize('compute', [_loop, _reduce])
def test_ctrl_c_ends_clients_before_their_last_step(
    compute, num_clients, context, tmp_path, monkeypatch
):
  @tff.tensorflow.computation(np.int64)
  def work(number):
    with tf.control_dependencies([compute(number)]):
      name = tf.strings.join([str(tmp_path / 'end'), tf.as_string(number)])
    with tf.control_dependencies([tf.io.write_file(name, '')]):
      return tf.identity(number)

  @tff.federated_computation(cases.clients(np.int64))
  def comp(numbers):
    return tff.federated_sum(tff.federated_map(work, numbers))

  assert context.invoke(comp, [0] * num_clients) == 0
  # Ctrl-C, also in a shell's job in the background.
  monkeypatch.setattr(interruptible, '_WAKE_UP_SECONDS', 0.1)
  previous = signal.signal(signal.SIGINT, signal.default_int_handler)
  timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
  timer.start()
  try:
    with pytest.raises(KeyboardInterrupt):
      context.invoke(comp, [1] * num_clients)
  finally:
    timer.join()
    signal.signal(signal.SIGINT, previous)
  # The context still works.
  assert context.invoke(comp, [0]) == 0
  context.close()
  assert [path.name for path in tmp_path.iterdir()] == ['end0']


def test_results_share_no_memory(in_process_context):
  """A caller may change a result without changing others."""

  @tff.federated_computation(cases.clients(np.int32))
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


@pytest.mark.usefixtures('in_process_runtime')
def test_arguments_are_freed_at_the_end():
  """Python's garbage collector, which runs seldom, is not needed for it."""

  @tff.federated_computation(
      cases.server(cases.VECTOR), cases.clients(cases.VECTOR)
  )
  def comp(x, y):
    return x, y, tff.federated_sum(y)

  gc.disable()
  try:
    arrays = [aligned_arrays.empty([2], np.dtype(np.float32)) for _ in 'abc']
    for number, array in enumerate(arrays):
      array[:] = number
    result = comp(arrays[0], arrays[1:])
    references = [weakref.ref(array) for array in arrays]
    del array, arrays
    assert [reference() for reference in references] == [None] * 3
  finally:
    gc.enable()
  np.testing.assert_array_equal(result[0], [0, 0])
  np.testing.assert_array_equal(result[1], [[1, 1], [2, 2]])
  np.testing.assert_array_equal(result[2], [3, 3])


@pytest.mark.usefixtures('in_process_runtime')
def test_results_share_no_memory_with_arguments():

  @tff.tensorflow.computation(cases.VECTOR)
  def dataset(x):
    return tf.data.Dataset.from_tensor_slices(x)

  @tff.federated_computation(
      cases.server(cases.VECTOR), cases.clients(cases.VECTOR)
  )
  def arrays(x, y):
    return x, tff.federated_broadcast(x), y

  @tff.federated_computation(
      cases.server(cases.VECTOR), cases.clients(cases.VECTOR)
  )
  def datasets(x, y):
    return tff.federated_map(dataset, x), tff.federated_map(dataset, y)

  for comp in (arrays, datasets):
    x, y = (aligned_arrays.empty([2], np.dtype(np.float32)) for _ in 'xy')
    x[:], y[:] = 1, 2
    result = tf.nest.flatten(comp(x, [y, y]))
    x[:], y[:] = 5, 6
    found = [np.array(list(part)).tolist() for part in result]
    count = len(found)
    assert found == [[1, 1]] * (count - 2) + [[2, 2]] * 2


class TestPlans:

  @pytest.fixture
  def context(self):
    context = runtime.InProcessContext(max_concurrent_clients=2)
    yield context
    context.close()

  @pytest.fixture
  def counts(self, monkeypatch):
    """Counts of imported graphs and traced functions."""
    counts = dict(imported=0, traced=0)

    def count(module, name, key):
      function = getattr(module, name)

      def counting(*args, **kwargs):
        counts[key] += 1
        return function(*args, **kwargs)

      monkeypatch.setattr(module, name, counting)

    count(imported_graph.ImportedGraph, '__init__', 'imported')
    count(plan_stage.Stage, '_trace', 'traced')
    return counts

  def test_are_made_once(self, counts, context):
    comp = sums.build_shifted_sum()
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
    first, second = sums.build_shifted_sum(), sums.build_shifted_sum()
    assert first is not second
    assert context.invoke(first, [[5]]) == 7
    imported = counts['imported']
    assert context.invoke(second, [[5]]) == 7
    assert counts['imported'] == imported

  def test_end_with_their_computation(self, context):
    comp = sums.build_shifted_sum()
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

  def test_are_not_mixed_up(self, context):
    """A new computation may get the address of a deleted one."""
    for constant in range(5):
      comp = sums.build_shifted_sum(constant)
      assert context.invoke(comp, [[0, 1], [2]]) == 3 + 4 * constant
      del comp
