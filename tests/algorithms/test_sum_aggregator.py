"""Training with sums of all that clients send, on every kind of algorithm."""

import builders
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn import algorithms
from tff_bn.processes.stateful_process import StatefulLearningProcess

pytestmark = [
    pytest.mark.usefixtures('in_process_runtime'),
    pytest.mark.filterwarnings('ignore:Secure aggregation:UserWarning'),
]

_OPTIMIZER = tff.learning.optimizers.build_sgdm(0.1)
_SUMS = tff.aggregators.SumFactory()
_SECURE = aggregators.SecureSums(
    weight_bound=16.0, count_bound=16 * 9.0, statistics_bound=10.0
)


def _no_noise(**options):
  return aggregators.DpSums(
      0.0, num_clients=3, clip_norm=1e6, statistics_clip_norm=1e6, **options
  )


def _datasets(toy, *, equal=False):
  """Clients with 16, 1 and 0 examples and one not finite; or 3 alike."""
  if equal:
    return [toy.dataset(16, seed) for seed in range(3)]
  x, y = toy.arrays(8, 5)
  broken = tf.data.Dataset.from_tensor_slices((x * np.nan, y)).batch(8)
  return [toy.dataset(16, 0), toy.dataset(1, 1), toy.dataset(0, 2), broken]


def _train(toy, name, datasets, rounds=2, **options):
  """Returns the model's weights and the last metrics."""
  process = builders.build(
      name, toy.model_for(name), _OPTIMIZER, local_steps=2, **options
  )
  state = process.initialize()
  clients = None
  if isinstance(process, StatefulLearningProcess):
    clients = [process.initialize_client(state) for _ in datasets]
  for _ in range(rounds):
    if clients is None:
      output = process.next(state, datasets)
    else:
      output = process.next(state, clients, datasets)
      clients = output.client_states
    state = output.state
  weights = process.get_model_weights(state)
  return tf.nest.flatten([weights.trainable, weights.non_trainable]), output


def _assert_close(found, expected, rtol=1e-5, atol=2e-6):
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    'name',
    [
        *('build_fed_avg', 'build_fbn'),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *('build_silo_bn', 'build_hbn', 'build_scaffold'),
                *('build_fed_nova', 'build_fed_dyn'),
            )
        ),
    ],
)
def test_sums_train_as_without_them(toy_images, name):
  datasets = _datasets(toy_images)
  expected, _ = _train(toy_images, name, datasets)
  found, output = _train(toy_images, name, datasets, sum_aggregator=_SUMS)
  _assert_close(found, expected)
  assert output.metrics['client_work']['num_dropped_clients'] == 1


@pytest.mark.parametrize(
    'moments', ['two_pass', pytest.param('fused', marks=pytest.mark.slow)]
)
def test_exchanges_of_fedtan_are_sums(toy_images, moments):
  datasets = _datasets(toy_images)
  expected, _ = _train(toy_images, 'build_fedtan', datasets, moments=moments)
  for factory in (_SUMS, _SECURE):
    found, output = _train(
        toy_images,
        'build_fedtan',
        datasets,
        moments=moments,
        sum_aggregator=factory,
    )
    _assert_close(found, expected)
    exchanges = output.metrics['distributor']
    assert len(exchanges) == (3 if moments == 'two_pass' else 2)
  # The measurements of the secure sums of each exchange.
  assert 'secure_upper_threshold' in str(exchanges[0])


@pytest.mark.slow
@pytest.mark.parametrize('moments', ['two_pass', 'fused'])
def test_fedtan_without_noise_is_fedtan(toy, moments):
  datasets = _datasets(toy, equal=True)
  expected, _ = _train(
      toy, 'build_fedtan', datasets, moments=moments, client_weighting='uniform'
  )
  found, _ = _train(
      toy,
      'build_fedtan',
      datasets,
      moments=moments,
      client_weighting='uniform',
      sum_aggregator=_no_noise(),
  )
  # Norms are in float32.
  _assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'phases'),
    [
        ('build_fedtan_ii', dict(sync_rounds=1)),
        ('build_fedtan', dict(synchronize_every=2)),
    ],
)
def test_phases_of_fedtan_keep_the_states_of_its_exchanges(toy, name, phases):
  datasets = _datasets(toy, equal=True)
  options = dict(client_weighting='uniform', **phases)
  expected, _ = _train(toy, name, datasets, **options)
  found, output = _train(
      toy,
      name,
      datasets,
      sum_aggregator=_no_noise(clip_quantile=0.5),
      **options,
  )
  _assert_close(found, expected, rtol=1e-9, atol=1e-9)
  # One round had exchanges, and two had updates.
  assert [int(s['round_num']) for s in output.state.distributor] == [1, 1, 1]
  assert output.state.aggregator['round_num'] == 2


@pytest.mark.slow
def test_noise_changes_the_model_and_repeats(toy_images):
  datasets = _datasets(toy_images)

  def train(seed):
    return _train(
        toy_images,
        'build_fedtan',
        datasets,
        client_weighting='uniform',
        sum_aggregator=aggregators.DpSums(
            1.0, num_clients=4, clip_norm=0.1, seed=seed
        ),
    )[0]

  first = train(0)
  for a, b, c in zip(first, train(0), train(1), strict=True):
    np.testing.assert_array_equal(a, b)
    assert np.all(np.isfinite(a)) and np.all(a != c)


def test_variances_stay_positive_under_much_noise(toy_images):
  weights, _ = _train(
      toy_images,
      'build_fedtan',
      _datasets(toy_images, equal=True),
      rounds=3,
      client_weighting='uniform',
      sum_aggregator=aggregators.DpSums(100.0, num_clients=3),
  )
  variance = weights[-1]
  assert variance.shape == (5,) and np.all(variance > 0)
  assert np.all(np.isfinite(np.concatenate([w.ravel() for w in weights])))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (
            dict(sum_aggregator=aggregators.CoordinateMedian()),
            'sum_aggregator=CoordinateMedian is a rule',
        ),
        (
            dict(
                sum_aggregator=_SUMS,
                model_aggregator=tff.aggregators.MeanFactory(),
            ),
            'model_aggregator and sum_aggregator exclude each other',
        ),
        (
            dict(
                sum_aggregator=_SUMS,
                statistics_aggregator=aggregators.CoordinateMedian(),
            ),
            'statistics_aggregator=CoordinateMedian and sum_aggregator exclude',
        ),
        (
            dict(sum_aggregator=_no_noise()),
            'client_weighting=num_examples is impossible with'
            ' sum_aggregator=DpSums',
        ),
        (
            dict(
                sum_aggregator=_SUMS,
                drift_correction=algorithms.FedBs(1.0, proximal_strength=0.1),
            ),
            'drift_correction=FedBs is impossible with sum_aggregator: its'
            ' clients also send losses',
        ),
        (
            dict(
                sum_aggregator=_no_noise(),
                client_weighting='uniform',
                drift_correction=algorithms.Scaffold(),
            ),
            'drift_correction=Scaffold is impossible with'
            ' sum_aggregator=DpSums: its clients also send',
        ),
    ],
)
def test_what_sums_exclude(toy, options, message):
  with pytest.raises(ValueError, match=message):
    algorithms.build_fed_avg(toy.model(), _OPTIMIZER, **options)


def test_a_mean_is_no_sum(toy):
  with pytest.raises(TypeError, match='sum_aggregator must be an unweighted'):
    algorithms.build_fed_avg(
        toy.model(),
        _OPTIMIZER,
        sum_aggregator=tff.aggregators.MeanFactory(),
    )
