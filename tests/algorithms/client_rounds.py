"""Several clients' data and rounds with client states."""

import functools

import builders
import numpy as np
import numpy_reference as reference
import tensorflow as tf
import tensorflow_federated as tff
import toy_problem

from tff_bn import algorithms
from tff_bn.processes.stateful_process import StatefulLearningProcess

BUILDERS = builders.NAMES


def build(builder_name, model, optimizer=None, **options):
  """Calls a builder, with values for the arguments that have no default."""
  optimizer = optimizer or tff.learning.optimizers.build_sgdm(0.1)
  return builders.build(builder_name, model, optimizer, **options)


def toy_model(builder_name=''):
  """Returns a float64 model that a builder can train; tests share it."""
  return _toy_model('build_hbn' if builder_name == 'build_hbn' else '')


@functools.cache
def _toy_model(builder_name):
  return toy_problem.Toy().model_for(builder_name)


@functools.lru_cache(maxsize=32)
def toy_process(builder_name, rate=0.1, momentum=None, **options):
  """Returns the toy problem's model and a process; tests share both.

  Tracing a process takes a second, and a round hundredths of a second. A
  process has no state, so tests can share it.

  Args:
    builder_name: The name of the builder.
    rate: The clients' learning rate.
    momentum: The clients' momentum.
    **options: Other arguments, which must be hashable.
  """
  model = toy_model(builder_name)
  if options.get('build_process') is algorithms.build_hbn:
    model = toy_model('build_hbn')
  optimizer = tff.learning.optimizers.build_sgdm(rate, momentum)
  return model, build(builder_name, model, optimizer, **options)


def datasets(problem, sizes, seeds=None):
  """Returns a dataset for each client; default seeds: 0, 1, …."""
  seeds = range(len(sizes)) if seeds is None else seeds
  return [
      problem.dataset(size, seed)
      for size, seed in zip(sizes, seeds, strict=True)
  ]


def batches(problem, sizes, seeds=None):
  """Returns the clients' batches of `datasets` as NumPy arrays."""
  seeds = range(len(sizes)) if seeds is None else seeds
  return [
      reference.split(*problem.arrays(size, seed))
      for size, seed in zip(sizes, seeds, strict=True)
  ]


def datasets_without_update(problem):
  """Returns datasets of a client without data and of one that diverges."""
  x, y = problem.arrays(16, 5)
  x[9] = np.nan  # In the second batch, after a good step.
  return [
      problem.dataset(8, 0).take(0),
      tf.data.Dataset.from_tensor_slices((x, y)).batch(8),
  ]


class Training:
  """Runs rounds and keeps the states of the server and of all clients.

  Attributes:
    process: The process, of either kind.
    state: The server's state.
    clients: The state of each client; empty if clients keep no state.
  """

  def __init__(self, process, num_clients):
    self.process = process
    self.state = process.initialize()
    self.clients = []
    if isinstance(process, StatefulLearningProcess):
      self.clients = [
          process.personalize(process.initialize_client(self.state), number)
          for number in range(num_clients)
      ]

  def next_round(self, data, sampled=None):
    """Runs a round.

    Args:
      data: A dataset for each client.
      sampled: The positions of the clients that take part. Default: all.

    Returns:
      The metrics.
    """
    sampled = range(len(data)) if sampled is None else sampled
    arguments = [[data[k] for k in sampled]]
    if self.clients:
      arguments.insert(0, [self.clients[k] for k in sampled])
    output = self.process.next(self.state, *arguments)
    self.state = output.state
    if self.clients:
      self.clients = list(self.clients)  # Tests may look at the old ones.
      for k, client in zip(sampled, output.client_states, strict=True):
        self.clients[k] = client
    return output.metrics

  def weights(self, model):
    """Returns the weights of the server's model."""
    return model.from_model_weights(self.process.get_model_weights(self.state))

  def client_weights(self, model):
    """Returns the weights of each client's model, if clients keep a state."""
    return [
        model.from_model_weights(
            self.process.get_client_model_weights(self.state, client)
        )
        for client in self.clients
    ]


def names_at_server(type_spec, is_at_server=False):
  """Yields the names of all values that a type places at the server."""
  if isinstance(type_spec, tff.FunctionType):
    yield from names_at_server(type_spec.parameter)
    yield from names_at_server(type_spec.result)
  elif isinstance(type_spec, tff.FederatedType):
    yield from names_at_server(
        type_spec.member, type_spec.placement is tff.SERVER
    )
  elif isinstance(type_spec, tff.StructType):
    for name, element in tff.structure.iter_elements(type_spec):
      if is_at_server and name is not None:
        yield name
      yield from names_at_server(element, is_at_server)


def assert_same(found, expected):
  """Asserts that nested structures of arrays are equal to the bit."""
  tf.nest.map_structure(np.testing.assert_array_equal, found, expected)


def assert_close(found, expected, rtol=1e-10, atol=1e-12):
  """Asserts that lists of arrays are close."""
  for value, truth in zip(found, expected, strict=True):
    np.testing.assert_allclose(value, truth, rtol=rtol, atol=atol)


def run(process, data, num_rounds):
  """Returns the training after `num_rounds` rounds of all clients."""
  training = Training(process, len(data))
  for _ in range(num_rounds):
    training.next_round(data)
  return training


def weights_after_two_rounds(problem, name, **options):
  """Returns the model's weights after two rounds of an algorithm."""
  model, process = toy_process(f'build_{name}', momentum=0.5, **options)
  sizes = [20] if name == 'centralized' else (20, 7, 33)
  return run(process, datasets(problem, sizes), 2).weights(model)
