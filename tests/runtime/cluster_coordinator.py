"""What the tests of clusters run in processes of their own.

A process can have one cluster only, and loses workers for good.
"""

import json
import os
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import BatchNormModel
from tff_bn import algorithms
from tff_bn import data as tff_bn_data
from tff_bn import round_data
from tff_bn import runtime
from tff_bn.runtime import client_dataset
from tff_bn.runtime import execution
from tff_bn.runtime import server

_NUM_CLIENTS = 5
_SPEC = (
    tf.TensorSpec((None, 4, 4, 1), tf.float32),
    tf.TensorSpec((None,), tf.int32),
)


def _keras_model():
  layers = keras.layers
  return keras.Sequential(
      [
          keras.Input((4, 4, 1)),
          layers.Conv2D(3, 3),
          layers.BatchNormalization(momentum=0.7),
          layers.ReLU(),
          layers.Flatten(),
          layers.Dense(3),
      ]
  )


def _model():
  keras.utils.set_random_seed(0)
  return BatchNormModel(
      _keras_model,
      _SPEC,
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
      metrics_fn=lambda: [],
  )


def _arrays(client):
  rng = np.random.default_rng(client)
  num_examples = 20 + 7 * client
  x = rng.normal(client, 1, (num_examples, 4, 4, 1)).astype(np.float32)
  return x, rng.integers(0, 3, num_examples).astype(np.int32)


class Trap(runtime.ClientDataset):
  """A client's dataset that does something when it is made."""

  element_spec = _SPEC

  def __init__(self, client, spring=None):
    self._client = client
    self._spring = spring

  def build(self, worker):
    if self._spring is not None:
      spring, self._spring = self._spring, None
      spring(worker)
    dataset = tf.data.Dataset.from_tensor_slices(_arrays(self._client))
    return client_dataset.dataset_to_worker(dataset.batch(8), worker)


@tff.tensorflow.computation(tff.TensorType(np.float32), np.float32)
def _subtract(value, mean):
  return value - mean


@tff.tensorflow.computation(np.float32)
def _sine(value):
  return tf.sin(3 * value)


@tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
def two_passes(values):
  """What the clients have in the first pass they need in the second."""
  first = tff.federated_map(_sine, values)
  mean = tff.federated_broadcast(tff.federated_mean(first))
  second = tff.federated_map(_subtract, (first, mean))
  return tff.federated_sum(tff.federated_map(_sine, second)), second


@tff.federated_computation(
    tff.FederatedType(tff.SequenceType(np.int32), tff.CLIENTS),
    tff.FederatedType(tff.SequenceType(np.int32), tff.SERVER),
)
def datasets_there_and_back(own, common):
  """Datasets as results, and one of the server that clients use."""

  @tff.tensorflow.computation(
      tff.SequenceType(np.int32), tff.SequenceType(np.int32)
  )
  def join(own, common):
    return own.concatenate(common).map(lambda value: 2 * value)

  return tff.federated_map(join, (own, tff.federated_broadcast(common)))


def _rounds(process, datasets_of_round, num_rounds=3):
  """What comes out of some rounds."""
  state = process.initialize()
  clients = [process.initialize_client(state) for _ in range(_NUM_CLIENTS)]
  for number in range(num_rounds):
    output = process.next(state, clients, datasets_of_round(number))
    state, clients = output.state, output.client_states
  leaves = tf.nest.flatten(
      [process.get_model_weights(state).trainable, clients]
  )
  return np.concatenate([np.ravel(leaf) for leaf in leaves])


def _is_close(found, expected):
  """Whether results differ by rounding only.

  TensorFlow compiles functions for other machines in another way.
  """
  return np.allclose(found, expected, rtol=1e-5, atol=1e-6)


def _build():
  return algorithms.build_fed_bn(
      _model(), tff.learning.optimizers.build_sgdm(0.1)
  )


def _count(module, name, calls=None):
  """Counts the calls of a function."""
  calls = [] if calls is None else calls
  original = getattr(module, name)

  def counted(*args, **kwargs):
    calls.append(args)
    return original(*args, **kwargs)

  setattr(module, name, counted)
  return calls


def same_as_one_process(addresses, pids):
  """Compares results, with data in all the ways in which it can come."""
  del pids  # All workers live on.
  process = _build()
  datasets = [
      tf.data.Dataset.from_tensor_slices(_arrays(c)).batch(8)
      for c in range(_NUM_CLIENTS)
  ]
  values = [0.5 * n for n in range(_NUM_CLIENTS)]
  xs, ys = zip(*map(_arrays, range(_NUM_CLIENTS)))
  ends = np.cumsum([0, *map(len, ys)])
  data = tff_bn_data.FederatedData(
      tff_bn_data.Dataset(
          name='test',
          x_train=np.concatenate(xs),
          y_train=np.concatenate(ys),
          x_test=xs[0],
          y_test=ys[0],
          num_classes=3,
      ),
      {f'c{n}': np.arange(*ends[n : n + 2]) for n in range(_NUM_CLIENTS)},
      {f'c{n}': np.arange(0) for n in range(_NUM_CLIENTS)},
  )

  def round_datasets(number):
    return [
        round_data.RoundDataset(
            data, [c], seed=1, round_num=number, batch_size=6, local_steps=7
        )
        for c in data.client_ids
    ]

  def plain_datasets(number):
    return [
        data.client_dataset(
            [c], seed=1, round_num=number, batch_size=6, local_steps=7
        )
        for c in data.client_ids
    ]

  sent_datasets, num_sent_datasets = [], []

  def compute():
    values_of_rounds = _rounds(process, lambda number: datasets)
    num_sent_datasets.append(len(sent_datasets))
    return [
        values_of_rounds,
        _rounds(process, round_datasets),
        repr(two_passes(values)),
        [
            list(map(int, dataset))
            for dataset in datasets_there_and_back([[1, 2], [], [3]], [7])
        ],
    ]

  with runtime.in_process_runtime():
    alone = compute()
    plain = _rounds(process, plain_datasets)
  with runtime.in_process_runtime(cluster=addresses) as context:
    _count(client_dataset, '_copy', sent_datasets)
    sent_samples = _count(round_data.RoundDataset, '_send_samples')
    numpy_samples = _count(round_data, '_samples')
    together = compute()
    tasks = sorted({worker.task for worker in context.workers})
  with runtime.in_process_runtime():
    alone_again = compute()
  return dict(
      is_same=(
          _is_close(together[0], alone[0])
          and _is_close(together[1], alone[1])
          and together[2:] == alone[2:]
      ),
      datasets=together[-1],
      is_same_afterwards=(
          all(map(np.array_equal, alone_again[:2], alone[:2]))
          and alone_again[2:] == alone[2:]
      ),
      is_same_as_plain_datasets=np.array_equal(plain, alone[1]),
      num_sent_datasets=num_sent_datasets[1],
      num_uses_of_samples=len(sent_samples),
      num_sent_samples=len(numpy_samples),
      tasks=tasks,
  )


def lose_one(addresses, pids):
  """Kills a worker in the middle of a round, and of a pass."""
  process = _build()

  def kill(worker):
    if worker is not None:
      os.kill(pids[addresses.index(worker.address)], signal.SIGKILL)

  def datasets_of_round(number):
    return [
        Trap(c, kill if (number, c) == (1, 3) else None)
        for c in range(_NUM_CLIENTS)
    ]

  with runtime.in_process_runtime():
    alone = _rounds(process, datasets_of_round)
    values = [0.5 * n for n in range(_NUM_CLIENTS)]
    two_alone = repr(two_passes(values))
  with runtime.in_process_runtime(cluster=addresses) as context:
    together = _rounds(process, datasets_of_round)
    two_together = repr(two_passes(values))
    left = [worker.address for worker in context.workers]
  return dict(
      is_same=_is_close(together, alone),
      is_same_two=two_together == two_alone,
      left=left,
  )


def lose_between_passes(addresses, pids):
  """Kills a worker when its clients' first pass has been added up."""
  values = [0.5 * n for n in range(_NUM_CLIENTS)]
  with runtime.in_process_runtime():
    alone = repr(two_passes(values))
  with runtime.in_process_runtime(cluster=addresses) as context:
    two_passes(values)
    kills = []
    advance = execution.Execution._advance

    def trap(self, tensors, number, device):
      if number == 1 and not kills:
        kills.append(device.worker.address)
        os.kill(pids[addresses.index(device.worker.address)], signal.SIGKILL)
      return advance(self, tensors, number, device)

    execution.Execution._advance = trap
    together = repr(two_passes(values))
    left = [worker.address for worker in context.workers]
  return dict(is_same=together == alone, killed=kills, left=left)


def hang(addresses, pids):
  """Freezes a worker; what it does is neither done nor does it fail."""
  message = ''
  with runtime.in_process_runtime(
      cluster=addresses, on_worker_loss='stop', max_concurrent_clients=2
  ):
    two_passes([1.0, 2.0])
    os.kill(pids[1], signal.SIGSTOP)
    started = time.monotonic()
    try:
      two_passes([1.0, 2.0])
    except runtime.WorkerLostError as error:
      message = str(error)
    seconds = time.monotonic() - started
    os.kill(pids[1], signal.SIGKILL)
  return dict(message=message, seconds=seconds)


def lose_all(addresses, pids):
  """Kills all workers."""
  with runtime.in_process_runtime(cluster=addresses):
    two_passes([1.0, 2.0])
    for pid in pids:
      os.kill(pid, signal.SIGKILL)
    try:
      two_passes([1.0, 2.0])
    except runtime.WorkerLostError as error:
      return dict(message=str(error))
  return dict(message='')


def fail(addresses, pids):
  """A computation that fails is no lost worker."""
  del pids  # All workers live on.

  @tff.tensorflow.computation(np.float32)
  def check(value):
    with tf.control_dependencies([tf.debugging.assert_less(value, 1.5)]):
      return tf.identity(value)

  @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
  def checked_sum(values):
    return tff.federated_sum(tff.federated_map(check, values))

  with runtime.in_process_runtime(cluster=addresses) as context:
    try:
      checked_sum([1.0, 2.0, 1.0])
      error = None
    except tf.errors.OpError as caught:
      error = type(caught).__name__
    return dict(
        error=error,
        afterwards=float(checked_sum([1.0, 1.0, 1.0])),
        left=[worker.address for worker in context.workers],
    )


def refuse(addresses, pids):
  """Asks for what these workers are not, or don't have."""
  del pids  # All workers live on.

  def error(**options):
    try:
      runtime.InProcessContext(cluster=addresses, **options)
    except ValueError as caught:
      return str(caught)
    return None

  versions = server.versions
  no_device = error(client_devices=['GPU:7'])
  server.versions = lambda: {**versions(), 'tff_bn': '0.0.0'}
  other_version = error()
  server.versions = versions
  return dict(
      no_device=no_device,
      other_version=other_version,
      no_choice=error(on_worker_loss='hope'),
      accepted=error(client_devices=['cpu:0']),
  )


if __name__ == '__main__':
  scenario, *workers = sys.argv[1:]
  pairs = [worker.split(',') for worker in workers]
  outcome = globals()[scenario](
      [address for address, _ in pairs], [int(pid) for _, pid in pairs]
  )
  print('OUTCOME ' + json.dumps(outcome))
