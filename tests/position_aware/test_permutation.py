"""Tests of permuting hidden units and of the effect on the outputs."""

import collections
import itertools

import keras
import numpy as np
import pytest
import random_models

import tff_bn
from tff_bn import models
from tff_bn.layers import PositionEncoding
from tff_bn.position_aware import permutation

_layers = keras.layers


def _swap_rows(matrix, a, b):
  matrix = matrix.copy()
  matrix[[a, b]] = matrix[[b, a]]
  return matrix


def _distribution(num_units, probability):
  """Returns the probability of each matrix (as bytes) in algorithm 1."""
  outcomes = [(np.eye(num_units), 1.0)]
  for j in range(num_units - 1):
    following = []
    for matrix, p in outcomes:
      following.append((matrix, p * (1 - probability)))
      for i in range(j + 1, num_units):
        share = probability / (num_units - 1 - j)
        following.append((_swap_rows(matrix, j, i), p * share))
    outcomes = following
  result = collections.Counter()
  for matrix, p in outcomes:
    result[matrix.tobytes()] += p
  return result


def _expected_matrix(num_units, probability):
  """Returns the mean matrix in algorithm 1."""
  return sum(
      p * np.frombuffer(matrix).reshape(num_units, num_units)
      for matrix, p in _distribution(num_units, probability).items()
  )


def _expected_kept(num_units, probability):
  """Returns the expected share for one permutation in closed form.

  A unit that was swapped away never returns. Unit j stays if no unit before it
  is swapped with it, and it isn't swapped in its turn; the last unit has none.
  """
  stay = [
      np.prod([1 - probability / (num_units - 1 - k) for k in range(j)])
      * (1 - probability if j < num_units - 1 else 1)
      for j in range(num_units)
  ]
  return np.mean(stay)


def test_all_permutations_have_their_probability():
  rng = np.random.default_rng(0)
  num = 20_000
  counts = collections.Counter(
      np.eye(4)[permutation.random_permutation(4, 0.6, rng)].tobytes()
      for _ in range(num)
  )
  expected = _distribution(4, 0.6)
  assert set(counts) <= set(expected)
  for matrix, p in expected.items():
    assert abs(counts[matrix] / num - p) < 4.5 * np.sqrt(p * (1 - p) / num)


def test_permutations_without_and_with_certain_swaps():
  rng = np.random.default_rng(0)
  np.testing.assert_array_equal(
      permutation.random_permutation(9, 0.0, rng), np.arange(9)
  )
  np.testing.assert_array_equal(permutation.random_permutation(1, 1.0, rng), 0)
  for _ in range(20):
    # Sattolo's algorithm: one cycle through all.
    p = permutation.random_permutation(9, 1.0, rng)
    unit, visited = 0, []
    for _ in range(9):
      visited.append(unit)
      unit = p[unit]
    assert sorted(visited) == list(range(9))
    assert permutation.kept_share(p) == 0


def test_kept_share():
  assert permutation.kept_share([0, 1, 2, 3]) == 1
  assert permutation.kept_share([0, 2, 1, 3, 4]) == 0.6
  assert permutation.kept_share(np.array([1, 0])) == 0


@pytest.mark.parametrize('probability', [0.1, 0.5, 1.0])
@pytest.mark.parametrize('num_units', [2, 5, 40])
def test_mean_kept_share_of_one_permutation(num_units, probability):
  expected = _expected_kept(num_units, probability)
  found = permutation.mean_kept_share(num_units, probability, repeats=1000)
  # No share deviates by more than 1/2 on average.
  assert found == pytest.approx(expected, abs=4.5 * 0.5 / 1000**0.5)


def test_mean_kept_share_of_the_paper():
  for seed in range(3):
    assert 0.80 <= permutation.mean_kept_share(1024, 0.1, seed=seed) <= 0.86
  local = dict(num_steps=50, repeats=200)
  # Section 5.2: about 84 % are kept for 1, and 3.8 % misaligned for 0.2.
  assert permutation.mean_kept_share(
      256, 0.1, num_shuffles=1, **local
  ) == pytest.approx(0.84, abs=0.03)
  assert permutation.mean_kept_share(
      256, 0.1, num_shuffles=0.2, **local
  ) == pytest.approx(0.962, abs=0.02)


@pytest.mark.parametrize(
    ('num_shuffles', 'num_steps'), [(0.3, 4), (2, 4), (4, 4), (3.5, 10)]
)
def test_mean_kept_share_of_several_permutations(num_shuffles, num_steps):
  # The mean of a product of independent matrices is the product of the means.
  share = num_shuffles / num_steps
  step = (1 - share) * np.eye(6) + share * _expected_matrix(6, 0.3)
  expected = np.mean(np.diag(np.linalg.matrix_power(step, num_steps)))
  found = permutation.mean_kept_share(
      6, 0.3, num_shuffles=num_shuffles, num_steps=num_steps, repeats=3000
  )
  assert found == pytest.approx(expected, abs=4.5 * 0.4 / 3000**0.5)


def test_mean_kept_share_never_and_always():
  share = permutation.mean_kept_share
  assert share(5, 1.0, num_shuffles=0, num_steps=3) == 1
  # Two swaps of the same two units, in each of two steps.
  assert share(2, 1.0, num_shuffles=2, num_steps=2) == 1
  assert share(2, 1.0, num_shuffles=3, num_steps=3) == 0
  assert share(50, 0.5, seed=1) == share(50, 0.5, seed=1)
  assert share(50, 0.5, seed=1) != share(50, 0.5, seed=2)


def test_position_encodings_change_no_permutation():
  model = random_models.build('small_cnn')
  shuffled = permutation.shuffle_units(model, 1.0, 5)
  off = tff_bn.add_position_encodings(model, 'multiply', 0)
  assert any(isinstance(layer, PositionEncoding) for layer in off.layers)
  for a, b in zip(
      permutation.shuffle_units(off, 1.0, 5).get_weights(),
      shuffled.get_weights(),
      strict=True,
  ):
    np.testing.assert_array_equal(a, b)


def _perceptron(seed=0):
  model = keras.Sequential(
      [
          keras.Input((3,)),
          _layers.Dense(4, 'relu', name='a'),
          _layers.Dense(3, 'relu', name='b'),
          _layers.Dense(2, name='c'),
      ]
  )
  rng = np.random.default_rng(seed)
  model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
  return model


def _perceptron_outputs(weights, x, encode=lambda h: h):
  """Computes the outputs in NumPy; `encode` is applied before the ReLU."""
  w1, b1, w2, b2, w3, b3 = (w.astype(np.float64) for w in weights)
  h = np.maximum(encode(x @ w1 + b1), 0)
  h = np.maximum(encode(h @ w2 + b2), 0)
  return h @ w3 + b3


def test_a_known_permutation():
  model = _perceptron()
  before = [w.copy() for w in model.get_weights()]
  w1, b1, w2, b2, w3, b3 = before
  permuted = permutation.permute_units(
      model, {'a': [2, 0, 3, 1], 'b': np.array([1, 2, 0])}
  )
  # Equation 1: position 0 of `a` gets unit 2, and so on. Rows of matrices in
  # the paper are columns in Keras.
  first = np.eye(4)[[2, 0, 3, 1]]
  second = np.eye(3)[[1, 2, 0]]
  expected = [
      (first @ w1.T).T,
      first @ b1,
      (second @ w2.T @ first.T).T,
      second @ b2,
      (w3.T @ second.T).T,
      b3,
  ]
  for found, known in zip(permuted.get_weights(), expected, strict=True):
    np.testing.assert_array_equal(found, known.astype(np.float32))
  assert permuted.get_weights()[1][0] == b1[2]
  # The model itself doesn't change. A group can be left out.
  only_b = permutation.permute_units(model, {'b': [1, 2, 0]}).get_weights()
  np.testing.assert_array_equal(only_b[0], w1)
  np.testing.assert_array_equal(only_b[2], w2[:, [1, 2, 0]])
  for found, known in zip(model.get_weights(), before, strict=True):
    np.testing.assert_array_equal(found, known)


def test_copies_keep_names_and_flags():
  model = random_models.build('small_cnn')
  model.get_layer('conv_2').trainable = False
  model.get_layer('norm_1').trainable = False
  copy = permutation.shuffle_units(model, 0.5, 0)
  assert copy.name == model.name
  assert [w.path for w in copy.trainable_weights] == [
      w.path for w in model.trainable_weights
  ]
  weights = model.get_weights()
  copy.set_weights([w + 1 for w in weights])
  for a, b in zip(model.get_weights(), weights, strict=True):
    np.testing.assert_array_equal(a, b)


def test_shuffles_depend_on_the_seed():
  model = _perceptron()
  shuffled = [
      permutation.shuffle_units(model, 0.5, seed).get_weights()
      for seed in (3, 3, *range(8))
  ]
  for a, b in zip(*shuffled[:2], strict=True):
    np.testing.assert_array_equal(a, b)
  assert len({weights[0].tobytes() for weights in shuffled}) > 3


def test_each_group_has_its_own_permutation():
  model = random_models.build('mlp4', 'none')
  shuffled = permutation.shuffle_units(model, 0.5, 0)
  found = []
  for name in ('hidden_1', 'hidden_2', 'hidden_3'):
    old, new = (m.get_layer(name).bias.numpy() for m in (model, shuffled))
    order = np.argsort(old)
    found.append(order[np.searchsorted(old, new, sorter=order)])
  for a, b in itertools.combinations(found, 2):
    # Both keep some units by chance.
    assert np.mean(a == b) < 0.5
  for p in found:
    assert permutation.kept_share(p) == pytest.approx(
        _expected_kept(1024, 0.5), abs=0.08
    )


def _encode(mode, amplitude):
  def encode(h):
    j = np.arange(h.shape[-1])
    sine = amplitude * np.sin(2 * np.pi * j / h.shape[-1])
    return h + sine if mode == 'add' else h * (1 + sine)

  return encode


@pytest.mark.parametrize('mode', ['add', 'multiply'])
def test_position_encodings_stay_where_they_are(mode):
  model = _perceptron()
  on = tff_bn.add_position_encodings(model, mode, 0.7)
  x = np.random.default_rng(1).normal(size=(6, 3))
  encode = _encode(mode, 0.7)
  p = [2, 0, 3, 1]
  permuted = permutation.permute_units(on, {'a': p})
  w1, b1, w2, b2, w3, b3 = on.get_weights()
  expected = _perceptron_outputs(
      [w1[:, p], b1[p], w2[p], b2, w3, b3], x, encode
  )
  np.testing.assert_allclose(
      permuted(x.astype(np.float32)), expected, rtol=1e-5, atol=1e-5
  )
  # Equation 8.
  shuffled = permutation.shuffle_units(on, 1.0, 4)
  before = _perceptron_outputs(on.get_weights(), x, encode)
  after = _perceptron_outputs(shuffled.get_weights(), x, encode)
  error = np.mean([np.sqrt(np.sum(d**2)) / 2 for d in after - before])
  assert error > 0.01
  found = permutation.shuffle_error(on, x.astype(np.float32), 1.0, 4)
  assert isinstance(found, float)
  assert found == pytest.approx(error, rel=1e-4)


def test_shuffle_error_needs_shuffles_and_positions():
  model = random_models.build('small_cnn')
  x = random_models.inputs(model, 3)
  on = tff_bn.add_position_encodings(model, 'multiply')
  errors = [permutation.shuffle_error(on, x, p, 0) for p in (0, 0.1, 0.5)]
  assert errors[0] == 0 < errors[1] < errors[2]
  scale = np.linalg.norm(model(x), axis=1).mean() / 10
  assert permutation.shuffle_error(model, x, 1.0, 1) < 1e-5 * scale
  assert permutation.shuffle_error(on, x, 1.0, 1) > 1e-2 * scale


def test_shuffle_error_uses_inference_mode():
  model = random_models.build('fbn_cnn')
  x = random_models.inputs(model, 3)
  weights = model.get_weights()
  # Training has random dropout and another normalization.
  off = permutation.shuffle_error(model, x, 1.0, 1)
  assert off < 1e-5 * np.abs(model(x)).max()
  for a, b in zip(model.get_weights(), weights, strict=True):
    np.testing.assert_array_equal(a, b)


def test_shuffle_error_of_outputs_of_any_shape():
  inputs = keras.Input((4, 4, 2))
  x = _layers.Conv2D(5, 3, activation='relu')(inputs)
  model = keras.Model(inputs, _layers.Conv2D(3, 1)(PositionEncoding('add')(x)))
  x = random_models.inputs(model, 3)
  shuffled = permutation.shuffle_units(model, 1.0, 2)
  difference = np.asarray(shuffled(x) - model(x), np.float64)
  expected = np.mean([np.sqrt(np.sum(d**2)) for d in difference]) / 12
  assert expected > 0
  assert permutation.shuffle_error(model, x, 1.0, 2) == pytest.approx(expected)


@pytest.mark.parametrize(
    ('name', 'shuffle_probability', 'faster'),
    # More layers increase the growth.
    [
        ('mlp4', 0.1, 1.1),
        pytest.param('vgg9', 0.1, 2, marks=pytest.mark.slow),
    ],
)
def test_shuffle_error_grows_with_the_amplitude(
    name, shuffle_probability, faster
):
  """Figures 3 and 14: linear growth for added encodings, else faster."""
  keras.utils.set_random_seed(3)
  model = models.build_model_fn(name, (4, 4, 3), 10, 'none')()
  x = random_models.inputs(model, 8)
  growth = {}
  for mode in ('add', 'multiply'):
    errors = [
        permutation.shuffle_error(
            tff_bn.add_position_encodings(model, mode, amplitude),
            x,
            shuffle_probability,
            0,
        )
        for amplitude in (0, 0.1, 0.9)
    ]
    assert errors == sorted(errors)
    assert errors[0] < 1e-5 < 1e-3 < errors[1]
    growth[mode] = errors[-1] / errors[1]
  # The amplitude grows by a factor of 9.
  assert 4 < growth['add'] < 10 < growth['multiply']
  assert growth['multiply'] > faster * growth['add']


@pytest.mark.parametrize(
    ('group', 'wrong', 'message'),
    [
        *(
            ('b', wrong, r"permutations\['b'\] must have each of .* 0 to 2")
            for wrong in (
                *([0, 1], [0, 1, 1], [1, 2, 3]),
                *([0.0, 1.0, 2.0], [[0, 1, 2]]),
            )
        ),
        ('c', [0, 1], "the group 'c'.* 'a', 'b'"),
    ],
)
def test_invalid_permutations(group, wrong, message):
  with pytest.raises(ValueError, match=message):
    permutation.permute_units(_perceptron(), {group: wrong})


def test_invalid_arguments():
  rng = np.random.default_rng(0)
  for probability in (-0.1, 1.1, np.nan):
    message = f'shuffle_probability={probability} must be'
    with pytest.raises(ValueError, match=message):
      permutation.random_permutation(3, probability, rng)
    with pytest.raises(ValueError, match=message):
      permutation.mean_kept_share(3, probability)
    with pytest.raises(ValueError, match=message):
      permutation.shuffle_units(_perceptron(), probability, 0)
  with pytest.raises(ValueError, match='num_units=0 must be'):
    permutation.random_permutation(0, 0.1, rng)
  for wrong in ([], [0, 0], [1, 2]):
    with pytest.raises(ValueError, match='permutation must have each'):
      permutation.kept_share(wrong)


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        (dict(repeats=0), 'repeats=0 must be'),
        (dict(num_shuffles=1), 'num_shuffles=1 and num_steps=None: give both'),
        (dict(num_steps=1), 'num_shuffles=None and num_steps=1: give both'),
        (dict(num_shuffles=0, num_steps=0), 'num_steps=0 must be'),
        (dict(num_shuffles=3, num_steps=2), 'num_shuffles=3 must be between'),
        (dict(num_shuffles=-1, num_steps=2), 'num_shuffles=-1 must be between'),
    ],
)
def test_invalid_numbers_of_shuffles(kwargs, message):
  with pytest.raises(ValueError, match=message):
    permutation.mean_kept_share(4, 0.1, **kwargs)
