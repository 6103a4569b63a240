"""What is left of the initial running statistics after a run."""

import dataclasses
import functools
import types
import warnings

import keras
import numpy as np
import pytest
from scipy import stats
import small_models
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn import data as tff_bn_data
from tff_bn import training
from tff_bn.clients.client_work import Moves
from tff_bn.clients.client_work import MovingStatistics
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.layers import HybridBatchNormalization
from tff_bn.training import kept_statistics

_SIZES = dict(a=5, b=11, c=24)
_MOMENTUM = 0.8
_OPTIMIZER = tff.learning.optimizers.build_sgdm(0.01)


def _data():
  """Three clients, whose two features are the same."""
  n = sum(_SIZES.values())
  rng = np.random.default_rng(0)
  x = np.repeat(rng.normal(3, 2, [n, 1]), 2, axis=1).astype(np.float32)
  y = rng.integers(0, 2, n).astype(np.int32)
  ends = np.cumsum(list(_SIZES.values()))
  indices = dict(zip(_SIZES, np.split(np.arange(n), ends[:-1])))
  return tff_bn_data.FederatedData(
      tff_bn_data.Dataset('pairs', x, y, x, y, 2), indices, indices
  )


def _start(shape, dtype=None):
  """The initial means: they differ, and nothing else does."""
  del shape
  return tf.constant([0.0, 1.0], dtype)


def _norm(momentum=_MOMENTUM, **kwargs):
  return keras.layers.BatchNormalization(
      momentum=momentum, moving_mean_initializer=_start, **kwargs
  )


def _model(*layers):
  def keras_model_fn():
    return keras.Sequential(
        [
            keras.Input([2]),
            *(build() for build in layers),
            keras.layers.Dense(2),
        ]
    )

  return small_models.classifier(keras_model_fn, (2,))


@pytest.fixture(scope='module')
def data():
  return _data()


@pytest.fixture(scope='module')
def model():
  return _model(_norm)


@pytest.fixture(scope='module')
def build(model):
  """Builds processes by their names and options, each once."""
  return functools.cache(
      lambda name, **options: getattr(algorithms, f'build_{name}')(
          model, _OPTIMIZER, **options
      )
  )


_STEPS = dict(local_steps=3)
_EPOCHS = dict(local_epochs=2)


@pytest.mark.usefixtures('in_process_runtime')
@pytest.mark.parametrize(
    ('name', 'options', 'lengths', 'num_rounds', 'is_union'),
    [
        ('fed_avg', {}, _STEPS, 2, False),
        # 4, 6 and 12 steps with 5, 11 and 24 examples.
        ('fed_avg', {}, _EPOCHS, 2, False),
        (
            'fedtan',
            dict(
                local_steps=2,
                running_statistics='first_step',
                synchronize_every=3,
            ),
            *(_STEPS, 4, False),
        ),
        ('fbn', dict(backward='running'), _STEPS, 2, False),
        ('fixbn', dict(fixbn_rounds=2), _STEPS, 3, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ('fed_avg', {}, _EPOCHS, 2, True),
                (
                    'fed_avg',
                    dict(client_weighting='uniform'),
                    _EPOCHS,
                    2,
                    False,
                ),
                ('fed_bn', {}, _EPOCHS, 2, False),
                ('fedtan', dict(local_steps=2), _STEPS, 2, False),
                (
                    'fedtan',
                    dict(local_steps=2, running_statistics='first_step'),
                    *(_STEPS, 2, False),
                ),
            )
        ),
    ],
)
def test_share_is_what_a_run_leaves(
    model, build, data, name, options, lengths, num_rounds, is_union
):
  """The means of equal features differ by the share of their initial values."""
  process = build(name, **options)
  batch_size = 4
  draw = dict(seed=0, batch_size=batch_size * (3 if is_union else 1), **lengths)
  groups = [list(_SIZES)] if is_union else [[c] for c in _SIZES]
  state = process.initialize()
  has_states = hasattr(process, 'initialize_client')
  clients = [process.initialize_client(state)] * 3 if has_states else None
  for round_num in range(1, num_rounds + 1):
    datasets = [
        data.client_dataset(group, round_num=round_num, **draw)
        for group in groups
    ]
    if has_states:
      output = process.next(state, clients, datasets)
      clients = output.client_states
    else:
      output = process.next(state, datasets)
    state = output.state
  models = (
      [process.get_client_model_weights(state, client) for client in clients]
      if has_states
      else [process.get_model_weights(state)]
  )
  left = np.mean([np.diff(each.non_trainable[0]) for each in models])
  found = kept_statistics.find(
      process,
      model,
      data,
      training.TrainingConfig(
          rounds=num_rounds, batch_size=batch_size, **lengths
      ),
      train_on_union=is_union,
  )
  np.testing.assert_allclose(found.share, left, rtol=1e-5)
  assert found.momentum == _MOMENTUM
  assert found.num_rounds == 2


def _process(moves=Moves.EACH_STEP, are_local=False, **config):
  """A process as `find` sees it."""
  return types.SimpleNamespace(
      next=types.SimpleNamespace(
          statistics=MovingStatistics(
              moves, are_local, LocalTrainingConfig(_OPTIMIZER, **config)
          )
      )
  )


def _share(model, data, process=None, **config):
  config = {'rounds': 3, 'batch_size': 4, 'local_steps': 2, **config}
  found = kept_statistics.find(
      process or _process(), model, data, training.TrainingConfig(**config)
  )
  return None if found is None else found.share


def test_union_with_batches_of_its_own_size(model, data):
  config = training.TrainingConfig(
      rounds=3, batch_size=4, local_epochs=2, centralized_batch_size=7
  )
  found = kept_statistics.find(
      _process(), model, data, config, train_on_union=True
  )
  # 40 examples are 6 batches.
  assert found.share == pytest.approx(_MOMENTUM ** (3 * 2 * 6))


@pytest.mark.parametrize('clients_per_round', [1, 2])
def test_clients_that_take_part_in_some_rounds(model, data, clients_per_round):
  probabilities = stats.binom.pmf(range(1, 5), 4, clients_per_round / 3)
  expected = np.average(
      _MOMENTUM ** (2 * np.arange(1, 5)), weights=probabilities
  )
  found = _share(
      model,
      data,
      _process(are_local=True),
      rounds=4,
      clients_per_round=clients_per_round,
  )
  np.testing.assert_allclose(found, expected)
  # Shared statistics move in every round.
  shared = _share(model, data, rounds=4, clients_per_round=clients_per_round)
  np.testing.assert_allclose(shared, _MOMENTUM**8)


def test_steps_of_the_process_count(model, data):
  process = _process(local_steps=1)
  np.testing.assert_allclose(_share(model, data, process), _MOMENTUM**3)
  process = _process(local_epochs=2)
  np.testing.assert_allclose(_share(model, data, process), _MOMENTUM**12)


def _shared_layer():
  layer = _norm(0.99)
  inputs = keras.Input([2])
  return keras.Model(inputs, layer(keras.layers.ReLU()(layer(inputs))))


class _Inference(keras.layers.Layer):
  """Calls batch normalization in inference mode, as for fine-tuning."""

  def __init__(self):
    super().__init__()
    self.norm = _norm(0.99)

  def call(self, inputs):
    return self.norm(inputs, training=False)


@pytest.mark.parametrize(
    ('layers', 'expected'),
    [
        (
            [lambda: _norm(0.9), lambda: _norm(0.99), lambda: _norm(0.5)],
            0.99**6,
        ),
        ([_norm, lambda: _norm(0.99, trainable=False)], _MOMENTUM**6),
        ([lambda: _norm(0.99, trainable=False)], None),
        ([_shared_layer], 0.99**12),
        ([_Inference, lambda: _norm(0.95)], 0.95**6),
        ([_Inference], None),
        ([lambda: keras.layers.GroupNormalization(1)], None),
    ],
)
def test_layers_that_training_moves_count(data, layers, expected):
  found = _share(_model(*layers), data)
  assert found == (None if expected is None else pytest.approx(expected))


def test_statistics_that_no_momentum_moves(model, data):
  assert _share(model, data, _process(Moves.NEVER)) is None
  hybrid = _model(lambda: HybridBatchNormalization(momentum=0.99))
  assert _share(hybrid, data) is None


def test_unknown_processes_and_data(model, data):
  process = types.SimpleNamespace(next=lambda state, data: None)
  assert _share(model, data, process) is None
  other = types.SimpleNamespace(client_ids=data.client_ids)
  epochs = dict(local_steps=None, local_epochs=1)
  assert _share(model, other, **epochs) is None
  assert _share(model, other) == _share(model, data)


def test_processes_with_short_rounds(model, data):
  process = algorithms.build_scaffold(model, _OPTIMIZER, num_clients=3)
  assert hasattr(process.next, 'full')
  np.testing.assert_allclose(_share(model, data, process), _MOMENTUM**6)


@pytest.mark.usefixtures('in_process_runtime')
def test_training_warns_where_more_than_half_is_left(
    model, build, data, tmp_path
):
  # 0.8^3 = 0.51 and 0.8^4 = 0.41.
  process = build('fed_avg')
  config = training.TrainingConfig(rounds=3, batch_size=4, local_steps=1)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always', training.KeptStatisticsWarning)
    training.train(process, model, data, config, tmp_path)
    longer = dataclasses.replace(config, rounds=4)
    kept_statistics.warn(kept_statistics.find(process, model, data, longer))
  found = [w for w in caught if w.category is training.KeptStatisticsWarning]
  (warning,) = found
  assert warning.filename == __file__
  assert str(warning.message) == (
      'momentum=0.8 leaves 51 % of the initial moving mean and variance of'
      ' batch normalization after 3 rounds, so the model can predict much worse'
      ' than in training. Use a smaller momentum or more rounds, or compute the'
      ' statistics again: tff_bn.evaluation.reestimate_batch_norm_statistics.'
  )


def test_the_limit_is_half():
  kept = kept_statistics.KeptStatistics(0.5, 0.5, 1)
  assert not kept.is_much
  assert dataclasses.replace(kept, share=0.501).is_much
  assert 'after 1 round,' in kept.describe('momentum', 'x')
