"""What several tests need: the runtime, and small models and datasets."""

import contexts
import keras
import numpy as np
import pytest
import tensorflow as tf


def pytest_addoption(parser):
  parser.addoption(
      '--slow', action='store_true', help='run the tests marked as slow, too'
  )


def pytest_collection_modifyitems(config, items):
  if config.getoption('--slow'):
    return
  for item in items:
    if item.get_closest_marker('slow'):
      item.add_marker(pytest.mark.skip(reason='slow; run with --slow'))


@pytest.fixture(scope='session')
def native_context():
  """TFF's own runtime; its worker process ends with the test run."""
  import tensorflow_federated as tff

  from tff_bn import runtime

  before = tff.framework.get_context_stack().current
  with runtime.native_runtime() as context:
    # Other tests use another context.
    tff.framework.set_default_context(before)
    yield context


@pytest.fixture(scope='module')
def in_process_context():
  """The runtime of this process, with two clients at a time."""
  from tff_bn import runtime

  context = runtime.InProcessContext(max_concurrent_clients=2)
  yield context
  context.close()


@pytest.fixture
def native_runtime(native_context):
  """Lets a test's computations run in TFF's own runtime."""
  with contexts.default(native_context) as context:
    yield context


@pytest.fixture
def in_process_runtime(in_process_context):
  """Lets a test's computations run in this process."""
  with contexts.default(in_process_context) as context:
    yield context


class Toy:
  """A small classification problem: 4 features, 3 classes, any dtype."""

  def __init__(self, dtype: str = 'float64', shape: tuple[int, ...] = (4,)):
    self.dtype = dtype
    self.shape = shape

  @property
  def input_spec(self):
    return (
        tf.TensorSpec((None, *self.shape), self.dtype),
        tf.TensorSpec((None,), tf.int32),
    )

  def keras_model(self, momentum: float = 0.75) -> keras.Model:
    """Dense, batch normalization, ReLU, dense; a convolution for images."""
    layers, dtype = keras.layers, self.dtype
    inputs = keras.Input(self.shape, dtype=dtype)
    if len(self.shape) == 1:
      x = layers.Dense(5, dtype=dtype, name='hidden')(inputs)
    else:
      x = layers.Conv2D(5, 3, dtype=dtype, name='hidden')(inputs)
    x = layers.BatchNormalization(
        momentum=momentum, epsilon=2**-10, dtype=dtype, name='norm'
    )(x)
    x = layers.ReLU(dtype=dtype)(x)
    if len(self.shape) > 1:
      x = layers.GlobalAveragePooling2D(dtype=dtype)(x)
    outputs = layers.Dense(3, dtype=dtype, name='logits')(x)
    return keras.Model(inputs, outputs)

  def model(self, keras_model_fn=None, seed: int = 0):
    """The `BatchNormModel` of `keras_model`, or of another function."""
    from tff_bn.keras_model.batch_norm_model import BatchNormModel

    keras.utils.set_random_seed(seed)
    return BatchNormModel(
        keras_model_fn or self.keras_model,
        self.input_spec,
        loss_fn=self.loss,
        metrics_fn=lambda: [
            keras.metrics.SparseCategoricalAccuracy('accuracy')
        ],
    )

  def loss(self) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, dtype=self.dtype
    )

  def arrays(
      self, num_examples: int, seed: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Clients with different seeds have different means and deviations."""
    rng = np.random.default_rng(seed)
    x = rng.normal(seed % 3, 1 + seed % 2, (num_examples, *self.shape))
    y = rng.integers(0, 3, num_examples)
    return x.astype(self.dtype), y.astype(np.int32)

  def dataset(
      self, num_examples: int, seed: int, batch_size: int = 8
  ) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(
        self.arrays(num_examples, seed)
    ).batch(batch_size)


@pytest.fixture
def toy():
  """The problem in float64."""
  return Toy()


@pytest.fixture
def toy_images():
  """The problem on float32 images, where fused operations are used."""
  return Toy('float32', (5, 5, 2))
