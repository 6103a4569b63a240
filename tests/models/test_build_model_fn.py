"""Models by name and by users' functions."""

import subprocess
import sys

import keras
import numpy as np
import pytest

from tff_bn import models

USER_MODULE = """
import keras

def dense(input_shape, num_classes):
  return keras.Sequential([
      keras.Input(input_shape),
      keras.layers.Flatten(),
      keras.layers.Dense(num_classes),
  ])

def with_normalization(input_shape, num_classes, normalization='batch'):
  model = dense(input_shape, num_classes)
  return keras.Model(model.inputs[0], model.outputs[0], name=normalization)

def with_keywords(input_shape, num_classes, **kwargs):
  return with_normalization(input_shape, num_classes, **kwargs)

class Subclassed(keras.Model):

  def __init__(self, num_classes):
    super().__init__()
    self.flatten = keras.layers.Flatten()
    self.dense = keras.layers.Dense(num_classes)

  def call(self, x):
    return self.dense(self.flatten(x))

def subclassed(input_shape, num_classes):
  return Subclassed(num_classes)

class Lazy(keras.Model):

  def __init__(self, num_classes):
    super().__init__()
    self.num_classes = num_classes

  def build(self, input_shape):
    self.dense = keras.layers.Dense(self.num_classes)
    self.dense.build(input_shape)

  def call(self, x):
    return self.dense(x)

def lazy(input_shape, num_classes):
  return Lazy(num_classes)

class LayersInCall(keras.Model):

  def call(self, x):
    self.dense = keras.layers.Dense(3)
    return self.dense(x)

def layers_in_call(input_shape, num_classes):
  return LayersInCall()

def one_more_class(input_shape, num_classes):
  return dense(input_shape, num_classes + 1)

def frozen(input_shape, num_classes):
  model = dense(input_shape, num_classes)
  model.trainable = False
  return model

def softmax(input_shape, num_classes):
  model = dense(input_shape, num_classes)
  model.layers[-1].activation = keras.activations.softmax
  return model

def sigmoid(input_shape, num_classes):
  model = dense(input_shape, num_classes)
  model.layers[-1].activation = keras.activations.sigmoid
  return model

def sigmoid_layer(input_shape, num_classes):
  model = dense(input_shape, num_classes)
  return keras.Sequential([model, keras.layers.Activation('sigmoid')])

def softmax_layer(input_shape, num_classes):
  model = Subclassed(num_classes)
  return keras.Sequential([
      keras.Input(input_shape), model, keras.layers.Softmax()
  ])

def two_outputs(input_shape, num_classes):
  model = dense(input_shape, num_classes)
  return keras.Model(model.inputs, model.outputs * 2)

def for_vectors(input_shape, num_classes):
  inputs = keras.Input((3,))
  return keras.Model(inputs, keras.layers.Dense(num_classes)(inputs))

def series(input_shape, num_classes):
  return keras.Sequential([
      keras.Input(input_shape), keras.layers.Conv1D(2, 3),
      keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(num_classes)
  ])

def series_without_input(input_shape, num_classes):
  return keras.Sequential([
      keras.layers.LSTM(2), keras.layers.Dense(num_classes)
  ])

def layer(input_shape, num_classes):
  return keras.layers.Dense(num_classes)

def softplus(input_shape, num_classes):
  model = dense(input_shape, num_classes)
  model.layers[-1].activation = keras.activations.softplus
  return model

def pixels(input_shape, num_classes):
  return keras.Sequential([
      keras.Input(input_shape), keras.layers.Conv2D(num_classes, 1)
  ])

def softmax_of_pixels(input_shape, num_classes):
  model = pixels(input_shape, num_classes)
  return keras.Sequential([model, keras.layers.Lambda(keras.ops.softmax)])

def fails(input_shape, num_classes):
  raise RuntimeError('no such\\nluck')

def ends(input_shape, num_classes):
  raise SystemExit(0)

def too_few(input_shape):
  return None

constant = 3
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path, monkeypatch):
  (tmp_path / 'user_models.py').write_text(USER_MODULE)
  (tmp_path / 'user_broken.py').write_text('import no_such_package\n')
  monkeypatch.syspath_prepend(tmp_path)
  yield
  for name in ('user_models', 'user_broken'):
    sys.modules.pop(name, None)


def check_refused(name, message, input_shape=(8, 8, 1), normalization='batch'):
  with pytest.raises(ValueError, match=message) as error:
    models.build_model_fn(name, input_shape, 10, normalization)
  assert str(error.value).startswith(('model=', 'normalization='))
  assert '\n' not in str(error.value)


def test_names_need_no_tensorflow():
  code = (
      'import sys, tff_bn.models;'
      ' assert "resnet20" in tff_bn.models.MODELS;'
      ' assert "tensorflow" not in sys.modules'
  )
  subprocess.run([sys.executable, '-c', code], check=True)


def test_package_members_exist():
  for name in models.__all__:
    assert getattr(models, name) is not None
  with pytest.raises(AttributeError, match='nothing'):
    models.nothing  # noqa: B018


def test_every_call_builds_a_new_model():
  model_fn = models.build_model_fn('mlp3', [4], 3)
  first, second = model_fn(), model_fn()
  assert first is not second
  first.layers[-1].kernel.assign(np.ones(first.layers[-1].kernel.shape))
  assert (second.layers[-1].kernel.numpy() != 1).any()


def test_unknown_model():
  check_refused(
      'resnet', r"='resnet' must be one of small_cnn, mlp3.*mean resnet50\?"
  )


@pytest.mark.parametrize(
    'name,input_shape,size,advice',
    [
        ('small_cnn', (3, 8, 1), 4, 'mlp3, .*, or resize by `image_size`.$'),
        ('small_cnn', (64,), 4, 'tabular, mlp3, [a-z_0-9, ]*.$'),
        ('digits_cnn', (8, 3, 1), 4, 'mlp3, .*, or resize'),
        ('resnet20', (3, 3, 3), 4, 'mlp3'),
        ('resnet20', (32, 32), 4, 'conv1d, mlp3, [a-z_0-9, ]*.$'),
        ('alexnet_bn', (94, 256, 3), 95, 'small_cnn, .* resize'),
        ('resnet50', (31, 64, 3), 32, 'small_cnn, .* resize'),
    ],
)
def test_samples_that_are_too_small_or_not_images(
    name, input_shape, size, advice
):
  shape = ', '.join(map(str, input_shape))
  check_refused(
      name,
      f'={name} needs images of at least {size}x{size} pixels as .height,'
      rf' width, channels., .* the shape \({shape}.*\); use model={advice}',
      input_shape,
  )


@pytest.mark.parametrize(
    ('name', 'size'),
    [
        ('small_cnn', 4),
        ('digits_cnn', 4),
        ('resnet20', 4),
        pytest.param('alexnet_bn', 95, marks=pytest.mark.slow),
    ],
)
def test_smallest_images(name, size):
  model = models.build_model_fn(name, (size, size, 1), 10)()
  assert model(np.zeros((1, size, size, 1), np.float32)).shape == (1, 10)


@pytest.mark.parametrize(
    ('name', 'groups', 'layer'),
    [
        ('small_cnn', 32, '16 channels at layer norm_1'),
        # Dense layers, too.
        ('mlp3', 8, '30 channels at layer norm;'),
        ('abide_mlp', 32, '16 channels at layer norm_1'),
        ('vgg9', 3, '32 channels at layer conv_norm_1'),
    ],
)
def test_groups_that_do_not_divide_the_channels(name, groups, layer):
  check_refused(
      name,
      f'normalization=group{groups} is impossible.* {groups} does not divide'
      f' the {layer}',
      normalization=f'group{groups}',
  )


class TestPrecision:

  @pytest.mark.parametrize(
      ('name', 'precision'),
      [
          ('fbn_cnn', 'mixed_float16'),
          ('resnet20', 'mixed_float16'),
          ('small_cnn', 'mixed_bfloat16'),
      ],
  )
  def test_layers_compute_in_16_bits_but_logits_and_variables_have_32(
      self, name, precision
  ):
    shape = (8, 8, 1)
    model = models.build_model_fn(name, shape, 10, precision=precision)()
    for layer in model.layers[1:-1]:
      assert layer.dtype_policy.name == precision
    assert model.layers[-1].name == 'logits'
    assert model.layers[-1].compute_dtype == 'float32'
    assert {v.dtype for v in model.weights} == {'float32'}
    x = np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)
    logits = model(x, training=False)
    assert logits.dtype.name == 'float32'
    # The first activations have the few bits of their dtype.
    first = keras.Model(model.input, model.layers[2].output)(x)
    assert first.dtype.name == precision.removeprefix('mixed_')

  def test_default_is_float32(self):
    model = models.build_model_fn('small_cnn', (8, 8, 1), 10)()
    assert {layer.dtype_policy.name for layer in model.layers} == {'float32'}

  @pytest.mark.parametrize('function', ['dense', 'subclassed', 'lazy'])
  def test_precision_of_user_models(self, function):
    model = models.build_model_fn(
        f'user_models:{function}', (4,), 10, precision='mixed_bfloat16'
    )()
    assert model(np.zeros((2, 4), np.float32)).dtype.name == 'bfloat16'
    (dense,) = [
        layer for layer in model.layers if isinstance(layer, keras.layers.Dense)
    ]
    assert dense.compute_dtype == 'bfloat16'
    assert dense.kernel.dtype == 'float32'

  @pytest.mark.parametrize('function', ['dense', 'fails', 'for_vectors'])
  def test_other_models_keep_the_default_precision(self, function):
    try:
      models.build_model_fn(
          f'user_models:{function}', (4,), 10, precision='mixed_float16'
      )()
    except ValueError:
      assert function != 'dense'
    assert keras.config.dtype_policy().name == 'float32'
    assert keras.layers.Dense(1).compute_dtype == 'float32'

  def test_unknown_precision(self):
    with pytest.raises(
        ValueError, match="precision='mixed_float8' .*mixed_bfloat16"
    ):
      models.build_model_fn('mlp3', (4,), 3, precision='mixed_float8')


class TestUserModel:

  @pytest.mark.parametrize('function', ['dense', 'subclassed'])
  def test_is_called_with_shape_and_classes(self, function):
    model = models.build_model_fn(f'user_models:{function}', (4, 4, 1), 7)()
    assert model(np.zeros((2, 4, 4, 1), np.float32)).shape == (2, 7)

  @pytest.mark.parametrize('function', ['with_normalization', 'with_keywords'])
  def test_gets_the_normalization_if_it_has_the_parameter(self, function):
    model = models.build_model_fn(f'user_models:{function}', (4,), 7, 'mine')()
    assert model.name == 'mine'

  def test_normalization_without_the_parameter_is_an_error(self):
    check_refused(
        'user_models:dense',
        'normalization=layer has no effect on model=user_models:dense',
        normalization='layer',
    )

  @pytest.mark.parametrize(
      'name,message',
      [
          ('user_missing:f', "'user_missing' can not be imported.*PYTHONPATH"),
          ('user_broken:f', "ModuleNotFoundError: .*'no_such_package'"),
          (':f', 'must have the form package.module:NAME'),
          ('user_models:missing', "has no 'missing'"),
          (
              'user_models:constant',
              'must be a function of the shape of a sample',
          ),
          ('user_models:', 'must have the form package.module:NAME'),
          ('user_models:layer', 'returned Dense, not a keras.Model'),
          ('user_models:fails', r'failed \(RuntimeError: no such\)'),
          ('user_models:ends', r'failed \(SystemExit: 0\)'),
          ('user_models:too_few', r'failed \(TypeError: '),
          (
              'user_models:one_more_class',
              r'shape \(11,\) for each sample; it must have the shape \(10,\)'
              ' for task=classification, one logit for each class',
          ),
          ('user_models:frozen', 'has no trainable variables'),
          ('user_models:softmax', 'probabilities, .*; remove the softmax'),
          ('user_models:softmax_layer', 'probabilities, .*; remove the softm'),
          ('user_models:sigmoid', 'ends in a sigmoid, .*; remove the sigmoid'),
          ('user_models:sigmoid_layer', 'ends in a sigmoid, .*; remove the si'),
          (
              'user_models:two_outputs',
              r'has several outputs; it must .* \(10,\)',
          ),
          (
              'user_models:layers_in_call',
              r'\(ValueError: .* LayersInCall.call\(\)\. You cannot add',
          ),
          (
              'user_models:for_vectors',
              r'does not take batches of samples of shape \(8, 8, 1\)',
          ),
      ],
  )
  def test_wrong_functions(self, name, message):
    check_refused(name, message)

  @pytest.mark.parametrize('name', ['series', 'series_without_input'])
  def test_models_of_series(self, name):
    models.build_model_fn(f'user_models:{name}', (8, 3), 10)
    advice = 'series of {} steps with {} features, load them as series:PATH'
    for shape in ((8, 8, 1), (9, 2, 1)):
      with pytest.raises(ValueError, match=advice.format(*shape)):
        models.build_model_fn(f'user_models:{name}', shape, 10)
    # Others are no grey images.
    for wrong, shape in ((name, (8, 8, 3)), ('fails', (8, 8, 1))):
      with pytest.raises(ValueError, match=wrong) as error:
        models.build_model_fn(f'user_models:{wrong}', shape, 10)
      assert 'series:PATH' not in str(error.value)


class TestTasks:

  @pytest.mark.parametrize(
      ('name', 'task', 'num_outputs'),
      [
          ('dense', 'binary', 1),
          ('dense', 'multilabel', 4),
          # Targets may be shares, or positive.
          ('softmax', 'regression', 3),
          ('sigmoid', 'regression', 1),
          ('softplus', 'regression', 2),
          ('pixels', 'segmentation', 3),
      ],
  )
  def test_models_of_users(self, name, task, num_outputs):
    model = models.build_model_fn(
        f'user_models:{name}', (4, 5, 1), num_outputs, task=task
    )()
    shape = (4, 5, 3) if task == 'segmentation' else (num_outputs,)
    assert model.output_shape == (None, *shape)

  @pytest.mark.parametrize(
      ('name', 'task', 'num_outputs', 'message'),
      [
          ('sigmoid', 'binary', 1, 'ends in a sigmoid'),
          ('softmax', 'multilabel', 3, 'ends in a softmax'),
          ('softmax_of_pixels', 'segmentation', 3, 'are probabilities'),
          (
              'dense',
              'segmentation',
              2,
              r'\(2,\) for each sample; it must have the shape \(4, 5, 2\) for'
              ' task=segmentation, one logit for each class',
          ),
          ('pixels', 'regression', 2, r'\(4, 5, 2\) .* \(2,\) for task=regr'),
      ],
  )
  def test_other_outputs(self, name, task, num_outputs, message):
    name = f'user_models:{name}'
    with pytest.raises(ValueError, match=f'model={name}: .*{message}'):
      models.build_model_fn(name, (4, 5, 1), num_outputs, task=task)

  @pytest.mark.parametrize('task', ['binary', 'multilabel', 'regression'])
  def test_models_of_the_catalog(self, task):
    model = models.build_model_fn('mlp3', (4,), 1, task=task)()
    assert model.output_shape == (None, 1)


class TestFrozenLayers:

  def test_frozen_layers(self):
    model = models.build_model_fn('mlp3', (4,), 3, frozen_layers='hid.*|norm')()
    trained = [x.name for x in model.layers if x.trainable_weights]
    assert trained == ['logits']

  def test_of_a_users_model(self):
    with pytest.raises(
        ValueError,
        match='frozen_layers=dense.* is impossible with model=user_models:sub'
        'classed: .*no trainable weight',
    ):
      models.build_model_fn(
          'user_models:subclassed', (4,), 3, frozen_layers='dense.*'
      )

  def test_no_such_layer(self):
    with pytest.raises(
        ValueError,
        match='frozen_layers=backbone is impossible with model=mlp3: .* no'
        " layer with weights; the model 'mlp3' has hidden, norm, logits.",
    ):
      models.build_model_fn('mlp3', (4,), 3, frozen_layers='backbone')

  def test_no_regular_expression(self):
    with pytest.raises(ValueError, match=r"frozen_layers='\(' is no regular"):
      models.build_model_fn('mlp3', (4,), 3, frozen_layers='(')
