"""The simulated client sends what the algorithms' clients send."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import BatchNormModel
from tff_bn import analysis
from tff_bn.catalog import algorithms as catalog
from tff_bn.papers.privacy import client_message
from tff_bn.papers.privacy import client_simulation
from tff_bn.papers.privacy import leakage
from tff_bn.papers.privacy import recorded_round
from tff_bn.runtime import plan_context

_LEARNING_RATE = 0.5
_BATCH = client_simulation.Normalization.BATCH


def _keras_model():
  layers = keras.layers
  model = keras.Sequential(
      [
          keras.Input((4, 4, 1)),
          layers.Conv2D(3, 3, use_bias=False),
          layers.BatchNormalization(momentum=0.8),
          layers.ReLU(),
          layers.Conv2D(2, 2),
          layers.BatchNormalization(momentum=0.9),
          layers.Flatten(),
          layers.Dense(3),
      ]
  )
  rng = np.random.default_rng(0)
  for layer in model.layers:
    if isinstance(layer, layers.BatchNormalization):
      for variable in layer.weights:
        variable.assign(rng.uniform(0.5, 1.5, variable.shape))
  return model


@pytest.fixture(name='model', scope='module')
def _model():
  keras.utils.set_random_seed(0)
  return BatchNormModel(
      _keras_model,
      input_spec=(
          tf.TensorSpec((None, 4, 4, 1), tf.float32),
          tf.TensorSpec((None,), tf.int32),
      ),
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
  )


def _clients():
  rng = np.random.default_rng(1)
  x = rng.standard_normal((3, 5, 4, 4, 1)).astype(np.float32)
  return x, rng.integers(3, size=(3, 5)).astype(np.int32)


def _recording(model, algorithm):
  process = catalog.find(algorithm).builder()(
      model,
      tff.learning.optimizers.build_sgdm(_LEARNING_RATE),
      local_steps=1,
  )
  datasets = [tf.data.Dataset.from_tensors(pair) for pair in zip(*_clients())]
  with plan_context.installed(recorded_round.RecordingContext()) as context:
    state = process.initialize()
    arguments = [state, datasets]
    if hasattr(process, 'initialize_client'):
      arguments.insert(1, [process.initialize_client(state)] * 3)
    output = process.next(*arguments)
  return context.recording, process, output


@pytest.mark.parametrize(
    'algorithm',
    [
        a if a == 'fedtan' else pytest.param(a, marks=pytest.mark.slow)
        for a in leakage.NORMALIZATIONS
    ],
)
def test_messages(algorithm, model):
  recording, process, output = _recording(model, algorithm)
  listed = analysis.messages(process.next)
  for direction, recorded in (
      (analysis.Direction.UP, recording.sent[2]),
      (analysis.Direction.DOWN, recording.received),
  ):
    # The metrics of a round may need what no client uses.
    assert recorded.keys() >= {
        (m.exchange, m.name)
        for m in listed
        if m.direction is direction and not m.metrics_only
    }
    for place, value in recorded.items():
      assert value.shape in {
          m.shape for m in listed if (m.exchange, m.name) == place
      }
  reader = client_message.Reader(model)
  messages = [reader.read(recording, number) for number in range(3)]
  simulation = client_simulation.ClientSimulation(model.keras_model)
  x, y = _clients()
  trainable = model.keras_model.trainable_variables
  affine = {p for p, v in enumerate(trainable) if v.name in ('gamma', 'beta')}
  for number, message in enumerate(messages):
    shared = None
    if leakage.NORMALIZATIONS[algorithm] is not _BATCH:
      shared = simulation.fixed_statistics(message.exchanges)
    simulated = simulation.run(x[number], y[number], shared)
    missing = affine if algorithm == 'fedbn' else set()
    for position, (update, gradient) in enumerate(
        zip(message.update, simulated.gradients, strict=True)
    ):
      assert (update is None) == (position in missing)
      if update is not None:
        np.testing.assert_allclose(update / _LEARNING_RATE, gradient, atol=2e-6)
    rates = [0.2, 0.1] if algorithm in ('fedavg', 'fbn') else []
    if rates:
      for seen, found, rate in zip(
          message.statistics, simulated.statistics, rates, strict=True
      ):
        np.testing.assert_allclose(seen / rate, found, atol=1e-5)
    assert (message.exchanges is not None) == (algorithm == 'fedtan')
    assert bool(message.statistics) == (algorithm not in ('fedbn', 'silobn'))
    if message.exchanges is not None:
      for seen, found in zip(
          message.exchanges.statistics, simulated.statistics, strict=True
      ):
        np.testing.assert_allclose(seen, found, atol=1e-5)
      placed = simulation.place(message.exchanges.gradients)
      for position, gradient in enumerate(placed):
        assert (gradient is not None) == (position in affine)
        if gradient is not None:
          np.testing.assert_allclose(
              gradient, simulated.gradients[position], atol=2e-6
          )
  if algorithm == 'fedavg':
    # The recorded messages are those that the server averages.
    before, after = (
        process.get_model_weights(state)
        for state in (process.initialize(), output.state)
    )
    for position, (old, new) in enumerate(
        zip(before.trainable, after.trainable, strict=True)
    ):
      mean = np.mean([message.update[position] for message in messages], 0)
      np.testing.assert_allclose(old - new, mean, atol=1e-6)


def test_relative_statistics():
  running = client_message.RunningStatistics(
      np.array([1.0, 2.0]), np.array([3.9, 8.9]), 0.1, 0.01
  )
  np.testing.assert_allclose(
      running.relative(np.array([5.0, -1.0]), np.array([4.9, 5.9])),
      [[2.0, -1.0], [0.25, -1 / 3]],
      rtol=1e-6,
  )
