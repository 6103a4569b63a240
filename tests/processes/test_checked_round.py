"""Tests that a process's `next` explains wrong arguments."""

import client_rounds
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

_WITHOUT_STATES = {
    'build_fed_avg': {},
    'build_centralized': {},
    'build_fedtan_ii': dict(sync_rounds=1),
}
_WITH_STATES = {
    'build_fed_bn': {},
    'build_scaffold': dict(num_clients=5),
}


class _Call:
  """A process and the arguments of a right call of its `next`."""

  def __init__(self, toy, name):
    options = {**_WITHOUT_STATES, **_WITH_STATES}[name]
    _, self.process = client_rounds.toy_process(name, **options)
    self.state = self.process.initialize()
    self.data = [toy.dataset(8, 0)]
    self.others = [self.data]
    if name in _WITH_STATES:
      self.clients = [self.process.initialize_client(self.state)]
      self.others = [self.clients, self.data]

  def next(self, *args, **kwargs):
    return self.process.next(*args, **kwargs)


@pytest.fixture(params=[*_WITHOUT_STATES, *_WITH_STATES])
def call(request, toy, in_process_runtime):
  return _Call(toy, request.param)


@pytest.fixture
def fed_avg(toy, in_process_runtime):
  return _Call(toy, 'build_fed_avg')


@pytest.fixture
def fed_bn(toy, in_process_runtime):
  return _Call(toy, 'build_fed_bn')


def test_wrong_arguments_of_each_kind_of_process(call):
  output = call.next(call.state, *call.others)
  with pytest.raises(TypeError, match='give output.state'):
    call.next(output, *call.others)
  for empty in range(len(call.others)):
    others = list(call.others)
    for nobody in ([], ()):
      others[empty] = nobody
      with pytest.raises(ValueError, match='at least one client'):
        call.next(call.state, *others)
  with pytest.raises(TypeError, match='single tf.data.Dataset'):
    call.next(call.state, *call.others[:-1], call.data[0])


def test_datasets_of_another_type(call, toy):
  data = call.data[0]
  wrong = data.map(lambda x, y: (x, tf.cast(y, tf.int64)))
  message = (
      r'data\[1\]: y has the dtype int64, but must have int32\. Use'
      r' dataset\.map\(lambda x, y: \(x, tf\.cast\(y, tf\.int32\)\)\)\.$'
  )
  others = [2 * other for other in call.others[:-1]]
  with pytest.raises(TypeError, match=message):
    call.next(call.state, *others, [data, wrong])
  unbatched = [data.unbatch()]
  with pytest.raises(TypeError, match=r'data\[0\]: x has .* not batched'):
    call.next(call.state, *call.others[:-1], unbatched)


@pytest.mark.parametrize('name', _WITHOUT_STATES)
def test_states_of_clients_that_keep_none(toy, in_process_runtime, name):
  call = _Call(toy, name)
  with pytest.raises(
      TypeError, match=r'2 arguments, process.next\(state, .*got 3.* no state'
  ):
    call.next(call.state, [{}], call.data)


@pytest.mark.parametrize('name', _WITH_STATES)
def test_states_of_clients_are_missing(toy, in_process_runtime, name):
  call = _Call(toy, name)
  with pytest.raises(
      TypeError,
      match=r'next\(state, client_states, data\), but got 2.*initialize_client',
  ):
    call.next(call.state, call.data)


def test_arguments_by_name(fed_bn):
  with pytest.raises(ValueError, match='data is empty'):
    fed_bn.next(fed_bn.state, data=[], client_states=fed_bn.clients)
  with pytest.raises(TypeError, match='but got 1'):
    fed_bn.next(fed_bn.state)


def test_next_can_be_part_of_another_computation(fed_avg):
  next_fn = fed_avg.process.next

  @tff.federated_computation(next_fn.type_signature.parameter)
  def inner(arguments):
    return next_fn(*arguments)

  expected = fed_avg.next(fed_avg.state, fed_avg.data)
  found = inner(fed_avg.state, fed_avg.data)
  np.testing.assert_array_equal(
      found.metrics['client_work']['train']['loss'],
      expected.metrics['client_work']['train']['loss'],
  )


def test_hyperparameters_can_be_set(fed_avg):
  process = fed_avg.process
  hparams = process.get_hparams(fed_avg.state)
  hparams['finalizer']['learning_rate'] = 0.5
  state = process.set_hparams(fed_avg.state, hparams)
  assert process.get_hparams(state)['finalizer']['learning_rate'] == 0.5


def test_weights_of_the_output_of_a_round(fed_bn):
  process = fed_bn.process
  output = fed_bn.next(fed_bn.state, *fed_bn.others)
  with pytest.raises(TypeError, match='give output.state'):
    process.get_model_weights(output)
  with pytest.raises(TypeError, match='give output.state'):
    process.get_client_model_weights(output, output.client_states[0])
  with pytest.raises(TypeError, match='one client, but is a list of 1'):
    process.get_client_model_weights(output.state, output.client_states)
