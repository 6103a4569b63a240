"""Tests of the comparison of the clients' update norms."""

import collections
import functools

import client_rounds
import keras
import numpy as np
import pytest
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn import data as tff_bn_data
from tff_bn import models
from tff_bn.clients import update_norms
from tff_bn.keras_model.batch_norm_model import BatchNormModel

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_NAN = np.float32('nan')


@tff.federated_computation(
    tff.FederatedType(
        tff.to_type(
            collections.OrderedDict.fromkeys(
                ('trainable', 'statistics', 'exchanged'),
                tff.TensorType(np.float32),
            )
        ),
        tff.CLIENTS,
    )
)
def _compare(norms):
  return update_norms.compare(norms)


def _client(trainable, statistics, exchanged=0.0):
  return collections.OrderedDict(
      trainable=np.float32(trainable),
      statistics=np.float32(statistics),
      exchanged=np.float32(exchanged),
  )


@pytest.mark.parametrize(
    ('clients', 'ratio', 'client'),
    [
        ([(1, 1), (2, 1), (3, 1)], 1.5, 2),
        # For an even number, the median is the mean of the two middle values.
        ([(1, 1), (2, 1), (4, 1), (30, 1)], 10, 3),
        ([(1, 5), (1, 1), (1, 1)], 5, 0),
        ([(1, 1, 2), (1, 1, 40), (1, 1, 2)], 20, 1),
        # Clients without weight, in front and between.
        ([(_NAN, _NAN), (1, 1), (_NAN, _NAN), (9, 1), (1, 1)], 9, 3),
        ([(4, 0)], 1, 0),
        ([(1, 1), (np.inf, 1), (1, 1)], np.inf, 1),
        # Nothing to compare.
        ([(0, 0), (0, 0)], _NAN, None),
        ([(_NAN, _NAN)], _NAN, None),
        # The median is 0.
        ([(0, 0), (0, 0), (1, 0)], _NAN, None),
    ],
)
def test_comparison(clients, ratio, client):
  result = _compare([_client(*c) for c in clients])
  np.testing.assert_allclose(result['max_update_norm_ratio'], ratio, rtol=1e-6)
  if client is not None:
    assert result['max_update_norm_client'] == client


def test_norms_equal_numpy(toy):
  data = client_rounds.datasets(toy, (16, 9, 20))
  model, process = client_rounds.toy_process('build_fed_avg')
  start = client_rounds.Training(process, 1)
  before = start.weights(model)
  norms = []
  for dataset in data:
    alone = client_rounds.run(process, [dataset], 1).weights(model)
    changes = [np.ravel(a - b) for a, b in zip(alone, before, strict=True)]
    is_statistic = [v.is_statistic for v in model.variables]
    norms.append(
        [
            np.linalg.norm(
                np.concatenate(
                    [c for c, s in zip(changes, is_statistic) if s == kind]
                )
            )
            for kind in (False, True)
        ]
    )
  metrics = client_rounds.Training(process, 3).next_round(data)['client_work']
  ratios = np.array(norms) / np.median(norms, axis=0)
  assert metrics['max_update_norm_ratio'] == pytest.approx(ratios.max(), 1e-5)
  assert metrics['max_update_norm_client'] == ratios.max(axis=1).argmax()


def test_no_comparison_without_shared_variables(toy):
  _, process = client_rounds.toy_process('build_single')
  data = client_rounds.datasets(toy, (16, 9))
  metrics = client_rounds.Training(process, 2).next_round(data)['client_work']
  assert np.isnan(metrics['max_update_norm_ratio'])


_BUILDERS = {
    'fed_avg': algorithms.build_fed_avg,
    'fedtan_fused': functools.partial(algorithms.build_fedtan, moments='fused'),
}


@pytest.mark.parametrize(
    ('name', 'local_steps'),
    [
        ('fed_avg', 3),
        pytest.param('fedtan_fused', 1, marks=pytest.mark.slow),
    ],
)
def test_a_client_whose_pixels_are_not_scaled_stands_out(name, local_steps):
  data = tff_bn_data.split_dataset(
      tff_bn_data.load_dataset('digits'),
      'dirichlet',
      6,
      seed=0,
      dirichlet_alpha=0.1,
  )
  keras.utils.set_random_seed(0)
  model = BatchNormModel(
      models.build_model_fn('small_cnn', (8, 8, 1), 10),
      data.element_spec,
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
  )
  process = _BUILDERS[name](model, _SGD(0.05), local_steps=local_steps)
  datasets = [
      data.client_dataset(
          [c], seed=0, round_num=0, batch_size=16, local_steps=local_steps
      )
      for c in data.client_ids
  ]
  scaled = [*datasets]
  scaled[4] = datasets[4].map(lambda x, y: (1000 * x, y))

  def metrics(clients):
    training = client_rounds.Training(process, len(clients))
    return training.next_round(clients)['client_work']

  assert metrics(datasets)['max_update_norm_ratio'] < 5
  found = metrics(scaled)
  assert found['num_dropped_clients'] == 0
  assert found['max_update_norm_ratio'] > 20
  assert found['max_update_norm_client'] == 4
