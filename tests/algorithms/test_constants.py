"""Variables that training cannot change: no algorithm touches or sends them.

The truth is the same algorithm for the rest of the model, with the frozen part
applied to the data beforehand.
"""

import client_rounds
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import toy_problem

from tff_bn import algorithms
from tff_bn import analysis
from tff_bn import partition
from tff_bn.processes import averaging
from tff_bn.processes.short_rounds import ShortRounds
from tff_bn.runtime import imported_graph

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_LAYERS = keras.layers
_SGD = tff.learning.optimizers.build_sgdm
_WIDTH = 6


@pytest.fixture(autouse=True)
def _all_weights_are_large(monkeypatch):
  # The shapes in graphs are still small.
  monkeypatch.setattr(imported_graph, '_LARGE_CONSTANT_BYTES', 64)


class _Shifted(tff.aggregators.WeightedAggregationFactory):
  """The mean plus a constant, which no variable survives that is aggregated."""

  def create(self, value_type, weight_type):
    mean = tff.aggregators.MeanFactory().create(value_type, weight_type)

    @tff.tensorflow.computation(value_type)
    def shifted(value):
      return tf.nest.map_structure(lambda v: v + tf.cast(0.125, v.dtype), value)

    @tff.federated_computation(
        mean.initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
        tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, value, weight):
      output = mean.next(state, value, weight)
      return tff.templates.MeasuredProcessOutput(
          output.state,
          tff.federated_map(shifted, output.result),
          output.measurements,
      )

    return tff.templates.AggregationProcess(mean.initialize, next_fn)


def _dense(units, seed, name):
  return _LAYERS.Dense(
      units,
      kernel_initializer=keras.initializers.GlorotUniform(seed=seed),
      dtype='float64',
      name=name,
  )


def _norm(name):
  return _LAYERS.BatchNormalization(
      momentum=0.75, epsilon=2**-10, dtype='float64', name=name
  )


def _backbone():
  """Normalization, and a frozen model with batch normalization."""
  normalization = _LAYERS.Normalization(dtype='float64', name='scaling')
  normalization.adapt(np.random.default_rng(0).normal(1, 3, (50, 4)))
  frozen = keras.Sequential(
      [
          keras.Input((4,), dtype='float64'),
          _dense(_WIDTH, 1, 'frozen_hidden'),
          _norm('frozen_norm'),
          _LAYERS.Activation('tanh', dtype='float64'),
      ],
      name='backbone',
  )
  rng = np.random.default_rng(1)
  frozen.get_layer('frozen_norm').set_weights(
      [rng.uniform(0.01, 2, _WIDTH) for _ in range(4)]
  )
  frozen.trainable = False
  return [normalization, frozen]


def _head():
  return [
      _dense(5, 2, 'hidden'),
      _norm('norm'),
      _LAYERS.ReLU(dtype='float64'),
      _dense(3, 3, 'logits'),
  ]


def _sequential(width, layers):
  return keras.Sequential([keras.Input((width,), dtype='float64'), *layers])


def _datasets(toy, sizes):
  """The clients' data, and the same data after the frozen part."""
  backbone = _sequential(4, _backbone())
  plain, mapped = [], []
  for seed, size in enumerate(sizes):
    x, y = toy.arrays(max(size, 1), seed)
    for found, inputs in ((plain, x), (mapped, backbone(x))):
      data = tf.data.Dataset.from_tensor_slices((inputs, y))
      found.append(data.take(size).batch(8))
  return plain, mapped


_WITHOUT_AGGREGATOR = (
    *('build_centralized', 'build_single', 'build_fed_ap'),
    # These take weighted means only.
    *('build_fed_nova', 'build_fed_dyn'),
)
# Its clients have the most computations.
_QUICK = ('build_fedtan',)


def _computation(process):
  """The computation of the first round, with all messages."""
  computation = process.next
  if hasattr(computation, 'phases'):
    computation = computation.phases[0].computation
  return (
      computation.full if isinstance(computation, ShortRounds) else computation
  )


def _num_bytes(state):
  return sum(np.asarray(leaf).nbytes for leaf in tf.nest.flatten(state))


@pytest.mark.parametrize(
    'name',
    [
        pytest.param(name, marks=[] if name in _QUICK else pytest.mark.slow)
        for name in client_rounds.BUILDERS
    ],
)
def test_a_round_is_that_of_the_rest_of_the_model(toy, name):
  wide = toy_problem.Toy(shape=(_WIDTH,))
  whole = toy.model_for(name, lambda: _sequential(4, [*_backbone(), *_head()]))
  rest = wide.model_for(name, lambda: _sequential(_WIDTH, _head()))
  options = dict(momentum=0.5) if name == 'build_dsgd' else {}
  if name not in _WITHOUT_AGGREGATOR:
    options['model_aggregator'] = _Shifted()
  sizes = (20, 11, 0)  # The last client has no data.
  if name == 'build_centralized':
    sizes = sizes[:1]

  trained = []
  for model, data in zip((whole, rest), _datasets(toy, sizes)):
    process = client_rounds.build(name, model, **options)
    training = client_rounds.Training(process, len(sizes))
    training.next_round(data)
    trained.append(training)

  found, expected = trained
  initial = whole.from_model_weights(whole.initial_weights)
  assert len(whole.constants) == len(initial) - len(rest.variables) >= 9
  weights = [found.process.get_model_weights(found.state)]
  weights_of_rest = [expected.process.get_model_weights(expected.state)]
  if found.clients:
    for training, of_clients in zip(trained, (weights, weights_of_rest)):
      of_clients += [
          training.process.get_client_model_weights(training.state, client)
          for client in training.clients
      ]
  for of_whole, of_rest in zip(weights, weights_of_rest, strict=True):
    values = whole.from_model_weights(of_whole)
    for position in whole.constants:
      assert values[position].tobytes() == initial[position].tobytes()
    changing = [v for p, v in enumerate(values) if p not in whole.constants]
    for a, b in zip(changing, rest.from_model_weights(of_rest), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
  untrained = rest.initial_weights.trainable
  assert any(  # It has trained.
      np.any(a != b)
      for weights_of_one in weights_of_rest
      for a, b in zip(weights_of_one.trainable, untrained, strict=True)
  )
  # Neither sent nor in any state.
  assert analysis.computation_traffic(
      _computation(found.process)
  ) == analysis.computation_traffic(_computation(expected.process))
  assert _num_bytes(found.state) == _num_bytes(expected.state)
  assert _num_bytes(found.clients) == _num_bytes(expected.clients)


def _image_model():
  inputs = keras.Input((6, 6, 2))
  x = _LAYERS.Conv2D(4, 3, trainable=False)(inputs)
  frozen = _LAYERS.BatchNormalization(trainable=False)
  x = frozen(x)
  frozen.set_weights([np.full(4, v) for v in (2, -1, 0.5, 1e-3)])
  x = _LAYERS.BatchNormalization(momentum=0.5)(_LAYERS.Conv2D(3, 3)(x))
  x = _LAYERS.GlobalAveragePooling2D()(_LAYERS.ReLU()(x))
  return keras.Model(inputs, _LAYERS.Dense(3)(x))


def test_noise_changes_no_constants_of_images():
  """It once made a frozen moving variance negative."""
  images = toy_problem.Toy('float32', (6, 6, 2))
  model = images.model(_image_model)
  process = algorithms.build_fed_avg(
      model,
      _SGD(0.1),
      client_weighting='uniform',
      model_aggregator=(
          tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
              noise_multiplier=1.0, clients_per_round=3, clip=1.0
          )
      ),
  )
  training = client_rounds.Training(process, 3)
  data = [images.dataset(size, size) for size in (16, 9)]
  data.append(data[0].take(0))
  for _ in range(2):
    training.next_round(data)
  initial = model.from_model_weights(model.initial_weights)
  weights = process.get_model_weights(training.state)
  values = model.from_model_weights(weights)
  assert sorted(model.constants) == list(range(6))
  for position, (a, b) in enumerate(zip(values, initial)):
    assert np.all(np.isfinite(a))
    assert (a.tobytes() == b.tobytes()) == (position in model.constants)
  keras_model = model.to_keras(weights)
  for a, b in zip(keras_model.get_weights(), values):
    np.testing.assert_array_equal(a, b)


def _frozen_except(*names):
  model = _sequential(4, _head())
  for layer in model.layers:
    layer.trainable = layer.name in names
  return model


def test_the_shared_part_can_be_constant(toy):
  """FedBN sends nothing if only batch normalization is trained."""
  data = [toy.dataset(16, 0), toy.dataset(9, 1)]
  model = toy.model(lambda: _frozen_except('norm'))
  process = algorithms.build_fed_bn(model, _SGD(0.1))
  training = client_rounds.Training(process, 2)
  training.next_round(data)
  training.next_round(data)
  roles = ['scale', 'shift', 'moving_mean', 'moving_variance']
  for client in training.clients:
    assert [n.rpartition('_')[0] for n in client] == roles
  assert not analysis.computation_traffic(process.next).upload_bytes
  assert process.has_client_models
  after, before = (
      model.from_model_weights(weights)
      for weights in (
          process.get_client_model_weights(training.state, training.clients[0]),
          model.initial_weights,
      )
  )
  for position, (a, b) in enumerate(zip(after, before)):
    assert np.array_equal(a, b) == (position in model.constants)


@pytest.mark.parametrize(
    ('build', 'options'),
    [
        ('fed_bn', {}),
        ('fed_bn', {'local_layers': 'logits'}),
        ('silo_bn', {}),
        ('local_affine', {}),
    ],
)
def test_local_batch_norm_must_not_be_constant(toy, build, options):
  """It would be FedAvg."""
  model = toy.model(lambda: _frozen_except('logits'))
  with pytest.raises(
      ValueError,
      match=r'keeps the variables .* but training changes none of them in .*'
      r' frozen \(norm\)\. .* fedavg',
  ):
    getattr(algorithms, f'build_{build}')(model, _SGD(0.1), **options)


def test_frozen_scale_of_a_trained_layer_is_not_local(toy):
  def keras_model_fn():
    model = _sequential(4, _head())
    model.get_layer('norm').gamma.trainable = False
    return model

  model = toy.model(keras_model_fn)
  process = averaging.build_partitioned(model, partition.FEDBN, _SGD(0.1))
  names = [model.variables[p].name for p in model.constants]
  assert [name.partition('_')[0] for name in names] == ['scale']
  client = process.initialize_client(process.initialize())
  assert not set(names) & set(client)
  assert len(client) == 3


def test_other_constants_cannot_be_set(toy):
  model = toy.model(lambda: _frozen_except('norm', 'logits'))
  process = algorithms.build_fed_avg(model, _SGD(0.1))
  state = process.initialize()
  other = model.from_model_weights(process.get_model_weights(state))
  trained = [value + 1 for value in other]
  for position in model.constants:
    trained[position] = other[position]
  moved = process.set_model_weights(state, model.to_model_weights(trained))
  found = model.from_model_weights(process.get_model_weights(moved))
  for a, b in zip(found, trained):
    np.testing.assert_array_equal(a, b)
  # The next round starts from them.
  after = process.next(moved, [toy.dataset(8, 0).take(0)]).state
  found = model.from_model_weights(process.get_model_weights(after))
  for a, b in zip(found, trained):
    np.testing.assert_array_equal(a, b)

  trained[0] = trained[0] + 1e-9
  with pytest.raises(
      ValueError,
      match=r"1 of the model's 2 variables that training cannot change \(in the"
      r" layers 'hidden'\).* BatchNormModel\(lambda: model.to_keras\(weights\)",
  ):
    process.set_model_weights(state, model.to_model_weights(trained))
  # What the error says works.
  weights = model.to_model_weights(trained)
  again = toy.model(lambda: model.to_keras(weights))
  process = algorithms.build_fed_avg(again, _SGD(0.1))
  found = process.get_model_weights(process.initialize())
  for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(weights)):
    np.testing.assert_array_equal(a, b)


def test_a_models_constants_cannot_be_changed_by_accident(toy):
  """Whole models need states with values."""
  model = toy.model(lambda: _frozen_except('logits'))
  process = algorithms.build_fed_avg(model, _SGD(0.1))
  weights = process.get_model_weights(process.initialize())
  with pytest.raises(ValueError, match='read-only'):
    weights.non_trainable[0] += 1
  state_type = process.initialize.type_signature.result.member
  with pytest.raises(TypeError, match='cannot be called inside a computation'):
    tff.federated_computation(process.get_model_weights, state_type)
  assert process.get_model_weights.type_signature.result.is_equivalent_to(
      tff.to_type(
          type(weights)(
              *(
                  [tff.TensorType(v.dtype, v.shape) for v in part]
                  for part in weights
              )
          )
      )
  )


@pytest.mark.parametrize(
    ('name', 'local_steps', 'copies'),
    [
        ('build_moon', 2, 1),
        ('build_fedtan', 2, 2),
    ],
)
def test_computations_contain_constants_once(toy, name, local_steps, copies):
  """Each stage of FedTAN that needs them all; a stage carries what it used."""
  model = toy.model(lambda: _big_frozen(300))
  size = sum(model.variables[p].num_bytes for p in model.constants)
  assert size > 700_000
  process = client_rounds.build(name, model, local_steps=local_steps)
  assert _proto_size(process.next) // size == copies
  assert _proto_size(process.initialize) < size / 2
  if hasattr(process, 'initialize_client'):
    assert _proto_size(process.initialize_client) < size / 2


def _big_frozen(width):
  frozen = keras.Sequential([_dense(width, 1, 'in'), _dense(width, 2, 'out')])
  frozen.trainable = False
  return _sequential(4, [frozen, _dense(5, 3, 'hidden'), _norm('norm')])


def _proto_size(computation):
  proto = tff.framework.ConcreteComputation.get_proto(computation)
  return proto.ByteSize()
