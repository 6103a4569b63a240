"""The models against the papers, and the perceptron for tables."""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn import layers
from tff_bn import models
from tff_bn.catalog import models as catalog
from tff_bn.keras_model import keras_graph

SHAPES = {
    'small_cnn': (8, 8, 1),
    'mlp3': (28, 28, 1),
    'digits_cnn': (28, 28, 3),
    'fbn_cnn': (32, 32, 3),
    'resnet20': (32, 32, 3),
    'mlp4': (28, 28, 1),
    'vgg9': (32, 32, 3),
    'vgg11': (32, 32, 3),
    'vgg13': (32, 32, 3),
    'resnet20_wide': (32, 32, 3),
    'fedbn_two_layer': (10,),
    'alexnet_bn': (256, 256, 3),
    'abide_mlp': (5995,),
    'tabular': (30,),
}
_CNNS = ('small_cnn', 'fbn_cnn')
# A model of each kind: the others are made by the same functions.
_DIFFERENT = ('small_cnn', 'mlp3', 'fbn_cnn', 'resnet20', 'vgg9')
_some_models = pytest.mark.parametrize('name', ['small_cnn', 'resnet20'])


def build(name, normalization='batch', input_shape=None, num_classes=10):
  return _build(name, normalization, input_shape or SHAPES[name], num_classes)


@functools.cache
def _build(name, normalization, input_shape, num_classes):
  # `build_model_fn` would build it twice.
  return catalog.MODELS[name].load()(input_shape, num_classes, normalization)


def num_layers(model):
  """Counts the layers by class name."""
  return collections.Counter(type(layer).__name__ for layer in model.layers)


class TestEveryModel:

  @pytest.mark.parametrize(
      ('name', 'normalization', 'kind'),
      [
          *((n, 'batch', 'BatchNormalization') for n in SHAPES),
          *((n, 'none', None) for n in _DIFFERENT),
          *((n, 'layer', 'LayerNormalization') for n in _CNNS),
          *((n, 'group2', 'GroupNormalization') for n in _CNNS),
      ],
  )
  def test_has_the_normalization_after_each_layer_but_the_last(
      self, name, normalization, kind
  ):
    model = build(name, normalization)
    found = num_layers(model)
    expected = {
        'small_cnn': 3,
        'mlp3': 1,
        'digits_cnn': 5,
        'fbn_cnn': 4,
        'resnet20': 19,
        'mlp4': 3,
        'vgg9': 8,
        'vgg11': 8,
        'vgg13': 10,
        'resnet20_wide': 19,
        'fedbn_two_layer': 1,
        'alexnet_bn': 7,
        'abide_mlp': 2,
        'tabular': 2,
    }
    # Its dense layer has no normalization; layers before a ReLU have biases.
    not_normalized = 1 if name == 'fbn_cnn' else 0
    for other in (
        'BatchNormalization',
        'LayerNormalization',
        'GroupNormalization',
    ):
      assert found[other] == (expected[name] if other == kind else 0)
    weighted = expected[name] + not_normalized
    assert found['Conv2D'] + found['Dense'] == weighted + 1
    assert found['ReLU'] == weighted
    assert model.name == name
    assert len({layer.name for layer in model.layers}) == len(model.layers)
    assert model.output_shape == (None, 10)
    assert model.layers[-1].activation is keras.activations.linear
    for layer in model.layers:
      # A saved model opens without this package.
      assert type(layer).__module__.startswith('keras.')
      if isinstance(layer, keras.layers.BatchNormalization):
        assert (layer.momentum, layer.epsilon) == (0.9, 1e-5)
      # A bias before a normalization would be one parameter too many.
      if isinstance(layer, (keras.layers.Conv2D, keras.layers.Dense)):
        assert layer.use_bias == (
            kind is None or layer.name == 'logits' or name == 'fbn_cnn'
        )

  @_some_models
  def test_builds_with_the_same_seed_are_equal(self, name):
    model_fn = models.build_model_fn(name, SHAPES[name], 10)
    builds = []
    for seed in (1, 1):
      keras.utils.set_random_seed(seed)
      builds.append(model_fn())
    first, second = builds
    names = [[layer.name for layer in model.layers] for model in builds]
    assert names[0] == names[1]
    kernels = [model.get_weights()[0] for model in (*builds, build(name))]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert (kernels[0] != kernels[2]).any()
    for a, b in zip(first.weights, second.weights, strict=True):
      np.testing.assert_array_equal(a, b)


class TestAlternatives:
  """What stands in the place of batch normalization."""

  @pytest.mark.parametrize(
      ('normalization', 'kind'),
      [
          ('batch_renorm', layers.BatchRenormalization),
          ('static_batch', layers.StaticBatchNormalization),
      ],
  )
  @pytest.mark.parametrize('name', _CNNS)
  def test_normalization_layers(self, name, normalization, kind):
    model, expected = build(name, normalization), build(name)
    names = [x.name for x in expected.layers]
    assert [x.name for x in model.layers] == names
    for layer, other in zip(model.layers, expected.layers, strict=True):
      if isinstance(other, keras.layers.BatchNormalization):
        assert type(layer) is kind
        assert layer.epsilon == 1e-5
        if normalization == 'batch_renorm':
          assert (layer.momentum, layer.r_max, layer.d_max) == (0.9, 3, 5)
      else:
        assert type(layer) is type(other)
        assert layer.get_config() == other.get_config()
    num = 4 if normalization == 'batch_renorm' else 2
    assert len(model.weights) == len(expected.weights) - (4 - num) * len(
        layers.batch_norm_layers(expected)
    )

  @_some_models
  def test_weight_standardization(self, name):
    model, expected = build(name, 'weight_standardization'), build(name, 'none')
    kinds = {
        'Conv2D': layers.WeightStandardizedConv2D,
        'Dense': layers.WeightStandardizedDense,
    }
    for layer, other in zip(model.layers, expected.layers, strict=True):
      kind = kinds.get(type(other).__name__, type(other))
      assert type(layer) is (type(other) if other.name == 'logits' else kind)
      assert layer.name == other.name
      config = layer.get_config()
      assert other.get_config().items() <= config.items()

  @_some_models
  def test_feature_normalization(self, name):
    model, expected = build(name, 'feature'), build(name, 'none')
    kinds = [type(x) for x in expected.layers]
    kinds.insert(-1, layers.FeatureNormalization)
    assert [type(x) for x in model.layers] == kinds
    assert model.count_params() == expected.count_params()
    x = np.random.default_rng(0).uniform(size=(3, *SHAPES[name]))
    features = keras.Model(model.input, model.layers[-1].input)(x)
    size = features.shape[-1]
    np.testing.assert_allclose(
        np.linalg.norm(features, axis=1), np.full(3, size**0.5), rtol=1e-5
    )

  def test_fixup_is_only_for_residual_networks(self):
    shapes = {
        **SHAPES,
        'conv1d': (9, 2),
        **dict.fromkeys(('unet', 'mobilenet_v2', 'resnet50'), (32, 32, 3)),
    }
    for name in models.MODELS.keys() - set(catalog.FIXUP_MODELS):
      with pytest.raises(
          ValueError,
          match=f'=fixup is impossible with model={name}; .*'
          'model=resnet20 or resnet20_wide',
      ):
        models.build_model_fn(name, shapes[name], 10, 'fixup')

  @pytest.mark.parametrize(
      ('name', 'normalization'),
      [
          *(('small_cnn', n) for n in models.NORMALIZATIONS if n != 'fixup'),
          ('resnet20', 'batch'),
      ],
  )
  def test_all_weights_get_a_gradient(self, name, normalization):
    # Not one of the cached models: its statistics change.
    model = _build.__wrapped__(name, normalization, SHAPES[name], 10)
    x = np.random.default_rng(0).normal(size=(8, *SHAPES[name])).astype('f')
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean(model(x, training=True) ** 2)
    for gradient in tape.gradient(loss, model.trainable_weights):
      assert np.isfinite(gradient).all()
      assert np.any(gradient)


_CONVOLUTION = ['Conv2D', 'BatchNormalization', 'ReLU']
_DENSE = ['Dense', 'BatchNormalization', 'ReLU']
_FBN_BLOCK = ['Conv2D', 'ReLU', 'BatchNormalization'] * 2
_POOL = ['MaxPooling2D']


@pytest.mark.parametrize(
    ('name', 'normalization', 'expected'),
    [
        ('small_cnn', 'batch', 14_618),
        ('mlp3', 'batch', 23_950),
        ('fedbn_two_layer', 'batch', 2_410),
        ('abide_mlp', 'batch', 96_474),
        ('fbn_cnn', 'batch', 1_311_690),
        ('digits_cnn', 'batch', 14_222_026),
        ('alexnet_bn', 'batch', 57_072_842),
        ('resnet20', 'batch', 271_098),
        ('resnet20', 'group2', 269_722),
        # Kernels and the last bias, 4 biases and a multiplier in each of 9
        # blocks, and 2 more biases.
        ('resnet20', 'fixup', 269_722 - 2 * 688 + 9 * 5 + 2),
        ('resnet20_wide', 'batch', 4_291_530),
        ('mlp4', 'batch', 2_922_506),
        # FedMA's paper has the same number.
        ('vgg9', 'none', 3_491_530),
        ('vgg9', 'batch', 3_497_194),
        ('vgg11', 'batch', 9_233_866),
        ('vgg13', 'batch', 9_418_954),
    ],
)
def test_number_of_values(name, normalization, expected):
  assert build(name, normalization).count_params() == expected


@pytest.mark.parametrize(
    ('name', 'kernels', 'order'),
    [
        (
            'small_cnn',
            [(3, 3, 1, 16), (3, 3, 16, 32), (3, 3, 32, 32), (32, 10)],
            (_CONVOLUTION + _POOL) * 2 + _CONVOLUTION + ['Dense'],
        ),
        # FedTAN, section 6.
        ('mlp3', [(784, 30), (30, 10)], [*_DENSE, 'Dense']),
        # FedBN, section 5.
        ('fedbn_two_layer', [(10, 100), (100, 10)], [*_DENSE, 'Dense']),
        # FedBN, section 5.2.
        ('abide_mlp', [(5995, 16), (16, 16), (16, 10)], [*_DENSE * 2, 'Dense']),
        ('tabular', [(30, 64), (64, 32), (32, 10)], [*_DENSE * 2, 'Dense']),
        # FBN, table 1.
        (
            'fbn_cnn',
            [(3, 3, 3, 64), (3, 3, 64, 64), (3, 3, 64, 128), (3, 3, 128, 128)]
            + [(8192, 128), (128, 10)],
            (_FBN_BLOCK + _POOL + ['Dropout']) * 2 + ['Dense', 'ReLU', 'Dense'],
        ),
        # FedBN, table 3.
        (
            'digits_cnn',
            [(5, 5, 3, 64), (5, 5, 64, 64), (5, 5, 64, 128)]
            + [(6272, 2048), (2048, 512), (512, 10)],
            (_CONVOLUTION + _POOL) * 2 + _CONVOLUTION + _DENSE * 2 + ['Dense'],
        ),
        # FedBN, table 9.
        (
            'alexnet_bn',
            [(11, 11, 3, 64), (5, 5, 64, 192), (3, 3, 192, 384)]
            + [(3, 3, 384, 256), (3, 3, 256, 256)]
            + [(9216, 4096), (4096, 4096), (4096, 10)],
            (_CONVOLUTION + _POOL) * 2
            + (_CONVOLUTION * 3 + _POOL + _DENSE * 2 + ['Dense']),
        ),
    ],
)
def test_kernels_and_order_of_layers(name, kernels, order):
  model = build(name)
  weighted = [layer for layer in model.layers if hasattr(layer, 'kernel')]
  assert [tuple(layer.kernel.shape) for layer in weighted] == kernels
  kinds = {*_CONVOLUTION, *_DENSE, *_POOL, 'Dropout'}
  found = [type(layer).__name__ for layer in model.layers]
  assert [kind for kind in found if kind in kinds] == order
  if name == 'fbn_cnn':
    assert {x.rate for x in model.layers if hasattr(x, 'rate')} == {0.25}


def test_hidden_weights_of_fedbn_two_layer_are_normal():
  model = build('fedbn_two_layer', 'none', input_shape=(400,))
  kernel, bias = model.get_layer('hidden').get_weights()
  np.testing.assert_allclose(kernel.std(), 1, atol=0.02)
  np.testing.assert_allclose(bias.std(), 1, atol=0.3)


class TestResnet20:

  def test_stages(self):
    model = build('resnet20')
    found = num_layers(model)
    assert found['Add'] == 9
    # Two shortcuts, and before the two strided convolutions.
    assert found['ZeroPadding2D'] == 4
    shapes = [
        layer.output.shape[1:]
        for layer in model.layers
        if isinstance(layer, keras.layers.Add)
    ]
    assert shapes == [(32, 32, 16)] * 3 + [(16, 16, 32)] * 3 + [(8, 8, 64)] * 3

  @pytest.mark.parametrize('stage,size', [(3, 32), (2, 9)])
  def test_shortcut_takes_every_other_pixel_and_pads_with_zero_channels(
      self, stage, size
  ):
    model = build('resnet20', input_shape=(size, size, 3))
    add = model.get_layer(f'stage_{stage}_block_1_add')
    shortcut = keras.Model(
        model.input,
        [model.get_layer(f'stage_{stage - 1}_block_3_relu_2').output]
        + [
            tensor
            for tensor in add.input
            if keras_graph.producer(tensor).layer.name.endswith('_pad')
        ],
    )
    x = np.random.default_rng(0).normal(size=(2, size, size, 3))
    before, after = (tensor.numpy() for tensor in shortcut(x.astype('f')))
    added = before.shape[-1] // 2
    assert np.ptp(before) > 0
    np.testing.assert_array_equal(
        after,
        np.pad(
            before[:, ::2, ::2, :], ((0, 0), (0, 0), (0, 0), (added, added))
        ),
    )

  def test_shortcut_of_other_blocks_is_the_identity(self):
    model = build('resnet20')
    add = model.get_layer('stage_2_block_2_add')
    before = model.get_layer('stage_2_block_1_relu_2').output
    assert any(tensor is before for tensor in add.input)

  @pytest.mark.parametrize('size', [32, 9])
  def test_strided_kernels_are_centered_at_pixels_of_the_shortcut(self, size):
    model = build('resnet20', input_shape=(size, size, 3), num_classes=2)
    convolution = model.get_layer('stage_2_block_1_1_conv')
    before = model.get_layer('stage_1_block_3_relu_2').output
    outputs = keras.Model(model.input, [before, convolution.output])
    # A kernel that selects its center.
    kernel = np.zeros(convolution.kernel.shape)
    kernel[1, 1, np.arange(16), np.arange(16)] = 1
    convolution.kernel.assign(kernel)
    x = np.random.default_rng(0).normal(size=(2, size, size, 3)).astype('f')
    inputs, centers = outputs(x)
    np.testing.assert_array_equal(centers[..., :16], inputs[:, ::2, ::2])
    # And one that selects the pixel above and to the left: zeros at the edges.
    convolution.kernel.assign(np.roll(kernel, (-1, -1), (0, 1)))
    _, corners = outputs(x)
    padded = np.pad(inputs, ((0, 0), (1, 0), (1, 0), (0, 0)))
    np.testing.assert_array_equal(
        corners[..., :16], padded[:, :size:2, :size:2]
    )

  def test_kernels_are_he_normal(self):
    model = build('resnet20')
    kernel = model.get_layer('stage_3_block_2_1_conv').kernel.numpy()
    np.testing.assert_allclose(
        kernel.std(), np.sqrt(2 / (3 * 3 * 64)), rtol=0.05
    )


class TestFixup:
  """ResNet-20 with Fixup initialization, section 3 of its paper."""

  def test_branches_and_logits_start_at_zero(self):
    model = build('resnet20', 'fixup')
    x = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype('f')
    np.testing.assert_array_equal(model(x), np.zeros((2, 10)))
    for stage in (1, 2, 3):
      for block in (1, 2, 3):
        add = model.get_layer(f'stage_{stage}_block_{block}_add')
        branch, shortcut = keras.Model(model.input, add.input)(x)
        np.testing.assert_array_equal(branch, np.zeros(shortcut.shape))
        assert np.ptp(shortcut) > 0

  def test_first_convolutions_are_scaled_down(self):
    model = build('resnet20_wide', 'fixup')
    # L^(-1/(2m-2)) with L = 9 branches of m = 2 convolutions.
    for stage, channels in ((1, 64), (2, 128), (3, 256)):
      kernel = model.get_layer(f'stage_{stage}_block_2_1_conv').kernel
      expected = np.sqrt(2 / (9 * channels)) * 9 ** (-1 / 2)
      assert np.std(kernel) == pytest.approx(expected, rel=0.02)
    assert np.std(model.get_layer('stem_conv').kernel) == pytest.approx(
        np.sqrt(2 / 27), rel=0.1
    )

  def test_order(self):
    model = build('resnet20', 'fixup')
    kinds = [
        type(x).__name__
        for x in model.layers
        if x.name.startswith(('stem', 'stage_1_block_1', 'mean'))
    ]
    assert kinds == [
        *('Conv2D', 'ScalarBias', 'ReLU'),
        *('ScalarBias', 'Conv2D', 'ScalarBias', 'ReLU'),
        *('ScalarBias', 'Conv2D', 'ScalarMultiplier', 'ScalarBias'),
        *('Add', 'ReLU'),
        *('GlobalAveragePooling2D', 'ScalarBias'),
    ]
    assert not any(
        x.use_bias for x in model.layers if isinstance(x, keras.layers.Conv2D)
    )


class TestAlexnet:
  """Table 9 of the FedBN paper."""

  def test_sizes(self):
    model = build('alexnet_bn')
    # In PyTorch, whose padding is symmetric.
    assert [
        x.output.shape[1]
        for x in model.layers
        if x.name.startswith(('conv_relu', 'pool', 'mean'))
    ] == [63, 31, 31, 15, 15, 15, 15, 7, 6]

  def test_first_kernels_are_centered_as_in_pytorch(self):
    model = build('alexnet_bn')
    convolution = model.get_layer('conv_1')
    before = convolution.kernel.numpy()
    kernel = np.zeros(before.shape)
    kernel[2, 2, 0, 0] = 1
    try:
      convolution.kernel.assign(kernel)
      x = np.random.default_rng(0).normal(size=(1, 256, 256, 3)).astype('f')
      found = keras.Model(model.input, convolution.output)(x)
    finally:
      convolution.kernel.assign(before)
    # Two pixels of padding: offset 2 of the kernel is the pixel itself.
    np.testing.assert_array_equal(found[0, :, :, 0], x[0, :252:4, :252:4, 0])

  @pytest.mark.parametrize('size', [2, 6, 7, 13])
  def test_pooling_of_the_last_map(self, size):
    """As PyTorch's AdaptiveAvgPool2d: means over windows that may overlap."""
    pool = build('alexnet_bn').get_layer('mean')
    spec = tf.TensorSpec((None, size, size, 2))
    x = np.random.default_rng(0).normal(size=(3, size, size, 2)).astype('f')
    found = tf.function(pool.call, input_signature=[spec])(x)
    windows = [(i * size // 6, -(-(i + 1) * size // 6)) for i in range(6)]
    expected = [
        [x[:, a:b, c:d].mean((1, 2)) for c, d in windows] for a, b in windows
    ]
    np.testing.assert_allclose(
        found, np.moveaxis(expected, 2, 0), rtol=1e-5, atol=1e-6
    )


class TestFedPanModels:
  """Appendix B of the FedPAN paper."""

  @pytest.mark.parametrize(
      ('name', 'channels', 'dense'),
      [
          (
              'vgg9',
              [32, 64, 'M', 128, 128, 'M', 256, 256, 'M'],
              [(4096, 512), (512, 512), (512, 10)],
          ),
          (
              'vgg11',
              [64, 'M', 128, 'M', 256, 256, 'M', 512, 512, 'M', 512, 512, 'M'],
              [(512, 10)],
          ),
          (
              'vgg13',
              [64, 64, 'M', 128, 128, 'M', 256, 256, 'M']
              + [512, 512, 'M', 512, 512, 'M'],
              [(512, 10)],
          ),
      ],
  )
  def test_vgg(self, name, channels, dense):
    model = build(name)
    found = []
    for layer in model.layers:
      if isinstance(layer, keras.layers.Conv2D):
        assert layer.kernel_size == (3, 3)
        assert layer.padding == 'same'
        found.append(layer.filters)
      elif isinstance(layer, keras.layers.MaxPooling2D):
        assert layer.pool_size == layer.strides == (2, 2)
        found.append('M')
    assert found == channels
    assert [
        tuple(layer.kernel.shape)
        for layer in model.layers
        if isinstance(layer, keras.layers.Dense)
    ] == dense

  def test_vgg_on_small_images(self):
    assert build('vgg11', input_shape=(8, 8, 1)).output_shape == (None, 10)
