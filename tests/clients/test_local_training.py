"""Tests of the training loop, in 16 bits and compiled by XLA."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import toy_problem

from tff_bn import algorithms
from tff_bn.clients import local_training
from tff_bn.clients import local_training_config
from tff_bn.keras_model.batch_norm_model import BatchNormModel


def _optimizer(learning_rate=1.0, momentum=None):
  return tff.learning.optimizers.build_sgdm(learning_rate, momentum)


def _training(model, optimizer=None, **options):
  return local_training.LocalTraining(
      model,
      local_training_config.LocalTrainingConfig(
          optimizer or _optimizer(), **options
      ),
  )


def _train(model, training, batches, values=None):
  """Trains on batches of `(x, y)`, which may have different sizes."""
  if values is None:
    values = model.from_model_weights(model.initial_weights)

  @tf.function
  def train():
    dataset = tf.data.Dataset.from_generator(
        lambda: batches, output_signature=model.input_spec
    )
    return training.train(
        [tf.constant(value) for value in values],
        dataset,
        training.initial_optimizer_state(),
        tf.constant(0),
    )._asdict()

  return tf.nest.map_structure(lambda tensor: tensor.numpy(), train())


class Product(keras.losses.Loss):
  """Returns the mean of label · output, whose gradient is the label."""

  def call(self, y_true, y_pred):
    return tf.reduce_mean(y_true * y_pred, axis=-1)


_SCALAR_SPEC = (
    tf.TensorSpec([None, 1], tf.float32),
    tf.TensorSpec([None, 1], tf.float32),
)


def _slope_model(policy):
  """The model w · x with w = 1; its loss is the mean of label · output."""

  def keras_model_fn():
    return keras.Sequential(
        [
            keras.layers.Input([1]),
            keras.layers.Dense(
                1, use_bias=False, kernel_initializer='ones', dtype=policy
            ),
        ]
    )

  return BatchNormModel(keras_model_fn, _SCALAR_SPEC, Product)


def _column(*values):
  return np.array(values, np.float32)[:, np.newaxis]


def test_weight_on_which_the_loss_does_not_depend_stays():
  def keras_model_fn():
    inputs = keras.Input([1])
    used, unused = [
        keras.layers.Dense(
            1, use_bias=False, kernel_initializer='ones', name=name
        )(inputs)
        for name in ('used', 'unused')
    ]
    outputs = used + keras.ops.stop_gradient(unused)
    return keras.Model(inputs, outputs)

  model = BatchNormModel(keras_model_fn, _SCALAR_SPEC, Product)
  batch = _column(1.0), _column(0.25)

  result = _train(model, _training(model), [batch])

  values = {
      variable.path: value
      for variable, value in zip(model.keras_model.weights, result['values'])
  }
  np.testing.assert_allclose(values['used/kernel'], [[1 - 0.25]])
  np.testing.assert_array_equal(values['unused/kernel'], [[1]])


class _AddOutputs(keras.layers.Layer):

  def call(self, inputs):
    self.add_loss(inputs)
    return inputs


def test_losses_of_layers_are_summed():
  def keras_model_fn():
    return keras.Sequential(
        [
            keras.layers.Input([1]),
            keras.layers.Dense(1, use_bias=False, kernel_initializer='ones'),
            _AddOutputs(),
        ]
    )

  model = BatchNormModel(keras_model_fn, _SCALAR_SPEC, Product)
  batch = _column(1.0, 2.0), _column(0.0, 0.0)
  result = _train(model, _training(model), [batch])
  np.testing.assert_allclose(result['values'][0], [[1 - 3]])
  np.testing.assert_allclose(result['loss_sum'], 2 * 3)


class TestFloat16:

  def test_gradients_too_small_for_float16_are_right(self):
    x = _column(0.01, 0.02, 0.03, 0.02)
    labels = np.full_like(x, 1e-6)
    # The gradient, 2e-8, is zero in float16.
    assert np.float16(2e-8) == 0

    model = _slope_model('mixed_float16')
    result = _train(model, _training(model, _optimizer(1e7)), [(x, labels)])

    (weight,) = result['values']
    assert weight.dtype == np.float32
    np.testing.assert_allclose(weight, [[1 - 1e7 * 2e-8]], rtol=1e-3)

  def test_scale_is_halved_until_gradients_fit(self):
    model = _slope_model('mixed_float16')
    training = _training(model)
    # 2^15 times the gradient must be less than 65,520. The scale starts afresh
    # with each call. Each client can have a single batch in a round.
    for gradient, num_batches in ((30.0, 1), (3e4, 1), (3.0, 6), (1.5, 6)):
      batch = _column(1.0), _column(gradient)
      batches = [batch] * num_batches
      result = _train(model, training, batches, values=[[[5.0]]])

      assert result['num_examples'] == num_batches
      np.testing.assert_allclose(
          result['values'][0], [[5 - num_batches * gradient]], rtol=1e-3
      )

  def test_batch_without_finite_gradients_keeps_the_scale(self):
    model = _slope_model('mixed_float16')
    batches = [(_column(1.0), _column(label)) for label in (1e30, 1e-7)]
    # With the scale 1, the second gradient is a multiple of 6e-8.
    result = _train(model, _training(model, _optimizer(1e6)), batches)
    assert result['num_examples'] == 1
    np.testing.assert_allclose(result['values'][0], [[1 - 0.1]], rtol=1e-4)

  @pytest.mark.parametrize(
      'jit_compile', [False, pytest.param(True, marks=pytest.mark.slow)]
  )
  def test_skipped_batch_leaves_nothing_behind(self, jit_compile):
    layers = keras.layers

    def keras_model_fn():
      keras.utils.set_random_seed(1)
      return keras.Sequential(
          [
              layers.Input([2]),
              layers.Dense(3, dtype='mixed_float16'),
              layers.BatchNormalization(momentum=0.5, dtype='mixed_float16'),
              layers.ReLU(dtype='mixed_float16'),
              layers.Dense(1, dtype='mixed_float16'),
          ]
      )

    model = BatchNormModel(
        keras_model_fn,
        (tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1])),
        Product,
        lambda: [keras.metrics.MeanAbsoluteError('error')],
    )
    rng = np.random.default_rng(0)
    batches = [
        (
            rng.normal(size=[8, 2]).astype(np.float32),
            rng.normal(size=[8, 1]).astype(np.float32),
        )
        for _ in range(4)
    ]
    training = _training(
        model,
        _optimizer(0.1, 0.9),
        client_weight_decay=0.01,
        jit_compile=jit_compile,
    )
    expected = _train(model, training, batches)
    assert expected['num_examples'] == 32
    initial = model.from_model_weights(model.initial_weights)
    assert all((a != b).any() for a, b in zip(expected['values'], initial))

    x, y = batches[1]
    for bad in (
        (x + 1, np.float32(1e30) * y),  # Gradients overflow.
        (1e6 * (x + 1), y),  # Outputs overflow.
        (x + 1, np.float32(np.inf) * y),  # The loss overflows.
    ):
      result = _train(model, training, [*batches[:2], bad, *batches[2:]])

      tf.nest.map_structure(
          lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
          result,
          expected,
      )

  @pytest.mark.usefixtures('in_process_runtime')
  def test_client_with_skipped_steps_is_not_dropped(self):
    model = _slope_model('mixed_float16')
    process = algorithms.build_fed_avg(model, _optimizer())
    one = tf.data.Dataset.from_tensor_slices(
        (_column(1, 1, 1), _column(1, 1e30, 1))
    ).batch(1)
    none = one.map(lambda x, y: (1e6 * x, y))

    output = process.next(process.initialize(), [one, none])

    metrics = output.metrics['client_work']
    assert metrics['num_clients'] == 2
    assert metrics['num_dropped_clients'] == 0
    assert metrics['train']['num_examples'] == 2
    # A client without any remaining step has no weight in the mean.
    weights = process.get_model_weights(output.state)
    np.testing.assert_allclose(weights.trainable[0], [[1 - 2]], rtol=1e-3)

  def test_gradient_is_clipped_without_the_scale(self):
    model = _slope_model('mixed_float16')
    training = _training(model, client_gradient_clip_norm=1.0)
    for gradient in (0.5, 1.5, -9.0):
      batch = _column(1.0), _column(gradient)
      result = _train(model, training, [batch] * 6)

      assert result['num_examples'] == 6
      step = np.clip(gradient, -1, 1)
      np.testing.assert_allclose(
          result['values'][0], [[1 - 6 * step]], rtol=1e-6
      )

  def test_skipped_steps_do_not_count_in_the_warmup(self):
    model = _slope_model('mixed_float16')
    batches = [(_column(1.0), _column(y)) for y in (1e30, 3, 3, 3, 3, 3)]
    result = _train(model, _training(model, client_warmup_steps=4), batches)

    assert result['num_examples'] == 5
    np.testing.assert_allclose(
        result['values'][0], [[1 - 3 * (0.25 + 0.5 + 0.75 + 1 + 1)]], rtol=1e-6
    )


class TestMixedPrecision:

  @pytest.mark.parametrize('policy', ['mixed_bfloat16', 'mixed_float16'])
  def test_loss_of_16_bit_logits(self, policy):
    def keras_model_fn():
      keras.utils.set_random_seed(2)
      return keras.Sequential(
          [
              keras.layers.Input([4]),
              keras.layers.Dense(3, use_bias=False, dtype=policy),
          ]
      )

    model = BatchNormModel(
        keras_model_fn,
        (tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int32)),
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=[50, 4]).astype(np.float32)
    y = rng.integers(0, 3, 50).astype(np.int32)

    result = _train(model, _training(model), [(x, y)])

    logits = model.to_keras()(x)
    assert logits.dtype.name == policy.removeprefix('mixed_')
    logits = logits.numpy().astype(np.float64)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(50), y]
    assert result['loss_sum'] == pytest.approx(losses.sum(), rel=1e-6)

  def test_bfloat16_needs_no_scale(self):
    model = _slope_model('mixed_bfloat16')
    # Float16 has no such gradient.
    batch = _column(1.0), _column(1e30)
    result = _train(model, _training(model), [batch])
    assert result['num_examples'] == 1
    np.testing.assert_allclose(result['values'][0], [[-1e30]], rtol=1e-2)

  @pytest.mark.slow
  def test_training_is_near_training_in_float32(self, toy_images):
    layers = keras.layers

    def train(name):
      def keras_model_fn():
        return keras.Sequential(
            [
                layers.Input(toy_images.shape),
                layers.Conv2D(5, 3, dtype=name),
                layers.BatchNormalization(momentum=0.5, dtype=name),
                layers.ReLU(dtype=name),
                layers.Flatten(dtype=name),
                layers.Dense(3, dtype=name),
            ]
        )

      model = toy_images.model(keras_model_fn)
      return _train(model, _training(model, _optimizer(0.05)), batches)

    batches = list(toy_images.dataset(21, 0).repeat(4).as_numpy_iterator())
    exact, result = train('float32'), train('mixed_float16')

    assert result['num_examples'] == 4 * 21
    np.testing.assert_allclose(result['loss_sum'], exact['loss_sum'], rtol=0.02)
    for value, exact_value in zip(
        result['values'], exact['values'], strict=True
    ):
      assert value.dtype == np.float32
      np.testing.assert_allclose(value, exact_value, atol=0.03)


class TestJitCompile:

  def test_result_is_the_same_as_without_xla(self, toy_images):
    model = toy_images.model()
    batches = list(toy_images.dataset(21, 0).repeat(2).as_numpy_iterator())
    plain, compiled = (
        _train(
            model,
            _training(
                model,
                _optimizer(0.1, 0.9),
                client_weight_decay=0.01,
                jit_compile=jit_compile,
            ),
            batches,
        )
        for jit_compile in (False, True)
    )
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        compiled,
        plain,
    )

  @pytest.mark.usefixtures('in_process_runtime')
  @pytest.mark.parametrize(
      ('name', 'options', 'is_unbiased'),
      [
          ('build_fed_avg', {}, False),
          ('build_fbn', dict(backward='running'), True),
          *(
              pytest.param(*case, marks=pytest.mark.slow)
              for case in (
                  ('build_fedtan', dict(moments='fused'), False),
                  ('build_hbn', dict(statistics_rate=1.0), True),
              )
          ),
      ],
  )
  def test_variances_of_pictures_keep_their_digits(
      self, name, options, is_unbiased
  ):
    """XLA would compute E[x²] - E[x]² from TensorFlow's fused operations."""
    images = toy_problem.Toy('float32', (8, 8, 3))

    def keras_model_fn():
      return keras.Sequential(
          [
              keras.Input(images.shape),
              keras.layers.BatchNormalization(momentum=0.0),
              keras.layers.GlobalAveragePooling2D(),
              keras.layers.Dense(3),
          ]
      )

    process = getattr(algorithms, name)(
        images.model_for(name, keras_model_fn),
        _optimizer(1e-3),
        local_steps=1,
        jit_compile=True,
        **options,
    )
    initial = process.initialize()
    _, y = images.arrays(32, 0)
    for mean, deviation in ((300, 1), (3000, 10), (1e4, 0.1)):
      x = np.random.default_rng(0).normal(mean, deviation, (32, *images.shape))
      x = x.astype('float32')
      arguments = [[tf.data.Dataset.from_tensors((x, y))]]
      if hasattr(process, 'initialize_client'):
        arguments.insert(0, [process.initialize_client(initial)])
      state = process.next(initial, *arguments).state
      *_, found_mean, found_variance = process.get_model_weights(
          state
      ).non_trainable
      values = x.astype('float64').reshape([-1, 3])
      np.testing.assert_allclose(found_mean, values.mean(0), rtol=1e-6)
      np.testing.assert_allclose(
          found_variance, values.var(0, ddof=int(is_unbiased)), rtol=1e-5
      )

  @pytest.mark.usefixtures('in_process_runtime')
  @pytest.mark.parametrize(
      'build', [algorithms.build_fed_avg, algorithms.build_centralized]
  )
  def test_xla_is_used_if_asked_for(self, build, toy):

    class Text(keras.layers.Layer):
      """Uses an operation that XLA lacks."""

      def call(self, inputs):
        zero = tf.strings.to_number(tf.strings.as_string(0.0 * inputs))
        return inputs + tf.cast(zero, inputs.dtype)

    def keras_model_fn():
      inputs = keras.Input([4], dtype='float64')
      x = Text(dtype='float64')(inputs)
      x = keras.layers.BatchNormalization(dtype='float64')(x)
      x = keras.layers.Dense(3, dtype='float64')(x)
      return keras.Model(inputs, x)

    process = build(toy.model(keras_model_fn), _optimizer(), jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match='XLA'):
      process.next(process.initialize(), [toy.dataset(8, 0)])

  @pytest.mark.slow
  def test_dropout_repeats(self, toy):
    def keras_model_fn():
      inputs = keras.Input([4], dtype='float64')
      x = keras.layers.Dropout(0.5, dtype='float64')(inputs)
      x = keras.layers.Dense(3, dtype='float64')(x)
      return keras.Model(inputs, x)

    model = toy.model(keras_model_fn)
    batches = [toy.arrays(8, 0), toy.arrays(5, 1)]

    one, two = (
        _training(model, seed=seed, jit_compile=True) for seed in (1, 2)
    )
    first, again, other = (
        _train(model, training, batches)['values'][0]
        for training in (one, one, two)
    )
    np.testing.assert_array_equal(again, first)
    assert (other != first).any()
