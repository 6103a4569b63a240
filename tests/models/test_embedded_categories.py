"""Models that learn a vector for each category of a table."""

import client_rounds
import keras
import numpy as np
import pytest
import small_models
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn import models
from tff_bn.models import perceptrons

# Of five features, the second is one of 7 categories and the fourth one of 3.
_COUNTS = {1: 7, 3: 3}
_NUMBERS = [0, 2, 4]
_SIZES = {1: 4, 3: 2}


def _samples(seed, number=8):
  """Returns samples, of which the last has unknown categories."""
  rng = np.random.default_rng(seed)
  x = rng.normal(seed, size=(number, 5)).astype(np.float32)
  for position, count in _COUNTS.items():
    x[:, position] = rng.integers(count, size=number)
    x[-1, position] = count
  return x, rng.integers(0, 3, number).astype(np.int32)


def _one_hot(x):
  parts = [x[:, _NUMBERS]]
  for position, count in _COUNTS.items():
    parts.append(x[:, [position]] == np.arange(count))
  return np.concatenate(parts, axis=1).astype(np.float32)


def _build_fn(**changes):
  return models.build_model_fn(
      'tabular', (5,), 3, **{'category_counts': _COUNTS, **changes}
  )


@pytest.fixture(name='model')
def fixture_model():
  keras.utils.set_random_seed(0)
  return _build_fn()()


@pytest.mark.parametrize(
    ('count', 'size'), [(1, 1), (2, 1), (3, 2), (99, 50), (1000, 50)]
)
def test_embedding_size(count, size):
  assert perceptrons.embedding_size(count) == size


def test_is_a_model_of_one_hot_features(model):
  """Its vectors times the first kernel are the kernel of one-hot features."""
  expected = models.build_model_fn('tabular', (13,), 3)()
  kernel = model.get_layer('hidden_1').kernel.numpy()
  parts = np.split(kernel, np.cumsum([3, *_SIZES.values()])[:-1])
  tables = [
      model.get_layer(f'embedding_{position}').embeddings.numpy()
      for position in _COUNTS
  ]
  assert [table.shape for table in tables] == [(7, 4), (3, 2)]
  expected.set_weights(
      [np.concatenate([parts[0], *map(np.matmul, tables, parts[1:])])]
      + model.get_weights()[3:]
  )
  x, y = _samples(0, 32)
  np.testing.assert_allclose(
      model(x), expected(_one_hot(x)), rtol=1e-4, atol=1e-5
  )

  def gradients(model, x, variables):
    with tf.GradientTape() as tape:
      loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(
          y, model(x, training=True)
      )
    return map(tf.convert_to_tensor, tape.gradient(loss, variables))

  (of_kernel,) = gradients(
      expected, _one_hot(x), [expected.get_layer('hidden_1').kernel.value]
  )
  found = gradients(
      model,
      x,
      [model.get_layer(f'embedding_{n}').embeddings.value for n in _COUNTS],
  )
  rows = np.split(of_kernel, np.cumsum([3, *_COUNTS.values()])[:-1])
  for gradient, part, row in zip(found, parts[1:], rows[1:], strict=True):
    # The chain rule.
    np.testing.assert_allclose(gradient, row @ part.T, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    'name',
    [
        'fed_avg',
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ('fedtan', 'fed_bn')
        ),
    ],
)
@pytest.mark.usefixtures('in_process_runtime')
def test_training(name):
  """FedTAN is a step on the union; with one client, the others are Keras's."""
  keras.utils.set_random_seed(0)
  model = small_models.classifier(_build_fn(), (5,))
  x, y = zip(*map(_samples, range(2 if name == 'fedtan' else 1)))
  data = [
      tf.data.Dataset.from_tensor_slices(pair).batch(8) for pair in zip(x, y)
  ]
  process = getattr(algorithms, f'build_{name}')(
      model, tff.learning.optimizers.build_sgdm(0.1)
  )
  training = client_rounds.Training(process, len(data))
  training.next_round(data)
  expected = model.to_keras()
  before = expected.get_layer('embedding_1').embeddings.numpy()
  expected.compile(keras.optimizers.SGD(0.1), model.loss_fn())
  expected.train_on_batch(np.concatenate(x), np.concatenate(y))
  found = training.weights(model)
  if training.clients:
    (found,) = training.client_weights(model)
  client_rounds.assert_close(found, expected.get_weights(), 1e-3, 1e-5)
  after = expected.get_layer('embedding_1').embeddings.numpy()
  assert np.any(after != before)


def test_only_categories():
  model = models.build_model_fn('tabular', (1,), 2, category_counts={0: 4})()
  assert model.get_layer('hidden_1').kernel.shape == (2, 64)


def test_mixed_precision_keeps_large_numbers():
  model = models.build_model_fn(
      'tabular',
      (2,),
      2,
      precision='mixed_bfloat16',
      category_counts={0: 1000},
  )()
  embedding = model.get_layer('embedding_0')
  found = keras.Model(model.input, embedding.output)(
      np.float32([[998, 0.5], [999, 0.5]])
  )
  expected = tf.cast(embedding.embeddings[998:], tf.bfloat16)
  np.testing.assert_array_equal(found, expected)


def test_a_file_needs_only_keras(model, tmp_path):
  model.save(tmp_path / 'model.keras')
  loaded = keras.saving.load_model(tmp_path / 'model.keras')
  x, _ = _samples(0)
  np.testing.assert_array_equal(loaded(x), model(x))
  assert all(
      type(layer).__module__.startswith('keras.') for layer in loaded.layers
  )


@pytest.mark.parametrize('name', ['mlp3', 'small_cnn'])
def test_other_models_embed_nothing(name):
  with pytest.raises(
      ValueError,
      match=f'categories=embedded is impossible with model={name}.*; use'
      ' model=tabular, or categories=one_hot',
  ):
    models.build_model_fn(name, (5,), 3, category_counts=_COUNTS)
