"""Tests of personal position encodings in all algorithms."""

import collections
import functools

import client_rounds
import keras
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import toy_problem

import tff_bn
from tff_bn import algorithms
from tff_bn import analysis
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import Role
from tff_bn.processes import personal_phases
from tff_bn.processes import phased_process
from tff_bn.processes.stateful_process import StatefulLearningProcess

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_SIZES = (20, 7, 13)  # Unequal, with short last batches.
# Positions in the weights of dense, batch norm, encoding, ReLU, dense.
_PHASE = 6

_REFUSING = {
    'build_centralized': 'centralized training',
    'build_fedtan': 'FedTAN',
    'build_fedtan_ii': 'FedTAN',
}
# They keep phases as others do.
_ALIKE = frozenset(
    [
        'build_local_affine',
        'build_silo_bn',
        'build_fed_prox',
        'build_fed_bs',
        'build_fixbn',
        'build_moon',
        'build_dsgd',
        'build_fbn',
        'build_scaffold',
        'build_bn_scaffold',
        'build_fed_nova',
        'build_fed_dyn',
        'build_fed_stein',
        'build_fed_ap',
        'build_greg',
        'build_hbn',
    ]
)


def _model(toy, share=0.5, mode='add', amplitude=0.4, builder_name=''):
  return toy.model_for(
      builder_name,
      lambda: tff_bn.add_position_encodings(
          toy.keras_model(), mode, amplitude, personal_share=share
      ),
  )


def _deep_model():
  """Returns a model with two phases and no batch normalization."""

  def keras_model_fn():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(6, 'relu'),
            keras.layers.Dense(6, 'relu'),
            keras.layers.Dense(3),
        ]
    )
    return tff_bn.add_position_encodings(model, personal_share=1.0)

  return BatchNormModel(
      keras_model_fn,
      (tf.TensorSpec((None, 4)), tf.TensorSpec((None,), tf.int32)),
      lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
  )


@functools.cache
def _process(name, share=0.5, **options):
  """Returns a model and a process, which tests share."""
  model = _model(toy_problem.Toy(), share, builder_name=name)
  return model, client_rounds.build(name, model, **options)


def _datasets(toy):
  return client_rounds.datasets(toy, _SIZES)


def _first_clients(process, state, num=3):
  initial = process.initialize_client(state)
  return [process.personalize(initial, number) for number in range(num)]


def _training(process, num=3):
  """Returns a training of clients with phases."""
  training = client_rounds.Training(process, num)
  training.clients = _first_clients(process, training.state, num)
  return training


def _phases(client_states):
  """Returns one row for each client."""
  return np.array(
      [
          [v for n, v in state.items() if n.startswith('personal_phase_')]
          for state in client_states
      ]
  )


def _encodings(num_units, num_personal, phase, mode, amplitude):
  """Computes the sines unit by unit, in float64."""
  values = []
  for j in range(num_units):
    turns = j / num_units
    if j >= num_units - num_personal:
      turns += phase
    values.append(amplitude * np.sin(2 * np.pi * turns))
  return np.array(values) + (1 if mode == 'multiply' else 0)


def _gradients_with(encodings, mode):
  """Computes the gradients of the model with encodings from another model's.

  After batch normalization, an encoding that is added is a part of the shift;
  one that is multiplied by scales both the scale and the shift.
  """
  factor, summand = (1, encodings) if mode == 'add' else (encodings, 0)

  def gradients(weights, x, y, **kwargs):
    folded = list(weights)
    folded[2] = weights[2] * factor
    folded[3] = weights[3] * factor + summand
    loss, grads, *statistics = reference.gradients(folded, x, y, **kwargs)
    grads[2] = grads[2] * factor
    grads[3] = grads[3] * factor
    return loss, grads, *statistics

  return gradients


@pytest.mark.parametrize(
    ('mode', 'share', 'num_personal'),
    [
        ('add', 0.3, 2),
        pytest.param('multiply', 0.7, 4, marks=pytest.mark.slow),
    ],
)
def test_rounds_of_fed_avg_equal_numpy_in_float64(
    toy, mode, share, num_personal
):
  model = _model(toy, share, mode)
  process = algorithms.build_fed_avg(
      model, _SGD(0.1, 0.5), client_weight_decay=0.01, seed=7
  )
  training = _training(process)
  phases = _phases(training.clients)[:, 0].astype(np.float64)
  assert np.ptp(phases) > 0.1
  expected = training.weights(model)
  assert expected.pop(_PHASE) == 0

  for _ in range(3):
    trained = []
    for number, size in enumerate(_SIZES):
      encodings = _encodings(5, num_personal, phases[number], mode, 0.4)
      trained.append(
          reference.train(
              expected,
              reference.split(*toy.arrays(size, number)),
              0.1,
              momentum=0.5,
              weight_decay=0.01,
              gradients_fn=_gradients_with(encodings, mode),
          )
      )
    expected = reference.average_models([w for w, _, _ in trained], _SIZES)
    metrics = training.next_round(_datasets(toy))
    np.testing.assert_allclose(
        metrics['client_work']['train']['loss'],
        sum(loss for _, _, loss in trained) / sum(_SIZES),
        rtol=1e-10,
    )

  found = training.weights(model)
  assert found.pop(_PHASE) == 0
  client_rounds.assert_close(found, expected)
  np.testing.assert_array_equal(_phases(training.clients)[:, 0], phases)
  for own, phase in zip(training.client_weights(model), phases, strict=True):
    assert own.pop(_PHASE) == phase
    client_rounds.assert_same(own, found)


@pytest.mark.parametrize(
    'name',
    [
        pytest.param(n, marks=pytest.mark.slow) if n in _ALIKE else n
        for n in client_rounds.BUILDERS
    ],
)
def test_every_algorithm_trains_or_refuses(toy, name):
  if name in _REFUSING:
    message = (
        f'^{_REFUSING[name]} is impossible with personal position encodings, as'
        ' in the layers hidden_position of the model'
    )
    with pytest.raises(ValueError, match=message):
      client_rounds.build(name, _model(toy))
    return
  model, process = _process(name)
  assert isinstance(process, StatefulLearningProcess)
  assert process.has_client_models
  assert process.has_personal_state
  client_type = process.initialize_client.type_signature.result
  local = [n for n, _ in tff.structure.iter_elements(client_type)]
  phase_at = _PHASE + (name == 'build_hbn')  # Its layer has one more weight.
  assert local.count(f'personal_phase_{phase_at}') == 1
  names = set(client_rounds.names_at_server(process.next.type_signature))
  # FedBN and others have the names of shared variables in the type.
  assert name in ('build_single', 'build_lg_fed_avg') or 'kernel_0' in names
  assert not any('personal_phase' in n for n in names)

  training = _training(process)
  before = _phases(training.clients)
  assert len(np.unique(before)) == 3
  for _ in range(2):  # FixBN's second round belongs to its second phase.
    metrics = training.next_round(_datasets(toy))
  assert metrics['client_work']['num_dropped_clients'] == 0
  np.testing.assert_array_equal(_phases(training.clients), before)
  initial = model.from_model_weights(model.initial_weights)
  for own, phase in zip(
      training.client_weights(model), before[:, 0], strict=True
  ):
    assert own[phase_at] == phase
    assert all(np.all(np.isfinite(value)) for value in own)
    assert np.any(own[0] != initial[0])
  assert training.weights(model)[phase_at] == 0


def test_clients_send_the_same_as_without_encodings():
  sent = []
  for share in (0.0, 0.5):
    _, process = _process('build_fed_avg', share)
    sent.append(
        collections.Counter(
            (m.direction, m.shape, m.num_bytes)
            for m in analysis.messages(process.next)
        )
    )
  assert sent[0] == sent[1]


def test_all_encodings_are_shared_by_default(toy):
  """Such a process has no client states."""
  default = toy.model(
      lambda: tff_bn.add_position_encodings(toy.keras_model(), 'add', 0.4)
  )
  weights = []
  for model, process in (
      _process('build_fed_avg', 0.0),
      (default, client_rounds.build('build_fed_avg', default)),
  ):
    assert Role.PERSONAL_PHASE not in {v.role for v in model.variables}
    assert isinstance(process, tff.learning.templates.LearningProcess)
    training = client_rounds.run(process, _datasets(toy), 1)
    weights.append(process.get_model_weights(training.state))
  # Without phases, all clients have the server's model.
  process = algorithms.build_fed_avg(_model(toy, 1.0), _SGD(0.1))
  data = _datasets(toy)
  training = client_rounds.Training(process, len(data))
  training.clients = [process.initialize_client(training.state)] * len(data)
  training.next_round(data)
  found = process.get_model_weights(training.state)
  assert found.non_trainable.pop() == 0
  for part, other, own in zip(*weights, found, strict=True):
    for a, b, c in zip(part, other, own, strict=True):
      np.testing.assert_array_equal(a, b)
      # TensorFlow first adds constant encodings to beta.
      np.testing.assert_allclose(a, c, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    ('build', 'base'),
    [
        pytest.param(
            algorithms.build_moon,
            algorithms.build_fed_bn,
            marks=pytest.mark.slow,
        ),
        (algorithms.build_scaffold, algorithms.build_fbn),
    ],
)
def test_combinations(toy, build, base):
  model, plain = _process('build_fed_avg')
  process = build(model, _SGD(0.1), build_process=base)
  training = _training(process)
  names = set(training.clients[0])
  # The same model and seed: the same phases.
  expected = _phases(_first_clients(plain, plain.initialize()))
  np.testing.assert_array_equal(_phases(training.clients), expected)
  training.next_round(_datasets(toy))
  np.testing.assert_array_equal(_phases(training.clients), expected)
  # The rest of a client's state is trained as usual.
  assert set(training.clients[0]) == names


def test_moon_compares_models_with_the_clients_encodings(toy):
  """Rounds equal rounds in NumPy."""
  model = _model(toy, 1.0, 'multiply', 0.9)
  process = algorithms.build_moon(
      model, _SGD(0.1), contrastive_weight=0.7, temperature=0.4
  )
  training = _training(process)
  phases = _phases(training.clients)[:, 0]
  server = training.weights(model)
  server.pop(_PHASE)
  previous = [server] * 3

  def features(weights, x, encodings):
    folded = list(weights)
    folded[2] = weights[2] * encodings
    folded[3] = weights[3] * encodings
    return reference.features(folded, x)

  def train(number):
    encodings = _encodings(5, 5, float(phases[number]), 'multiply', 0.9)

    def feature_gradient(x):
      frozen = [features(w, x, encodings) for w in (server, previous[number])]
      return lambda z: 0.7 * reference.contrast(z, *frozen, 0.4)[1]

    return reference.train(
        server,
        reference.split(*toy.arrays(_SIZES[number], number)),
        0.1,
        gradients_fn=_gradients_with(encodings, 'multiply'),
        feature_gradient=feature_gradient,
    )[0]

  for _ in range(2):
    previous = [train(number) for number in range(3)]
    server = reference.average_models(previous, _SIZES)
    training.next_round(_datasets(toy))

  found = training.weights(model)
  found.pop(_PHASE)
  client_rounds.assert_close(found, server, 1e-9, 1e-11)


def test_phases_depend_only_on_seed_client_and_layer():
  model = _deep_model()

  def draw(seed, numbers):
    return np.array(
        [
            [*personal_phases.draw(model, seed, number).values()]
            for number in numbers
        ]
    )

  phases = draw(3, range(200))
  assert phases.dtype == np.float32
  assert phases.shape == (200, 2)
  for build in (algorithms.build_fed_avg, algorithms.build_single):
    process = build(model, _SGD(0.1), seed=3)
    initial = process.initialize_client(process.initialize())
    # The order of the clients does not matter.
    numbers = [5, 199, 5, 0]
    states = [process.personalize(initial, number) for number in numbers]
    np.testing.assert_array_equal(_phases(states), phases[numbers])
    assert not np.any(_phases([initial]))  # It stays as it is.
  expected = [
      np.random.default_rng([3, number, 0x70686173]).random(2, np.float32)
      for number in range(200)
  ]
  np.testing.assert_array_equal(phases, expected)
  assert len(np.unique(phases)) == 400
  assert 0 <= phases.min() < 0.02
  assert 0.98 < phases.max() < 1
  np.testing.assert_allclose(phases.mean(0), 0.5, atol=0.06)
  assert abs(np.corrcoef(phases.T)[0, 1]) < 0.2
  for seed in (4, -3, 2**32 - 1):
    assert not np.any(draw(seed, range(3)) == phases[:3])


def test_nothing_is_personal_without_phases():
  _, process = _process('build_single', 0.0)
  assert not process.has_personal_state
  client = process.initialize_client(process.initialize())
  assert process.personalize(client, 3) is client


def test_phased_processes_forward_it():
  _, first = _process('build_fed_bn')
  _, second = _process('build_fed_bn', seed=6)
  process = phased_process.build_phased_process([(1, first), (None, second)])
  assert process.has_personal_state
  state = process.initialize()
  expected = _first_clients(first, state)
  found = _first_clients(process, state)
  np.testing.assert_array_equal(_phases(found), _phases(expected))
  assert np.any(_phases(_first_clients(second, state)) != _phases(expected))


def test_personal_phases_are_no_batch_normalization():
  model = _deep_model()
  for build in (algorithms.build_fed_bn, algorithms.build_silo_bn):
    with pytest.raises(ValueError, match='has none of them'):
      build(model, _SGD(0.1))
  with pytest.raises(ValueError, match='as in the layers .*, .* of the model'):
    algorithms.build_centralized(model, _SGD(0.1))


def test_clients_that_are_left_out_keep_their_phases(toy):
  _, process = _process('build_fed_avg')
  training, alone = _training(process), _training(process)
  before = _phases(training.clients)

  good = toy.dataset(16, 1)
  metrics = training.next_round(
      [good, *client_rounds.datasets_without_update(toy)]
  )

  assert metrics['client_work']['num_dropped_clients'] == 1
  np.testing.assert_array_equal(_phases(training.clients), before)
  alone.next_round([good], [0])
  client_rounds.assert_close(
      *(
          process.get_model_weights(t.state).trainable
          for t in (training, alone)
      ),
      rtol=1e-12,
      atol=0,
  )


def test_mixed_precision():
  policy = 'mixed_float16'

  def keras_model_fn():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(5, dtype=policy)(inputs)
    x = keras.layers.ReLU(dtype=policy)(x)
    outputs = keras.layers.Dense(3, dtype=policy)(x)
    return tff_bn.add_position_encodings(
        keras.Model(inputs, outputs), 'multiply', 0.9, personal_share=1.0
    )

  rng = np.random.default_rng(0)
  keras.utils.set_random_seed(0)
  model = BatchNormModel(
      keras_model_fn,
      (tf.TensorSpec((None, 4)), tf.TensorSpec((None,), tf.int32)),
      lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
  )
  (phase,) = (v for v in model.variables if v.role is Role.PERSONAL_PHASE)
  assert phase.dtype == tf.float32
  process = algorithms.build_fed_avg(model, _SGD(0.1))
  training = _training(process, 2)
  phases, before = _phases(training.clients), training.weights(model)
  data = [
      tf.data.Dataset.from_tensor_slices(
          (rng.normal(size=(16, 4)).astype(np.float32), np.arange(16) % 3)
      )
      .map(lambda x, y: (x, tf.cast(y, tf.int32)))
      .batch(8)
  ] * 2
  metrics = training.next_round(data)
  assert metrics['client_work']['num_dropped_clients'] == 0
  np.testing.assert_array_equal(_phases(training.clients), phases)
  assert np.any(training.weights(model)[0] != before[0])
