"""Computations and datasets for the tests of Ray, which workers import."""

import contextlib
import os
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import BatchNormModel
from tff_bn import algorithms
from tff_bn import runtime
from tff_bn.runtime import client_dataset

NUM_CLIENTS = 5
STATE_SIZE = 250_000
_SHAPE = (4, 4, 1)
_SPEC = (
    tf.TensorSpec((None, *_SHAPE), tf.float32),
    tf.TensorSpec((None,), tf.int32),
)


def _keras_model():
  layers = keras.layers
  return keras.Sequential(
      [
          keras.Input(_SHAPE),
          layers.Conv2D(3, 3),
          layers.BatchNormalization(momentum=0.7),
          layers.ReLU(),
          layers.Flatten(),
          layers.Dense(3),
      ]
  )


def build(name):
  """Builds an algorithm for a small convolutional model."""
  keras.utils.set_random_seed(0)
  model = BatchNormModel(
      _keras_model,
      _SPEC,
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
      metrics_fn=lambda: [],
  )
  return getattr(algorithms, name)(
      model, tff.learning.optimizers.build_sgdm(0.1)
  )


def arrays(client):
  """Returns a client's samples and labels, whose number differs by client."""
  rng = np.random.default_rng(client)
  num_examples = 20 + 7 * client
  x = rng.normal(client, 1, (num_examples, *_SHAPE)).astype(np.float32)
  return x, rng.integers(0, 3, num_examples).astype(np.int32)


class Trap(runtime.ClientDataset):
  """A client's dataset that, once, stops or signals the process building it."""

  def __init__(self, client, path=None, signal_number=None, seconds=0):
    """Initializes the dataset.

    Args:
      client: The number of the client.
      path: The file that arms the trap: the process that removes it is trapped.
        Default: the trap is never armed.
      signal_number: The signal that the process gets. Default: it sleeps.
      seconds: The seconds to sleep.
    """
    self._client = client
    self._path = path
    self._signal_number = signal_number
    self._seconds = seconds

  @property
  def element_spec(self):
    return _SPEC

  def build(self):
    if self._path is not None:
      spring(self._path, self._signal_number, self._seconds)
    return client_dataset.to_variant(plain_dataset(self._client))


def spring(path, signal_number, seconds):
  """Traps this process if the trap is armed, see `Trap`."""
  with contextlib.suppress(FileNotFoundError):
    pathlib.Path(path).unlink()
    if signal_number is not None:
      os.kill(os.getpid(), signal_number)
    time.sleep(seconds)


def plain_dataset(client):
  """Returns a client's dataset without a trap."""
  return tf.data.Dataset.from_tensor_slices(arrays(client)).batch(8)


def rounds(process, datasets_of_round, num_rounds=3):
  """Runs rounds; returns the bits of the weights and the client states."""
  state = process.initialize()
  is_stateful = hasattr(process, 'initialize_client')
  clients = []
  if is_stateful:
    clients = [
        process.personalize(process.initialize_client(state), number)
        for number in range(NUM_CLIENTS)
    ]
  for number in range(num_rounds):
    if is_stateful:
      output = process.next(state, clients, datasets_of_round(number))
      clients = output.client_states
    else:
      output = process.next(state, datasets_of_round(number))
    state = output.state
  weights = process.get_model_weights(state)
  leaves = tf.nest.flatten([weights.trainable, weights.non_trainable, clients])
  return b''.join(np.asarray(leaf).tobytes() for leaf in leaves)


def traps(path=None, client=3, round_num=1, **what):
  """Returns datasets for `rounds`, with a trap for one client in one round."""

  def datasets_of_round(number):
    return [
        Trap(c, path, **what) if (number, c) == (round_num, client) else Trap(c)
        for c in range(NUM_CLIENTS)
    ]

  return datasets_of_round


@tff.tensorflow.computation(tff.TensorType(np.float32), np.float32)
def _subtract(value, mean):
  return value - mean


@tff.tensorflow.computation(np.float32)
def _sine(value):
  return tf.sin(3 * value)


@tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
def two_passes(values):
  """Clients need a value of the first pass in the second one."""
  first = tff.federated_map(_sine, values)
  mean = tff.federated_broadcast(tff.federated_mean(first))
  second = tff.federated_map(_subtract, (first, mean))
  return tff.federated_sum(tff.federated_map(_sine, second)), second


@tff.tensorflow.computation(
    tff.TensorType(np.float32, [STATE_SIZE]), np.float32
)
def _add(state, value):
  return state + value


@tff.federated_computation(
    tff.FederatedType(tff.TensorType(np.float32, [STATE_SIZE]), tff.SERVER),
    tff.FederatedType(np.float32, tff.CLIENTS),
)
def add_to_state(state, values):
  """Each client adds a number to a state of 1 MB; returns their sum."""
  at_clients = tff.federated_broadcast(state)
  return tff.federated_sum(tff.federated_map(_add, (at_clients, values)))


@tff.tensorflow.computation(
    tff.SequenceType(
        (
            tff.TensorType(np.float32, [None, *_SHAPE]),
            tff.TensorType(np.int32, [None]),
        )
    )
)
def _count(dataset):
  return dataset.reduce(np.int32(0), lambda n, xy: n + tf.size(xy[1]))


@tff.federated_computation(
    tff.FederatedType(_count.type_signature.parameter, tff.CLIENTS)
)
def num_examples(datasets):
  """Returns the total number of examples."""
  return tff.federated_sum(tff.federated_map(_count, datasets))
