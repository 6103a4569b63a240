"""Tests of converting batch normalization to group or layer normalization.

And to frozen batch normalization.
"""

import convertible_models
import keras
import numpy as np
import pytest
import tensorflow as tf

import tff_bn
from tff_bn import layers
from tff_bn.keras_model import training_writes

keras_layers = keras.layers
_CLASSES = {
    'group': keras_layers.GroupNormalization,
    'layer': keras_layers.LayerNormalization,
    'frozen': keras_layers.BatchNormalization,
}


def _convert(model, to):
  # A single group is possible for all channels.
  groups = {'groups': 1} if to == 'group' else {}
  return tff_bn.convert_batch_norm(model, to, **groups)


def _norms(model, to):
  found = [x for x in layers.all_layers(model) if type(x) is _CLASSES[to]]
  if to == 'frozen':
    assert not any(layer.trainable for layer in found)
  else:
    assert not layers.batch_norm_layers(model)
  return found


def _single(shape, **arguments):
  """A model of one layer with random weights."""
  norm = keras_layers.BatchNormalization(name='norm', **arguments)
  model = keras.Sequential([keras.Input(shape), norm], name='single')
  return convertible_models.randomize(model)


def _affine(x, layer, axis=-1):
  """Scales and shifts each channel, where the layer does."""
  shape = [1] * x.ndim
  shape[axis] = -1
  if layer.gamma is not None:
    x = x * np.reshape(layer.gamma, shape)
  return x if layer.beta is None else x + np.reshape(layer.beta, shape)


def _standardized(x, axes, epsilon):
  mean, variance = (f(x, axes, keepdims=True) for f in (np.mean, np.var))
  return (x - mean) / np.sqrt(variance + epsilon)


_AFFINE = [{}, {'scale': False}, {'center': False}]


@pytest.mark.parametrize('affine', _AFFINE, ids=str)
@pytest.mark.parametrize(('shape', 'axis'), [((3, 4, 6), -1), ((6, 2, 5), 1)])
def test_group_normalization(affine, shape, axis):
  model = _single(shape, axis=axis, epsilon=0.1, **affine)
  converted = tff_bn.convert_batch_norm(model, 'group', groups=3)
  x = convertible_models.random_data(7, *shape)
  channels_last = np.moveaxis(x, axis, -1)
  # Each group has two neighboring channels.
  groups = np.stack(
      [
          _standardized(channels_last[..., i : i + 2], (1, 2, 3), 0.1)
          for i in (0, 2, 4)
      ],
      axis=-2,
  )
  expected = np.moveaxis(groups.reshape(channels_last.shape), -1, axis)
  old, new = model.get_layer('norm'), converted.get_layer('norm')
  for training in (False, True):
    np.testing.assert_allclose(
        converted(x, training=training),
        _affine(expected, old, axis),
        rtol=1e-5,
        atol=1e-5,
    )
  assert (new.gamma is None, new.beta is None) == (
      old.gamma is None,
      old.beta is None,
  )
  assert [w.path for w in converted.weights] == [
      w.path for w in model.trainable_weights
  ]


@pytest.mark.parametrize(
    ('arguments', 'width'),
    [
        ({'groups': -1}, 1),
        ({'groups': 1}, 36),
        ({'groups': np.int64(12)}, 3),
        ({'adjust_groups': True}, 9),  # Of 32 and 36: 4.
        ({'groups': 24, 'adjust_groups': True}, 3),
        ({'groups': -1, 'adjust_groups': True}, 1),
    ],
)
def test_numbers_of_groups(arguments, width):
  model = _single((2, 36))
  converted = tff_bn.convert_batch_norm(model, 'group', **arguments)
  assert converted.get_layer('norm').groups == 36 // width
  x = convertible_models.random_data(3, 2, 36)
  expected = np.concatenate(
      [
          _standardized(x[..., i : i + width], (1, 2), 1e-3)
          for i in range(0, 36, width)
      ],
      axis=-1,
  )
  expected = _affine(expected, model.get_layer('norm'))
  np.testing.assert_allclose(converted(x), expected, rtol=1e-4, atol=1e-5)


def test_the_default_is_32_groups():
  converted = tff_bn.convert_batch_norm(_single((2, 64)), 'group')
  assert converted.get_layer('norm').groups == 32


@pytest.mark.parametrize('affine', _AFFINE, ids=str)
@pytest.mark.parametrize(('shape', 'axis'), [((3, 4, 6), -1), ((6, 5), 1)])
def test_layer_normalization(affine, shape, axis):
  model = _single(shape, axis=axis, epsilon=0.1, **affine)
  converted = tff_bn.convert_batch_norm(model, 'layer')
  x = convertible_models.random_data(7, *shape)
  expected = _affine(_standardized(x, axis, 0.1), model.get_layer('norm'), axis)
  for training in (False, True):
    np.testing.assert_allclose(
        converted(x, training=training), expected, rtol=1e-5, atol=1e-5
    )


def test_frozen_layers_keep_their_variables():
  model = convertible_models.nested()
  convertible_models.randomize(model)
  convertible_models.randomize(model.get_layer('bare'), 3)
  x = convertible_models.random_data(8, 5, 3)
  expected = model(x)
  frozen = tff_bn.convert_batch_norm(model, 'frozen')
  norms = _norms(frozen, 'frozen')
  assert len(norms) == 4
  assert len(frozen.trainable_weights) == len(model.trainable_weights) - 8
  before = frozen.get_weights()
  # Training does not use the statistics of the batch.
  for training in (False, True):
    np.testing.assert_allclose(
        frozen(x, training=training), expected, rtol=1e-5, atol=1e-5
    )
  frozen.compile('sgd', 'mse')
  frozen.train_on_batch(x, np.zeros([8, 3]))
  constant = {id(w) for norm in norms for w in norm.weights}
  for old, new in zip(before, frozen.weights, strict=True):
    assert np.array_equal(old, new) == (id(new) in constant)


def test_frozen_layers_are_constants_of_the_federated_model():
  model = tff_bn.BatchNormModel(
      lambda: tff_bn.convert_batch_norm(convertible_models.nested(), 'frozen'),
      (tf.TensorSpec((None, 5, 3)), tf.TensorSpec((None, 3))),
      loss_fn=keras.losses.MeanSquaredError,
  )
  constants = [model.variables[i] for i in model.constants]
  assert len(constants) == 16
  assert {v.batch_norm for v in constants} == {0, 1, 2, 3}
  assert not any(v.is_statistic or v.trainable for v in constants)


@pytest.mark.parametrize(
    'to', ['group', pytest.param('layer', marks=pytest.mark.slow)]
)
def test_other_norms_have_no_state(to):
  model = _convert(convertible_models.nested(), to)
  assert not model.non_trainable_weights
  assert not training_writes.assigned_positions(
      model, tf.TensorSpec((None, 5, 3))
  )


@pytest.mark.parametrize('to', _CLASSES)
def test_nested_and_shared_layers(to):
  model = convertible_models.randomize(convertible_models.nested())
  converted = _convert(model, to)
  assert len(_norms(converted, to)) == 4
  shared = converted.get_layer('bare')
  assert converted.get_layer('wrapped').layer is shared
  values = {w.path: w.numpy() for w in model.weights}
  assert len(values) == len(model.weights)
  for weight in converted.weights:
    np.testing.assert_array_equal(values.pop(weight.path), weight)
  assert {path.split('/')[-1] for path in values} == (
      set() if to == 'frozen' else {'moving_mean', 'moving_variance'}
  )


@pytest.mark.parametrize('to', _CLASSES)
def test_keras_loads_the_model_without_this_package(to, tmp_path):
  inner = keras.Sequential(
      [keras.Input((3, 4)), keras_layers.BatchNormalization()], name='inner'
  )
  inputs = keras.Input((3, 4))
  x = keras_layers.BatchNormalization()(inner(inputs), training=True)
  x = keras_layers.TimeDistributed(keras_layers.BatchNormalization())(x)
  model = convertible_models.randomize(keras.Model(inputs, x))
  converted = _convert(model, to)
  assert 'tff_bn' not in converted.to_json()
  converted.save(tmp_path / 'model.keras')
  loaded = keras.models.load_model(tmp_path / 'model.keras')
  assert len(_norms(loaded, to)) == 3
  x = convertible_models.random_data(8, 3, 4)
  for training in (False, True):
    np.testing.assert_array_equal(
        loaded(x, training=training), converted(x, training=training)
    )


def test_layers_in_wrappers_normalize_each_step():
  norm = keras_layers.BatchNormalization(epsilon=0.1)
  model = keras.Sequential(
      [keras.Input((5, 2, 4)), keras_layers.TimeDistributed(norm)]
  )
  convertible_models.randomize(model)
  converted = tff_bn.convert_batch_norm(model, 'group', groups=1)
  x = convertible_models.random_data(3, 5, 2, 4)
  expected = _affine(_standardized(x, (2, 3), 0.1), norm)
  np.testing.assert_allclose(converted(x), expected, rtol=1e-5, atol=1e-5)


def test_group_normalization_ignores_masks():
  model = keras.Sequential(
      [
          keras.Input((5, 4)),
          keras_layers.Masking(),
          keras_layers.BatchNormalization(),
          keras_layers.GlobalAveragePooling1D(),
      ]
  )
  x = convertible_models.random_data(3, 5, 4)
  x[:, 3:] = 0
  group, layer = (_convert(model, to)(x) for to in ('group', 'layer'))
  # The pooling still gets the mask.
  expected = _standardized(x, (1, 2), 1e-3)[:, :3].mean(1)
  np.testing.assert_allclose(group, expected, rtol=1e-5, atol=1e-5)
  expected = _standardized(x, -1, 1e-3)[:, :3].mean(1)
  np.testing.assert_allclose(layer, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('to', ['group', 'layer'])
def test_arguments_are_kept(to):
  norm = keras_layers.BatchNormalization(
      name='norm',
      momentum=0.3,
      epsilon=0.2,
      gamma_initializer='zeros',
      beta_initializer=keras.initializers.Constant(2),
      gamma_regularizer=keras.regularizers.L2(0.5),
      beta_regularizer=keras.regularizers.L1(0.25),
      gamma_constraint=keras.constraints.NonNeg(),
      beta_constraint=keras.constraints.MaxNorm(3),
      dtype='mixed_bfloat16',
      trainable=False,
  )
  model = keras.Sequential([keras.Input((3, 4)), norm])
  new = _convert(model, to).get_layer('norm')
  assert type(new) is _CLASSES[to]
  expected, found = norm.get_config(), new.get_config()
  for key in (
      *('epsilon', 'dtype', 'trainable', 'center', 'scale'),
      *(
          f'{name}_{kind}'
          for name in ('gamma', 'beta')
          for kind in ('initializer', 'regularizer', 'constraint')
      ),
  ):
    assert found[key] == expected[key], key
  assert new.compute_dtype == 'bfloat16'
  assert new.gamma.dtype == 'float32'
  assert not new.trainable_weights


def test_from_layers_of_this_package():
  model = keras.Sequential(
      [
          keras.Input((3, 4)),
          layers.FederatedBatchNormalization(),
          layers.HybridBatchNormalization(),
          layers.BatchRenormalization(r_max=2.0),
      ]
  )
  convertible_models.randomize(model)
  x = convertible_models.random_data(5, 3, 4)
  frozen = tff_bn.convert_batch_norm(model, 'frozen')
  assert len(_norms(frozen, 'frozen')) == 3
  np.testing.assert_allclose(frozen(x, training=True), model(x), 1e-5, 1e-5)
  for to in ('group', 'layer'):
    converted = _convert(model, to)
    assert len(_norms(converted, to)) == 3
    assert {w.name for w in converted.weights} == {'gamma', 'beta'}


@pytest.mark.parametrize('to', ['group', 'layer'])
def test_of_other_classes_only_batch_normalization_is_replaced(to):
  other = _CLASSES[to](name='other', **({'groups': 2} if to == 'group' else {}))
  model = keras.Sequential(
      [keras.Input((3, 4)), other, keras_layers.BatchNormalization()]
  )
  converted = _convert(model, to)
  assert converted.layers[0].get_config() == other.get_config()
  # It is an ordinary model without batch normalization.
  with pytest.raises(ValueError, match='no batch normalization'):
    tff_bn.convert_batch_norm(converted, 'batch')


@pytest.mark.parametrize(
    ('kind', 'to'),
    [
        ('containers', 'frozen'),
        ('argument with its own', 'layer'),
        ('wrapper', 'group'),
        ('model', 'frozen'),
        pytest.param('containers', 'group', marks=pytest.mark.slow),
        pytest.param('model', 'group', marks=pytest.mark.slow),
        pytest.param('wrapper', 'frozen', marks=pytest.mark.slow),
        pytest.param('recurrent', 'layer', marks=pytest.mark.slow),
        pytest.param('recurrent', 'frozen', marks=pytest.mark.slow),
        pytest.param('time distributed', 'group', marks=pytest.mark.slow),
        pytest.param('argument', 'group', marks=pytest.mark.slow),
    ],
)
def test_custom_classes_keep_new_layers(tmp_path, kind, to):
  build, x, _ = convertible_models.HOLDERS[kind]
  model = convertible_models.randomize(build())
  converted = _convert(model, to)
  num_norms = len(layers.batch_norm_layers(model))
  assert len(_norms(converted, to)) == num_norms
  expected = np.asarray(converted(x, training=True))
  if to == 'frozen':
    np.testing.assert_allclose(expected, model(x), rtol=1e-5, atol=1e-5)
  else:
    assert np.abs(expected - model(x)).max() > 0.1
  weights = converted.get_weights()
  classes = convertible_models.HOLDER_CLASSES
  with keras.saving.CustomObjectScope(classes):
    converted.save(tmp_path / 'model.keras')
    loaded = keras.models.load_model(tmp_path / 'model.keras')
    # Loading does not lose what saving needs.
    loaded.save(tmp_path / 'again.keras')
    again = keras.models.load_model(tmp_path / 'again.keras')
    clone = keras.models.clone_model(converted)
  copy = tff_bn.copy_model(converted)
  clone.set_weights(weights)
  for other in (loaded, again, clone, copy):
    assert len(_norms(other, to)) == num_norms
    np.testing.assert_allclose(other(x, training=True), expected, 1e-5, 1e-5)


def test_a_layer_that_was_converted_before_is_kept():
  """A converted layer is part of a layer with batch normalization."""
  part = _convert(
      convertible_models.stack(convertible_models.AutoConfig(4)), 'group'
  ).layers[0]
  model = convertible_models.stack(convertible_models.WrapperWithNorm(part))
  convertible_models.randomize(model)
  converted = tff_bn.convert_batch_norm(model, 'federated')
  assert len(layers.batch_norm_layers(converted)) == 1
  x = convertible_models.random_data(8, 4)
  np.testing.assert_allclose(converted(x), model(x), rtol=1e-5, atol=1e-5)


class WithMask(keras_layers.Layer):
  """Gives batch normalization a mask explicitly."""

  def __init__(self, **kwargs):
    super().__init__(**kwargs)
    self.norm = keras_layers.BatchNormalization()

  def call(self, x, mask=None):
    return self.norm(x, mask=mask)


def test_masks_as_arguments():
  inputs = keras.Input((3, 4))
  x = keras_layers.Masking()(inputs)
  norm = keras_layers.BatchNormalization()
  model = keras.Model(inputs, norm(x, training=True, mask=inputs[..., 0] > 0))
  converted = tff_bn.convert_batch_norm(model, 'layer')
  x = convertible_models.random_data(8, 3, 4)
  expected = _standardized(x, -1, 1e-3)
  np.testing.assert_allclose(converted(x), expected, rtol=1e-5, atol=1e-5)

  model = convertible_models.stack(WithMask())
  with pytest.raises(
      ValueError, match="the argument mask, which to='layer' does not have"
  ):
    tff_bn.convert_batch_norm(model, 'layer')
  assert len(_norms(_convert(model, 'frozen'), 'frozen')) == 1


def test_unbuilt_model():
  def build():
    return keras.Sequential(
        [keras_layers.Dense(6), keras_layers.BatchNormalization()]
    )

  x = convertible_models.random_data(3, 4)
  for to in _CLASSES:
    converted = _convert(build(), to)
    assert not converted.built
    assert converted(x).shape == (3, 6)
    assert len(_norms(converted, to)) == 1
  with pytest.raises(ValueError, match=r'.*is not built.* adjust_groups=True'):
    tff_bn.convert_batch_norm(build(), 'group', adjust_groups=True)


def _two_norms(*channels):
  inputs = keras.Input((2, 3))
  x = inputs
  for number, units in enumerate(channels):
    x = keras_layers.Dense(units)(x)
    x = keras_layers.BatchNormalization(name=f'norm{number}')(x)
  return keras.Model(inputs, x)


@pytest.mark.parametrize(
    ('groups', 'channels', 'message'),
    [
        (
            None,
            (64, 12),
            r"^groups=32 does not divide the 12 channels of the .* 'norm1'; use"
            ' a divisor of the channels of every layer, such as 4, or'
            ' adjust_groups=True for',
        ),
        (
            2,
            (8, 9),
            r"^groups=2 does .* 9 channels of .* 'norm1'; use adjust_groups=",
        ),
        (12, (6,), r"^groups=12 does .* 6 channels of .* 'norm0'; use a div"),
    ],
)
def test_groups_must_divide_the_channels(groups, channels, message):
  with pytest.raises(ValueError, match=message):
    tff_bn.convert_batch_norm(_two_norms(*channels), 'group', groups=groups)
  converted = tff_bn.convert_batch_norm(
      _two_norms(*channels), 'group', groups=groups, adjust_groups=True
  )
  assert [norm.groups for norm in _norms(converted, 'group')] == [
      np.gcd(groups or 32, size) for size in channels
  ]


@pytest.mark.parametrize(
    ('shape', 'to', 'arguments'),
    [
        ((4,), 'group', {'groups': 4}),
        ((4,), 'group', {'groups': -1}),
        ((4,), 'group', {'groups': 8, 'adjust_groups': True}),
        ((3, 1), 'layer', {}),
    ],
)
def test_constant_outputs_are_an_error(shape, to, arguments):
  with pytest.raises(
      ValueError, match="'norm' .*output .*would not depend on the input"
  ):
    tff_bn.convert_batch_norm(_single(shape), to, **arguments)


@pytest.mark.parametrize(
    ('to', 'arguments', 'error', 'message'),
    [
        ('layer', {'groups': 2}, ValueError, "groups has .* to='group' only"),
        ('frozen', {'adjust_groups': True}, ValueError, '^adjust_groups has'),
        ('group', {'groups': 0}, ValueError, 'groups=0 must be .*positive'),
        ('group', {'groups': -2}, ValueError, 'groups=-2 must be .*positive'),
        ('group', {'groups': 2.0}, TypeError, 'groups must be an integer'),
        ('group', {'groups': True}, TypeError, 'groups must be an integer'),
        ('group', {'adjust_groups': 1}, TypeError, 'adjust_groups must be'),
    ],
)
def test_wrong_arguments(to, arguments, error, message):
  with pytest.raises(error, match=message):
    tff_bn.convert_batch_norm(_single((3, 4)), to, **arguments)


class _OwnCall(keras_layers.BatchNormalization):

  def call(self, inputs, training=None, mask=None):
    return 2 * super().call(inputs, training=training, mask=mask)


@pytest.mark.parametrize('to', _CLASSES)
def test_other_computations_are_an_error(to):
  for norm, message in (
      (_OwnCall(name='mine'), "'mine' is a _OwnCall, whose method call"),
      (
          keras_layers.BatchNormalization(renorm=True, name='mine'),
          "'mine' has renorm=True",
      ),
  ):
    model = keras.Sequential([keras.Input((3, 4)), norm])
    with pytest.raises(ValueError, match=message):
      _convert(model, to)
