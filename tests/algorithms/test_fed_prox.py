"""Tests of FedProx."""

import client_rounds
import keras
import numpy as np
import numpy_reference as reference
import pytest
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn.keras_model import partition
from tff_bn.processes import averaging

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_SIZES = (20, 7, 33)  # Unequal, with short last batches.
_STRENGTH = 0.7
_assert_same = client_rounds.assert_same
_assert_close = client_rounds.assert_close


def _run(model, process, rounds):
  """Returns the server's and the clients' weights, and all rounds' metrics."""
  training = client_rounds.Training(process, len(rounds[0]))
  metrics = [training.next_round(data) for data in rounds]
  return training.weights(model), training.client_weights(model), metrics


def _process(momentum=None, **options):
  """Returns a model and a process, which tests share."""
  return client_rounds.toy_process(
      'build_fed_prox',
      momentum=momentum,
      proximal_strength=_STRENGTH,
      **options,
  )


def _build(model, optimizer=None, strength=_STRENGTH, **options):
  return algorithms.build_fed_prox(
      model, optimizer or _SGD(0.1), proximal_strength=strength, **options
  )


def _rounds(problem, num_rounds, sizes=_SIZES):
  return [client_rounds.datasets(problem, sizes)] * num_rounds


def _numpy_round(weights, clients, **kwargs):
  """Runs FedProx in NumPy; returns the new weights and the mean loss."""
  proximal = reference.proximal(weights, _STRENGTH, range(len(weights)))
  results = [
      reference.train(weights, batches, 0.1, extra=proximal, **kwargs)
      for batches in clients
  ]
  models, counts, loss_sums = zip(*results)
  weights = reference.average_models(models, counts)
  return weights, sum(loss_sums) / sum(counts)


def test_strength_0_is_fed_avg_to_the_bit(toy):
  toy.dtype = 'float32'
  model = toy.model()
  rounds = _rounds(toy, 3)
  options = {'client_weight_decay': 0.01, 'client_gradient_clip_norm': 0.5}
  optimizer = _SGD(0.1, momentum=0.5)
  found = _run(model, _build(model, optimizer, 0.0, **options), rounds)
  expected = _run(
      model, algorithms.build_fed_avg(model, optimizer, **options), rounds
  )
  _assert_same(found, expected)


def test_rounds_equal_numpy(toy):
  model, process = _process(
      momentum=0.5, client_weight_decay=0.01, local_epochs=2
  )
  assert isinstance(process, tff.learning.templates.LearningProcess)
  weights = model.from_model_weights(model.initial_weights)
  clients = [own * 2 for own in client_rounds.batches(toy, _SIZES)]
  losses = []
  for _ in range(3):
    weights, loss = _numpy_round(
        weights,
        clients,
        momentum=0.5,
        weight_decay=0.01,
    )
    # The loss in the metrics does not include the proximal term.
    losses.append(loss)

  found, _, metrics = _run(model, process, _rounds(toy, 3))

  _assert_close(found, weights)
  _assert_close([m['client_work']['train']['loss'] for m in metrics], losses)
  assert all(not m['client_work']['correction'] for m in metrics)


def test_local_variables_have_no_proximal_term(toy):
  model, process = _process(
      momentum=0.5,
      build_process=algorithms.build_fed_bn,
      client_weighting='uniform',
      client_weight_decay=0.01,
  )
  local = {*reference.AFFINE, *reference.STATISTICS}
  shared = sorted(set(range(8)) - local)
  initial = model.from_model_weights(model.initial_weights)
  models = [list(initial) for _ in _SIZES]
  batches = client_rounds.batches(toy, _SIZES)
  for _ in range(3):
    models = [
        reference.train(
            weights,
            own,
            0.1,
            momentum=0.5,
            weight_decay=0.01,
            extra=reference.proximal(weights, _STRENGTH, shared),
        )[0]
        for weights, own in zip(models, batches, strict=True)
    ]
    mean = reference.average_models(models, [1, 1, 1])
    for weights in models:
      for i in shared:
        weights[i] = mean[i]

  _, clients, _ = _run(model, process, _rounds(toy, 3))

  for found, expected in zip(clients, models, strict=True):
    _assert_close(found, expected)


def test_frozen_layers_stay(toy):
  def keras_model_fn():
    model = toy.keras_model()
    model.get_layer('logits').trainable = False
    return model

  model = toy.model(keras_model_fn)
  process = _build(model)
  weights = model.from_model_weights(model.initial_weights)
  proximal = reference.proximal(weights, _STRENGTH, range(8))
  expected = weights
  for batch in reference.split(*toy.arrays(20, 1)):
    expected, _, _ = reference.train(expected, [batch], 0.1, extra=proximal)
    expected[-2:] = weights[-2:]
  found, _, _ = _run(model, process, [[toy.dataset(20, 1)]])
  _assert_close(found, expected)


@pytest.mark.parametrize(
    'correction',
    [
        algorithms.FedBs(0.1, 0.1),
        algorithms.FedProx(0.1),
        algorithms.Moon(),
        algorithms.Scaffold(),
    ],
)
def test_corrections_need_a_shared_trainable_variable(correction):
  with pytest.raises(ValueError, match='keeps .* is shared'):
    averaging.build_partitioned(
        client_rounds.toy_model(),
        partition.SINGLE,
        _SGD(0.1),
        drift_correction=correction,
    )


def test_a_shared_affine_variable_is_enough(toy):
  correction = algorithms.FedProx(0.1)

  def only_norm():
    inputs = keras.Input((4,), dtype='float64')
    outputs = keras.layers.BatchNormalization(dtype='float64')(inputs)
    return keras.Model(inputs, outputs, name='only_norm')

  model = toy.model(only_norm)
  algorithms.build_fed_avg(model, _SGD(0.1), drift_correction=correction)
  with pytest.raises(ValueError, match="FedProx keeps .*'only_norm'"):
    algorithms.build_fed_bn(model, _SGD(0.1), drift_correction=correction)


@pytest.mark.parametrize(
    ('build', 'message'),
    [
        (algorithms.build_dsgd, 'drift_correction has no effect in DSGD.*one'),
        (algorithms.build_single, 'drift_correction has no effect in single'),
        (algorithms.build_centralized, 'drift_correction=FedProx .* one model'),
    ],
)
def test_algorithms_without_drift_refuse_it(build, message):
  with pytest.raises(ValueError, match=message):
    _process(build_process=build)


@pytest.mark.parametrize('value', [0.1, algorithms.FedProx, 'fedprox'])
def test_other_types_are_refused(value):
  with pytest.raises(TypeError, match='drift_correction must be a DriftCorr'):
    client_rounds.toy_process('build_fed_avg', drift_correction=value)


def test_fedtan_allows_fed_prox_only():
  for correction in (
      algorithms.Scaffold(),
      algorithms.Moon(),
      algorithms.FedBs(0.1, 0.1),
  ):
    for builder_name in ('build_fedtan', 'build_fedtan_ii'):
      name = type(correction).__name__
      with pytest.raises(ValueError, match=f'drift_correction={name}.*FedProx'):
        client_rounds.toy_process(builder_name, drift_correction=correction)


def test_one_step_of_fedtan_has_no_proximal_term(toy):
  rounds = _rounds(toy, 2)
  found = _run(
      *_process(build_process=algorithms.build_fedtan, local_steps=1), rounds
  )
  fedtan = client_rounds.toy_process('build_fedtan', local_steps=1)
  _assert_same(found, _run(*fedtan, rounds))


def _fedtan_round(weights, clients):
  """Makes one synchronized step, then local steps with a proximal term."""
  union = [np.concatenate(parts) for parts in zip(*(own[0] for own in clients))]
  models = []
  for number, own in enumerate(clients):
    # The client's share of the gradient of the mean loss on the union.
    _, grads, mean, variance = reference.gradients(
        weights, *union, rows=slice(8 * number, 8 * number + 8)
    )
    first = [
        w if g is None else w - 0.1 * len(clients) * g
        for w, g in zip(weights, grads)
    ]
    for i, value in ((reference.MEAN, mean), (reference.VARIANCE, variance)):
      first[i] = 0.75 * weights[i] + 0.25 * value
    models.append(
        reference.train(
            first,
            own[1:],
            0.1,
            # The anchor is the server's model, not the first step's result.
            extra=reference.proximal(weights, _STRENGTH, range(8)),
        )[0]
    )
  counts = [sum(len(x) for x, _ in own) for own in clients]
  return reference.average_models(models, counts)


def test_several_steps_of_fedtan_equal_numpy(toy):
  model, process = _process(
      build_process=algorithms.build_fedtan_ii,
      sync_rounds=2,
      local_steps=3,
  )
  sizes = (20, 8, 33)
  clients = [own[:3] for own in client_rounds.batches(toy, sizes)]
  weights = model.from_model_weights(model.initial_weights)
  for _ in range(2):
    weights = _fedtan_round(weights, clients)
  # The last round is FedTAN-II's second phase.
  weights, _ = _numpy_round(weights, clients, fixed=True)

  found, _, _ = _run(model, process, _rounds(toy, 3, sizes))

  _assert_close(found, weights)
