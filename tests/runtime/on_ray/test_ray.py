"""Tests that Ray computes the same bits as in process and survives losses."""

import collections
import dataclasses
import functools
import os
import pickle
import signal
import time

from absl.testing import absltest
import array_data
import arrays_trap
import comparison
import contexts
import multiplications
import numpy as np
import psutil
import pytest
import ray_contexts
import ray_example
import rounds_at_once
import tensorflow as tf
import tensorflow_federated as tff
import toy_problem

from tff_bn import runtime
from tff_bn.runtime import portioning
from tff_bn.runtime.on_ray import ray_clients
from tff_bn.runtime.on_ray import ray_workers

# They have states, several passes, personal models, or send statistics.
_AT_ONCE = (
    *('build_fed_avg', 'build_fed_bn', 'build_fedtan', 'build_hbn'),
    *('build_ditto', 'build_fed_ap', 'build_fixbn'),
)

_VALUES = [np.float32(0.5 * n) for n in range(ray_example.NUM_CLIENTS)]


@pytest.fixture(scope='module')
def two_expected():
  with runtime.in_process_runtime():
    return repr(ray_example.two_passes(_VALUES))


def _processes():
  """Returns the processes that this one and its children have started."""
  return set(psutil.Process().children(recursive=True))


@pytest.fixture(scope='module')
def earlier():
  """The processes of other tests: TFF's worker, a pool's resource tracker."""
  return _processes()


@pytest.fixture(scope='module')
def context(earlier):
  """Two workers; all processes end with the context."""
  context = ray_contexts.make()
  yield context
  processes = _processes() - earlier
  context.close()
  _, alive = psutil.wait_procs(processes, timeout=30)
  assert not alive


def test_the_cluster_listens_on_loopback_only(earlier, context):
  del context
  processes = _processes() - earlier
  assert {'raylet', 'gcs_server'} <= {process.name() for process in processes}
  found = {
      connection.laddr.ip
      for process in [psutil.Process(), *processes]
      for connection in process.net_connections('tcp')
      if connection.status == psutil.CONN_LISTEN
  }
  assert found <= {'127.0.0.1', '::ffff:127.0.0.1'}


def test_seconds_of_each_client(context):
  compute = multiplications.computation()
  with contexts.default(context):
    for number in (1, 2000):  # First, each worker traces the function.
      compute([np.int32(1), np.int32(1), np.int32(number), np.int32(1)])
  quick, _, slow, _ = context.client_seconds
  assert slow > 10 * quick > 0


@pytest.fixture
def stored(context, monkeypatch):
  """The sizes in bytes of the values put into Ray's object store."""
  import ray

  sizes = []
  put = ray.put

  def record(value):
    sizes.append(len(pickle.dumps(value)))
    return put(value)

  monkeypatch.setattr(ray, 'put', record)
  monkeypatch.setattr(context._sender, '_put', record)
  return sizes


@pytest.fixture
def sent(monkeypatch):
  """The tasks that are sent to workers."""
  tasks = []
  call = ray_workers.Workers.call

  def record(self, owner, worker, task):
    tasks.append(task)
    call(self, owner, worker, task)

  monkeypatch.setattr(ray_workers.Workers, 'call', record)
  return tasks


@pytest.fixture
def change_options(context, monkeypatch):
  """Returns a function that changes the options of the running workers."""

  def change(**options):
    workers = context._workers
    changed = dataclasses.replace(workers._options, **options)
    monkeypatch.setattr(workers, '_options', changed)

  return change


class TestSameBits:

  @pytest.fixture(autouse=True)
  def use(self, context):
    with contexts.default(context):
      yield

  def test_stateful_clients(self, fed_bn, expected):
    assert ray_example.rounds(fed_bn, ray_example.traps()) == expected

  def test_datasets_from_python(self, fed_bn, expected):
    datasets = [
        ray_example.plain_dataset(c) for c in range(ray_example.NUM_CLIENTS)
    ]
    assert ray_example.rounds(fed_bn, lambda _: datasets) == expected

  @pytest.mark.slow
  def test_fedtan(self):
    process = ray_example.build('build_fedtan')
    found = ray_example.rounds(process, ray_example.traps())
    with runtime.in_process_runtime():
      assert found == ray_example.rounds(process, ray_example.traps())

  def test_several_passes(self, two_expected):
    assert repr(ray_example.two_passes(_VALUES)) == two_expected


class TestTransfers:

  @pytest.fixture(autouse=True)
  def use(self, context):
    with contexts.default(context):
      yield

  def test_state_is_stored_once_a_round(self, stored, sent):
    size = ray_example.STATE_SIZE
    ray_example.add_to_state(np.zeros(size, np.float32), [0.0])  # Traces.
    stored.clear()
    sent.clear()
    values = list(range(20))
    for number in range(2):
      state = np.full(size, number, np.float32)
      total = ray_example.add_to_state(state, values)
      assert set(total) == {20 * number + sum(values)}
    assert [4 * size <= bytes_ < 4.1 * size for bytes_ in stored] == [True] * 2
    assert len(sent) == 40
    assert all(np.size(task.inputs) == 1 for task in sent)

  def test_datasets_are_stored_once(self, stored, sent):
    arrays = [np.zeros((1000 + c, 4, 4, 1), np.float32) for c in range(3)]
    datasets = [
        tf.data.Dataset.from_tensor_slices((x, np.zeros(len(x), np.int32)))
        for x in arrays
    ]
    datasets = [d.batch(8) for d in datasets]
    given = [*datasets, datasets[0], datasets[1]]
    for _ in range(2):
      assert ray_example.num_examples(given) == 5004
    sizes = [bytes_ for bytes_ in stored if bytes_ > 30_000]
    assert [a.nbytes < size for a, size in zip(arrays, sizes, strict=True)]
    assert len(sent) == 10
    assert all(len(value.data) < 1000 for t in sent for value in t.inputs)

  def test_few_clients_are_computed_ahead(self, monkeypatch, trap):
    waiting = []
    on_answer = ray_clients.RayClients.on_answer

    def record(self, call):
      on_answer(self, call)
      waiting.append(len(self._answers))

    monkeypatch.setattr(ray_clients.RayClients, 'on_answer', record)
    datasets = [
        ray_example.Trap(c, trap if c == 3 else None, seconds=2)
        for c in range(40)
    ]
    total = ray_example.num_examples(datasets)
    assert not trap.exists()
    assert total == sum(len(ray_example.arrays(c)[1]) for c in range(40))
    # While the fourth client sleeps, only a few others are computed.
    assert 1 < max(waiting) <= 4


@functools.cache
def _fed_avg():
  problem = toy_problem.Toy('float32')
  return problem, rounds_at_once.process('build_fed_avg', problem.model())


def _toy():
  """Returns a problem, a process and seven clients."""
  problem, process = _fed_avg()
  return problem, process, rounds_at_once.clients_of_all_kinds(problem)


class TestAtOnce:
  """Workers compute several clients in one call."""

  @pytest.fixture(autouse=True)
  def limits(self, monkeypatch):
    """From the second round on, clients are computed at once; no XLA."""
    monkeypatch.setattr(portioning, '_MIN_CLIENTS_SEEN', 0.1)
    monkeypatch.setattr(portioning, '_MAX_SECONDS', np.inf)

  @pytest.fixture(name='compiling')
  def _compiling(self, monkeypatch):
    """Lets XLA compile from two clients on, two at once."""
    monkeypatch.setattr(portioning, '_MIN_COMPILED_CLIENTS', 2)
    monkeypatch.setattr(portioning, '_COMPILED_CLIENTS', 2)

  @pytest.fixture
  def use(self, context):
    with contexts.default(context):
      yield

  def _expected(self, process, clients):
    """Computes one client after another in process."""
    with runtime.in_process_runtime():
      return rounds_at_once.outputs(
          process, [array_data.dataset(client) for client in clients]
      )

  def _check(self, context, process, clients):
    """Checks rounds on Ray against one client after another in process."""
    expected = self._expected(process, clients)
    with contexts.default(context):
      found = rounds_at_once.outputs(process, clients)
    comparison.assert_equal(found, expected, same_leaf_types=True)
    return found

  @pytest.mark.slow
  @pytest.mark.parametrize('name', ['build_scaffold', *_AT_ONCE])
  def test_all_kinds_of_clients(self, context, sent, name):
    problem = toy_problem.Toy('float32')
    process = rounds_at_once.process(
        name, problem.model_for(name), local_epochs=2
    )
    clients = rounds_at_once.clients_for(name, problem)
    found = self._check(context, process, clients)
    work = found[-1].metrics['client_work']
    assert work['num_dropped_clients'] == 1
    at_once = [t.clients for t in sent if t.forms and t.pass_number == 0]
    # Two workers, at each of which a portion waits.
    size = -(-len(clients) // 4)
    assert {len(numbers) for numbers in at_once} <= {size, len(clients) % size}
    num_rounds = rounds_at_once.num_rounds(name)
    assert sum(map(len, at_once)) == len(clients) * num_rounds
    # A worker keeps the values that later passes need.
    assert all(bool(t.inputs) == (t.pass_number == 0) for t in sent)

  @pytest.mark.slow
  @pytest.mark.usefixtures('compiling')
  def test_xla_compiles_the_same(self, context, sent, monkeypatch):
    """Also for the clients that are left over, and after other rounds."""
    monkeypatch.setattr(portioning, '_MIN_CLIENTS_SEEN', 10**9)
    problem = toy_problem.Toy('float32')
    process = rounds_at_once.process('build_fed_bn', problem.model())
    clients = rounds_at_once.equal_clients(problem, number=7)
    with runtime.in_process_runtime():
      expected = rounds_at_once.outputs(process, clients)
    with contexts.default(context):
      found = rounds_at_once.outputs(process, clients)
    comparison.assert_equal(found, expected, same_leaf_types=True)
    assert [(len(t.clients), bool(t.forms)) for t in sent] == 3 * [
        *(3 * [(2, True)]),
        (1, False),
    ]
    assert all(t.forms.are_compiled for t in sent if t.forms)

  @pytest.mark.slow
  @pytest.mark.usefixtures('compiling')
  def test_operations_that_xla_does_not_know(self, context, sent):
    problem = toy_problem.Toy('float32')
    process = rounds_at_once.process(
        'build_fed_avg', rounds_at_once.model_that_xla_does_not_know(problem)
    )
    clients = rounds_at_once.equal_clients(problem, nan=False)
    self._check(context, process, clients)
    compiled = [t for t in sent if t.forms and t.forms.are_compiled]
    assert 1 <= len(compiled) <= 2
    assert all(task.invocation == sent[0].invocation for task in compiled)
    others = [task for task in sent if task not in compiled]
    num_computed = sum(len(task.clients) for task in others)
    assert num_computed == rounds_at_once.NUM_ROUNDS * len(clients)

  @pytest.mark.usefixtures('use')
  def test_time_is_divided_by_the_number_of_batches(self, context):
    problem, process, _ = _toy()
    clients = [
        array_data.client(problem, sizes, seed=0)
        for sizes in ([4] * 8, [], [4], [4, 4, 4], [4])
    ]
    rounds_at_once.outputs(process, clients)
    # There are portions of two clients.
    seconds = context.client_seconds
    np.testing.assert_allclose(seconds[0] / seconds[1], 9)
    np.testing.assert_allclose(seconds[3] / seconds[2], 2)

  @pytest.mark.slow
  def test_killed_while_it_computes_a_portion(self, context, sent, trap):
    _, process, clients = _toy()
    expected = self._expected(process, clients)
    clients[2] = arrays_trap.ArraysTrap(
        clients[2], trap, signal_number=signal.SIGKILL
    )
    before = ray_contexts.pids(context)
    with contexts.default(context):
      found = rounds_at_once.outputs(process, clients)
    assert not trap.exists()
    comparison.assert_equal(found, expected, same_leaf_types=True)
    repeated = collections.Counter((t.invocation, t.portion) for t in sent)
    assert max(repeated.values()) == 2
    ray_contexts.wait_for(context, 2)
    assert len(set(ray_contexts.pids(context)) - set(before)) == 1

  @pytest.mark.slow
  def test_lost_between_two_passes(self, context, monkeypatch):
    problem = toy_problem.Toy('float32')
    process = rounds_at_once.process('build_fedtan', problem.model())
    clients = rounds_at_once.clients_for('build_fedtan', problem)
    lost = []
    compute = ray_clients.RayClients.compute

    def lose_all_first(self, number):
      if number == 2 and self._portions[0].bulk and not lost:
        lost.extend(ray_contexts.pids(context))
        for pid in lost:
          os.kill(pid, signal.SIGKILL)
      yield from compute(self, number)

    monkeypatch.setattr(ray_clients.RayClients, 'compute', lose_all_first)
    self._check(context, process, clients)
    assert lost
    ray_contexts.wait_for(context, 2)

  @pytest.mark.slow
  def test_late_portion_is_computed_elsewhere(
      self, context, trap, change_options
  ):
    """A portion may take as long as all its clients."""
    _, process, clients = _toy()
    expected = self._expected(process, clients)
    with (
        contexts.default(context),
        absltest.TestCase().assertLogs(level='WARNING') as logs,
    ):
      rounds_at_once.outputs(process, clients)  # Traces everything.
      clients[2] = arrays_trap.ArraysTrap(clients[2], trap, seconds=10)
      change_options(client_timeout=1.5)
      found = rounds_at_once.outputs(process, clients)
    comparison.assert_equal(found, expected, same_leaf_types=True)
    assert any(
        'takes more than 3 seconds; another worker computes clients number 2 to'
        ' 3, too' in line
        for line in logs.output
    )


class TestLosses:
  """Lost workers don't change the results."""

  @pytest.fixture(autouse=True)
  def use(self, context):
    with contexts.default(context):
      yield

  @pytest.mark.slow
  def test_killed_while_it_computes(self, context, fed_bn, expected, trap):
    before = ray_contexts.pids(context)
    datasets = ray_example.traps(trap, signal_number=signal.SIGKILL)
    assert ray_example.rounds(fed_bn, datasets) == expected
    assert not trap.exists()
    # Ray restarts it, and the program uses it again.
    ray_contexts.wait_for(context, 2)
    assert len(set(ray_contexts.pids(context)) - set(before)) == 1
    assert ray_example.rounds(fed_bn, ray_example.traps()) == expected

  @pytest.mark.slow
  @pytest.mark.usefixtures('quick_to_notice')
  def test_hangs(self, context, fed_bn, expected, trap):
    before = ray_contexts.pids(context)
    datasets = ray_example.traps(trap, signal_number=signal.SIGSTOP)
    assert ray_example.rounds(fed_bn, datasets) == expected
    ray_contexts.wait_for(context, 2)
    (hung,) = set(before) - set(ray_contexts.pids(context))
    assert not psutil.pid_exists(hung)

  @pytest.mark.slow
  def test_lost_between_two_passes(self, context, two_expected, monkeypatch):
    lost = []
    compute = ray_clients.RayClients.compute

    def lose_one_first(self, number):
      if number == 1 and not lost:
        lost.append(ray_contexts.pids(context)[0])
        os.kill(lost[0], signal.SIGKILL)
      yield from compute(self, number)

    monkeypatch.setattr(ray_clients.RayClients, 'compute', lose_one_first)
    assert repr(ray_example.two_passes(_VALUES)) == two_expected
    assert lost
    ray_contexts.wait_for(context, 2)
    assert repr(ray_example.two_passes(_VALUES)) == two_expected

  @pytest.mark.slow
  def test_all_killed(self, context, fed_bn, expected):
    for pid in ray_contexts.pids(context):
      os.kill(pid, signal.SIGKILL)
    assert ray_example.rounds(fed_bn, ray_example.traps()) == expected

  @pytest.mark.slow
  def test_client_that_kills_its_workers_ends_the_round(
      self, context, monkeypatch
  ):
    monkeypatch.setattr(ray_clients, '_MAX_LOSSES', 2)

    @tff.tensorflow.computation(tff.SequenceType(np.int32))
    def count(dataset):
      return dataset.reduce(np.int32(0), lambda n, _: n + 1)

    @tff.federated_computation(
        tff.FederatedType(tff.SequenceType(np.int32), tff.CLIENTS)
    )
    def comp(datasets):
      return tff.federated_sum(tff.federated_map(count, datasets))

    class Fatal(runtime.ClientDataset):
      element_spec = tf.TensorSpec([], tf.int32)

      def build(self):
        os.kill(os.getpid(), signal.SIGKILL)

    workers = ray_workers.Workers
    ready, on_call = workers.ready.fget, workers._on_call
    with monkeypatch.context() as m:
      # Clients 0 and 1 go to the same worker, whose end loses both answers.
      m.setattr(workers, 'ready', property(lambda self: ready(self)[:1]))
      m.setattr(
          workers,
          '_on_call',
          lambda self, call: on_call(self, call.worker.calls[-1]),
      )
      with pytest.raises(
          runtime.WorkersLostError, match='2 .* client number 1'
      ):
        comp([[1], Fatal(), [2]])
    ray_contexts.wait_for(context, 2)
    assert comp([[1], [2, 3]]) == 3

  @pytest.mark.slow
  def test_slow_client_is_computed_elsewhere(
      self, context, fed_bn, expected, trap, change_options
  ):
    ray_example.rounds(fed_bn, ray_example.traps())  # Traces everything.
    change_options(client_timeout=2.0)
    began = time.monotonic()
    datasets = ray_example.traps(trap, seconds=600)
    assert ray_example.rounds(fed_bn, datasets) == expected
    assert time.monotonic() - began < 60
    # The sleeping worker still exists, but gets no clients.
    assert len(ray_contexts.pids(context)) == 2
    assert ray_example.rounds(fed_bn, ray_example.traps()) == expected

  # This test is the last one, because no worker is left.
  @pytest.mark.slow
  def test_round_without_workers_ends(self, context, fed_bn, change_options):
    change_options(worker_timeout=0.5)
    for pid in ray_contexts.pids(context):
      os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        runtime.WorkersLostError, match='worker_timeout=0.5 seconds'
    ):
      ray_example.rounds(fed_bn, ray_example.traps())
