"""Tests of Adam as the clients' optimizer."""

import client_rounds
import numpy as np
import numpy_reference as reference
import plain_model
import pytest

from tff_bn import algorithms
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import settings

pytestmark = pytest.mark.usefixtures('in_process_runtime')


class _Adam:
  """Adam (Kingma, Ba, ICLR 2015), with epsilon as in TFF and Keras."""

  def __init__(self, weights, rate):
    self.rate = rate
    self.step = 0
    self.mean = [np.zeros_like(w) for w in weights]
    self.square = [np.zeros_like(w) for w in weights]

  def next(self, weights, gradients):
    self.step += 1
    self.mean = [0.9 * m + 0.1 * g for m, g in zip(self.mean, gradients)]
    self.square = [
        0.999 * s + 0.001 * g**2 for s, g in zip(self.square, gradients)
    ]
    rate = self.rate * np.sqrt(1 - 0.999**self.step) / (1 - 0.9**self.step)
    return [
        w - rate * m / (np.sqrt(s) + 1e-7)
        for w, m, s in zip(weights, self.mean, self.square)
    ]


def _optimizer(*arguments):
  flags = command_line.parse(train.PROGRAM.define_flags, arguments)
  settings.check(flags)
  return settings.resolve(flags, 'fedavg', 0).build_client_optimizer()


def test_every_round_starts_afresh(toy):
  rate = 0.01
  model = toy.model(plain_model.keras_model)
  process = algorithms.build_fed_avg(
      model,
      _optimizer('--client_optimizer=adam', f'--client_learning_rate={rate}'),
      client_weighting='uniform',
  )
  training = client_rounds.Training(process, 2)
  weights = model.from_model_weights(model.initial_weights)
  for number in range(2):
    seeds = [10 * number, 10 * number + 1]
    found = []
    for batches in client_rounds.batches(toy, (24, 16), seeds):
      adam, own = _Adam(weights, rate), weights
      for x, y in batches:
        own = adam.next(own, plain_model.gradients(own, x, y))
      found.append(own)
    weights = [np.mean(values, axis=0) for values in zip(*found)]
    training.next_round(client_rounds.datasets(toy, (24, 16), seeds))
    # TFF's hyperparameters are float32 constants.
    client_rounds.assert_close(training.weights(model), weights, rtol=1e-7)


def test_centralized_training_keeps_its_state(toy):
  model = toy.model(plain_model.keras_model)
  process = algorithms.build_centralized(
      model, _optimizer('--client_optimizer=adam')
  )
  training = client_rounds.Training(process, 1)
  weights = model.from_model_weights(model.initial_weights)
  adam = _Adam(weights, 3e-4)
  for number in range(3):
    for x, y in reference.split(*toy.arrays(16, number)):
      weights = adam.next(weights, plain_model.gradients(weights, x, y))
    training.next_round([toy.dataset(16, number)])
    client_rounds.assert_close(training.weights(model), weights, rtol=1e-7)


def test_a_step_of_fedtan(toy):
  """Each client makes a step of Adam with its own gradient."""
  model = client_rounds.toy_model()
  process = algorithms.build_fedtan(
      model, _optimizer('--client_optimizer=adam'), local_steps=1
  )
  before = model.from_model_weights(model.initial_weights)
  after = client_rounds.run(
      process, client_rounds.datasets(toy, (8, 8)), 1
  ).weights(model)
  # The first step of Adam has the length of the learning rate.
  for old, new, trainable in zip(before, after, model.keras_model.weights):
    if trainable.trainable:
      assert 0 < np.abs(new - old).max() <= 3e-4 * (1 + 1e-6)
