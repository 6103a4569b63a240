"""Rounds for the tests of clients that are computed at once."""

import array_data
import builders
import keras
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.processes.stateful_process import StatefulLearningProcess

# Centralized training has one client.
BUILDERS = [
    name
    for name in builders.WITH_DIFFERENT_ROUNDS
    if name != 'build_centralized'
]
# These begin with another computation than they end with.
PHASED = ('build_fedtan_ii', 'build_fixbn')
NUM_ROUNDS = 3


def process(name, model, **options):
  """Builds an algorithm by the name of its builder."""
  if name == 'build_dsgd':
    options = dict(momentum=0.5)
  momentum = None if 'scaffold' in name else 0.9
  optimizer = tff.learning.optimizers.build_sgdm(0.1, momentum)
  return builders.build(name, model, optimizer, **options)


def model_that_xla_does_not_know(problem):
  """Returns a model with an operation that XLA can't compile."""

  def loss(labels, logits):
    number = tf.raw_ops.Fingerprint(data=logits, method='farmhash64')
    losses = keras.losses.sparse_categorical_crossentropy(
        labels, logits, from_logits=True
    )
    return losses + 0.0 * tf.cast(number[0, 0], losses.dtype)

  return BatchNormModel(
      problem.keras_model, problem.input_spec, loss_fn=lambda: loss
  )


def num_rounds(name):
  """Returns the number of rounds whose computation has run before."""
  return NUM_ROUNDS - 2 if name in PHASED else NUM_ROUNDS - 1


def clients_for(name, problem):
  """Returns clients that an algorithm computes at once; one is not finite."""
  if 'fedtan' not in name:
    return clients_of_all_kinds(problem)
  # The clients keep activations, which must have the same shapes.
  clients = [
      array_data.client(problem, sizes, seed)
      for seed, sizes in enumerate(([4, 4, 4], [4], [4, 4], [4, 4, 4, 4]))
  ]
  clients[1].samples[0][0] = np.nan
  return clients


def clients_of_all_kinds(problem):
  """Returns clients with many, few or no batches; one is not finite."""
  nan = array_data.client(problem, [4, 4], 6)
  nan.samples[0][0] = np.nan
  return [
      array_data.client(problem, sizes, seed)
      for seed, sizes in enumerate(
          ([4, 4, 3], [], [1], [4, 4, 4, 2], [0, 5, 0], [2, 7])
      )
  ] + [nan]


def equal_clients(problem, number=4, nan=True):
  """Returns clients whose batches have the same size."""
  clients = [
      array_data.client(problem, [4] * (1 + seed % 3), seed)
      for seed in range(number)
  ]
  if nan:
    clients[1].samples[0][0] = np.nan
  return clients


def outputs(process, clients):
  """Returns the outputs of rounds; the clients' data alternates."""
  state = process.initialize()
  is_stateful = isinstance(process, StatefulLearningProcess)
  states = []
  if is_stateful:
    states = [
        process.personalize(process.initialize_client(state), number)
        for number in range(len(clients))
    ]
  found = []
  for number in range(NUM_ROUNDS):
    data = clients[number % 2 :] + clients[: number % 2]
    if is_stateful:
      output = process.next(state, states, data)
      states = output.client_states
    else:
      output = process.next(state, data)
    state = output.state
    found.append(output)
  return found
