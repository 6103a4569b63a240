"""Tests of the running statistics of FedTAN with several local steps."""

import client_rounds
import numpy as np
import numpy_reference as reference
import pytest

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SIZES = (16, 16, 11)  # Two batches each, the last one of 3.
_BETA = 0.25  # 1 - the toy model's momentum.


def _train(toy, name, num_rounds=1, **options):
  """Returns the toy model, and its weights after rounds of two steps."""
  model, process = client_rounds.toy_process(
      name, local_steps=2, moments='fused', **options
  )
  data = client_rounds.datasets(toy, _SIZES)
  training = client_rounds.run(process, data, num_rounds)
  return model, training.weights(model)


def _union_statistics(weights, batches):
  """Returns the mean and the variance of the union of the first batches."""
  x = np.concatenate([client[0][0] for client in batches])
  y = np.concatenate([client[0][1] for client in batches])
  return reference.gradients(weights, x, y)[2:]


def test_only_the_synchronized_step_moves_the_running_statistics(toy):
  model, found = _train(toy, 'build_fedtan', running_statistics='first_step')
  before = model.from_model_weights(model.initial_weights)
  batches = client_rounds.batches(toy, _SIZES)
  for position, new in zip(
      reference.STATISTICS, _union_statistics(before, batches), strict=True
  ):
    np.testing.assert_allclose(
        found[position],
        (1 - _BETA) * before[position] + _BETA * new,
        rtol=1e-12,
    )


def test_training_is_the_same_as_with_all_steps(toy):
  _, first = _train(
      toy, 'build_fedtan', num_rounds=3, running_statistics='first_step'
  )
  _, all_steps = _train(toy, 'build_fedtan', num_rounds=3)
  for position, (found, expected) in enumerate(
      zip(first, all_steps, strict=True)
  ):
    if position in reference.STATISTICS:
      assert np.abs(found - expected).max() > 1e-3
    else:
      np.testing.assert_array_equal(found, expected)


def test_fedtan_ii_fixes_these_statistics(toy):
  _, in_sync = _train(toy, 'build_fedtan', running_statistics='first_step')
  _, later = _train(
      toy,
      'build_fedtan_ii',
      num_rounds=3,
      sync_rounds=1,
      running_statistics='first_step',
  )
  for position in reference.STATISTICS:
    np.testing.assert_array_equal(later[position], in_sync[position])


def test_another_value_is_refused(toy):
  del toy
  with pytest.raises(
      ValueError,
      match="running_statistics='last_step' must be one of all_steps",
  ):
    client_rounds.toy_process('build_fedtan', running_statistics='last_step')
