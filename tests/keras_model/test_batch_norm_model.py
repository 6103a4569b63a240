"""Tests of a Keras model as data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn import BatchNormModel
from tff_bn.clients import local_step
from tff_bn.keras_model.batch import Batch
from tff_bn.keras_model.partition import Role
from tff_bn.layers import PositionEncoding

layers = keras.layers
_SPEC = (tf.TensorSpec((None, 4)), tf.TensorSpec((None,), tf.int32))


def _loss_fn():
  return keras.losses.SparseCategoricalCrossentropy(True)


def _model(keras_model_fn, input_spec=_SPEC, loss_fn=_loss_fn, metrics_fn=None):
  return BatchNormModel(keras_model_fn, input_spec, loss_fn, metrics_fn)


def _sequential(make_layers):
  """A model of the layers that `make_layers` returns."""
  return _model(lambda: keras.Sequential([keras.Input((4,)), *make_layers()]))


def _roles(model):
  return [(v.role.value, v.trainable, v.frozen) for v in model.variables]


_NORM = [
    ('scale', True, False),
    ('shift', True, False),
    ('moving_mean', False, False),
    ('moving_variance', False, False),
]
_FROZEN_NORM = [(role, False, True) for role, _, _ in _NORM]


def test_roles_of_a_sequential_model():
  model = _sequential(
      lambda: [
          layers.Dense(3, name='bn'),
          layers.BatchNormalization(name='dense'),
          layers.LayerNormalization(),
      ]
  )
  kernel = ('kernel', True, False)
  assert _roles(model) == [kernel, kernel, *_NORM, kernel, kernel]
  assert model.has_batch_norm
  assert [v.name for v in model.variables][2:5] == [
      'scale_2',
      'shift_3',
      'moving_mean_4',
  ]


def test_scale_and_shift_are_found_by_attribute_not_position():
  model = _sequential(
      lambda: [
          layers.BatchNormalization(scale=False),
          layers.BatchNormalization(center=False),
          layers.Dense(2),
      ]
  )
  assert [v.role.value for v in model.variables[:6]] == [
      'shift',
      'moving_mean',
      'moving_variance',
      'scale',
      'moving_mean',
      'moving_variance',
  ]
  numbers = [v.batch_norm for v in model.variables]
  assert numbers == [*[0] * 3, *[1] * 3, None, None]


def test_mixed_precision_changes_no_variable(tmp_path):
  def make_layers(dtype):
    return [
        layers.Dense(3, dtype=dtype, name='a'),
        layers.BatchNormalization(dtype=dtype, name='b'),
        layers.Dense(2, dtype=dtype, name='c'),
    ]

  model = _sequential(lambda: make_layers('mixed_float16'))

  float32_model = _sequential(lambda: make_layers('float32'))
  assert model.variables == float32_model.variables
  model.to_keras().save(tmp_path / 'model.keras')
  weights = model.from_keras(keras.models.load_model(tmp_path / 'model.keras'))
  for loaded, initial in zip(
      (*weights.trainable, *weights.non_trainable),
      (*model.initial_weights.trainable, *model.initial_weights.non_trainable),
      strict=True,
  ):
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(loaded, initial)


def test_frozen_layers_keep_their_roles():
  def make_layers():
    inner = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4), layers.BatchNormalization()]
    )
    inner.trainable = False
    return [
        layers.BatchNormalization(trainable=False),
        inner,
        layers.BatchNormalization(),
        layers.Dense(2),
    ]

  model = _sequential(make_layers)
  other = ('other_state', False, False)
  kernel = ('kernel', True, False)
  assert sorted(_roles(model)) == sorted(
      [*_FROZEN_NORM, other, other, *_FROZEN_NORM, *_NORM, kernel, kernel]
  )


def test_roles_inside_wrappers_synchronized_and_shared_layers():
  def keras_model_fn():
    inputs = keras.Input((2, 4))
    shared = layers.BatchNormalization()
    x = layers.TimeDistributed(layers.BatchNormalization())(inputs)
    x = shared(shared(x))
    x = layers.BatchNormalization(synchronized=True)(x)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))

  model = _model(keras_model_fn, (tf.TensorSpec((None, 2, 4)), _SPEC[1]))
  kernel = ('kernel', True, False)
  assert sorted(_roles(model)) == sorted([*_NORM * 3, kernel, kernel])


def _with_own(*methods):
  own = dict.fromkeys(methods, lambda self, *args, **kwargs: None)
  return type('Own', (keras.Model,), own)


class _OwnStepsInside(keras.layers.Layer):

  def train_step(self, x):
    return x

  def call(self, x):
    return x


def _functional(model_class=keras.Model):
  inputs = keras.Input((4,))
  return model_class(inputs, layers.Dense(3)(inputs), name='own')


def _with_replaced_method():
  model = _functional()
  model.fit = lambda *args, **kwargs: None
  return model


@pytest.mark.parametrize(
    ('keras_model_fn', 'methods'),
    [
        *(
            (lambda method=method: _functional(_with_own(method)), method)
            for method in (
                *('fit', 'make_train_function', 'train_on_batch'),
                *('train_step', 'test_step'),
            )
        ),
        (
            lambda: _functional(_with_own('compute_loss', 'compute_metrics')),
            'compute_loss, compute_metrics',
        ),
        (_with_replaced_method, 'fit'),
    ],
)
def test_overridden_training_is_not_ignored(keras_model_fn, methods):
  with pytest.raises(
      ValueError,
      match=rf"'own' .*\((Own|Functional)\) has its own {methods}, which",
  ):
    _model(keras_model_fn)


def test_methods_that_training_does_not_replace():
  """The remedy of the error, and a layer whose methods Keras ignores, too."""

  def keras_model_fn():
    model = _functional(_with_own('train_step'))
    return keras.Model(model.inputs, _OwnStepsInside()(model.outputs[0]))

  assert len(_model(keras_model_fn).variables) == 2


def test_compiled_model(caplog):
  def keras_model_fn(**arguments):
    model = _functional()
    if arguments:
      model.compile(**arguments)
    return model

  def scaled_error(y_true, y_pred):
    return keras.ops.mean(y_true - y_pred)

  _model(keras_model_fn).to_keras()
  assert not caplog.records
  _model(
      lambda: keras_model_fn(
          optimizer=keras.optimizers.Adam(0.1),
          loss=[scaled_error],
          loss_weights=[0.25],
          metrics={'dense': ['mae', keras.metrics.AUC()]},
          weighted_metrics=[scaled_error],
      )
  ).to_keras()
  (record,) = caplog.records
  assert record.levelname == 'WARNING'
  assert record.getMessage() == (
      "The model 'own' of keras_model_fn is compiled, but training ignores its"
      ' optimizer (Adam), loss (scaled_error), loss_weights (0.25), metrics'
      ' (dense: mae, AUC), weighted_metrics (scaled_error): loss_fn,'
      ' metrics_fn and the client_optimizer of the builder replace them.'
      ' BatchNormModel.from_compiled takes the losses and metrics of a compiled'
      ' model.'
  )
  caplog.clear()
  _model(lambda: keras_model_fn(loss='mse'))
  assert 'ignores its optimizer (RMSprop), loss (mse):' in caplog.text


class _Subclassed(keras.Model):

  def __init__(self):
    super().__init__()
    self.norms = [layers.BatchNormalization() for _ in range(2)]
    self.dense = layers.Dense(3)

  def call(self, x, training=None):
    for norm in self.norms:
      x = norm(x, training=training)
    return self.dense(x)


@pytest.mark.parametrize(
    'keras_model_fn',
    [
        _Subclassed,
        lambda: keras.Sequential(
            [layers.BatchNormalization(), layers.Dense(3)]
        ),
    ],
    ids=['subclassed', 'sequential_without_input'],
)
def test_a_model_without_input_shape_is_built_from_the_spec(keras_model_fn):
  model = _model(keras_model_fn)
  assert model.has_batch_norm
  values = [
      np.full(v.shape, i, np.float32) for i, v in enumerate(model.variables)
  ]
  keras_model = model.to_keras(model.to_model_weights(values))
  for found, value in zip(keras_model.get_weights(), values):
    np.testing.assert_array_equal(found, value)


def test_other_state_is_neither_trained_nor_a_statistic():
  model = _sequential(lambda: [layers.Normalization(), layers.Dense(2)])
  assert [v.role for v in model.variables][:3] == [Role.OTHER_STATE] * 3
  assert model.variables[2].dtype == tf.int64  # Keras's counter.
  assert not model.has_batch_norm


def test_weights_go_to_keras_and_back():
  model = _sequential(
      lambda: [layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)]
  )
  keras_model = model.keras_model_fn()
  x = np.random.default_rng(0).normal(3, 2, (16, 4)).astype(np.float32)
  keras_model(x, training=True)  # Moves the statistics.

  weights = model.from_keras(keras_model)
  copy = model.to_keras(weights)

  assert copy is not keras_model
  assert type(copy) is keras.Sequential
  np.testing.assert_array_equal(copy(x), keras_model(x))
  assert not np.array_equal(copy(x), model.to_keras()(x))
  for list_of_weights, variables in zip(
      weights,
      (keras_model.trainable_weights, keras_model.non_trainable_weights),
  ):
    for value, variable in zip(list_of_weights, variables):
      np.testing.assert_array_equal(value, variable.numpy())
  # TFF's method works, too.
  other = model.keras_model_fn()
  weights.assign_weights_to(other)
  np.testing.assert_array_equal(other(x), keras_model(x))


def test_initial_weights_come_from_the_function():
  kernel = np.arange(8.0, dtype=np.float32).reshape(4, 2)

  def pretrained():
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(2, use_bias=False)]
    )
    model.set_weights([kernel])
    return model

  model = _model(pretrained)
  np.testing.assert_array_equal(model.initial_weights.trainable[0], kernel)
  np.testing.assert_array_equal(model.to_keras().get_weights()[0], kernel)


def test_weights_that_are_none_are_an_error():
  model = _model(_with_norm)
  with pytest.raises(
      TypeError, match=r'get_model_weights\(state\), but is a li'
  ):
    model.to_keras([1, 2])
  with pytest.raises(TypeError, match='keras_model must be a keras.Model, but'):
    model.from_keras(_with_norm)


def test_weights_of_another_model_are_an_error():
  model = _sequential(lambda: [layers.Dense(2)])
  with pytest.raises(ValueError, match='weights has 1 trainable and 0 other'):
    model.to_keras(([np.zeros((4, 2))], []))
  wider = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
  with pytest.raises(ValueError, match=r'variable 0 is .*\(4, 3\)'):
    model.from_keras(wider)
  deeper = keras.Sequential([keras.Input((4,)), wider, layers.Dense(3)])
  with pytest.raises(ValueError, match='4 variables instead of 2'):
    model.from_keras(deeper)


class JoinedError(keras.losses.Loss):
  """A loss whose labels are two tensors."""

  def call(self, y_true, y_pred):
    labels, factors = y_true
    return factors * keras.ops.mean(keras.ops.square(labels - y_pred), -1)


def test_labels_of_several_tensors_for_one_output():
  spec = (_SPEC[0], (tf.TensorSpec((None, 3)), tf.TensorSpec((None,))))
  model = _model(_functional, spec, JoinedError)
  rng = np.random.default_rng(0)
  x, y, factors = (
      rng.uniform(size=shape).astype(np.float32)
      for shape in ((8, 4), (8, 3), 8)
  )
  output, loss = local_step.output_and_loss(
      model, Batch(x, (tf.constant(y), tf.constant(factors)))
  )
  np.testing.assert_allclose(
      loss, np.mean(factors * np.mean((y - output) ** 2, -1)), rtol=1e-5
  )


def _with_norm():
  return keras.Sequential(
      [keras.Input((4,)), layers.Dense(3), layers.BatchNormalization()],
      name='with_norm',
  )


def _norm_free():
  return keras.Sequential([keras.Input((4,)), layers.Flatten()])


def _with_two_inputs():
  inputs = [keras.Input((4,)), keras.Input((4,))]
  return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Add()(inputs)))


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(keras_model_fn=lambda: 3), 'returned a int'),
        (
            dict(input_spec=(tf.SparseTensorSpec((None, 4)), _SPEC[1])),
            'x has .* type SparseTensorSpec. .*x, y: .tf.sparse.to_dense.x., y',
        ),
        (
            dict(input_spec=(_SPEC[0], tf.SparseTensorSpec((None, 3)))),
            r'y has .* type SparseT.* y: \(x, tf.sparse.to_dense\(y\)\)\)\.$',
        ),
        (
            dict(input_spec=(tf.RaggedTensorSpec((8, None)), _SPEC[1])),
            r'type RaggedTensorSpec. .* y: \(x.to_tensor\(\), y\)\)\.$',
        ),
        (
            dict(input_spec=({'a': tf.RaggedTensorSpec((8, None))}, _SPEC[1])),
            r'RaggedTensorSpec. .* by part.to_tensor\(\) in dataset.map\.$',
        ),
        (
            dict(input_spec=(_SPEC[0], tf.OptionalSpec(_SPEC[1]))),
            'must consist of tf.TensorSpecs, but y has a part of type Optional',
        ),
        (
            dict(keras_model_fn=_with_norm()),
            r"is the model '\w+' itself; use lambda: tff_bn.copy_model",
        ),
        (dict(keras_model_fn='resnet20'), 'function .* but is a str'),
        (
            dict(loss_fn=keras.losses.MeanSquaredError()),
            'a MeanSquaredError itself; use lambda: keras.losses.MeanSquare',
        ),
        (dict(loss_fn='mse'), 'loss_fn must be a function'),
        (
            dict(loss_fn=keras.losses.mean_squared_error),
            "loss_fn .* call without arguments is impossible: .*'y_true'",
        ),
        (
            dict(keras_model_fn=lambda units: _with_norm()),
            "keras_model_fn .* without arguments is impossible: .*'units'",
        ),
        (
            dict(loss_fn=lambda: {'a': 3}),
            'loss_fn must return a keras.losses.Loss, .* 3 of type int',
        ),
        (dict(loss_fn=lambda: None), 'returned None of type NoneType'),
        (
            dict(metrics_fn=[keras.metrics.Mean('mean')]),
            'metrics_fn must be a function .* but is a list itself; use lambda',
        ),
        (dict(metrics_fn=keras.metrics.Mean('mean')), 'is a Mean itself'),
        (
            dict(metrics_fn=lambda: keras.metrics.Mean('mean')),
            'return a list of keras.metrics.Metric, .*, but is a Mean',
        ),
        (
            dict(metrics_fn=lambda: {'a': ['mae', 3.0]}),
            'a list of keras.metrics.Metric, .* but it contains 3.0 of type fl',
        ),
        (dict(input_spec=tf.data.Dataset.range(3)), 'use dataset.element_spec'),
        (
            dict(input_spec=([0.0] * 4, 1)),
            'input_spec must consist of tf.TensorSpecs',
        ),
    ],
)
def test_arguments_of_wrong_type(arguments, message):
  with pytest.raises(TypeError, match=message):
    _model(**{'keras_model_fn': _with_norm, **arguments})


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(keras_model_fn=_norm_free), 'no trainable variable'),
        (
            dict(keras_model_fn=_Subclassed, input_spec=_SPEC[0]),
            'input_spec must be the element_spec',
        ),
        (
            dict(input_spec=(*_SPEC, _SPEC[1], _SPEC[1])),
            r'of \(x, y\) pairs or of \(x, y, sample_weight\), but is',
        ),
        (
            dict(input_spec=(_SPEC[0], {})),
            'input_spec has no tensor in y',
        ),
        (
            dict(input_spec=dict(zip(('image', 'label'), _SPEC))),
            r'pairs .*, but is .*dataset.map .* lambda batch: \(batch\[X',
        ),
        (
            dict(input_spec=(tf.TensorSpec(None), _SPEC[1])),
            'unknown rank in x: .*from_generator an output_signature with shap',
        ),
        (
            dict(input_spec=(_SPEC[0], (_SPEC[1], tf.TensorSpec(None)))),
            'unknown rank in y: .*call set_shape after tf.py_function or tf.',
        ),
        (
            dict(keras_model_fn=_with_two_inputs),
            r"x of 1 tensors, but the model '\w+' has 2 inputs",
        ),
        (
            dict(input_spec=(tf.TensorSpec((4,)), tf.TensorSpec(()))),
            r'shape \(\), without an axis .* Use dataset.batch\(',
        ),
        (
            dict(input_spec=(tf.TensorSpec((4,)), tf.TensorSpec((3,)))),
            r'shape \(4,\), without an axis .* Use dataset.batch\(',
        ),
        (
            dict(input_spec=(tf.TensorSpec((None, 7)), _SPEC[1])),
            r'x of shape \(None, 7\), but .* has the shape \(None, 4\)',
        ),
    ],
)
def test_arguments_of_wrong_value(arguments, message):
  with pytest.raises(ValueError, match=message):
    _model(**{'keras_model_fn': _with_norm, **arguments})


@pytest.mark.parametrize('shape', [(8, 8), (8, 8, 1)])
@pytest.mark.parametrize('input_shape', [(8, 8), (8, 8, 1)])
def test_last_axis_of_size_1_is_optional(input_shape, shape):
  def keras_model_fn():
    return keras.Sequential(
        [keras.Input(input_shape), layers.Flatten(), layers.Dense(2)]
    )

  spec = (tf.TensorSpec((None, *shape)), _SPEC[1])
  # Keras accepts both, so do we.
  keras_model_fn()(tf.zeros((3, *shape)))
  assert _model(keras_model_fn, spec).input_spec == spec


def test_repr_describes_the_model():
  # A kernel of 4 x 3 and a bias; 3 scales and 3 shifts; 3 means and variances.
  assert repr(_model(_with_norm)) == (
      "<BatchNormModel 'with_norm': 21 trainable and 6 other parameters, 1"
      ' batch normalization layers, x: float32 (None, 4), y: int32 (None,)>'
  )


class _CountedCalls:

  def __init__(self, build):
    self._build = build
    self.count = 0

  def __call__(self):
    self.count += 1
    return self._build()


def _shared_parts():
  """Models that share trained layers with a model that existed before."""
  with_norm = _with_norm()
  built, unbuilt = _Subclassed(), _Subclassed()
  built(tf.zeros((1, 4)))
  dense, norm = layers.Dense(3), layers.BatchNormalization(
      center=False, scale=False
  )
  dense.build((None, 4))
  norm.build((None, 4))

  class WithPart(keras.Model):

    def __init__(self, part):
      super().__init__()
      self.part = part
      self.last = layers.Dense(3)

    def call(self, x):
      return self.last(self.part(x))

  return {
      'functional': lambda: with_norm,
      'subclassed': lambda: built,
      'not built': lambda: unbuilt,
      'same layers': lambda: keras.Model(with_norm.inputs, with_norm.outputs),
      'part': lambda: keras.Sequential([with_norm, layers.Dense(3)]),
      'layer': lambda: keras.Sequential([keras.Input((4,)), dense]),
      'part of subclassed': lambda: WithPart(with_norm),
      'layer of subclassed': lambda: WithPart(dense),
      'statistics of subclassed': lambda: WithPart(norm),
      'statistics': lambda: keras.Sequential(
          [keras.Input((4,)), norm, layers.Dense(3)]
      ),
  }


def test_a_function_must_build_new_models():
  for kind, keras_model_fn in _shared_parts().items():
    build = _CountedCalls(keras_model_fn)
    with pytest.raises(
        ValueError,
        match='keras_model_fn must build a new model at each call.*copy_model',
    ):
      _model(build)
    assert build.count <= 2, kind


def test_a_function_that_keeps_its_model_is_an_error_later():
  keep = []

  def keras_model_fn():
    keep.append(_with_norm())
    return keep[0]

  model = _model(keras_model_fn)
  with pytest.raises(ValueError, match='must build a new model'):
    model.to_keras()


@pytest.mark.parametrize('is_subclassed', [False, True])
def test_parts_that_training_does_not_change_may_be_shared(is_subclassed):
  normalization = layers.Normalization()
  normalization.adapt(np.arange(12.0).reshape(3, 4))
  backbone = _with_norm()
  backbone.trainable = False

  class Subclassed(keras.Model):

    def __init__(self):
      super().__init__()
      self.parts = [normalization, backbone, layers.Dense(3)]

    def call(self, x):
      for part in self.parts:
        x = part(x)
      return x

  model = _model(
      Subclassed
      if is_subclassed
      else lambda: keras.Sequential(
          [keras.Input((4,)), normalization, backbone, layers.Dense(3)]
      )
  )
  assert len(model.to_keras().weights) == len(model.variables)


@pytest.mark.parametrize('build', [_with_norm, _Subclassed])
def test_the_check_changes_no_random_number(build):
  keras.utils.set_random_seed(1)
  keras_model_fn = _CountedCalls(build)
  model = _model(keras_model_fn)
  found = build()
  # A model without variables costs nothing.
  assert keras_model_fn.count == 1 + (build is _Subclassed)
  keras.utils.set_random_seed(1)
  expected = build()
  expected(tf.zeros((1, 4)))
  for a, b in zip(
      model.keras_model.get_weights(), expected.get_weights(), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  second = build()
  for each in (found, second):
    each(tf.zeros((1, 4)))
  for a, b in zip(found.get_weights(), second.get_weights(), strict=True):
    np.testing.assert_array_equal(a, b)


def test_roles_of_personal_position_encodings():
  def keras_model_fn():
    inputs = keras.Input((4,))
    inner_inputs = keras.Input((6,))
    x = PositionEncoding(personal_share=0.5)(inner_inputs)
    inner = keras.Model(inner_inputs, layers.ReLU()(x), name='inner')
    x = layers.Dense(6)(inputs)
    x = PositionEncoding(trainable=False, personal_share=1)(x)
    x = layers.BatchNormalization()(PositionEncoding()(x))
    return keras.Model(inputs, layers.Dense(3)(inner(x)))

  model = _model(keras_model_fn)
  phase = ('personal_phase', False, False)
  kernel = ('kernel', True, False)
  found = _roles(model)
  assert sorted(found) == sorted([*[kernel] * 4, *_NORM, phase, phase])
  infos = [v for v in model.variables if v.role is Role.PERSONAL_PHASE]
  assert [v.name.rsplit('_', 1)[0] for v in infos] == ['personal_phase'] * 2
  for info in infos:
    assert info.name == f'personal_phase_{model.variables.index(info)}'
    assert info.shape == ()
    assert info.dtype == tf.float32
    assert info.batch_norm is None
    assert not info.is_statistic
  assert {v.batch_norm for v in model.variables} == {None, 0}
  weights = model.from_keras(model.to_keras())
  assert len(model.from_model_weights(weights)) == len(found)


def test_shared_position_encodings_are_not_personal():
  model = _sequential(
      lambda: [
          layers.Dense(3),
          PositionEncoding(),
          PositionEncoding(amplitude=0, personal_share=1),
      ]
  )
  assert {info.role for info in model.variables} == {Role.KERNEL}
