"""Tests that constraints of variables are applied as in Keras's fit."""

import collections
import functools

import client_rounds
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import BatchNormModel
from tff_bn import algorithms
from tff_bn.algorithms import dsgd

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SPEC = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 2)))
_RATE = 0.5
_constraints = keras.constraints


class Masked(keras.constraints.Constraint):
  """Keeps zeros, by a variable of its own."""

  def __init__(self):
    self.mask = keras.Variable([[1.0, 0.0]] * 3, trainable=False)

  def __call__(self, w):
    return w.value * self.mask


def _keras_model():
  keras.utils.set_random_seed(3)
  layers = keras.layers
  return keras.Sequential(
      [
          keras.Input((4,)),
          layers.Dense(
              3,
              kernel_constraint=_constraints.MaxNorm(0.1),
              bias_constraint=lambda w: keras.ops.clip(w, -0.01, 0.02),
              kernel_regularizer=keras.regularizers.L2(0.1),
          ),
          layers.BatchNormalization(
              momentum=0.75,
              gamma_constraint=_constraints.MinMaxNorm(0.2, 0.9, axis=0),
              beta_constraint=_constraints.NonNeg(),
          ),
          layers.ReLU(),
          # Its kernel has no constraint.
          layers.Dense(
              3, name='features', bias_constraint=_constraints.UnitNorm()
          ),
          layers.Dense(2, kernel_constraint=Masked()),
      ]
  )


def _model(keras_model_fn=_keras_model, spec=_SPEC):
  return BatchNormModel(keras_model_fn, spec, keras.losses.MeanSquaredError)


def _batches(seed, num_batches=2, size=8):
  rng = np.random.default_rng(seed)
  return [
      (
          rng.normal(seed, 1, (size, 4)).astype(np.float32),
          rng.normal(-seed, 2, (size, 2)).astype(np.float32),
      )
      for _ in range(num_batches)
  ]


def _dataset(batches, spec=_SPEC):
  return tf.data.Dataset.from_generator(lambda: batches, output_signature=spec)


@functools.cache
def _fitted(seed, num_batches=2):
  """Batches, and the variables after Keras's own training with them."""
  batches = _batches(seed, num_batches)
  return batches, _fit(_model(), batches)


def _fit(model, batches):
  keras_model = model.to_keras()
  keras_model.compile(keras.optimizers.SGD(_RATE), 'mse')
  keras_model.fit(_dataset(batches), verbose=0)
  return keras_model.get_weights()


def _assert_satisfied(values, atol=1e-6):
  kernel, bias, gamma, beta, *_ = values
  assert np.all(np.linalg.norm(kernel, axis=0) <= 0.1 + atol)
  assert np.all((bias >= -0.01 - atol) & (bias <= 0.02 + atol))
  assert np.linalg.norm(gamma) <= 0.9 + atol
  assert np.all(beta >= -atol)


_LOCAL = dict(client_optimizer=tff.learning.optimizers.build_sgdm(_RATE))
_BUILDERS = {
    'centralized': (algorithms.build_centralized, {}),
    'compiled': (algorithms.build_fed_avg, dict(jit_compile=True)),
    'fedtan': (algorithms.build_fedtan, dict(local_steps=2)),
    'scaffold': (algorithms.build_scaffold, {}),
    'fed_nova': (algorithms.build_fed_nova, {}),
    'moon': (
        algorithms.build_moon,
        dict(contrastive_weight=0.0, feature_layer='features'),
    ),
}


def _train(process, model, rounds):
  """Makes rounds of one client; returns the weights that it uses."""
  training = client_rounds.Training(process, 1)
  for data in rounds:
    training.next_round([data])
  if training.clients:
    return training.client_weights(model)[0]
  return training.weights(model)


@pytest.mark.parametrize(
    'name',
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name in ('moon', 'scaffold', 'compiled', 'fedtan')
        else name
        for name in _BUILDERS
    ],
)
def test_one_client_equals_keras_fit(name):
  model = _model()
  build, options = _BUILDERS[name]
  batches, expected = _fitted(1)

  found = _train(build(model, **_LOCAL, **options), model, [_dataset(batches)])

  _assert_satisfied(expected)
  client_rounds.assert_close(found, expected, 1e-5, 1e-6)


@pytest.mark.parametrize(
    ('build', 'options'),
    [
        (algorithms.build_dsgd, {}),
        pytest.param(
            algorithms.build_dsgd, dict(momentum=0.0), marks=pytest.mark.slow
        ),
        (algorithms.build_fedtan, dict(local_steps=1, moments='fused')),
    ],
)
def test_one_step_in_a_round(build, options):
  model = _model()
  batches, expected = _fitted(2, num_batches=3)

  found = _train(
      build(model, **_LOCAL, **options),
      model,
      [_dataset([batch]) for batch in batches],
  )

  client_rounds.assert_close(found, expected, 1e-5, 1e-6)


def test_dsgd_with_named_weights():
  """As with personal position encodings, whose phases are local."""
  model = _model()
  optimizer = dsgd._ConstrainedOptimizer(
      _LOCAL['client_optimizer'], model.constraints
  )
  values = [np.full(v.shape, 0.3, np.float32) for v in model.variables]
  weights = model.to_model_weights(values).trainable
  # In the order of the variables, unlike the alphabet's.
  names = [f'weight_{number}' for number in reversed(range(len(weights)))]

  @tf.function
  def step(weights, named):
    state = optimizer.initialize([tf.TensorSpec(w.shape) for w in weights])
    return [
        optimizer.next(state, w, tf.nest.map_structure(tf.zeros_like, w))[1]
        for w in (weights, named)
    ]

  found, named = step(weights, collections.OrderedDict(zip(names, weights)))

  _assert_satisfied([w.numpy() for w in found])
  for name, value in zip(names, found, strict=True):
    np.testing.assert_array_equal(named[name], value)
  with pytest.raises(ValueError, match='8 trainable variables, but 3 values'):
    model.constraints.apply([1.0, 2.0, 3.0])


def test_dsgd_constrains_the_step_with_the_mean_gradient():
  """Clients of equal size are one batch, for a model without normalization."""

  def keras_model_fn():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(2, kernel_constraint=_constraints.MaxNorm(0.1)),
        ]
    )

  model = _model(keras_model_fn)
  clients = [_batches(seed, 1) for seed in (1, 2)]
  process = algorithms.build_dsgd(model, **_LOCAL)

  training = client_rounds.run(
      process, [_dataset(batches) for batches in clients], 1
  )

  union = [
      tuple(np.concatenate(parts) for parts in zip(*(c[0] for c in clients)))
  ]
  client_rounds.assert_close(
      training.weights(model), _fit(model, union), 1e-5, 1e-6
  )


class TestMean:
  """What the mean of the clients' models keeps."""

  _SPEC = (tf.TensorSpec((None, 3), 'float64'),) * 2
  _BOUND = 0.5

  def _model(self, constraint):
    def keras_model_fn():
      return keras.Sequential(
          [
              keras.Input((3,), dtype='float64'),
              keras.layers.Dense(
                  3,
                  use_bias=False,
                  kernel_initializer=keras.initializers.Constant(0.2),
                  kernel_constraint=constraint,
                  dtype='float64',
              ),
          ]
      )

    return BatchNormModel(
        keras_model_fn,
        self._SPEC,
        lambda: keras.losses.MeanSquaredError(dtype='float64'),
    )

  def _round(self, constraint, clients):
    model = self._model(constraint)
    process = algorithms.build_fed_avg(model, **_LOCAL)
    data = [_dataset(batches, self._SPEC) for batches in clients]
    (kernel,) = client_rounds.run(process, data, 1).weights(model)
    return kernel

  def _clients(self):
    rng = np.random.default_rng(0)
    return [
        [(rng.normal(size=(size, 3)), rng.normal(size=(size, 3))) for _ in '12']
        for size in (4, 6)
    ]

  def test_max_norm_in_closed_form(self):
    clients = self._clients()
    found = self._round(_constraints.MaxNorm(self._BOUND), clients)

    ends = []
    for batches in clients:
      w = np.full((3, 3), 0.2)
      for x, y in batches:
        w = w - _RATE * 2 * x.T @ (x @ w - y) / y.size
        norms = np.linalg.norm(w, axis=0)
        w = w * np.minimum(norms, self._BOUND) / norms
      ends.append(w)
    np.testing.assert_allclose(
        found, 0.4 * ends[0] + 0.6 * ends[1], rtol=1e-6, atol=1e-7
    )
    assert np.all(np.linalg.norm(found, axis=0) <= self._BOUND)


@pytest.mark.slow
def test_fbn_does_not_take_constrained_changes_for_gradients():
  """With and without sending the gradients, the averages are equal."""
  model = _model()
  batches = _batches(1, num_batches=3)
  ends = []
  # With a tiny momentum, clients always send the gradients.
  for momentum in (None, 1e-30):
    process = algorithms.build_fbn(
        model,
        tff.learning.optimizers.build_sgdm(_RATE, momentum),
        backward='running',
        local_steps=1,
    )
    ends.append(
        _train(process, model, [_dataset([batch]) for batch in batches])
    )
  _assert_satisfied(ends[0])
  client_rounds.assert_close(*ends, 1e-5, 1e-6)


def test_layers_that_do_not_train_are_not_constrained():
  """As in Keras, whose optimizers leave out frozen variables."""

  def frozen_head():
    keras_model = _keras_model()
    keras_model.layers[-1].trainable = False
    return keras_model

  rounds = [_dataset(_batches(1))]
  model, frozen = _model(), _model(frozen_head)
  found = _train(algorithms.build_fed_babu(model, **_LOCAL), model, rounds)

  expected = _train(algorithms.build_fed_avg(frozen, **_LOCAL), frozen, rounds)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
