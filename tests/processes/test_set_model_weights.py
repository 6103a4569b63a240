"""Tests of setting the model of processes whose clients have a state."""

import functools
import warnings

import client_rounds
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn.processes import phased_process
from tff_bn.processes import short_rounds
from tff_bn.processes.stateful_process import StatefulLearningProcess

pytestmark = pytest.mark.usefixtures('in_process_runtime')


def _phased():
  model, process = client_rounds.toy_process('build_fed_bn')
  _, other = client_rounds.toy_process('build_fed_bn', local_steps=1)
  return model, phased_process.build_phased_process(
      [(1, process), (None, other)]
  )


def _shared(name, **options):
  return functools.partial(client_rounds.toy_process, name, **options)


# With the roles that the server does not have.
_STATISTICS = {'moving_mean', 'moving_variance'}
_AFFINE = {'scale', 'shift'}
_PROCESSES = {
    'fed_bn': (_shared('build_fed_bn'), _STATISTICS | _AFFINE),
    'silo_bn': (_shared('build_silo_bn'), _STATISTICS),
    'local_affine': (_shared('build_local_affine'), _AFFINE),
    'scaffold': (_shared('build_scaffold', num_clients=5), set()),
    'scaffold_fed_bn': (
        _shared('build_scaffold', build_process=algorithms.build_fed_bn),
        _STATISTICS | _AFFINE,
    ),
    'fed_dyn': (_shared('build_fed_dyn', num_clients=5), set()),
    'moon': (_shared('build_moon'), set()),
    'phased': (_phased, _STATISTICS | _AFFINE),
}


def _shifted(model, by=1.0):
  """Weights that differ from the initial ones in each number."""
  return model.to_model_weights(
      [v + by for v in model.from_model_weights(model.initial_weights)]
  )


def _values(model, weights):
  return [np.asarray(v) for v in model.from_model_weights(weights)]


@pytest.mark.parametrize('name', _PROCESSES)
def test_the_server_takes_what_it_has(name):
  build, local = _PROCESSES[name]
  model, process = build()
  before = process.initialize()
  weights = _shifted(model)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    state = process.set_model_weights(before, weights)
  messages = [str(w.message) for w in caught if w.category is UserWarning]
  assert [m for m in messages if 'local variables' in m] == messages
  assert len(messages) == bool(local)

  initial = _values(model, model.initial_weights)
  expected = [
      old if info.role.value in local else new
      for info, old, new in zip(
          model.variables, initial, _values(model, weights), strict=True
      )
  ]
  assert any(info.role.value not in local for info in model.variables)
  client = process.initialize_client(state)
  for found in (
      process.get_model_weights(state),
      process.get_client_model_weights(state, client),
  ):
    for a, b in zip(_values(model, found), expected, strict=True):
      np.testing.assert_array_equal(a, b)
  # The given state did not change, and nothing else did.
  for a, b in zip(
      _values(model, process.get_model_weights(before)), initial, strict=True
  ):
    np.testing.assert_array_equal(a, b)
  tf.nest.map_structure(
      np.testing.assert_array_equal,
      state._replace(global_model_weights=()),
      before._replace(global_model_weights=()),
  )
  # Its own weights change nothing, without a warning.
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    same = process.set_model_weights(state, process.get_model_weights(state))
  tf.nest.map_structure(np.testing.assert_array_equal, same, state)


def test_training_goes_on_from_the_new_model(toy):
  toy_model, process = client_rounds.toy_process('build_fed_bn')
  datasets = [toy.dataset(20, 0)]
  start = process.initialize()
  client = process.initialize_client(start)
  # A process of a model with these weights is the truth.
  output = process.next(start, [client], datasets)
  trained = process.get_model_weights(output.state)
  state = process.set_model_weights(start, trained)
  found = process.next(state, output.client_states, datasets)
  # Only the number of the round differs.
  expected = process.next(output.state, output.client_states, datasets)
  for a, b in zip(
      _values(toy_model, process.get_model_weights(found.state)),
      _values(toy_model, process.get_model_weights(expected.state)),
      strict=True,
  ):
    np.testing.assert_array_equal(a, b)


def test_short_rounds_notice_another_model(toy):
  toy_model, process = client_rounds.toy_process(
      'build_scaffold', num_clients=5
  )
  assert isinstance(process.next, short_rounds.ShortRounds)
  datasets = [toy.dataset(20, i) for i in range(5)]
  state = process.initialize()
  output = process.next(state, [process.initialize_client(state)] * 5, datasets)
  state = process.set_model_weights(output.state, _shifted(toy_model, 0.1))
  arguments = state, output.client_states, datasets
  found = process.next(*arguments)
  expected = process.next.full(*arguments)
  for a, b in zip(
      _values(toy_model, process.get_model_weights(found.state)),
      _values(toy_model, process.get_model_weights(expected.state)),
      strict=True,
  ):
    np.testing.assert_array_equal(a, b)
  correction = found.state.client_work['correction']
  assert (correction['full_rounds'], correction['repeated_rounds']) == (1, 1)


def test_the_phase_stays(toy):
  toy_model, process = _phased()
  state = process.initialize()
  output = process.next(
      state, [process.initialize_client(state)], [toy.dataset(20, 0)]
  )
  weights = process.get_model_weights(output.state)
  state = process.set_model_weights(output.state, weights)
  assert state.client_work['round_num'] == 1
  arguments = state, output.client_states, [toy.dataset(20, 0)]
  first, second = (
      _values(toy_model, process.get_model_weights(phase(*arguments).state))
      for phase in (phase.computation for phase in process.next.phases)
  )
  output = process.next(*arguments)
  found = _values(toy_model, process.get_model_weights(output.state))
  for a, b in zip(found, second, strict=True):
    np.testing.assert_array_equal(a, b)
  assert any((a != b).any() for a, b in zip(found, first, strict=True))


def test_wrong_weights_and_states_are_errors():
  toy_model, process = client_rounds.toy_process('build_fed_bn')
  state = process.initialize()
  weights = toy_model.initial_weights
  with pytest.raises(TypeError, match='must be ModelWeights.* is a list'):
    process.set_model_weights(state, list(weights.trainable))
  with pytest.raises(ValueError, match='weights has 1 trainable and 0 other'):
    process.set_model_weights(state, (weights.trainable[:1], []))
  values = toy_model.from_model_weights(weights)
  for wrong in (values[0][..., None], values[0].astype(np.float16)):
    given = toy_model.to_model_weights([wrong, *values[1:]])
    with pytest.raises(
        ValueError, match=f'for the variable {toy_model.variables[0].name} of'
    ):
      process.set_model_weights(state, given)
  with pytest.raises(TypeError, match='whole output of a round'):
    process.set_model_weights(
        tff.learning.templates.LearningProcessOutput(state, {}), weights
    )
  _, other = client_rounds.toy_process('build_silo_bn')
  for wrong in (other.initialize(), weights, 3):
    with pytest.raises(TypeError, match='must be a state of this process'):
      process.set_model_weights(wrong, weights)


def test_a_process_without_the_function():
  toy_model, process = client_rounds.toy_process('build_fed_bn')
  without = StatefulLearningProcess(
      process.initialize,
      process.initialize_client,
      process.next,
      process.get_model_weights,
      process.get_client_model_weights,
  )
  with pytest.raises(NotImplementedError, match='set_model_weights_fn'):
    without.set_model_weights(process.initialize(), toy_model.initial_weights)
