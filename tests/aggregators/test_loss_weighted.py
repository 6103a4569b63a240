"""The mean weighted by losses, against NumPy."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_VALUES = [
    collections.OrderedDict(a=np.array([1.0, -2.0]), b=[np.float64(3)]),
    collections.OrderedDict(a=np.array([4.0, 0.5]), b=[np.float64(-1)]),
    collections.OrderedDict(a=np.array([-7.0, 8.0]), b=[np.float64(10)]),
]
_TYPE = tff.to_type(
    collections.OrderedDict(
        a=tff.TensorType(np.float64, [2]), b=[tff.TensorType(np.float64)]
    )
)
_NAN, _INF = float('nan'), float('inf')


@pytest.fixture(scope='module')
def process():
  return aggregators.LossWeightedFactory().create(
      _TYPE, tff.TensorType(np.float32)
  )


def _check(process, losses, weights):
  output = process.next(process.initialize(), _VALUES, losses)
  shares = np.array(weights) / sum(weights)
  np.testing.assert_allclose(
      output.result['a'],
      sum(w * value['a'] for w, value in zip(shares, _VALUES)),
      rtol=1e-7,
  )
  np.testing.assert_allclose(
      output.result['b'][0],
      sum(w * value['b'][0] for w, value in zip(shares, _VALUES)),
      rtol=1e-7,
  )


@pytest.mark.parametrize(
    ('losses', 'weights'),
    [
        ([0.5, 2.0, 1.5], [1, 4, 3]),
        ([1e-6, 2e-6, 5e-6], [1, 2, 5]),
        ([1e6, 2e6, 1.0], [1e6, 2e6, 1]),
        ([0.7, 0.7, 0.7], [1, 1, 1]),
        ([0.0, 0.0, 0.0], [1, 1, 1]),
        ([-1.0, -5.0, 0.0], [1, 1, 1]),
        ([0.0, 2.0, 3.0], [0, 2, 3]),
        ([-4.0, 2.0, 3.0], [0, 2, 3]),
        ([_NAN, 2.0, 3.0], [0, 2, 3]),
        ([1.0, _INF, 3.0], [1, 0, 3]),
        ([1.0, 3.0, -_INF], [1, 3, 0]),
        ([_NAN, 0.0, _INF], [0, 1, 0]),
        ([_NAN, 0.0, 0.0], [0, 1, 1]),
    ],
)
def test_the_mean_equals_numpy(process, losses, weights):
  assert process.is_weighted
  _check(process, losses, weights)


def test_without_any_loss_the_mean_is_0(process):
  output = process.next(process.initialize(), _VALUES, [_NAN, _INF, -_INF])
  np.testing.assert_array_equal(output.result['a'], [0, 0])
  np.testing.assert_array_equal(output.result['b'][0], 0)


def test_inner_factory_gets_the_weights_and_keeps_its_state():
  clipping = tff.aggregators.clipping_factory(
      tff.aggregators.PrivateQuantileEstimationProcess.no_noise(1.0, 0.5, 0.5),
      tff.aggregators.MeanFactory(),
  )
  process = aggregators.LossWeightedFactory(clipping).create(
      _TYPE, tff.TensorType(np.float32)
  )
  state = process.initialize()
  output = process.next(state, _VALUES, [0.5, 0.0, 1.5])
  # Clipped to length 1, then averaged.
  expected = 0
  for share, value in zip((0.25, 0, 0.75), _VALUES):
    vector = np.array([*value['a'], *value['b']])
    expected = expected + share * vector / np.linalg.norm(vector)
  found = [*output.result['a'], *output.result['b']]
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  assert output.measurements['clipped_count'] == 3
  again = process.next(output.state, _VALUES, [0.5, 0.0, 1.5])
  assert (
      again.measurements['clipping_norm'] > output.measurements['clipping_norm']
  )


@pytest.mark.parametrize(
    'factory',
    [
        tff.aggregators.UnweightedMeanFactory(),
        aggregators.CoordinateMedian(),
        tff.aggregators.MeanFactory,
    ],
    ids=['mean', 'median', 'class'],
)
def test_factories_without_weights_are_an_error(factory):
  with pytest.raises(
      TypeError,
      match=f'must take weights, here losses.*{type(factory).__name__}',
  ):
    aggregators.LossWeightedFactory(factory)


@pytest.mark.parametrize('dtype', [tf.float32, tf.float64])
def test_smallest_weight_is_negligible(dtype):
  """Even 1000 clients without a loss are negligible."""
  from tff_bn.aggregators import loss_weighted

  weights = [
      loss_weighted.loss_weight(tf.constant(loss, dtype)).numpy()
      for loss in (0.0, 1e-6, 3.0)
  ]
  assert weights[0] > 0
  assert weights[1] + 1000 * weights[0] == pytest.approx(1e-6, rel=1e-9)
  assert weights[2] == 3
