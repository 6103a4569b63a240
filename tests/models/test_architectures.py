"""The models against the papers."""

import collections
import functools
import subprocess
import sys

import keras
import numpy as np
import pytest

from tff_bn import models
from tff_bn.keras_model import keras_graph

SHAPES = {
    'small_cnn': (8, 8, 1),
    'mlp3': (28, 28, 1),
    'digits_cnn': (8, 8, 1),
    'fbn_cnn': (32, 32, 3),
    'resnet20': (32, 32, 3),
    'mlp4': (28, 28, 1),
    'vgg9': (32, 32, 3),
    'vgg11': (32, 32, 3),
    'vgg13': (32, 32, 3),
    'resnet20_wide': (32, 32, 3),
    'fedbn_two_layer': (10,),
}
# A model of each kind: the others are made by the same functions.
_DIFFERENT = ('small_cnn', 'mlp3', 'fbn_cnn', 'resnet20', 'vgg9')


@functools.cache
def build(name, normalization='batch', input_shape=None, num_classes=10):
  return models.build_model_fn(
      name, input_shape or SHAPES[name], num_classes, normalization
  )()


def num_values(variables):
  return sum(int(np.prod(variable.shape)) for variable in variables)


def num_layers(model):
  """Counts the layers by class name."""
  return collections.Counter(type(layer).__name__ for layer in model.layers)


def order_of(model, *kinds):
  """Returns the class names of the layers of `kinds`, in the model's order."""
  names = [type(layer).__name__ for layer in model.layers]
  return [name for name in names if name in kinds]


class TestEveryModel:

  @pytest.mark.parametrize(
      ('name', 'normalization', 'kind'),
      [
          *((n, 'batch', 'BatchNormalization') for n in models.MODEL_NAMES),
          *((n, 'none', None) for n in models.MODEL_NAMES),
          *((n, 'layer', 'LayerNormalization') for n in _DIFFERENT),
          *((n, 'group2', 'GroupNormalization') for n in _DIFFERENT),
      ],
  )
  def test_has_the_normalization_after_each_layer_but_the_last(
      self, name, normalization, kind
  ):
    model = build(name, normalization)
    layers = num_layers(model)
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
    }
    # Its dense layer has no normalization; layers before a ReLU have biases.
    not_normalized = 1 if name == 'fbn_cnn' else 0
    for other in (
        'BatchNormalization',
        'LayerNormalization',
        'GroupNormalization',
    ):
      assert layers[other] == (expected[name] if other == kind else 0)
    weighted = expected[name] + not_normalized
    assert layers['Conv2D'] + layers['Dense'] == weighted + 1
    assert layers['ReLU'] == weighted
    for layer in model.layers:
      # A bias before a normalization would be one parameter too many.
      if isinstance(layer, (keras.layers.Conv2D, keras.layers.Dense)):
        assert layer.use_bias == (
            kind is None or layer.name == 'logits' or name == 'fbn_cnn'
        )

  @pytest.mark.parametrize('name', models.MODEL_NAMES)
  def test_batch_normalization_has_the_papers_constants(self, name):
    for layer in build(name).layers:
      if isinstance(layer, keras.layers.BatchNormalization):
        assert layer.momentum == 0.9
        assert layer.epsilon == 1e-5

  @pytest.mark.slow
  def test_saved_models_give_the_same_predictions_without_this_package(
      self, tmp_path
  ):
    rng = np.random.default_rng(0)
    expected = {}
    for name, normalization in [
        *((name, 'batch') for name in _DIFFERENT),
        ('small_cnn', 'none'),
        ('small_cnn', 'group2'),
    ]:
      # Not one of the cached models: this test changes it.
      model = models.build_model_fn(name, SHAPES[name], 10, normalization)()
      for variable in model.non_trainable_variables:
        variable.assign(rng.uniform(0.5, 1.5, variable.shape))
      x = rng.uniform(size=(3, *SHAPES[name])).astype(np.float32)
      key = f'{name}-{normalization}'
      model.save(tmp_path / f'{key}.keras')
      np.save(tmp_path / f'{key}.x.npy', x)
      expected[key] = model(x, training=False)
    code = f"""
import pathlib
import sys
import keras
import numpy as np
for path in pathlib.Path({str(tmp_path)!r}).glob('*.keras'):
  model = keras.models.load_model(path)
  x = np.load(path.with_suffix('.x.npy'))
  np.save(path.with_suffix('.y.npy'), model(x, training=False))
assert not any(name.startswith('tff_bn') for name in sys.modules)
"""
    subprocess.run([sys.executable, '-c', code], check=True)
    assert len(expected) == len(_DIFFERENT) + 2
    for key, outputs in expected.items():
      np.testing.assert_allclose(
          np.load(tmp_path / f'{key}.y.npy'), outputs, rtol=1e-5, atol=1e-5
      )

  @pytest.mark.parametrize('name', models.MODEL_NAMES)
  def test_builds_with_the_same_seed_are_equal(self, name):
    model_fn = models.build_model_fn(name, SHAPES[name], 10)
    builds = []
    for seed in (1, 1):
      keras.utils.set_random_seed(seed)
      builds.append(model_fn())
    first, second = builds
    names = [layer.name for layer in first.layers]
    assert names == [layer.name for layer in second.layers]
    assert len(set(names)) == len(names)
    assert first.name == second.name == name
    kernels = [model.get_weights()[0] for model in (*builds, build(name))]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert (kernels[0] != kernels[2]).any()
    for a, b in zip(first.weights, second.weights, strict=True):
      np.testing.assert_array_equal(a, b)

  @pytest.mark.parametrize('name', models.MODEL_NAMES)
  def test_output_is_logits(self, name):
    model = build(name)
    # A saved model opens without this package.
    for layer in model.layers:
      assert type(layer).__module__.startswith('keras.')
    assert model.output_shape == (None, 10)
    assert model.layers[-1].activation is keras.activations.linear


class TestSmallCnn:

  def test_values(self):
    # Kernels; scales, shifts and statistics of 80 channels; the dense layer.
    kernels = 9 * (1 * 16 + 16 * 32 + 32 * 32)
    assert build('small_cnn').count_params() == kernels + 4 * 80 + 33 * 10

  @pytest.mark.parametrize('size', [(8, 8), (9, 13), (32, 32)])
  def test_takes_images_from_8x8_pixels_on(self, size):
    model = build('small_cnn', input_shape=(*size, 3), num_classes=4)
    assert model(np.zeros((2, *size, 3), np.float32)).shape == (2, 4)

  def test_normalization_comes_before_relu(self):
    order = order_of(build('small_cnn'), 'Conv2D', 'BatchNormalization', 'ReLU')
    assert order == ['Conv2D', 'BatchNormalization', 'ReLU'] * 3


class TestMlp3:

  def test_values(self):
    # 784-30-10 with a BN layer of 30 neurons.
    assert build('mlp3').count_params() == 784 * 30 + 4 * 30 + 30 * 10 + 10

  def test_order(self):
    assert order_of(
        build('mlp3'), 'Flatten', 'Dense', 'BatchNormalization', 'ReLU'
    ) == ['Flatten', 'Dense', 'BatchNormalization', 'ReLU', 'Dense']

  def test_takes_vectors(self):
    model = build('mlp3', input_shape=(5,), num_classes=3)
    assert model.count_params() == 5 * 30 + 4 * 30 + 30 * 3 + 3


class TestFedBnTwoLayer:

  def test_hidden_layer_of_100_neurons(self):
    model = build('fedbn_two_layer', num_classes=2)
    assert [w.shape for w in model.trainable_weights] == [
        (10, 100), (100,), (100,), (100, 2), (2,),
    ]  # fmt: skip
    assert order_of(model, 'Dense', 'BatchNormalization', 'ReLU') == [
        'Dense', 'BatchNormalization', 'ReLU', 'Dense',
    ]  # fmt: skip

  def test_hidden_weights_are_normal(self):
    model = build('fedbn_two_layer', 'none', input_shape=(400,))
    kernel, bias = model.get_layer('hidden').get_weights()
    np.testing.assert_allclose(kernel.std(), 1, atol=0.02)
    np.testing.assert_allclose(bias.std(), 1, atol=0.3)


class TestFbnCnn:

  def test_table_1(self):
    model = build('fbn_cnn')
    shapes = [
        tuple(layer.kernel.shape)
        for layer in model.layers
        if isinstance(layer, (keras.layers.Conv2D, keras.layers.Dense))
    ]
    assert shapes == [
        (3, 3, 3, 64),
        (3, 3, 64, 64),
        (3, 3, 64, 128),
        (3, 3, 128, 128),
        (8192, 128),
        (128, 10),
    ]
    rates = [
        layer.rate
        for layer in model.layers
        if isinstance(layer, keras.layers.Dropout)
    ]
    assert rates == [0.25, 0.25]

  def test_normalization_comes_after_relu(self):
    order = order_of(
        build('fbn_cnn'),
        'Conv2D', 'Dense', 'BatchNormalization', 'ReLU', 'MaxPooling2D',
        'Dropout',
    )  # fmt: skip
    block = ['Conv2D', 'ReLU', 'BatchNormalization'] * 2
    block += ['MaxPooling2D', 'Dropout']
    assert order == block * 2 + ['Dense', 'ReLU', 'Dense']


class TestDigitsCnn:

  def test_table_3(self):
    model = build('digits_cnn', input_shape=(28, 28, 3))
    layers = num_layers(model)
    assert layers['MaxPooling2D'] == 2
    convolutions = [
        layer
        for layer in model.layers
        if isinstance(layer, keras.layers.Conv2D)
    ]
    assert [layer.kernel.shape for layer in convolutions] == [
        (5, 5, 3, 64),
        (5, 5, 64, 64),
        (5, 5, 64, 128),
    ]
    dense = [
        layer for layer in model.layers if isinstance(layer, keras.layers.Dense)
    ]
    assert [layer.kernel.shape for layer in dense] == [
        (6272, 2048),
        (2048, 512),
        (512, 10),
    ]

  def test_order(self):
    order = order_of(
        build('digits_cnn'),
        'Conv2D', 'Dense', 'BatchNormalization', 'ReLU', 'MaxPooling2D',
    )  # fmt: skip
    convolution = ['Conv2D', 'BatchNormalization', 'ReLU']
    dense = ['Dense', 'BatchNormalization', 'ReLU']
    assert order == (
        convolution
        + ['MaxPooling2D']
        + convolution
        + ['MaxPooling2D']
        + convolution
        + dense * 2
        + ['Dense']
    )


class TestResnet20:

  def test_values(self):
    model = build('resnet20')
    assert model.count_params() == 271_098
    assert num_values(model.trainable_variables) == 269_722
    statistics = model.non_trainable_variables
    assert num_values(statistics) == 1_376
    assert len(statistics) == 2 * 19

  def test_values_with_group_normalization(self):
    assert build('resnet20', 'group2').count_params() == 269_722

  def test_layers(self):
    layers = num_layers(build('resnet20'))
    assert layers['Conv2D'] == 19
    assert layers['BatchNormalization'] == 19
    assert layers['Add'] == 9
    assert layers['ZeroPadding2D'] == 2

  def test_stages_halve_the_image(self):
    model = build('resnet20')
    shapes = [
        layer.output.shape[1:]
        for layer in model.layers
        if isinstance(layer, keras.layers.Add)
    ]
    assert shapes == [(32, 32, 16)] * 3 + [(16, 16, 32)] * 3 + [(8, 8, 64)] * 3

  @pytest.mark.parametrize('stage,size', [(2, 32), (3, 32), (2, 9)])
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

  def test_kernels_are_he_normal(self):
    model = build('resnet20')
    kernel = model.get_layer('stage_3_block_2_1_conv').kernel.numpy()
    np.testing.assert_allclose(
        kernel.std(), np.sqrt(2 / (3 * 3 * 64)), rtol=0.05
    )


class TestFedPanModels:
  """Appendix B of the FedPAN paper."""

  @pytest.mark.parametrize(
      ('name', 'expected'),
      [
          ('mlp4', 2_913_290),
          # As FedMA's paper has it.
          ('vgg9', 3_491_530),
          ('vgg11', 9_225_610),
          ('vgg13', 9_410_122),
      ],
  )
  def test_values_without_normalization(self, name, expected):
    assert build(name, 'none').count_params() == expected

  def test_values_of_resnet20_wide(self):
    model = build('resnet20_wide')
    assert num_values(model.trainable_variables) == 4_286_026
    assert num_values(model.non_trainable_variables) == 5_504
    assert num_layers(model)['ZeroPadding2D'] == 2

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
    model = build(name, 'none')
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

  @pytest.mark.parametrize('name', ['vgg9', 'vgg11', 'vgg13'])
  def test_vgg_on_small_images(self, name):
    assert build(name, input_shape=(8, 8, 1)).output_shape == (None, 10)

  @pytest.mark.parametrize(
      ('name', 'groups'),
      [('mlp4', 1), ('vgg9', 32), ('vgg13', 8), ('resnet20_wide', 2)],
  )
  def test_group_normalization(self, name, groups):
    model = build(name, f'group{groups}')
    assert {
        layer.groups
        for layer in model.layers
        if isinstance(layer, keras.layers.GroupNormalization)
    } == {groups}
    x = np.random.default_rng(0).normal(size=(2, *SHAPES[name]))
    assert np.all(np.isfinite(model(x.astype(np.float32))))
