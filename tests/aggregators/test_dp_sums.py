"""Tests of clipping, noise and adaptive clipping, against closed forms."""

import collections
import math

import numpy as np
import pytest
import tensorflow_federated as tff

from tff_bn import aggregators

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SIZE = 10_000


def _type(*parts, size=_SIZE):
  return tff.to_type(
      collections.OrderedDict(
          (part, [tff.TensorType(np.float32, [size]), np.float64])
          for part in parts
      )
  )


def _value(size=_SIZE, **parts):
  """A client's message: each part has a vector and a number."""
  return collections.OrderedDict(
      (name, [np.full(size, value, np.float32), np.float64(last)])
      for name, (value, last) in parts.items()
  )


_NOTHING = (0.0, 0.0)


def _noise(factory, *parts, rounds=1):
  """Draws the noise of each part in the last of some rounds."""
  process = factory.create(_type(*parts))
  state = process.initialize()
  value = _value(**dict.fromkeys(parts, _NOTHING))
  for _ in range(rounds):
    output = process.next(state, [value, value])
    state = output.state
  return {part: output.result[part][0] for part in parts}


def test_clipping_without_noise():
  process = aggregators.DpSums(
      0.0, num_clients=2, clip_norm=1.0, statistics_clip_norm=20.0
  ).create(_type('update', 'statistics', size=2))
  # The norms of the updates are 0.5 and 3, those of the statistics 9 and 90.
  small = _value(2, update=(0.3, math.sqrt(0.07)), statistics=(6.0, 3.0))
  large = _value(2, update=(2.0, 1.0), statistics=(60.0, 30.0))

  result = process.next(process.initialize(), [small, large]).result

  update, statistics = result['update'], result['statistics']
  np.testing.assert_allclose(update[0], [0.3 + 2 / 3] * 2, rtol=1e-6)
  np.testing.assert_allclose(update[1], math.sqrt(0.07) + 1 / 3, rtol=1e-6)
  np.testing.assert_allclose(statistics[0], [6 + 60 / 4.5] * 2, rtol=1e-6)
  np.testing.assert_allclose(statistics[1], 3 + 30 / 4.5, rtol=1e-6)
  assert update[1].dtype == np.float64


def test_a_message_that_is_not_finite_counts_as_zeros():
  process = aggregators.DpSums(0.0, num_clients=3, clip_norm=10.0).create(
      _type('update', size=2)
  )
  values = [_value(2, update=(x, 1.0)) for x in (1.0, math.nan, math.inf, 1e30)]
  result = process.next(process.initialize(), values).result
  np.testing.assert_allclose(result['update'][0], [1, 1])


def test_deviation_of_the_noise():
  found = _noise(
      aggregators.DpSums(
          2.0,
          num_clients=5,
          clip_norm=3.0,
          statistics_clip_norm=0.5,
          statistics_share=0.2,
      ),
      'update',
      'statistics',
  )
  assert np.std(found['update']) == pytest.approx(
      2 * 3 / math.sqrt(0.8), rel=0.03
  )
  assert np.std(found['statistics']) == pytest.approx(
      2 * 0.5 / math.sqrt(0.2), rel=0.03
  )
  for noise in found.values():
    assert abs(np.mean(noise)) < 4 * np.std(noise) / math.sqrt(_SIZE)
    # The fourth moment of a normal distribution.
    assert np.mean(noise**4) == pytest.approx(3 * np.var(noise) ** 2, rel=0.15)


@pytest.mark.parametrize('part', ['update', 'statistics'])
def test_a_part_that_is_alone_has_all_of_the_privacy(part):
  found = _noise(
      aggregators.DpSums(
          2.0, num_clients=5, clip_norm=1.0, statistics_clip_norm=1.0
      ),
      part,
  )
  assert np.std(found[part]) == pytest.approx(2, rel=0.03)


def _messages(num_exchanges, **options):
  sums = aggregators.DpSums(1.5, num_clients=5, **options)
  return [
      *((f, ('exchange',)) for f in sums.exchange_factories(num_exchanges)),
      (sums.update_factory(num_exchanges), ('update', 'statistics')),
  ]


def test_all_messages_of_a_round_are_one_mechanism():
  deviations = [
      np.std(noise)
      for factory, parts in _messages(2)
      for noise in _noise(factory, *parts).values()
  ]
  assert len(deviations) == 4
  total = sum(1 / deviation**2 for deviation in deviations)
  assert total == pytest.approx(1 / 1.5**2, rel=0.03)


def test_bits_of_adaptive_clipping_are_a_part_of_the_mechanism():
  factory, parts = _messages(1, clip_quantile=0.5)[1]
  process = factory.create(_type(*parts, size=1))
  state = process.initialize()
  value = _value(1, **dict.fromkeys(parts, _NOTHING))
  logs = []
  for _ in range(400):
    before = state['clip_norms']['update']
    state = process.next(state, [value] * 5).state
    logs.append(math.log(state['clip_norms']['update'] / before))
  # All norms are at most C, so the noisy share is 1 plus the noise.
  assert np.mean(logs) == pytest.approx(-0.2 * 0.5, abs=0.2 * 4 / 5 / 20 * 3)
  # An update has two bits here, and the exchange one.
  deviation = np.std(logs) / 0.2 * 5
  # A bit is ±1/2, which is its norm.
  assert (0.5 / deviation) ** 2 == pytest.approx(0.1 / 3 / 1.5**2, rel=0.25)
  noise = [
      np.std(noise)
      for factory, parts in _messages(1, clip_quantile=0.5)
      for noise in _noise(factory, *parts).values()
  ]
  # The first round has the initial norms, 1.
  assert sum(1 / d**2 for d in noise) == pytest.approx(0.9 / 1.5**2, rel=0.05)


def test_adaptive_clipping_follows_the_quantile():
  process = aggregators.DpSums(
      0.0, num_clients=4, clip_norm=2.0, clip_quantile=0.6
  ).create(_type('update', size=1))
  values = [_value(1, update=(x, 0.0)) for x in (1.0, 2.0, 3.0, 4.0)]
  output = process.next(process.initialize(), values)
  # Half of the norms are at most 2.
  expected = 2 * math.exp(-0.2 * (0.5 - 0.6))
  assert output.state['clip_norms']['update'] == pytest.approx(expected)
  assert output.measurements['clip_norms']['update'] == 2
  np.testing.assert_allclose(output.result['update'][0], [1 + 2 + 2 + 2])


def test_noise_repeats_for_a_state_and_differs_between_rounds():
  def draw(factory, **more):
    return _noise(factory, 'update', **more)['update']

  def sums(seed=0):
    return aggregators.DpSums(1.0, num_clients=2, seed=seed)

  first = draw(sums())
  np.testing.assert_array_equal(first, draw(sums()))
  others = [
      draw(sums(), rounds=2),
      draw(sums(seed=1)),
      *(
          _noise(exchange, 'exchange')['exchange']
          for exchange in sums().exchange_factories(2)
      ),
  ]
  all_noise = [first, *(noise / np.std(noise) for noise in others)]
  for i, noise in enumerate(all_noise):
    for other in all_noise[:i]:
      assert abs(np.corrcoef(noise, other)[0, 1]) < 0.05


def test_all_tensors_of_a_message_have_their_own_noise():
  vectors = [tff.TensorType(np.float32, [_SIZE])] * 2
  process = aggregators.DpSums(1.0, num_clients=2).create(
      tff.to_type(collections.OrderedDict(update=vectors, statistics=vectors))
  )
  zeros = [np.zeros(_SIZE, np.float32)] * 2
  value = collections.OrderedDict(update=zeros, statistics=zeros)
  result = process.next(process.initialize(), [value, value]).result
  noise = np.stack([*result['update'], *result['statistics']])
  correlations = np.corrcoef(noise) - np.eye(4)
  assert np.max(np.abs(correlations)) < 0.05


def test_the_state_counts_rounds():
  process = aggregators.DpSums(1.0, num_clients=1).create(_type('update'))
  state = process.initialize()
  for expected in range(3):
    assert state['round_num'] == expected
    state = process.next(state, [_value(update=_NOTHING)]).state


def test_only_with_noise_variances_keep_a_tenth_in_a_round():
  assert aggregators.DpSums(0.1, num_clients=1).smallest_variance == 0.1
  assert aggregators.DpSums(0.0, num_clients=1).smallest_variance == 0


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(noise_multiplier=-1.0), 'dp_noise|noise_multiplier.*-1'),
        (dict(num_clients=0), 'num_clients.*0'),
        (dict(clip_norm=0.0), 'clip_norm.*0'),
        (dict(statistics_clip_norm=-2.0), 'statistics_clip_norm.*-2'),
        (dict(statistics_share=1.0), 'statistics_share.*1'),
        (dict(clip_quantile=0.0), 'clip_quantile.*0'),
        (dict(seed=-1), 'seed.*-1'),
    ],
)
def test_wrong_arguments(options, message):
  with pytest.raises(ValueError, match=message):
    aggregators.DpSums(**{'noise_multiplier': 1.0, 'num_clients': 3, **options})
