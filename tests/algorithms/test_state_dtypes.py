"""Tests of non-trainable variables that are no float32, such as flags."""

import client_rounds
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import BatchNormModel
from tff_bn import algorithms
from tff_bn import training
from tff_bn.keras_model.partition import FEDAVG
from tff_bn.keras_model.shared_weights import SharedWeights

_SPEC = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 2)))
_LARGE = 2**60 + 1  # Not a float64.


class Counters(keras.layers.Layer):
  """Counts steps in several dtypes, and remembers that it was trained."""

  def __init__(self, dtypes, **kwargs):
    super().__init__(**kwargs)
    self.dtypes = dtypes

  def build(self, input_shape):
    del input_shape
    self.states = [
        self.add_weight(
            shape=(2,),
            dtype=dtype,
            initializer='zeros',
            # Keras's default, which has no effect on integers.
            trainable=number % 2 == 0 and 'float' not in dtype,
        )
        for number, dtype in enumerate(self.dtypes)
    ]

  def call(self, x, training=None):
    if training:
      for state in self.states:
        if state.dtype == 'bool':
          state.assign([True, False])
        elif state.dtype == 'complex64':
          state.assign(state)
        else:
          state.assign(state + keras.ops.cast([1, 3], state.dtype))
    return x


_INTEGERS = [f'{sign}int{bits}' for sign in ('', 'u') for bits in (8, 16, 32)]
_DTYPES = ['bool', *_INTEGERS, 'int64', 'uint64', 'float16', 'float64']


def _keras_model(dtypes):
  return keras.Sequential(
      [
          keras.Input((4,)),
          Counters(dtypes, name='counters'),
          keras.layers.Dense(2),
          keras.layers.BatchNormalization(),
      ]
  )


def _model(dtypes):
  return BatchNormModel(
      lambda: _keras_model(dtypes), _SPEC, keras.losses.MeanSquaredError
  )


def _dataset():
  rng = np.random.default_rng(0)
  return tf.data.Dataset.from_tensor_slices(
      (
          rng.normal(size=(8, 4)).astype(np.float32),
          rng.normal(size=(8, 2)).astype(np.float32),
      )
  ).batch(4)


@pytest.mark.usefixtures('in_process_runtime')
@pytest.mark.parametrize(
    'build',
    [
        algorithms.build_centralized,
        *(
            pytest.param(build, marks=pytest.mark.slow)
            for build in (
                algorithms.build_fedtan,
                algorithms.build_fed_avg,
                algorithms.build_single,
                algorithms.build_fbn,
                algorithms.build_scaffold,
                algorithms.build_dsgd,
            )
        ),
    ],
)
def test_one_client_equals_keras_fit(build):
  model = _model(_DTYPES)
  process = build(model, tff.learning.optimizers.build_sgdm(0.1))
  training = client_rounds.run(process, [_dataset()], 1)
  weights = process.get_model_weights(training.state)
  if training.clients:
    weights = process.get_client_model_weights(
        training.state, training.clients[0]
    )

  keras_model = _keras_model(_DTYPES)
  keras_model.compile('sgd', 'mse')
  num_batches = 1 if build is algorithms.build_dsgd else 2
  keras_model.fit(_dataset().take(num_batches), verbose=0)
  found = model.to_keras(weights).get_layer('counters').states
  for dtype, value, expected in zip(
      _DTYPES, found, keras_model.get_layer('counters').states, strict=True
  ):
    assert value.dtype == dtype
    np.testing.assert_array_equal(value.numpy(), expected.numpy(), dtype)
  assert found[0].numpy().tolist() == [True, False]


def test_weights_of_a_model_whose_flags_are_trainable():
  keras_model = _keras_model(['bool', 'int32'])
  flag, count = keras_model.get_layer('counters').states
  flag.assign([False, True])
  count.assign([5, 6])
  assert flag.trainable
  model = _model(['bool', 'int32'])

  weights = model.from_keras(keras_model)

  flag, count = model.to_keras(weights).get_layer('counters').states
  assert flag.numpy().tolist() == [False, True]
  assert count.numpy().tolist() == [5, 6]
  assert len(weights.trainable) == 4


class TestMeanOverClients:
  """The arithmetic of the server, eagerly."""

  def _mean(self, dtype, before, clients, shares):
    """The new value after the weighted mean of the clients' updates."""
    model = _model([dtype])
    weights = SharedWeights(model, FEDAVG)
    initial = model.from_model_weights(model.initial_weights)
    (position,) = [
        p for p, v in enumerate(model.variables) if v.layer == 'counters'
    ]

    def values(state):
      values = [tf.constant(value) for value in initial]
      values[position] = tf.constant(state, dtype)
      return values

    updates = [
        weights.update(values(before), values(client), [])['other_state']
        for client in clients
    ]
    mean = [
        tf.add_n([s * u for s, u in zip(shares, parts, strict=True)])
        for parts in zip(*updates, strict=True)
    ]
    shared = weights.shared(values(before))
    after = weights.apply(
        shared,
        shared.trainable,
        {
            'other_state': mean,
            'statistics': [(0.0, 0.0, 1.0)] * len(weights.statistics),
        },
    )
    value = weights.merge(after, {})[position]
    assert value.dtype == dtype
    return value.numpy().tolist()

  @pytest.mark.parametrize('dtype', [*_INTEGERS, 'int64', 'uint64'])
  def test_integers_are_rounded_means(self, dtype):
    # Up, and down; 0.25 · 8 + 0.75 · 5 = 5.75 and 0.25 · 5 + 0.75 · 0 = 1.25.
    assert self._mean(dtype, [2, 7], [[8, 5], [5, 0]], (0.25, 0.75)) == [6, 1]

  def test_large_integers_are_exact(self):
    for dtype in ('int64', 'uint64'):
      found = self._mean(
          dtype, [_LARGE, 1], [[_LARGE + 2, 1], [_LARGE + 4, 1]], (0.5, 0.5)
      )
      assert found == [_LARGE + 3, 1]

  def test_small_integers_stay_in_their_range(self):
    # An aggregator adds noise, or extrapolates.
    assert self._mean('uint8', [250, 5], [[255, 0]], (2.0,)) == [255, 0]
    assert self._mean('int8', [0, 0], [[100, -100]], (2.0,)) == [127, -128]

  def test_booleans_are_the_majority(self):
    T, F = True, False
    for before in ([T, T], [F, F]):
      clients = [[T, F], [F, T], [T, F]]
      assert self._mean('bool', before, clients, (0.3, 0.4, 0.3)) == [T, F]
      # Evenly divided.
      assert self._mean('bool', before, clients[:2], (0.5, 0.5)) == before
      # Too much noise in one direction or the other.
      for factor in (3.0, -3.0):
        found = self._mean('bool', before, [[T, F]], (factor,))
        assert found == ([T, F] if factor > 0 else before)


def test_variables_that_clients_cannot_send():
  with pytest.raises(
      ValueError,
      match="other_state_. of the layer 'counters' has the dtype complex64; .*"
      ' be one of bfloat16, bool, float16, ',
  ):
    _model(['complex64'])


class Mask(keras.layers.Layer):
  """Multiplies by a constant that is complex."""

  def build(self, input_shape):
    self.mask = self.add_weight(
        shape=input_shape[1:], dtype='complex64', trainable=False
    )

  def call(self, x):
    return x * keras.ops.real(self.mask)


def test_constants_may_have_any_dtype():
  model = BatchNormModel(
      lambda: keras.Sequential(
          [keras.Input((4,)), Mask(), keras.layers.Dense(2)]
      ),
      _SPEC,
      keras.losses.MeanSquaredError,
  )
  assert [model.variables[p].dtype for p in model.constants] == [tf.complex64]


def test_variables_that_files_cannot_hold(tmp_path):
  data = type('Data', (), dict(client_ids=['a']))()
  with pytest.raises(ValueError, match="'counters' has the dtype bfloat16"):
    training.train(
        None,
        _model(['bfloat16']),
        data,
        training.TrainingConfig(rounds=1, batch_size=4, local_steps=1),
        tmp_path / 'run',
    )
