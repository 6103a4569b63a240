"""Tests of the algorithms with local variables."""

import collections

import client_rounds
import keras
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow_federated as tff

from tff_bn.processes.stateful_process import StatefulLearningProcess

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_SIZES = (20, 7, 33)
_LOCAL = {
    'fed_bn': reference.AFFINE + reference.STATISTICS,
    'silo_bn': reference.STATISTICS,
    'local_affine': reference.AFFINE,
    'single': tuple(range(8)),
}
_UNIFORM = ('fed_bn', 'single')


def _process(name):
  """Returns a model and a process, which tests share."""
  return client_rounds.toy_process(
      f'build_{name}',
      momentum=0.5,
      client_weighting='uniform' if name in _UNIFORM else 'num_examples',
  )


@pytest.mark.parametrize('name', _LOCAL)
def test_the_type_shows_local_variables(name):
  model, process = _process(name)
  assert isinstance(process, StatefulLearningProcess)
  local = {model.variables[i].name for i in _LOCAL[name]}
  shared = {v.name for v in model.variables} - local

  signature = process.next.type_signature
  state_type, client_type, data_type = signature.parameter
  assert client_type.placement is tff.CLIENTS
  assert isinstance(data_type.member, tff.SequenceType)
  assert {n for n, _ in tff.structure.iter_elements(client_type.member)} == (
      local
  )
  assert signature.result.client_states == client_type
  assert not local & set(client_rounds.names_at_server(signature))
  weights = tff.FederatedType(
      state_type.member.global_model_weights, tff.SERVER
  )
  names = set(client_rounds.names_at_server(weights))
  assert names - {'trainable', 'non_trainable'} == shared


@pytest.mark.parametrize('name', _LOCAL)
def test_rounds_equal_numpy_in_float64(toy, name):
  model, process = _process(name)
  training = client_rounds.Training(process, len(_SIZES))
  data = client_rounds.datasets(toy, _SIZES)
  initial = model.from_model_weights(model.initial_weights)
  expected = [list(initial) for _ in _SIZES]

  # The second client misses one round.
  for sampled in [(0, 1, 2), (0, 2), (0, 1, 2)]:
    for i in sampled:
      expected[i], _, _ = reference.train(
          expected[i],
          reference.split(*toy.arrays(_SIZES[i], i)),
          0.1,
          momentum=0.5,
      )
    counts = [1 if name in _UNIFORM else _SIZES[i] for i in sampled]
    for j in set(range(8)) - set(_LOCAL[name]):
      mean = reference.average([expected[i][j] for i in sampled], counts)
      for weights in expected:
        weights[j] = mean
    training.next_round(data, sampled)

  for found, truth in zip(
      training.client_weights(model), expected, strict=True
  ):
    for value, array in zip(found, truth):
      np.testing.assert_allclose(value, array, rtol=1e-10, atol=1e-12)
  for j, value in enumerate(training.weights(model)):
    truth = initial[j] if j in _LOCAL[name] else expected[0][j]
    np.testing.assert_allclose(value, truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('name', ['fed_bn', 'silo_bn', 'local_affine'])
def test_a_model_without_batch_norm_is_refused(toy, name):
  def keras_model_fn():
    return keras.Sequential(
        [
            keras.Input((4,), dtype='float64'),
            keras.layers.LayerNormalization(name='bn', dtype='float64'),
            keras.layers.Dense(3, name='head', dtype='float64'),
        ]
    )

  with pytest.raises(ValueError, match='has none of them .*bn, head'):
    client_rounds.build(f'build_{name}', toy.model(keras_model_fn))


def test_local_affine_needs_a_scale_or_a_shift(toy):
  def keras_model_fn():
    return keras.Sequential(
        [
            keras.Input((4,), dtype='float64'),
            keras.layers.BatchNormalization(
                center=False, scale=False, dtype='float64'
            ),
            keras.layers.Dense(3, dtype='float64'),
        ]
    )

  model = toy.model(keras_model_fn)
  client_rounds.build('build_silo_bn', model)
  with pytest.raises(ValueError, match='local_affine keeps .*shift'):
    client_rounds.build('build_local_affine', model)


def test_single_refuses_options_of_the_server():
  with pytest.raises(ValueError, match='server_optimizer has no effect'):
    client_rounds.toy_process('build_single', server_optimizer=_SGD(1.0))


def test_the_process_checks_its_types():
  _, good = _process('fed_bn')

  @tff.tensorflow.computation
  def unplaced():
    return 0

  def make(**kwargs):
    arguments = collections.OrderedDict(
        initialize=good.initialize,
        initialize_client=good.initialize_client,
        next_fn=good.next,
        get_model_weights_fn=None,
        get_client_model_weights_fn=None,
    )
    arguments.update(kwargs)
    return StatefulLearningProcess(**arguments)

  make()
  _, other = _process('silo_bn')
  with pytest.raises(TypeError, match='initialize must return a state'):
    make(initialize=unplaced)
  with pytest.raises(TypeError, match='initialize_client must take'):
    make(initialize=other.initialize)
  with pytest.raises(TypeError, match='next must take'):
    make(next_fn=other.next)
  _, stateless = client_rounds.toy_process('build_fed_avg')
  with pytest.raises(TypeError, match='next must take'):
    make(next_fn=stateless.next)


def test_evaluation_state_has_the_arguments_of_next():
  _, good = client_rounds.toy_process('build_hbn')

  @tff.federated_computation(good.initialize.type_signature.result)
  def other_arguments(state):
    return state

  arguments = dict(
      initialize=good.initialize,
      initialize_client=good.initialize_client,
      next_fn=good.next,
      get_model_weights_fn=None,
      get_client_model_weights_fn=None,
  )
  process = StatefulLearningProcess(
      **arguments, evaluation_state=good.evaluation_state
  )
  assert process.evaluation_state is good.evaluation_state
  assert StatefulLearningProcess(**arguments).evaluation_state is None
  for wrong in (other_arguments, good.next):
    with pytest.raises(TypeError, match='evaluation_state must take the'):
      StatefulLearningProcess(**arguments, evaluation_state=wrong)
