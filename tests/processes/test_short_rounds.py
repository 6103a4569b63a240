"""Tests of the choice between short and full rounds."""

import client_rounds
import pytest
import tensorflow_federated as tff

from tff_bn import analysis
from tff_bn.processes.short_rounds import ShortRounds

pytestmark = pytest.mark.usefixtures('in_process_runtime')


@pytest.fixture
def process():
  return client_rounds.toy_process('build_scaffold', num_clients=5)[1]


def test_both_rounds_must_have_the_same_type(process):
  _, other = client_rounds.toy_process('build_fed_bn')
  with pytest.raises(TypeError, match='A short round must have the type of a'):
    ShortRounds(process.next.short, other.next, None)


def test_arguments_by_name(toy, process):
  parameter = process.next.type_signature.parameter
  names = [name for name, _ in tff.structure.to_elements(parameter)]
  state = process.initialize()
  values = (state, [process.initialize_client(state)], [toy.dataset(8, 0)])
  by_position = process.next(*values)
  by_name = process.next(values[0], **dict(zip(names[1:], values[1:])))
  assert (
      by_name.metrics['client_work']['train']['loss']
      == by_position.metrics['client_work']['train']['loss']
  )


def test_it_is_no_part_of_another_computation(process):
  with pytest.raises(TypeError, match='cannot be called inside another'):

    @tff.federated_computation(process.next.type_signature.parameter)
    def _(arguments):
      return process.next(*arguments)


def test_its_traffic_depends_on_the_round(process):
  with pytest.raises(ValueError, match='ShortRounds .* ProcessTraffic'):
    analysis.computation_traffic(process.next)
