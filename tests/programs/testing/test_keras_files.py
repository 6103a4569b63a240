"""Tests that the printed code loads models."""

import sys
import types

import keras
import numpy as np
import pandas as pd
import pytest
from sklearn import datasets

from tff_bn import data as tff_bn_data
from tff_bn import layers
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import table_encoding
from tff_bn.keras_model import raw_inputs
from tff_bn.programs.testing import keras_files
from tff_bn.training import final_models
from tff_bn.training import manifests
from tff_bn.training import saved_inputs

# A user's module with layers and a function that Keras does not know.
_MODULE = types.ModuleType('users_module')
exec(
    """
import keras

class Doubling(keras.layers.Layer):
  def call(self, x):
    return 2 * x

class Tripling(Doubling):
  def call(self, x):
    return 3 * x

def squared(x):
  return x * x
""",
    _MODULE.__dict__,
)


@pytest.fixture(autouse=True)
def users_module(monkeypatch):
  monkeypatch.setitem(sys.modules, 'users_module', _MODULE)


def _model(*hidden):
  inputs = x = keras.layers.Input((4,))
  for layer in (*hidden, keras.layers.Dense(2)):
    x = layer(x)
  return keras.Model(inputs, x)


@pytest.mark.parametrize(
    ('hidden', 'imports', 'arguments'),
    [
        ([keras.layers.BatchNormalization], [], ''),
        (
            [layers.BatchRenormalization],
            ['import tff_bn.layers.batch_renormalization'],
            '',
        ),
        (
            [_MODULE.Doubling, _MODULE.Doubling],
            ['import users_module'],
            ", custom_objects={'Doubling': users_module.Doubling}",
        ),
        (
            [lambda: keras.layers.Activation(_MODULE.squared)],
            [],  # Keras does not save where a function is from.
            ", custom_objects={'squared': squared}",
        ),
        (
            [
                _MODULE.Tripling,
                layers.BatchRenormalization,
                lambda: keras.layers.Activation(_MODULE.squared),
                _MODULE.Doubling,
            ],
            [
                'import tff_bn.layers.batch_renormalization',
                'import users_module',
            ],
            ", custom_objects={'squared': squared,"
            " 'Doubling': users_module.Doubling,"
            " 'Tripling': users_module.Tripling}",
        ),
        (
            [lambda: keras.layers.Lambda(lambda x: 3 * x)],
            [],
            ', safe_mode=False',
        ),
    ],
)
def test_the_code_loads_the_model(hidden, imports, arguments, tmp_path):
  model = _model(*(build() for build in hidden))
  path = tmp_path / 'model.keras'
  model.save(path)

  code = keras_files.loading_code(path)

  assert code == [*imports, f"keras.models.load_model('{path}'{arguments})"]
  names = {'keras': keras, 'squared': _MODULE.squared}
  exec('\n'.join([*code[:-1], f'loaded = {code[-1]}']), names)
  x = np.ones((3, 4), np.float32)
  np.testing.assert_array_equal(names['loaded'](x).numpy(), model(x).numpy())
  if arguments:  # Without them, Keras refuses the file.
    with pytest.raises((TypeError, ValueError)):
      keras.models.load_model(path)


RNG = np.random.default_rng(0)


def _uint8(*shape):
  return RNG.integers(0, 256, (40, *shape), np.uint8)


def _dataset(x, names=(), **attributes):
  y = np.arange(40) % 3
  return dataset_lib.create_dataset(
      'mine', x, y, x, y, 3, class_names=names, **attributes
  )


def _digits():
  """Returns the raw digits that are the first test samples, and the dataset."""
  dataset = tff_bn_data.load_dataset('digits')
  raw = datasets.load_digits().images
  positions = [
      np.flatnonzero((raw / 16 == x[..., 0]).all(axis=(1, 2)))[0]
      for x in dataset.x_test
  ]
  return raw[positions][..., np.newaxis], dataset


def _raw_and_dataset(kind, folder):
  """Returns raw samples and the dataset that has them as test samples."""
  if kind == 'digits':
    return _digits()
  if kind == 'uint8':
    x = _uint8(4, 5, 3)
    return x, _dataset(x, ('dog', "it's", 'cat'))
  if kind == 'floats':
    x = RNG.normal(size=(40, 4, 5, 1)).astype(np.float32)
    return x, _dataset(x)
  if kind == 'features':
    x = (RNG.normal(size=(40, 30)) * 10 ** RNG.uniform(-3, 3, 30) + 5).astype(
        np.float32
    )
    x[:, 3] = 4
    return x, _dataset(x, tuple('abc'))
  assert kind == 'resized'
  x, y = _uint8(9, 7, 3), np.arange(40) % 3
  np.savez(folder / 'a.npz', x_train=x, y_train=y, x_test=x, y_test=y)
  dataset = tff_bn_data.load_dataset(f'{folder}/a.npz', image_size=(4, 5))
  return x, dataset


def _saved(dataset, image_size, folder, export='raw'):
  """Saves a random model, and returns it with the code that uses it."""
  model = keras.Sequential(
      [
          keras.Input(dataset.input_shape),
          keras.layers.Flatten(),
          keras.layers.Dense(
              dataset.num_classes, kernel_initializer='he_normal'
          ),
      ]
  )
  kernel = RNG.normal(size=(dataset.x_train[0].size, dataset.num_classes))
  # The mean of all pixels does not decide alone.
  kernel -= kernel.mean(axis=0)
  model.layers[-1].kernel.assign(kernel)
  # As a run writes it.
  description = dict(
      format=2,
      input_shape=list(dataset.input_shape),
      export=export,
      **final_models.describe(
          types.SimpleNamespace(dataset=dataset, client_scalings=None)
      ),
  )
  description['keras_inputs'] = saved_inputs.choose(description, export)
  manifests.write(folder, description)
  path = folder / 'model.keras'
  preparation = saved_inputs.preparation(manifests.read(folder, 2))
  saved = model
  if preparation is not None:
    saved = raw_inputs.wrap(model, preparation)
  saved.save(path)
  return model, keras_files.prediction_code(
      path, manifests.read(folder, 2), image_size
  )


@pytest.mark.parametrize(
    'kind, scaling, words',
    [
        ('digits', 'unit', ['[8, 8, 1] (gray), values from 0 to 16', '/ 16']),
        ('digits', 'standardized', ['/ 16', 'mean = np.float32([0.30']),
        ('uint8', 'unit', ['[4, 5, 3] (RGB), values from 0 to 255', '/ 255']),
        ('uint8', 'symmetric', ['deviation = np.float32([0.5, 0.5, 0.5])']),
        ('uint8', 'standardized', ['/ 255', 'mean = ', 'deviation = ']),
        ('floats', 'unit', ['values as in the training data']),
        ('floats', 'standardized', ['x = (x - mean) / deviation']),
        ('features', 'standardized', ["manifest['pixel_scaling']['mean']"]),
        ('resized', 'unit', ['[height, width, 3] (RGB)', '(4, 5)', '/ 255']),
        ('resized', 'standardized', ['(4, 5)', '/ 255', 'mean = ']),
    ],
)
@pytest.mark.parametrize('export', ['raw', 'training'])
def test_the_code_predicts_the_classes_of_raw_samples(
    kind, scaling, words, export, tmp_path
):
  raw, dataset = _raw_and_dataset(kind, tmp_path)
  data = tff_bn_data.split_dataset(dataset, 'iid', 2, 0).scaled(scaling)
  image_size = (4, 5) if kind == 'resized' else None
  model, code = _saved(data.dataset, image_size, tmp_path, export)

  found = {'x': raw}
  exec('\n'.join(code), found)

  # The pipeline of training and evaluation.
  ((x, _),) = data.test_dataset(len(raw)).as_numpy_iterator()
  labels = model(x).numpy().argmax(axis=1).tolist()
  assert len(set(labels)) > 1
  names = dataset.class_names or range(10)
  expected = [names[label] for label in labels]
  assert list(found['predicted']) == expected
  text = '\n'.join(code)
  if export == 'raw':
    assert 'mean' not in text and '/ ' not in text
    return
  np.testing.assert_allclose(found['x'], x, rtol=1e-4, atol=1e-4)
  for word in words:
    assert word in text
  assert not image_size or 'resize' in text
  assert image_size or 'resize' not in text


def test_pictures_of_several_sizes_are_resized(tmp_path):
  _, dataset = _raw_and_dataset('resized', tmp_path)
  pictures = [_uint8(size, 9, 3)[0] for size in (6, 4, 9)]
  resized = [
      np.rint(keras.ops.image.resize(np.float32(x), (4, 5), antialias=True))
      for x in pictures
  ]
  scaled = np.stack(resized) / 255
  for export in ('raw', 'training'):
    model, code = _saved(dataset, (4, 5), tmp_path, export)
    found = {'x': pictures}
    exec('\n'.join(code), found)
    expected = model(scaled).numpy().argmax(axis=1)
    assert found['predicted'].tolist() == expected.tolist()
  np.testing.assert_allclose(found['x'], scaled, rtol=1e-5, atol=1e-5)


def test_domains_that_were_scaled_in_several_ways(tmp_path):
  x, y = _uint8(8, 8), np.arange(40) % 10
  np.savez(tmp_path / 'a.npz', x_train=x, y_train=y, x_test=x, y_test=y)
  for other, words in (
      ('digits', 'values as in the training data, uint8 divided by 255'),
      (f'{tmp_path}/a.npz', 'values from 0 to 255'),
  ):
    dataset = tff_bn_data.load_dataset(f'domains:{tmp_path}/a.npz,b={other}')
    _, code = _saved(dataset, None, tmp_path, 'training')
    assert code[-3].endswith(words)
    _, code = _saved(dataset, None, tmp_path)
    # No file divides the values of each domain by another number.
    assert ('# The file takes scaled samples: the domains' in str(code)) == (
        other == 'digits'
    )
    assert ('np.float32(x)' in str(code)) == (other == 'digits')


def test_many_names_are_read_from_the_file(tmp_path):
  names = [f'class {number}' for number in range(21)]
  dataset = dataset_lib.create_dataset(
      *('mine', _uint8(4, 5, 3), np.arange(40) % 21),
      *(_uint8(4, 5, 3), np.arange(40) % 21, 21),
      class_names=tuple(names),
  )
  _, code = _saved(dataset, None, tmp_path)
  assert "class_names = manifest['class_names']" in code
  found = {'x': dataset.x_test}
  exec('\n'.join(code), found)
  assert found['class_names'] == names
  assert set(found['predicted']) <= set(names)


def test_models_of_earlier_versions_have_no_notes(tmp_path):
  path = tmp_path / 'model.keras'
  _model(keras.layers.BatchNormalization()).save(path)
  code = keras_files.prediction_code(path, dict(input_shape=[4]), None)
  assert code[-1] == f"model = keras.models.load_model('{path}')"


@pytest.mark.parametrize(
    'task, names, expected',
    [
        ('classification', ['a', 'b', 'c'], ['c', 'a']),
        ('binary', ['no', 'yes'], ['yes', 'no']),
        ('multilabel', ['a', 'b', 'c'], [['a', 'c'], ['b']]),
        ('regression', [], [[1, -1, 2], [-1, 0.5, -2]]),
    ],
)
def test_predictions_of_tasks(task, names, expected, tmp_path):
  manifest = dict(task=task, class_names=names, input_shape=[3], divisor=None)
  code = keras_files.usage_code(tmp_path, manifest, None)
  outputs = np.array([[1, -1, 2], [-1, 0.5, -2]])
  if task == 'classification':
    outputs[1] = [3, 0, 0]
  model = types.SimpleNamespace(predict=lambda x: outputs)
  found = {'x': np.zeros((2, 3)), 'model': model}
  exec('\n'.join(code), found)
  assert np.array_equal(
      np.asarray(found['predicted'], object), np.asarray(expected, object)
  )


@pytest.mark.parametrize('inputs', ['raw', 'training'])
@pytest.mark.parametrize('categories', ['one_hot', 'embedded'])
def test_the_code_makes_features_of_a_table(categories, inputs, tmp_path):
  table = pd.DataFrame(
      dict(sex=['f', 'm', None], age=[30, 40, 50], city=['x', 'y', 'x'])
  )
  encoding = table_encoding.TableEncoding.fit('t', table, 'mean', categories)
  later = pd.DataFrame(
      dict(city=['z', 'y', 'x'], sex=['m', None, 'd'], age=[1, None, 3])
  )
  expected = encoding.encode('t', later)
  manifest = dict(
      task='regression',
      class_names=[],
      input_shape=[expected.shape[1]],
      divisor=1,
      table=encoding.to_json(),
      keras_inputs=inputs,
  )
  manifests.write(tmp_path, dict(format=2, **manifest))
  found = {
      'table': later,
      'model': types.SimpleNamespace(predict=lambda x: x),
  }
  exec('\n'.join(keras_files.usage_code(tmp_path, manifest, None)), found)
  np.testing.assert_array_equal(found['predicted'], expected)


def test_predictions_of_pixels_are_numbers(tmp_path):
  manifest = dict(
      task='segmentation',
      class_names=['background', 'disc'],
      input_shape=[2, 2, 1],
      divisor=1,
  )
  code = keras_files.usage_code(tmp_path, manifest, None)
  assert code[-1] == 'predicted = model.predict(x).argmax(axis=-1)'
