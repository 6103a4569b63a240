"""Tests of FedTAN that synchronizes only some rounds."""

import client_rounds
import numpy as np
import numpy_reference as reference
import pytest

from tff_bn import aggregators

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SIZES = (20, 8, 33)
_BETA = 0.25  # 1 - the toy model's momentum.
_RATE = 0.1


def _synchronized_step(weights, first_batches):
  """Returns each client's model after a step with the union's statistics."""
  union = [np.concatenate(parts) for parts in zip(*first_batches)]
  models, start = [], 0
  for x, _ in first_batches:
    _, grads, mean, variance = reference.gradients(
        weights, *union, rows=slice(start, start + len(x))
    )
    start += len(x)
    # All batches have the same size, so all clients the same share of the mean.
    model = [
        w if g is None else w - _RATE * len(first_batches) * g
        for w, g in zip(weights, grads)
    ]
    for position, value in zip(reference.STATISTICS, (mean, variance)):
      model[position] = (1 - _BETA) * weights[position] + _BETA * value
    models.append(model)
  return models


def _keep_statistics(models, sources):
  for model, source in zip(models, sources, strict=True):
    for position in reference.STATISTICS:
      model[position] = source[position]


def _expected(weights, clients, num_rounds, every, moves_later=True):
  """Runs the rounds in NumPy; all clients have the same weight."""
  for round_num in range(num_rounds):
    batches = clients
    before = models = [weights] * len(clients)
    if round_num % every == 0:
      before = models = _synchronized_step(weights, [own[0] for own in clients])
      batches = [own[1:] for own in clients]
    models = [
        reference.train(model, own, _RATE)[0]
        for model, own in zip(models, batches, strict=True)
    ]
    if not moves_later:
      _keep_statistics(models, before)
    weights = reference.average_models(models, [1] * len(models))
  return weights


@pytest.mark.parametrize('steps', [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    ('every', 'num_rounds'),
    [
        (3, 4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, 2), (2, 5), (9, 3))
        ),
    ],
)
def test_rounds_equal_numpy(toy, every, num_rounds, steps):
  model, process = client_rounds.toy_process(
      'build_fedtan',
      local_steps=steps,
      client_weighting='uniform',
      synchronize_every=every,
  )
  found = client_rounds.run(
      process, client_rounds.datasets(toy, _SIZES), num_rounds
  ).weights(model)

  clients = [own[:steps] for own in client_rounds.batches(toy, _SIZES)]
  start = model.from_model_weights(model.initial_weights)
  client_rounds.assert_close(
      found, _expected(start, clients, num_rounds, every), rtol=1e-9
  )


@pytest.mark.parametrize('steps', [pytest.param(1, marks=pytest.mark.slow), 3])
def test_rounds_between_keep_the_statistics_of_the_first_step(toy, steps):
  model, process = client_rounds.toy_process(
      'build_fedtan',
      local_steps=steps,
      client_weighting='uniform',
      synchronize_every=2,
      running_statistics='first_step',
  )
  found = client_rounds.run(
      process, client_rounds.datasets(toy, _SIZES), 4
  ).weights(model)

  clients = [own[:steps] for own in client_rounds.batches(toy, _SIZES)]
  start = model.from_model_weights(model.initial_weights)
  client_rounds.assert_close(
      found, _expected(start, clients, 4, 2, moves_later=False), rtol=1e-9
  )


def test_every_round_is_fedtan(toy):
  del toy
  options = dict(local_steps=2, client_weighting='uniform')
  _, process = client_rounds.toy_process('build_fedtan', **options)
  _, same = client_rounds.toy_process(
      'build_fedtan', synchronize_every=1, **options
  )
  assert type(same.next) is type(process.next)


@pytest.mark.slow
def test_rules_of_the_exchanges_keep_their_state(toy):
  model, process = client_rounds.toy_process(
      'build_fedtan',
      local_steps=2,
      moments='fused',
      client_weighting='uniform',
      synchronize_every=2,
      exchange_aggregator=aggregators.CoordinateMedian(),
  )
  data = client_rounds.datasets(toy, _SIZES)
  training = client_rounds.Training(process, len(data))
  for _ in range(3):
    metrics = training.next_round(data)
    assert metrics['client_work']['num_participants'] == len(data)
  assert all(np.isfinite(w).all() for w in training.weights(model))


@pytest.mark.parametrize('value', [0, -1, 1.5, True])
def test_wrong_numbers(toy, value):
  del toy
  with pytest.raises((TypeError, ValueError), match='synchronize_every'):
    client_rounds.toy_process('build_fedtan', synchronize_every=value)
