"""Tests of algorithms with local, shared or fixed layers."""

import functools

import client_rounds
import keras
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn.keras_model.partition import FEDAVG
from tff_bn.keras_model.partition import Partition
from tff_bn.processes import averaging
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.training import evaluation

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_SIZES = (20, 7, 33)
_HEAD = (6, 7)
_BODY = tuple(range(6))
# The builder, its options, and the positions of local variables.
_CASES = {
    'fed_avg': ('fed_avg', (('local_layers', 'log.*'),), _HEAD),
    'fed_bn': (
        'fed_bn',
        (('local_layers', 'logits'),),
        (*reference.AFFINE, *reference.STATISTICS, *_HEAD),
    ),
    'silo_bn': (
        'silo_bn',
        (('local_layers', 'hidden|logits'),),
        (0, 1, *reference.STATISTICS, *_HEAD),
    ),
    'local_affine': (
        'local_affine',
        (('local_layers', 'norm'),),
        (*reference.AFFINE, *reference.STATISTICS),
    ),
    'fed_per': ('fed_per', (), _HEAD),
    'fed_per_of_two': (
        'fed_per',
        (('head_layers', 'norm|logits'),),
        range(2, 8),
    ),
    'fed_rep': ('fed_rep', (), _HEAD),
    'lg_fed_avg': ('lg_fed_avg', (), _BODY),
}
_ONE_PHASE = [name for name in _CASES if name != 'fed_rep']


def _process(case):
  builder, options, local = _CASES[case]
  model, process = client_rounds.toy_process(
      f'build_{builder}', momentum=0.5, **dict(options)
  )
  return model, process, tuple(local)


@pytest.mark.parametrize('case', _CASES)
def test_the_type_shows_local_variables(case):
  model, process, positions = _process(case)
  assert isinstance(process, StatefulLearningProcess)
  local = {model.variables[i].name for i in positions}
  shared = {v.name for v in model.variables} - local

  signature = process.next.type_signature
  state_type, client_type, _ = signature.parameter
  assert {n for n, _ in tff.structure.iter_elements(client_type.member)} == (
      local
  )
  assert not local & set(client_rounds.names_at_server(signature))
  names = set(
      client_rounds.names_at_server(
          tff.FederatedType(state_type.member.global_model_weights, tff.SERVER)
      )
  )
  assert names - {'trainable', 'non_trainable'} == shared
  assert process.has_client_models


def _numpy_rounds(toy, model, local, train, rounds):
  """Runs rounds in NumPy; returns the clients' models."""
  initial = model.from_model_weights(model.initial_weights)
  expected = [list(initial) for _ in _SIZES]
  batches = client_rounds.batches(toy, _SIZES)
  for sampled in rounds:
    for i in sampled:
      expected[i] = train(expected[i], batches[i])
    counts = [_SIZES[i] for i in sampled]
    for j in set(range(8)) - set(local):
      mean = reference.average([expected[i][j] for i in sampled], counts)
      for weights in expected:
        weights[j] = mean
  return expected


def _check_rounds(toy, model, process, local, train):
  """Compares three rounds with NumPy."""
  rounds = [(0, 1, 2), (0, 2), (0, 1, 2)]  # A client misses one of them.
  training = client_rounds.Training(process, len(_SIZES))
  data = client_rounds.datasets(toy, _SIZES)
  for sampled in rounds:
    training.next_round(data, sampled)
  expected = _numpy_rounds(toy, model, local, train, rounds)
  for found, truth in zip(
      training.client_weights(model), expected, strict=True
  ):
    client_rounds.assert_close(found, truth)
  initial = model.from_model_weights(model.initial_weights)
  client_rounds.assert_close(
      training.weights(model),
      [initial[j] if j in local else expected[0][j] for j in range(8)],
  )


@pytest.mark.parametrize('case', _ONE_PHASE)
def test_rounds_equal_numpy(toy, case):
  model, process, local = _process(case)

  def train(weights, batches):
    return reference.train(weights, batches, 0.1, momentum=0.5)[0]

  _check_rounds(toy, model, process, local, train)


def _part(before, after, positions):
  return [
      a if i in positions else b for i, (b, a) in enumerate(zip(before, after))
  ]


def _numpy_fed_rep(
    weights, batches, head=_HEAD, head_steps=None, local_epochs=1
):
  """Trains the head, then the other variables, in NumPy."""
  body = set(range(8)) - set(head)
  head_batches = batches
  if head_steps is not None:
    head_batches = (batches * head_steps)[:head_steps]
  train = functools.partial(reference.train, learning_rate=0.1, momentum=0.5)
  after, _, _ = train(
      weights, head_batches, gradients_fn=reference.without(body)
  )
  weights = _part(weights, after, head)
  after, _, _ = train(
      weights, batches * local_epochs, gradients_fn=reference.without(head)
  )
  return _part(weights, after, body)


@pytest.mark.parametrize(
    ('options', 'head'),
    [
        ({}, _HEAD),
        # Epochs are of the second phase only.
        pytest.param(
            dict(head_steps=5, local_epochs=2), _HEAD, marks=pytest.mark.slow
        ),
        # The statistics of this batch normalization change with the head only.
        (dict(head_layers='norm|logits'), (2, 3, 4, 5, 6, 7)),
    ],
    ids=['default', 'head_steps', 'with_batch_norm'],
)
def test_rounds_of_fed_rep_equal_numpy(toy, options, head):
  model, process = client_rounds.toy_process(
      'build_fed_rep', momentum=0.5, **options
  )
  options = {k: v for k, v in options.items() if k != 'head_layers'}
  train = functools.partial(_numpy_fed_rep, head=head, **options)
  _check_rounds(toy, model, process, head, train)


def test_fed_rep_clips_the_gradients_of_a_phase_alone(toy):
  model, process = client_rounds.toy_process(
      'build_fed_rep', client_gradient_clip_norm=0.05, local_steps=1
  )
  training = client_rounds.Training(process, 1)
  metrics = training.next_round([toy.dataset(8, 0)])
  (after,) = training.client_weights(model)
  before = model.from_model_weights(model.initial_weights)
  for positions in (_HEAD, (0, 1, 2, 3)):
    change = np.sqrt(
        sum(np.sum((after[p] - before[p]) ** 2) for p in positions)
    )
    np.testing.assert_allclose(change, 0.1 * 0.05, rtol=1e-9)
  # The examples of the second phase only.
  assert metrics['client_work']['train']['num_examples'] == 8


def test_fed_rep_with_fed_prox_penalizes_the_representation(toy):
  model, process = client_rounds.toy_process(
      'build_fed_prox',
      build_process=algorithms.build_fed_rep,
      proximal_strength=0.7,
  )

  def train(weights, batches):
    after, _, _ = reference.train(
        weights, batches, 0.1, gradients_fn=reference.without(_BODY)
    )
    weights = _part(weights, after, _HEAD)
    after, _, _ = reference.train(
        weights,
        batches,
        0.1,
        gradients_fn=reference.without(_HEAD),
        extra=reference.proximal(weights, 0.7, _BODY),
    )
    return _part(weights, after, _BODY)

  _check_rounds(toy, model, process, _HEAD, train)


def test_fed_babu_fixes_the_head(toy):
  model, process = client_rounds.toy_process(
      'build_fed_babu', momentum=0.5, client_weight_decay=0.01
  )
  assert isinstance(process, tff.learning.templates.LearningProcess)

  def train(weights, batches):
    after, _, _ = reference.train(
        weights,
        batches,
        0.1,
        momentum=0.5,
        weight_decay=0.01,
        gradients_fn=reference.without(_HEAD),
        # The weights of the head do not decay.
        extra=lambda now: [
            -0.01 * w if i in _HEAD else 0.0 for i, w in enumerate(now)
        ],
    )
    return _part(weights, after, _BODY)

  training = client_rounds.run(process, client_rounds.datasets(toy, _SIZES), 2)
  expected = _numpy_rounds(toy, model, (), train, [(0, 1, 2)] * 2)
  client_rounds.assert_close(training.weights(model), expected[0])
  # The head is never sent.
  weights_type = process.initialize.type_signature.result.member[0]
  assert [tuple(t.shape) for t in weights_type.trainable] == [
      v.shape for v in model.variables[:4]
  ]
  other = client_rounds.toy_model()
  changed = [v + 1 for v in other.from_model_weights(other.initial_weights)]
  with pytest.raises(ValueError, match='2 of .*cannot change .*logits'):
    process.set_model_weights(
        process.initialize(), model.to_model_weights(changed)
    )


@pytest.mark.slow
def test_fed_babu_equals_fed_avg_of_a_frozen_head(toy):
  def frozen():
    keras_model = toy.keras_model()
    keras_model.get_layer('logits').trainable = False
    return keras_model

  data = client_rounds.datasets(toy, _SIZES)
  model, process = client_rounds.toy_process('build_fed_babu')
  found = client_rounds.run(process, data, 2).weights(model)
  model = toy.model(frozen)
  fed_avg = algorithms.build_fed_avg(model, _SGD(0.1))
  expected = client_rounds.run(fed_avg, data, 2).weights(model)
  client_rounds.assert_close(found, expected)


def _nested(toy):
  layers = keras.layers
  backbone = keras.Sequential(
      [
          keras.Input((4,), dtype=toy.dtype),
          layers.Dense(5, dtype=toy.dtype, name='conv1'),
          layers.BatchNormalization(dtype=toy.dtype, name='norm'),
      ],
      name='backbone',
  )
  inputs = keras.Input((4,), dtype=toy.dtype)
  x = layers.Dense(5, dtype=toy.dtype, name='conv1')(backbone(inputs))
  outputs = layers.Dense(3, dtype=toy.dtype, name='head')(x)
  return keras.Model(inputs, outputs, name='nested')


@pytest.mark.parametrize(
    ('pattern', 'local'),
    [
        ('backbone', {'backbone/conv1', 'backbone/norm'}),
        ('backbone/conv1', {'backbone/conv1'}),
        ('conv1', {'backbone/conv1', 'conv1'}),
        ('back.*1|head', {'backbone/conv1', 'head'}),
    ],
)
def test_layers_of_nested_models(toy, pattern, local):
  model = toy.model(lambda: _nested(toy))
  process = algorithms.build_fed_avg(model, _SGD(0.1), local_layers=pattern)
  client_type = process.next.type_signature.parameter[1].member
  assert {n for n, _ in tff.structure.iter_elements(client_type)} == {
      v.name for v in model.variables if v.path in local
  }


def test_layers_that_are_not_there(toy):
  model = client_rounds.toy_model()
  for builder, argument in (
      ('fed_avg', 'local_layers'),
      ('fed_bn', 'local_layers'),
      ('fed_per', 'head_layers'),
      ('lg_fed_avg', 'head_layers'),
      ('fed_babu', 'head_layers'),
      ('fed_rep', 'head_layers'),
  ):
    build = functools.partial(client_rounds.build, f'build_{builder}', model)
    with pytest.raises(
        ValueError,
        match=f"{argument}='logit' matches .* no .*hidden, norm, logits",
    ):
      build(**{argument: 'logit'})
    with pytest.raises(TypeError, match=f'{argument} must be .*but is 3'):
      build(**{argument: 3})
    with pytest.raises(ValueError, match=f'{argument}.*is no regular expr'):
      build(**{argument: '('})


@pytest.mark.parametrize(
    ('builder', 'argument'),
    [
        ('fed_avg', 'local_layers'),
        ('fed_bn', 'local_layers'),
        ('fed_per', 'head_layers'),
        ('fed_rep', 'head_layers'),
        ('fed_babu', 'head_layers'),
    ],
)
def test_all_layers_are_too_many(builder, argument):
  with pytest.raises(ValueError, match=r"_layers='\.\*' leaves no .* single"):
    client_rounds.build(
        f'build_{builder}', client_rounds.toy_model(), **{argument: '.*'}
    )


def test_frozen_layers_are_no_layers_to_choose(toy):
  def keras_model_fn():
    keras_model = toy.keras_model()
    keras_model.get_layer('logits').trainable = False
    return keras_model

  model = toy.model(keras_model_fn)
  with pytest.raises(ValueError, match="'logits' matches .* has hidden, norm"):
    algorithms.build_fed_avg(model, _SGD(0.1), local_layers='logits')
  # The head is the last layer that is trained.
  process = algorithms.build_lg_fed_avg(model, _SGD(0.1))
  names = set(client_rounds.names_at_server(process.next.type_signature))
  assert {'kernel_0', 'kernel_1'} <= names
  assert 'scale_2' not in names


def test_a_head_by_name_only_is_ambiguous(toy):
  def keras_model_fn():
    keras_model = _nested(toy)
    outputs = keras_model.get_layer('conv1').output
    return keras.Model(keras_model.input, outputs, name='short')

  with pytest.raises(ValueError, match="'conv1' .* there is 'backbone/conv1'"):
    algorithms.build_fed_per(toy.model(keras_model_fn), _SGD(0.1))


def test_a_model_without_kernels_has_no_default_head(toy):
  def keras_model_fn():
    inputs = keras.Input((4,), dtype='float64')
    outputs = keras.layers.BatchNormalization(dtype='float64')(inputs)
    return keras.Model(inputs, outputs)

  with pytest.raises(ValueError, match='no trained layer with a kernel'):
    algorithms.build_fed_rep(toy.model(keras_model_fn), _SGD(0.1))


@pytest.mark.parametrize(
    ('builder', 'options', 'message'),
    [
        ('fed_rep', dict(shuffle_times=1.0), 'shuffle_times.*FedRep.*use 0'),
        ('fed_babu', dict(shuffle_times=1.0), 'shuffle_times.*FedBABU.*use 0'),
        ('fed_rep', dict(head_steps=0), 'head_steps=0 must be a whole'),
        ('ditto', dict(ditto_strength=-1), 'ditto_strength=-1 must be'),
    ],
)
def test_wrong_values(builder, options, message):
  with pytest.raises(ValueError, match=message):
    client_rounds.build(
        f'build_{builder}', client_rounds.toy_model(), **options
    )


@pytest.mark.parametrize('builder', ['fedtan', 'fbn', 'hbn', 'single'])
def test_other_builders_have_no_local_layers(builder):
  with pytest.raises(TypeError, match="'local_layers' is not an argument of"):
    client_rounds.build(
        f'build_{builder}',
        client_rounds.toy_model(f'build_{builder}'),
        local_layers='logits',
    )


def test_partitions_of_a_user():
  partition = Partition('mine', FEDAVG.local, local_layers='hidden')
  process = averaging.build_partitioned(
      client_rounds.toy_model(), partition, _SGD(0.1)
  )
  assert not {'kernel_0', 'kernel_1'} & set(
      client_rounds.names_at_server(process.next.type_signature)
  )


def test_heads_of_unseen_clients_are_means(toy):
  model, process, _ = _process('fed_per')
  data = client_rounds.datasets(toy, _SIZES)
  training = client_rounds.run(process, data, 1)
  weights = [
      process.get_client_model_weights(training.state, client)
      for client in training.clients
  ]
  merged = model.from_model_weights(
      evaluation.merge_client_weights(model, weights)
  )
  clients = training.client_weights(model)
  client_rounds.assert_close(
      merged,
      [np.mean([own[j] for own in clients], axis=0) for j in range(8)],
  )


# Ditto.


def _ditto(**options):
  return client_rounds.toy_process(
      'build_ditto', momentum=0.5, ditto_strength=0.3, **options
  )


def test_ditto_equals_numpy(toy):
  model, process = _ditto()
  training = client_rounds.Training(process, 3)
  data = client_rounds.datasets(toy, _SIZES)
  batches = client_rounds.batches(toy, _SIZES)
  shared = model.from_model_weights(model.initial_weights)
  personal = [list(shared) for _ in _SIZES]
  for sampled in [(0, 1, 2), (0, 2), (0, 1, 2)]:
    training.next_round(data, sampled)
    for i in sampled:
      personal[i], _, _ = reference.train(
          personal[i],
          batches[i],
          0.1,
          momentum=0.5,
          extra=reference.proximal(shared, 0.3, range(8)),
      )
    shared = reference.average_models(
        [
            reference.train(shared, batches[i], 0.1, momentum=0.5)[0]
            for i in sampled
        ],
        [_SIZES[i] for i in sampled],
    )
  client_rounds.assert_close(training.weights(model), shared)
  for found, truth in zip(
      training.client_weights(model), personal, strict=True
  ):
    client_rounds.assert_close(found, truth)


def test_the_type_of_ditto_shows_personal_models():
  model, process = _ditto()
  signature = process.next.type_signature
  client_type = signature.parameter[1].member
  names = {f'personal_{v.name}' for v in model.variables}
  assert {n for n, _ in tff.structure.iter_elements(client_type)} == names
  assert not names & set(client_rounds.names_at_server(signature))
  assert process.has_client_models


def test_new_clients_of_ditto_start_with_the_servers_model(toy):
  model, process = _ditto()
  training = client_rounds.run(process, client_rounds.datasets(toy, _SIZES), 1)
  new = process.initialize_client(training.state)
  client_rounds.assert_close(
      model.from_model_weights(
          process.get_client_model_weights(training.state, new)
      ),
      training.weights(model),
  )


def test_ditto_keeps_the_models_of_clients_without_update(toy):
  model, process = _ditto()
  training = client_rounds.run(process, client_rounds.datasets(toy, (20, 7)), 1)
  before = training.client_weights(model)
  training.next_round(client_rounds.datasets_without_update(toy))
  for found, truth in zip(training.client_weights(model), before, strict=True):
    client_rounds.assert_same(found, truth)


def test_ditto_keeps_a_personal_model_if_one_of_the_trainings_fails(toy):
  model, process = _ditto()
  state = process.initialize()
  weights = model.from_model_weights(model.initial_weights)
  huge = process.set_model_weights(
      state, model.to_model_weights([1e200 * w for w in weights])
  )
  for server, client in ((state, huge), (huge, state)):
    own = process.initialize_client(client)
    output = process.next(server, [own], [toy.dataset(8, 0)])
    client_rounds.assert_same(output.client_states[0], own)


def test_a_correction_of_ditto_corrects_the_servers_model(toy):
  data = client_rounds.datasets(toy, _SIZES)
  model, process = client_rounds.toy_process(
      'build_fed_prox',
      build_process=algorithms.build_ditto,
      proximal_strength=0.7,
  )
  training = client_rounds.run(process, data, 1)
  shared = model.from_model_weights(model.initial_weights)
  batches = client_rounds.batches(toy, _SIZES)
  for strength, found in (
      (0.7, [training.weights(model)]),
      (1.0, training.client_weights(model)),  # Ditto's default.
  ):
    expected = [
        reference.train(
            shared,
            own,
            0.1,
            extra=reference.proximal(shared, strength, range(8)),
        )[0]
        for own in batches
    ]
    if len(found) == 1:
      expected = [reference.average_models(expected, _SIZES)]
    for values, truth in zip(found, expected, strict=True):
      client_rounds.assert_close(values, truth)
