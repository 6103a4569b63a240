"""Tests of the learning rate's warm-up in local training."""

import collections
import functools

import client_rounds
import numpy as np
import numpy_reference as reference
import numpy_steps
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import algorithms

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SGD = tff.learning.optimizers.build_sgdm
_SIZES = (20, 7, 33)  # 3, 1 and 5 batches.
_assert_close = client_rounds.assert_close


def _rates(num, warmup_steps, rate=0.1):
  """Returns the rates of an optimizer's first steps."""
  return [rate * min(1.0, n / warmup_steps) for n in range(1, num + 1)]


def _initial(model):
  return model.from_model_weights(model.initial_weights)


def _check(
    toy,
    model,
    process,
    rounds,
    *,
    take,
    warmup_steps,
    rate=lambda r: 0.1,
    momentum=0.0,
    hparams=None,
):
  """Compares rounds, each a list of the clients' sizes, with NumPy."""
  training = client_rounds.Training(process, len(rounds[0]))
  if hparams is not None:
    training.state = process.set_hparams(training.state, hparams)
  expected = _initial(model)
  for r, sizes in enumerate(rounds):
    results, counts = [], []
    for batches in client_rounds.batches(toy, sizes):
      batches = batches[:take]
      rates = _rates(len(batches), warmup_steps, rate(r))
      results.append(
          numpy_steps.train(expected, batches, rates, momentum=momentum)
      )
      counts.append(sum(len(y) for _, y in batches))
    expected = [reference.average(values, counts) for values in zip(*results)]
    training.next_round(client_rounds.datasets(toy, sizes))
    _assert_close(training.weights(model), expected)
  return training.state


@pytest.mark.slow
def test_learning_rate_that_was_set_is_multiplied(toy):
  model = toy.model()
  process = algorithms.build_fed_avg(
      model, _SGD(123.0, 0.5), local_steps=2, client_warmup_steps=5
  )
  hparams = process.get_hparams(process.initialize())
  hparams['client_work'] = collections.OrderedDict(
      learning_rate=np.float64(0.3), momentum=np.float64(0.25)
  )
  state = _check(
      toy,
      model,
      process,
      [_SIZES] * 4,
      take=2,
      warmup_steps=5,
      rate=lambda r: 0.3,
      momentum=0.25,
      hparams=hparams,
  )
  # The rate of the last steps does not become the base rate.
  assert process.get_hparams(state)['client_work']['learning_rate'] == 0.3


def test_every_round_has_a_warmup_and_the_first_rounds_are_one(toy):
  """The schedule's rate counts, not the optimizer's."""
  rates = (0.25, 0.125, 0.5, 0.0625)
  model, process = client_rounds.toy_process(
      'build_fed_avg',
      rate=123.0,
      momentum=0.5,
      local_steps=4,
      client_warmup_rounds=3,
      client_warmup_steps=3,
      client_learning_rate_schedule=lambda r: tf.gather(rates, r),
  )
  _check(
      toy,
      model,
      process,
      [_SIZES] * 4,
      take=4,
      warmup_steps=3,
      rate=lambda r: min(1, (r + 1) / 3) * rates[r],
      momentum=0.5,
  )


def test_centralized_optimizer_lasts_and_keeps_its_learning_rate(toy):
  """The rate of a step or of a round is not the base of the next one."""
  model, process = client_rounds.toy_process(
      'build_centralized',
      momentum=0.5,
      client_warmup_steps=8,
      client_warmup_rounds=3,
      local_epochs=2,
  )
  training = client_rounds.Training(process, 1)
  for r in range(5):
    training.next_round([toy.dataset(20, 0)])
    optimizer = training.state.client_work['optimizer']
    assert optimizer['learning_rate'] == pytest.approx(
        0.1 * min(1, (r + 1) / 3)
    )
  # One long training, whose momentum goes on; a round has six steps.
  rates = [
      rate * min(1, (step // 6 + 1) / 3)
      for step, rate in enumerate(_rates(30, 8))
  ]
  expected = numpy_steps.train(
      _initial(model),
      reference.split(*toy.arrays(20, 0)) * 10,
      rates,
      momentum=0.5,
  )
  _assert_close(training.weights(model), expected)


def test_fedtans_first_step_is_a_step(toy):
  """With one client it is ordinary local training."""
  model, process = client_rounds.toy_process(
      'build_fedtan', momentum=0.5, client_warmup_steps=7, local_steps=2
  )
  _check(
      toy,
      model,
      process,
      [[20]] * 4,
      take=2,
      warmup_steps=7,
      momentum=0.5,
  )


def test_rounds_of_dsgd_are_steps(toy):
  model = toy.model()
  rates = (0.25, 0.125, 0.5, 0.0625, 0.1, 0.2)
  process = algorithms.build_dsgd(
      model,
      _SGD(123.0, 0.5),
      client_learning_rate_schedule=lambda r: tf.gather((*rates, 0.0), r),
      client_warmup_steps=4,
      client_warmup_rounds=2,
  )
  expected = _initial(model)
  training = client_rounds.Training(process, len(_SIZES))
  velocity = [0.0] * len(expected)
  for r in range(6):
    rate = rates[r] * min(1.0, (r + 1) / 4) * min(1.0, (r + 1) / 2)
    # With learning rate 1, what a step subtracts is the gradient.
    results = [
        numpy_steps.train(expected, batches[:1], 1.0)
        for batches in client_rounds.batches(toy, _SIZES)
    ]
    average = [reference.average(values, [8, 7, 8]) for values in zip(*results)]
    for i, (old, new) in enumerate(zip(expected, average)):
      if i not in reference.STATISTICS:
        velocity[i] = 0.5 * velocity[i] + old - new
        average[i] = old - rate * velocity[i]
    expected = average
    training.next_round(client_rounds.datasets(toy, _SIZES))
    # A schedule's rates are float32.
    _assert_close(training.weights(model), expected, 1e-6, 1e-8)


@pytest.mark.slow
def test_adam_is_warmed_up(toy):
  """The first steps of Adam are as long as the learning rate."""
  model = toy.model()
  process = algorithms.build_fed_avg(
      model,
      tff.learning.optimizers.build_adam(0.1, epsilon=1e-12),
      local_steps=1,
      client_warmup_steps=4,
  )
  training = client_rounds.Training(process, 1)
  for _ in range(3):
    before = training.weights(model)
    training.next_round([toy.dataset(8, 0)])
    after = training.weights(model)
    # The output's bias, whose gradient is not 0.
    np.testing.assert_allclose(
        np.abs(after[-1] - before[-1]), 0.1 / 4, rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize('name', ['fed_avg', 'dsgd'])
def test_0_and_1_are_no_warmup(toy, name):
  train = functools.partial(client_rounds.weights_after_two_rounds, toy, name)
  expected = train()
  for warmup_steps in (0, np.int64(1)):
    _assert_close(train(client_warmup_steps=warmup_steps), expected, 1e-7, 1e-9)


_NO_LEARNING_RATE = tff.learning.optimizers.schedule_learning_rate(
    _SGD(0.1), lambda n: 0.1
)


@pytest.mark.parametrize('name', client_rounds.BUILDERS)
def test_every_builder_names_a_wrong_argument(name):
  model = client_rounds.toy_model(name)
  build = functools.partial(client_rounds.build, name, model)
  for value in (-1, 2.5, '3', None):
    for flag in ('client_warmup_rounds', 'client_warmup_steps'):
      with pytest.raises(
          (TypeError, ValueError), match=f'{flag}.* whole number, at least 0'
      ):
        build(**{flag: value})
  for value in (0, 0.0, -1.0, np.nan):
    with pytest.raises(
        ValueError, match='client_gradient_clip_norm=.* greater than 0'
    ):
      build(client_gradient_clip_norm=value)
  if name != 'build_scaffold':
    for flag in ('client_warmup_rounds', 'client_warmup_steps'):
      with pytest.raises(ValueError, match=f'{flag} needs .*learn'):
        build(_NO_LEARNING_RATE, **{flag: 2})
