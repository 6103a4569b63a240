"""Tests that models of users train to the same bits on Ray as in process."""

import contexts
import pytest
import ray_contexts
import tensorflow_federated as tff
import user_models

from tff_bn import algorithms
from tff_bn import runtime

pytestmark = pytest.mark.slow


@pytest.fixture(name='context', scope='module')
def fixture_context():
  context = ray_contexts.make()
  yield context
  context.close()


def _round(case, model, builder):
  """Returns the weights of all models and the metrics after a round."""
  process = builder(model, tff.learning.optimizers.build_sgdm(0.05))
  datasets = [case.dataset(client, 6) for client in range(2)]
  datasets.append(case.dataset(2, 4).take(0))
  state = process.initialize()
  arguments = [datasets]
  if builder is algorithms.build_fed_bn:
    arguments.insert(0, [process.initialize_client(state)] * len(datasets))
  output = process.next(state, *arguments)
  clients = getattr(output, 'client_states', [])
  return repr(
      (process.get_model_weights(output.state), clients, output.metrics)
  )


@pytest.mark.parametrize(
    ('name', 'builder_name'),
    [
        ('two_outputs', 'build_fedtan'),
        ('text', 'build_fed_bn'),
        ('unet_dice', 'build_fed_avg'),
        ('binary', 'build_fbn'),
    ],
)
def test_same_bits_as_in_process(context, name, builder_name):
  case = user_models.MODELS[name]
  model = case.model()
  builder = getattr(algorithms, builder_name)
  with runtime.in_process_runtime():
    expected = _round(case, model, builder)
  with contexts.default(context):
    assert _round(case, model, builder) == expected
