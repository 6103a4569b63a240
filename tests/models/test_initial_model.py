"""Models that start from a file."""

import hashlib
import zipfile

import keras
import numpy as np
import pytest
import random_models
import small_models
import tensorflow_federated as tff

import tff_bn
from tff_bn import algorithms
from tff_bn import layers
from tff_bn import models
from tff_bn.data import dataset as dataset_lib
from tff_bn.keras_model import raw_inputs
from tff_bn.models import initial_model

_SHAPE = (8, 8, 1)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A model with random weights, and its file."""
  path = tmp_path_factory.mktemp('models') / 'small.keras'
  model = random_models.build('small_cnn')
  model.compile('sgd', 'mse')
  model.save(path)
  return model, path


def _save(model, folder):
  path = folder / 'model.keras'
  model.save(path)
  return path


def _assert_same(model, expected):
  x = random_models.inputs(expected, 5)
  np.testing.assert_array_equal(model(x), expected(x))
  for a, b in zip(model.weights, expected.weights, strict=True):
    assert a.trainable == b.trainable
    np.testing.assert_array_equal(a, b)


def test_copies_have_the_weights_of_the_file(saved):
  expected, path = saved
  model_fn = models.initial_model_fn(path, _SHAPE, 10)
  first, second = model_fn(), model_fn()
  _assert_same(first, expected)
  assert not first.compiled
  first.layers[-1].kernel.assign(0 * first.layers[-1].kernel)
  _assert_same(second, expected)
  _assert_same(model_fn(), expected)


@pytest.mark.parametrize(
    'builder',
    ['fed_avg', 'fbn', pytest.param('hbn', marks=pytest.mark.slow)],
)
def test_predictions_at_round_0(saved, builder, in_process_runtime):
  """Also with other classes of batch normalization layers."""
  expected, path = saved
  model_fn = models.initial_model_fn(path, _SHAPE, 10)
  kind = dict(fbn='federated', hbn='hybrid').get(builder)
  model = small_models.classifier(
      lambda: tff_bn.convert_batch_norm(model_fn(), kind)
      if kind
      else model_fn(),
      _SHAPE,
  )
  process = getattr(algorithms, f'build_{builder}')(
      model, tff.learning.optimizers.build_sgdm(0.1)
  )
  weights = process.get_model_weights(process.initialize())
  x = random_models.inputs(expected, 5)
  np.testing.assert_allclose(
      model.to_keras(weights)(x), expected(x), rtol=1e-5, atol=1e-5
  )


def test_a_loaded_model_in_python(saved, in_process_runtime):
  expected, path = saved
  loaded = keras.models.load_model(path, compile=False)
  tff_bn.freeze_layers(loaded, 'conv_1|norm_1')
  model = small_models.classifier(lambda: tff_bn.copy_model(loaded), _SHAPE)
  process = algorithms.build_fed_avg(
      model, tff.learning.optimizers.build_sgdm(0.1)
  )
  found = model.to_keras(process.get_model_weights(process.initialize()))
  x = random_models.inputs(expected, 5)
  np.testing.assert_array_equal(found(x), expected(x))
  assert not found.get_layer('conv_1').trainable
  assert not found.get_layer('norm_1').trainable
  assert found.get_layer('norm_2').trainable


def test_momentum_and_frozen_layers(saved):
  _, path = saved
  model = models.initial_model_fn(
      path, _SHAPE, 10, batch_norm_momentum=0.5, frozen_layers='.*_1'
  )()
  assert {norm.momentum for norm in layers.batch_norm_layers(model)} == {0.5}
  frozen = [x.name for x in model.layers if x.weights and not x.trainable]
  assert frozen == ['conv_1', 'norm_1']


def test_layers_that_the_file_has_as_frozen_stay_so(tmp_path):
  model = random_models.build('small_cnn')
  model.get_layer('conv_2').trainable = False
  path = _save(model, tmp_path)
  model_fn = models.initial_model_fn(path, _SHAPE, 10, frozen_layers='conv_1')
  found = [x.name for x in model_fn().layers if not x.trainable]
  assert found == ['conv_1', 'conv_2']


@pytest.mark.parametrize('kind', ['federated', 'standardized', 'encodings'])
def test_layers_of_this_package(kind, tmp_path):
  if kind == 'standardized':
    model = random_models.build('mlp3', 'weight_standardization')
  else:
    model = random_models.build('mlp3')
  if kind == 'federated':
    model = tff_bn.convert_batch_norm(model)
  elif kind == 'encodings':
    model = tff_bn.add_position_encodings(model, 'add', personal_share=0.5)
  path = _save(model, tmp_path)
  _assert_same(models.initial_model_fn(path, (4, 4, 1), 10)(), model)


def test_checksum(saved):
  _, path = saved
  sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
  assert models.initial_model_fn(path, _SHAPE, 10, sha256=sha256)
  with pytest.raises(
      ValueError,
      match=f'initial_model={path}: the file has changed. Its SHA-256 is'
      f' {sha256}, not {"0" * 64}.',
  ):
    models.initial_model_fn(path, _SHAPE, 10, sha256='0' * 64)
  with pytest.raises(ValueError, match="sha256='0' must be 64 hexadecimal"):
    models.initial_model_fn(path, _SHAPE, 10, sha256='0')


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('a.keras', None, 'a.keras: there is no such file.'),
        ('a.h5', b'', 'must be a file that ends in .keras.'),
        ('a.keras', b'text', 'it is not a file of Keras 3'),
        ('a.keras', zipfile, r'cannot load the file in its safe mode \('),
    ],
)
def test_other_files(name, content, message, tmp_path):
  path = tmp_path / name
  if content is zipfile:
    with zipfile.ZipFile(path, 'w') as archive:
      archive.writestr('config.json', '{}')
  elif content is not None:
    path.write_bytes(content)
  with pytest.raises(ValueError, match=f'^initial_model=.*{message}'):
    models.initial_model_fn(path, _SHAPE, 10)


class _Unregistered(keras.layers.Layer):

  def call(self, x):
    return x


@pytest.mark.parametrize(
    'layer', [keras.layers.Lambda(lambda x: x), _Unregistered()]
)
# Keras warns of the lambda when the file is written.
@pytest.mark.filterwarnings('ignore:.*includes a `lambda`')
def test_code_in_a_file_is_not_run(layer, tmp_path):
  model = keras.Sequential(
      [keras.Input((3,)), keras.layers.Dense(2), layer],
  )
  path = _save(model, tmp_path)
  with pytest.raises(
      ValueError, match='safe mode .* layers must be of Keras or of tff_bn'
  ):
    models.initial_model_fn(path, (3,), 2)


def _dense(num_outputs, activation=None, last=()):
  return keras.Sequential(
      [
          keras.Input((3,)),
          keras.layers.Dense(num_outputs, activation=activation),
          *last,
      ]
  )


_SOFTMAX = [keras.layers.Softmax()]


@pytest.mark.parametrize(
    ('model', 'num_outputs', 'task', 'message'),
    [
        (_dense(2, 'softmax'), 2, 'classification', 'are probabilities'),
        (_dense(2, None, _SOFTMAX), 2, 'multilabel', 'ends in a softmax, '),
        (_dense(1, 'sigmoid'), 1, 'binary', 'ends in a sigmoid, .*remove'),
        (
            _dense(3),
            2,
            'regression',
            r'output of the model has the shape \(3,\) for each sample; it must'
            r' have the shape \(2,\) for task=regression\.$',
        ),
        (_dense(2), 2, 'tables', "task='tables' must be one of"),
    ],
    ids=['softmax', 'softmax layer', 'sigmoid', 'shape', 'task'],
)
def test_outputs_that_do_not_fit(model, num_outputs, task, message, tmp_path):
  path = _save(model, tmp_path)
  with pytest.raises(ValueError, match=message):
    models.initial_model_fn(path, (3,), num_outputs, task=task)


def test_numbers_of_a_regression_may_be_anything(tmp_path):
  for activation in ('softmax', 'sigmoid', 'softplus'):
    path = _save(_dense(2, activation), tmp_path)
    assert models.initial_model_fn(path, (3,), 2, task='regression')


def test_one_logit_may_be_1(tmp_path):
  model = _dense(1)
  model.set_weights([np.zeros((3, 1)), np.ones(1)])
  path = _save(model, tmp_path)
  for task in ('binary', 'multilabel'):
    assert models.initial_model_fn(path, (3,), 1, task=task)


_SCALING = dataset_lib.Scaling(np.array([0.2]), np.array([0.5]))
_OTHER_SCALING = dataset_lib.Scaling(np.array([0.2]), np.array([0.4]))


@pytest.fixture(scope='module')
def raw(tmp_path_factory):
  """A model, and files that take raw samples: with a scaling and without."""
  folder = tmp_path_factory.mktemp('raw')
  model = random_models.build('small_cnn')
  scaled = raw_inputs.Preparation(
      _SHAPE, divisor=16, mean=_SCALING.mean, deviation=_SCALING.deviation
  )
  paths = folder / 'scaled.keras', folder / 'divided.keras'
  preparations = scaled, raw_inputs.Preparation(_SHAPE, divisor=16)
  for path, preparation in zip(paths, preparations, strict=True):
    raw_inputs.wrap(model, preparation).save(path)
  return model, *paths


def test_files_that_take_raw_samples(raw):
  expected, *paths = raw
  for path in paths:
    model = models.initial_model_fn(path, _SHAPE, 10, frozen_layers='conv_1')()
    x = random_models.inputs(expected, 5)
    np.testing.assert_array_equal(model(x), expected(x))
    assert not model.get_layer('conv_1').trainable


def test_scaling_of_files_that_take_raw_samples(raw, saved):
  _, scaled, divided = raw
  initial_model.check_scaling(scaled, _SCALING)
  initial_model.check_scaling(divided, None)
  # These do not say how samples are scaled.
  _, plain = saved
  initial_model.check_scaling(plain, None)
  initial_model.check_scaling(plain, _SCALING)
  for path, scaling, message in (
      (scaled, None, 'than this run, which does not scale them'),
      (scaled, _OTHER_SCALING, 'which subtracts 0.2 and divides by 0.4'),
      (divided, _SCALING, 'which subtracts 0.2 and divides by 0.5'),
  ):
    with pytest.raises(
        ValueError, match=f'^initial_model={path}: .*raw samples.* {message}'
    ):
      initial_model.check_scaling(path, scaling)


def test_file_is_loaded_once(raw, tmp_path, monkeypatch):
  """The check of the scaling and all models share one load."""
  expected, _, divided = raw
  path = tmp_path / 'copy.keras'
  path.write_bytes(divided.read_bytes())
  loaded = []
  load = keras.saving.load_model
  monkeypatch.setattr(
      keras.saving,
      'load_model',
      lambda *args, **kw: loaded.append(load(*args, **kw)) or loaded[-1],
  )
  x = random_models.inputs(expected, 5)
  for _ in range(2):
    initial_model.check_scaling(path, None)
    model = models.initial_model_fn(path, _SHAPE, 10)()
    np.testing.assert_array_equal(model(x), expected(x))
    # Each model has its own weights.
    for weight in model.weights:
      weight.assign(weight + 1)
  assert len(loaded) == 1
  expected.save(path)
  models.initial_model_fn(path, _SHAPE, 10)
  assert len(loaded) == 2


def test_other_samples(saved):
  _, path = saved
  with pytest.raises(
      ValueError,
      match=rf'{path}: the model does not take batches of samples of shape'
      r' \(8, 8, 3\)',
  ):
    models.initial_model_fn(path, (8, 8, 3), 10)


def test_errors_name_the_file(saved):
  _, path = saved
  with pytest.raises(
      ValueError,
      match=f'frozen_layers=x is impossible with initial_model={path}: .*conv',
  ):
    models.initial_model_fn(path, _SHAPE, 10, frozen_layers='x')


def test_no_momentum_without_batch_norm(tmp_path):
  path = _save(_dense(2), tmp_path)
  with pytest.raises(
      ValueError,
      match=f'momentum=0.5 has no effect: initial_model={path} has no batch',
  ):
    models.initial_model_fn(path, (3,), 2, batch_norm_momentum=0.5)
