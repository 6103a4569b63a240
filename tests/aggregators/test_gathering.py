"""Gathering of vectors, and rules as TFF aggregators."""

import collections

import attrs
import numpy as np
import pytest
import tensorflow_federated as tff
import tensorflow_privacy as tfp

from tff_bn import aggregators
from tff_bn.aggregators import gathering

_VECTOR = tff.TensorType(np.float32, [3])


@pytest.fixture(
    params=[
        'in_process_runtime',
        pytest.param('native_runtime', marks=pytest.mark.slow),
    ]
)
def any_runtime(request):
  return request.getfixturevalue(request.param)


@tff.federated_computation(
    tff.FederatedType(_VECTOR, tff.CLIENTS),
    tff.FederatedType(np.bool_, tff.CLIENTS),
)
def _gather(vectors, participates):
  return gathering.gather(vectors, participates)


def _rows(n):
  return np.arange(3 * n, dtype=np.float32).reshape([n, 3])


def test_gathered_type():
  expected = tff.FederatedType(gathering.gathered_type(_VECTOR), tff.SERVER)
  assert _gather.type_signature.result == expected
  assert str(expected) == (
      '<values=float32[?,3],num_dropped=int32,num_abstained=int32>@SERVER'
  )


def test_rows_are_in_the_clients_order(any_runtime):
  for n in (1, 2, 3, 8, 13, 130):
    result = _gather(list(_rows(n)), [True] * n)
    np.testing.assert_array_equal(result['values'], _rows(n))
    assert result['num_dropped'] == 0


def test_more_clients_than_levels(in_process_runtime):
  result = _gather(list(_rows(1200)), [True] * 1200)
  np.testing.assert_array_equal(result['values'], _rows(1200))


def test_clients_that_are_left_out(in_process_runtime):
  rows = _rows(8)
  rows[1, 2] = np.nan
  rows[4] = np.inf
  rows[5, 0] = -np.inf
  participates = [True, True, False, True, True, False, True, False]
  result = _gather(list(rows), participates)
  np.testing.assert_array_equal(result['values'], rows[[0, 3, 6]])
  assert result['num_dropped'] == 2
  assert result['num_abstained'] == 3

  result = _gather(list(rows), [False] * 8)
  assert result['values'].shape == (0, 3)
  assert result['num_dropped'] == 0
  assert result['num_abstained'] == 8


def test_merge_keeps_the_order(in_process_runtime):
  zero, accumulate, merge, report = gathering._accumulator(_VECTOR)

  def total(rows):
    result = zero()
    for row in rows:
      result = accumulate(result, (row, True))
    return result

  rows = _rows(24)
  rows[3] = rows[15] = np.nan
  kept = np.delete(rows, [3, 15], axis=0)
  merged = merge(total(rows[:11]), total(rows[11:17]))
  for row in rows[17:20]:
    merged = accumulate(merged, (row, True))
  result = report(merge(merged, total(rows[20:])))
  np.testing.assert_array_equal(result['values'], kept)
  assert result['num_dropped'] == 2


def test_rows_are_copied_log_n_times(in_process_runtime):
  # A row is copied when its level is carried on.
  zero, accumulate, _, _ = gathering._accumulator(_VECTOR)

  total, copied = zero(), 0
  for row in _rows(64):
    before = [len(level) for level in total['levels']]
    total = accumulate(total, (row, True))
    after = [len(level) for level in total['levels']]
    copied += sum(a for a, b in zip(after, before) if a != b)
    assert all(size in (0, 2**i) for i, size in enumerate(after))
  assert copied == 64 + 32 * 6


@attrs.define
class _Weights:
  second: np.ndarray
  first: tuple


_STRUCTURE = tff.to_type(
    collections.OrderedDict(
        # Not in alphabetical order.
        z=_Weights(
            second=tff.TensorType(np.float32, [2, 3]),
            first=(tff.TensorType(np.float64), tff.TensorType(np.float16, [2])),
        ),
        a=[tff.TensorType(np.float32, [0, 4]), tff.TensorType(np.float32, [1])],
    )
)


def _structure(rng):
  return collections.OrderedDict(
      z=_Weights(
          second=rng.normal(size=(2, 3)).astype(np.float32),
          first=(rng.normal(), rng.normal(size=2).astype(np.float16)),
      ),
      a=[
          np.zeros((0, 4), np.float32),
          rng.normal(size=1).astype(np.float32),
      ],
  )


def test_structures_are_preserved(any_runtime):
  process = aggregators.CoordinateMedian(1).create(_STRUCTURE)
  assert not process.is_weighted
  clients = [_structure(np.random.default_rng(i)) for i in range(5)]
  output = process.next(process.initialize(), clients)

  assert list(output.result) == ['z', 'a']
  assert isinstance(output.result['z'], _Weights)
  for get in (
      lambda v: v['z'].second,
      lambda v: v['z'].first[0],
      lambda v: v['z'].first[1],
      lambda v: v['a'][0],
      lambda v: v['a'][1],
  ):
    expected = np.median([get(c) for c in clients], axis=0)
    np.testing.assert_allclose(get(output.result), expected, rtol=1e-6)
    assert np.shape(get(output.result)) == np.shape(get(clients[0]))
    assert np.asarray(get(output.result)).dtype == (
        np.asarray(get(clients[0])).dtype
    )
  assert output.measurements == collections.OrderedDict(num_dropped=0)


@pytest.mark.parametrize(
    'dtype, shape, expected',
    [
        (np.float64, [], np.float64),
        (np.float32, [2, 2], np.float32),
        (np.float16, [3], np.float32),
    ],
)
def test_a_single_tensor(in_process_runtime, dtype, shape, expected):
  process = aggregators.CenteredClipping(1e6).create(
      tff.TensorType(dtype, shape)
  )
  assert process.initialize().dtype == expected  # The state is the last vector.
  clients = [np.full(shape, i, dtype)[()] for i in range(5)]
  output = process.next(process.initialize(), clients)
  np.testing.assert_array_equal(output.result, np.full(shape, 2))
  assert np.asarray(output.result).dtype == dtype


def test_distances_are_over_the_whole_structure(in_process_runtime):
  process = aggregators.Krum(0).create(
      tff.to_type([tff.TensorType(np.float64), tff.TensorType(np.float64)])
  )
  # Either number alone would select another client.
  clients = [[0.0, 9.0], [1.0, 0.0], [2.0, 1.0], [9.0, 2.0]]
  assert process.next(process.initialize(), clients).result == [2.0, 1.0]


@pytest.mark.parametrize(
    'value_type, name',
    [
        (tff.TensorType(np.int32, [2]), 'the value: int32'),
        (
            tff.to_type(collections.OrderedDict(a=np.float32, b=[np.int64])),
            'b/0',
        ),
        (tff.TensorType(np.float32, [None]), r'float32\[\?\]'),
        (tff.SequenceType(np.float32), r'float32\*'),
    ],
)
def test_types_that_are_not_allowed(value_type, name):
  with pytest.raises(TypeError, match=f'TrimmedMean.*floats.*{name}'):
    aggregators.TrimmedMean(1).create(value_type)


def test_participation_by_weight(in_process_runtime):
  process = aggregators.TrimmedMean(1).create_participating(
      tff.TensorType(np.float32), tff.TensorType(np.float32)
  )
  assert process.is_weighted
  values = [1.0, 2.0, 4.0, 8.0, 16.0, np.nan, np.nan]
  weights = [1.0, 0.5, 100.0, 0.0, 1e-9, 0.0, 0.0]
  output = process.next(process.initialize(), values, weights)
  assert output.result == 3
  assert output.measurements['num_dropped'] == 0
  # The dropped client counts as the tolerated attacker.
  weights[-1] = 1.0
  output = process.next(process.initialize(), values, weights)
  assert output.measurements['num_dropped'] == 1
  np.testing.assert_allclose(output.result, (1 + 2 + 4 + 16) / 4)
  output = process.next(process.initialize(), values, [0.0] * 7)
  assert output.result == 0
  # A client with weight NaN was dropped.
  weights[2], weights[-1] = np.nan, 0.0
  output = process.next(process.initialize(), values, weights)
  assert output.measurements['num_dropped'] == 1
  np.testing.assert_allclose(output.result, (1 + 2 + 16) / 3)


def test_weights_may_be_integers(in_process_runtime):
  process = aggregators.Mean().create_participating(
      tff.TensorType(np.float32), tff.TensorType(np.int64)
  )
  output = process.next(process.initialize(), [1.0, 3.0, 9.0], [7, 1, 0])
  assert output.result == 2


def test_too_few_clients_in_the_round(any_runtime):
  process = aggregators.NearestNeighborMixing(aggregators.Krum(2), 2).create(
      _VECTOR
  )
  with pytest.raises(Exception, match='Krum with num_byzantine=2') as error:
    process.next(process.initialize(), list(_rows(6)))
  for number in ('tolerate 2 ', 'at least 7 ', 'there are 6.'):
    assert number in str(error.value)
  process.next(process.initialize(), list(_rows(7)))


def test_state_lasts_over_rounds(any_runtime):
  process = aggregators.Bucketing(aggregators.CenteredClipping(1.0), 2).create(
      tff.TensorType(np.float32, [1])
  )
  state = process.initialize()
  clients = [np.array([5], np.float32)] * 4
  for round_num in range(3):
    assert state['round_num'] == round_num
    output = process.next(state, clients)
    np.testing.assert_allclose(output.result, [round_num + 1])
    state = output.state


@pytest.mark.slow
def test_runtimes_agree(in_process_context, native_context):
  process = aggregators.Bucketing(
      aggregators.NearestNeighborMixing(aggregators.TrimmedMean(2), 2), 2
  ).create(_STRUCTURE)
  clients = [_structure(np.random.default_rng(i)) for i in range(11)]
  stack = tff.framework.get_context_stack()
  results = []
  for context in (in_process_context, native_context):
    with stack.install(context):
      results.append(process.next(process.initialize(), clients).result)
  a, b = results
  np.testing.assert_allclose(a['z'].second, b['z'].second, rtol=1e-6)
  np.testing.assert_allclose(a['z'].first[0], b['z'].first[0], rtol=1e-12)
  np.testing.assert_allclose(a['a'][1], b['a'][1], rtol=1e-6)


@pytest.mark.parametrize(
    'wrap',
    [
        lambda rule: tff.aggregators.zeroing_factory(100.0, rule),
        lambda rule: tff.aggregators.clipping_factory(100.0, rule),
        lambda rule: tff.aggregators.DifferentiallyPrivateFactory(
            tfp.GaussianSumQuery(l2_norm_clip=100.0, stddev=0.0), rule
        ),
    ],
    ids=['zeroing', 'clipping', 'differential privacy'],
)
def test_inside_tff_wrappers(in_process_runtime, wrap):
  process = wrap(aggregators.CoordinateMedian()).create(
      tff.to_type([tff.TensorType(np.float32, [2])])
  )
  clients = [[np.array(x, np.float32)] for x in ([1, 2], [3, 4], [80, 900])]
  (result,) = process.next(process.initialize(), clients).result
  # The last value is zeroed, or clipped to length 100.
  expected = (
      [1, 2] if 'zeroed_count' in str(process.next.type_signature) else [3, 4]
  )
  np.testing.assert_allclose(result, expected)
