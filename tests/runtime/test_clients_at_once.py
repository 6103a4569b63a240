"""Tests of clients that one function computes: the same bits as one by one."""

import array_data
import comparison
import numpy as np
import pytest
import tensorflow_federated as tff
import toy_problem

from tff_bn import algorithms
from tff_bn import runtime
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.runtime import client_portions
from tff_bn.runtime import portioning

_BUILDERS = [
    name
    for name in algorithms.__all__
    # Centralized training has one client.
    if name.startswith('build_') and name != 'build_centralized'
]
_REQUIRED = {
    'build_fed_bs': dict(epsilon=1.0),
    'build_fedtan_ii': dict(sync_rounds=1),
    'build_fixbn': dict(fixbn_rounds=1),
}
# These begin with another computation than they end with.
_PHASED = ('build_fedtan_ii', 'build_fixbn')
_QUICK = ('build_fed_avg', 'build_scaffold', 'build_fedtan')
_SGD = tff.learning.optimizers.build_sgdm
_ROUNDS = 3


@pytest.fixture(name='at_once')
def _at_once(monkeypatch):
  """Returns the numbers of clients that were computed at once.

  From the second round on, all clients are that can be.
  """
  monkeypatch.setattr(portioning, '_MIN_CLIENTS_SEEN', 1)
  monkeypatch.setattr(portioning, '_MAX_SECONDS', np.inf)
  numbers = []
  compute = client_portions.SeveralClients.compute

  def count(self, number):
    if number == 0:
      numbers.append(len(self.seconds))
    return compute(self, number)

  monkeypatch.setattr(client_portions.SeveralClients, 'compute', count)
  return numbers


def _outputs(process, clients):
  """Returns the outputs of rounds; the clients' data alternates."""
  state = process.initialize()
  is_stateful = isinstance(process, StatefulLearningProcess)
  states = [process.initialize_client(state) for _ in clients]
  outputs = []
  for number in range(_ROUNDS):
    data = clients[number % 2 :] + clients[: number % 2]
    if is_stateful:
      output = process.next(state, states, data)
      states = output.client_states
    else:
      output = process.next(state, data)
    state = output.state
    outputs.append(output)
  return outputs


def _check(process, clients, at_once, num_portions=2, num_rounds=_ROUNDS - 1):
  """Computes rounds one by one, then again, the last ones at once."""
  if not isinstance(process, StatefulLearningProcess):
    process = _WithoutStates(process)
  with runtime.in_process_runtime(max_concurrent_clients=num_portions):
    datasets = [array_data.dataset(client) for client in clients]
    expected = _outputs(process, datasets)
  assert not at_once
  with runtime.in_process_runtime(max_concurrent_clients=num_portions):
    found = _outputs(process, clients)
  size = -(-len(clients) // num_portions)
  assert at_once and set(at_once) <= {size, len(clients) % size}
  assert sum(at_once) == num_rounds * len(clients)
  comparison.assert_equal(found, expected, same_leaf_types=True)
  return found


class _WithoutStates:
  """A process whose clients have no states."""

  def __init__(self, process):
    self.initialize, self.next = process.initialize, process.next
    self.initialize_client = lambda state: None


def _clients(problem):
  """Returns clients of all kinds."""
  nan = array_data.client(problem, [4, 4], 6)
  nan.samples[0][0] = np.nan
  return [
      array_data.client(problem, sizes, seed)
      for seed, sizes in enumerate(
          ([4, 4, 3], [], [1], [4, 4, 4, 2], [0, 5, 0], [2, 7])
      )
  ] + [nan]


@pytest.mark.parametrize(
    'name',
    [
        n if n in _QUICK else pytest.param(n, marks=pytest.mark.slow)
        for n in _BUILDERS
    ],
)
@pytest.mark.parametrize(
    'options',
    [
        dict(local_epochs=2),
        pytest.param(dict(local_steps=2), marks=pytest.mark.slow),
    ],
    ids=['epochs', 'steps'],
)
def test_all_kinds_of_clients(name, options, at_once):
  problem = toy_problem.Toy('float32', (6, 6, 1))
  model = problem.model_for(name)
  if name == 'build_dsgd':
    options = dict(momentum=0.5)
  momentum = None if 'scaffold' in name else 0.9
  process = getattr(algorithms, name)(
      model, _SGD(0.1, momentum), **_REQUIRED.get(name, {}), **options
  )
  clients = _clients(problem)
  if 'fedtan' in name:
    # The clients keep activations, which must have the same shapes.
    clients = [
        array_data.client(problem, sizes, seed)
        for seed, sizes in enumerate(([4, 4, 4], [4], [4, 4], [4, 4, 4, 4]))
    ]
    clients[1].samples[0][0] = np.nan
  num_rounds = _ROUNDS - 2 if name in _PHASED else _ROUNDS - 1
  found = _check(process, clients, at_once, num_rounds=num_rounds)
  metrics = found[-1].metrics
  assert metrics['client_work']['num_dropped_clients'] == 1
  assert np.isfinite(metrics['client_work']['train']['loss'])
