"""Small forms of the models that users train, with losses, metrics and data."""

from collections.abc import Callable
import dataclasses
from typing import Any, Optional

import keras
import numpy as np
import tensorflow as tf

from tff_bn.keras_model.batch_norm_model import BatchNormModel

_LAYERS = keras.layers
_LOSSES = keras.losses
_METRICS = keras.metrics
Input = keras.Input
Model = keras.Model


@dataclasses.dataclass(frozen=True)
class UserModel:
  """A model with what `compile` and `fit` need.

  Attributes:
    build: Returns a new Keras model.
    data: Returns x and y for a generator of random numbers, the number of a
      client and the number of examples; each client's distribution differs.
    loss_fn: Returns the loss, or a dictionary with one for each output.
    metrics_fn: Returns metrics, likewise.
    loss_weights: The weights of the losses.
  """

  build: Callable[[], keras.Model]
  data: Callable[[np.random.Generator, int, int], Any]
  loss_fn: Callable[[], Any]
  metrics_fn: Callable[[], Any] = list
  loss_weights: Optional[dict[str, float]] = None

  def model(self) -> BatchNormModel:
    """Returns the federated model, in the present policy of Keras."""
    keras.utils.set_random_seed(1)
    more = {}
    if self.loss_weights is not None:
      more = {'loss_weights': self.loss_weights}
    return BatchNormModel(
        self.build,
        self.dataset(0, 4).element_spec,
        self.loss_fn,
        self.metrics_fn,
        **more,
    )

  def compiled(
      self, keras_model: keras.Model, optimizer: keras.optimizers.Optimizer
  ) -> keras.Model:
    """Compiles a Keras model with the same loss and metrics."""
    keras_model.compile(
        optimizer,
        self.loss_fn(),
        loss_weights=self.loss_weights,
        metrics=self.metrics_fn(),
    )
    return keras_model

  def arrays(self, client: int, size: int) -> Any:
    """Returns a client's x and y; floats have Keras's `floatx`."""
    rng = np.random.default_rng([client, size])
    dtype = keras.config.floatx()
    return tf.nest.map_structure(
        lambda values: values.astype(
            dtype if values.dtype.kind == 'f' else 'int32'
        ),
        self.data(rng, client, size),
    )

  def dataset(
      self, client: int, size: int, batch_size: int = 4
  ) -> tf.data.Dataset:
    """Returns the client's batches."""
    return tf.data.Dataset.from_tensor_slices(self.arrays(client, size)).batch(
        batch_size
    )


def _norm(x: keras.KerasTensor) -> keras.KerasTensor:
  return _LAYERS.ReLU()(_LAYERS.BatchNormalization(momentum=0.8)(x))


def _outputs(x, units, activation=None, name=None):
  # In mixed precision, the outputs are float32.
  dtype = keras.config.floatx()
  return _LAYERS.Dense(units, activation, dtype=dtype, name=name)(x)


def _features(rng, client, *shape):
  """Draws features whose mean and deviation depend on the client."""
  return rng.normal(client % 3 - 1, 0.5 + client % 2, shape)


def _classes(num_classes):
  def draw(rng, client, *shape):
    shares = np.roll([0.6, 0.3, 0.1][:num_classes], client)
    return rng.choice(num_classes, shape, p=shares / shares.sum())

  return draw


def _sparse_cross_entropy():
  return _LOSSES.SparseCategoricalCrossentropy(from_logits=True)


def _accuracy():
  return [_METRICS.SparseCategoricalAccuracy('accuracy')]


def _classification(build, shape):
  draw = _classes(3)
  return UserModel(
      build,
      lambda rng, client, size: (
          _features(rng, client, size, *shape),
          draw(rng, client, size),
      ),
      _sparse_cross_entropy,
      _accuracy,
  )


# Segmentation.


def _unet(channels, activation):
  inputs = Input((8, 8, 1))
  x = high = _norm(_LAYERS.Conv2D(3, 3, padding='same')(inputs))
  x = _LAYERS.MaxPooling2D()(x)
  x = _norm(_LAYERS.Conv2D(4, 3, padding='same')(x))
  x = _norm(_LAYERS.Conv2DTranspose(3, 2, strides=2)(x))
  x = _LAYERS.Concatenate()([x, high])
  x = _norm(_LAYERS.Conv2D(3, 3, padding='same')(x))
  x = _LAYERS.Conv2D(
      channels, 1, activation=activation, dtype=keras.config.floatx()
  )(x)
  return Model(inputs, x)


def _mask(rng, client, size):
  x = _features(rng, client, size, 8, 8, 1)
  return x, (x > 0.3).astype('float32')


def _label_map(rng, client, size):
  return _features(rng, client, size, 8, 8, 1), rng.integers(0, 3, (size, 8, 8))


# Pictures, volumes, series and text.


def _conv3d():
  inputs = Input((4, 4, 4, 1))
  x = _norm(_LAYERS.Conv3D(3, 2)(inputs))
  return Model(inputs, _outputs(_LAYERS.GlobalAveragePooling3D()(x), 3))


def _series():
  inputs = Input((6, 2))
  x = _LAYERS.LSTM(4, return_sequences=True)(inputs)
  x = _LAYERS.LSTM(3)(_LAYERS.BatchNormalization(momentum=0.8)(x))
  return Model(inputs, _outputs(_norm(x), 3))


def _text():
  inputs = Input((6,), dtype='int32')
  x = _LAYERS.Embedding(12, 4, mask_zero=True)(inputs)
  x = _norm(_LAYERS.TimeDistributed(_LAYERS.Dense(4))(x))
  x = _norm(_LAYERS.GlobalAveragePooling1D()(x))
  return Model(inputs, _outputs(x, 3))


def _tokens(rng, client, size):
  lengths = rng.integers(1, 7, size)
  tokens = rng.integers(1, 8 + client % 4, (size, 6))
  x = np.where(np.arange(6) < lengths[:, None], tokens, 0)
  return x, _classes(3)(rng, client, size)


def _image(units, activation=None):
  inputs = Input((6, 6, 1))
  x = _norm(_LAYERS.Conv2D(4, 3, use_bias=False)(inputs))
  x = _LAYERS.GlobalAveragePooling2D()(x)
  return Model(inputs, _outputs(x, units, activation))


def _findings(rng, client, size):
  x = _features(rng, client, size, 6, 6, 1)
  return x, (rng.uniform(size=(size, 3)) < 0.4).astype('int32')


def _one_hot(rng, client, size):
  y = np.eye(3, dtype='float32')[_classes(3)(rng, client, size)]
  return _features(rng, client, size, 6, 6, 1), y


def _mobile_net():
  base = keras.applications.MobileNetV2(
      (32, 32, 3), alpha=0.35, include_top=False, weights=None, pooling='avg'
  )
  for layer in base.layers:
    if isinstance(layer, _LAYERS.BatchNormalization):
      # Untrained, the features would be smaller than the numbers of float16.
      layer.gamma.assign(np.full(layer.gamma.shape, 3.0))
  base.trainable = False
  inputs = Input((32, 32, 3))
  x = _norm(_LAYERS.Dense(4)(base(inputs)))
  return Model(inputs, _outputs(x, 3))


# Vectors.


def _dense(units=1, activation=None):
  inputs = Input((5,))
  x = _norm(_LAYERS.Dense(6)(inputs))
  return Model(inputs, _outputs(x, units, activation))


def _binary(rng, client, size):
  x = _features(rng, client, size, 5)
  return x, _classes(2)(rng, client, size, 1)


def _number(rng, client, size):
  x = _features(rng, client, size, 5)
  return x, 2 * x[:, :1] - x[:, 1:2] + rng.normal(0, 0.1, (size, 1))


def _autoencoder():
  inputs = Input((6,))
  x = _norm(_LAYERS.Dense(3)(_norm(_LAYERS.Dense(5)(inputs))))
  return Model(inputs, _outputs(_norm(_LAYERS.Dense(5)(x)), 6))


def _itself(rng, client, size):
  x = _features(rng, client, size, 6)
  return x, x


# Several inputs or outputs.


def _two_inputs():
  image, age = Input((6, 6, 1), name='image'), Input((1,), name='age')
  x = _LAYERS.GlobalAveragePooling2D()(_norm(_LAYERS.Conv2D(3, 3)(image)))
  x = _LAYERS.Concatenate()([x, _LAYERS.BatchNormalization(momentum=0.8)(age)])
  return Model({'image': image, 'age': age}, _outputs(x, 3))


def _image_and_age(rng, client, size):
  x = {
      'image': _features(rng, client, size, 6, 6, 1),
      'age': _features(rng, client + 1, size, 1),
  }
  return x, _classes(3)(rng, client, size)


def _two_outputs():
  inputs = Input((5,))
  x = _norm(_LAYERS.Dense(6)(inputs))
  return Model(
      inputs,
      {
          'kind': _outputs(x, 3, name='kind'),
          'amount': _outputs(_norm(_LAYERS.Dense(4)(x)), 1, name='amount'),
      },
  )


def _kind_and_amount(rng, client, size):
  x, amount = _number(rng, client, size)
  return x, {'kind': _classes(3)(rng, client, size), 'amount': amount}


MODELS: dict[str, UserModel] = {
    # The loss is a mean over examples. By default, Dice is of a whole batch.
    'unet_dice': UserModel(
        lambda: _unet(1, 'sigmoid'),
        _mask,
        lambda: _LOSSES.Dice(axis=(1, 2, 3)),
        lambda: [_METRICS.BinaryIoU([1], name='iou')],
    ),
    'unet_cross_entropy': UserModel(
        lambda: _unet(3, None),
        _label_map,
        _sparse_cross_entropy,
        lambda: [_METRICS.MeanIoU(3, 'iou', sparse_y_pred=False), *_accuracy()],
    ),
    'conv3d': _classification(_conv3d, (4, 4, 4, 1)),
    'series': _classification(_series, (6, 2)),
    'text': UserModel(_text, _tokens, _sparse_cross_entropy, _accuracy),
    'multilabel': UserModel(
        lambda: _image(3),
        _findings,
        lambda: _LOSSES.BinaryCrossentropy(from_logits=True),
        lambda: [
            _METRICS.AUC(multi_label=True, from_logits=True, name='auc'),
            _METRICS.F1Score(threshold=0.5, name='f1'),
        ],
    ),
    'binary': UserModel(
        lambda: _dense(1, 'sigmoid'),
        _binary,
        _LOSSES.BinaryCrossentropy,
        lambda: [_METRICS.BinaryAccuracy('accuracy'), _METRICS.AUC(name='auc')],
    ),
    'one_hot': UserModel(
        lambda: _image(3, 'softmax'),
        _one_hot,
        _LOSSES.CategoricalCrossentropy,
        lambda: [_METRICS.CategoricalAccuracy('accuracy')],
    ),
    'focal': UserModel(
        lambda: _image(3, 'softmax'),
        _one_hot,
        lambda: _LOSSES.CategoricalFocalCrossentropy(gamma=2.0),
        lambda: [_METRICS.Precision(name='precision')],
    ),
    'autoencoder': UserModel(
        _autoencoder,
        _itself,
        _LOSSES.MeanSquaredError,
        lambda: [_METRICS.RootMeanSquaredError('rmse')],
    ),
    'two_inputs': UserModel(
        _two_inputs, _image_and_age, _sparse_cross_entropy, _accuracy
    ),
    'two_outputs': UserModel(
        _two_outputs,
        _kind_and_amount,
        lambda: {
            'kind': _sparse_cross_entropy(),
            'amount': _LOSSES.MeanSquaredError(),
        },
        lambda: {
            'kind': _accuracy(),
            'amount': [_METRICS.MeanAbsoluteError('mae')],
        },
        {'kind': 1.0, 'amount': 0.5},
    ),
    'frozen_mobile_net': _classification(_mobile_net, (32, 32, 3)),
    'huber': UserModel(
        _dense,
        _number,
        _LOSSES.Huber,
        lambda: [
            _METRICS.MeanAbsoluteError('mae'),
            _METRICS.R2Score(name='r2'),
        ],
    ),
}
