"""Tests of evaluation with other statistics than the training's."""

import dataclasses

import numpy as np
import pytest
import tensorflow_federated as tff
import training_example
import training_fakes

import tff_bn
from tff_bn import algorithms
from tff_bn import training
from tff_bn.data import load_dataset
from tff_bn.data import split_dataset
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.partition import Role
from tff_bn.training import evaluation
from tff_bn.training import saved_models

_FAKE_CONFIG = dataclasses.replace(training_fakes.CONFIG, rounds=4)


class _Process(training_fakes.FakeStatefulProcess):
  """Doubles the kernel for evaluation."""

  has_client_models = False

  def __init__(self, model):
    super().__init__(model)
    self.evaluated = []

  def evaluation_state(self, state, client_states, datasets):
    self.evaluated.append(
        (int(state['round']), [int(c['rounds']) for c in client_states])
    )
    assert len(datasets) == len(client_states)
    kernel, *rest = state['weights'].trainable
    weights = ModelWeights([2 * kernel, *rest], state['weights'].non_trainable)
    return dict(state, weights=weights)


def _doubled(model, state):
  process = _Process(model)
  evaluated = process.evaluation_state(state, [], [])
  return process.get_model_weights(evaluated)


def test_evaluations_and_the_final_model_use_the_evaluation_state(
    fake_model, tmp_path
):
  process, data = _Process(fake_model), training_fakes.FakeData()
  result = training.train(process, fake_model, data, _FAKE_CONFIG, tmp_path)
  plain = training_fakes.train(
      fake_model, tmp_path / 'plain', _FAKE_CONFIG, stateful=True
  )
  # Training goes on with the state of the round.
  np.testing.assert_array_equal(
      result.state['weights'].trainable[0], plain.state['weights'].trainable[0]
  )
  rounds = [row['round'] for row in result.rows]
  # Once for each evaluated round, also for the last one.
  assert [round_num for round_num, _ in process.evaluated] == rounds
  # All clients take part; new ones have their initial state.
  assert process.evaluated[0][1] == [0, 0, 0, 0]
  for round_num, num_rounds in process.evaluated:
    assert sum(num_rounds) == round_num * _FAKE_CONFIG.clients_per_round
  of_evaluations = [c for c in data.calls if c['local_epochs'] == 1]
  assert of_evaluations == [
      dict(
          client_ids=(client_id,),
          seed=_FAKE_CONFIG.seed,
          round_num=round_num,
          batch_size=_FAKE_CONFIG.batch_size,
          local_steps=None,
          local_epochs=1,
          # Statistics are those of the images themselves.
          augment=False,
      )
      for round_num in rounds
      for client_id in data.client_ids
  ]
  expected = _doubled(fake_model, result.state)
  np.testing.assert_array_equal(
      result.model_weights.trainable[0], expected.trainable[0]
  )
  saved = saved_models.SavedModels(tmp_path / 'model').weights(fake_model)
  np.testing.assert_array_equal(saved.trainable[0], expected.trainable[0])
  test = evaluation.Evaluator(fake_model).evaluate(
      expected, data.test_dataset(256)
  )
  assert result.rows[-1]['test_loss'] == pytest.approx(test['loss'], rel=1e-5)
  assert result.rows[-1]['client_test_loss'] is not None


def test_a_continued_run_gives_the_same(fake_model, tmp_path):
  def train(folder, num_rounds):
    config = dataclasses.replace(_FAKE_CONFIG, rounds=num_rounds)
    return training_fakes.train(
        fake_model, tmp_path / folder, config, process=_Process(fake_model)
    )

  at_once = train('a', 3)
  train('b', 2)
  continued = train('b', 3)
  assert continued.rows[-1] == at_once.rows[-1]
  # A finished run has its model already.
  again = train('b', 3)
  for result in (continued, again):
    for a, b in zip(
        result.model_weights.trainable, at_once.model_weights.trainable
    ):
      np.testing.assert_array_equal(a, b)


def test_few_evaluation_clients(fake_model, tmp_path):
  config = dataclasses.replace(_FAKE_CONFIG, max_evaluation_clients=2, rounds=1)
  process = _Process(fake_model)
  training_fakes.train(fake_model, tmp_path, config, process=process)
  assert all(len(clients) == 2 for _, clients in process.evaluated)


@pytest.mark.slow
@pytest.mark.usefixtures('in_process_runtime')
def test_hbn_is_evaluated_with_statistics_of_all_training_data(tmp_path):
  data = training_example.build_data()
  plain = training_example.build_model(data)
  model = BatchNormModel(
      lambda: tff_bn.convert_batch_norm(plain.keras_model_fn(), 'hybrid'),
      plain.input_spec,
      plain.loss_fn,
      plain.metrics_fn,
  )
  process = algorithms.build_hbn(model, tff.learning.optimizers.build_sgdm(0.1))
  config = dataclasses.replace(training_example.CONFIG, rounds=2)
  result = training.train(process, model, data, config, tmp_path)
  found = model.from_model_weights(result.model_weights)
  x = data.dataset.x_train[np.concatenate(list(data.train_indices.values()))]
  kernel, bias = found[:2]
  inputs = x.reshape(len(x), -1).astype(np.float64) @ kernel + bias
  roles = [v.role for v in model.variables]
  for role, expected in (
      (Role.MOVING_MEAN, inputs.mean(0)),
      (Role.MOVING_VARIANCE, inputs.var(0, ddof=1)),
      (Role.MIXING, np.zeros(8)),
  ):
    np.testing.assert_allclose(
        found[roles.index(role)], expected, rtol=1e-4, atol=1e-4
    )
  saved = saved_models.SavedModels(tmp_path / 'model')
  assert not saved.client_ids


@pytest.mark.usefixtures('in_process_runtime')
@pytest.mark.parametrize(
    'build',
    [
        algorithms.build_fed_avg,
        pytest.param(algorithms.build_fed_bn, marks=pytest.mark.slow),
    ],
)
def test_the_loss_on_training_data_is_that_of_keras(build, tmp_path):
  """Clients of different sizes, of which each counts alike."""
  data = split_dataset(
      load_dataset('digits'), 'dirichlet', 4, 0, dirichlet_alpha=0.3
  )
  data = dataclasses.replace(data, augmentation='flip_crop')
  sizes = list(map(len, data.train_indices.values()))
  assert max(sizes) > 1.2 * min(sizes)
  model = training_example.build_model(data)
  process = build(model, tff.learning.optimizers.build_sgdm(0.1))
  config = dataclasses.replace(
      training_example.CONFIG,
      rounds=2,
      clients_per_round=None,
      evaluate_every=1,
      evaluate_train_loss=True,
  )
  result = training.train(process, model, data, config, tmp_path)
  saved = saved_models.SavedModels(tmp_path / 'model')
  losses = []
  for client_id, positions in data.train_indices.items():
    own = client_id if build is algorithms.build_fed_bn else None
    keras_model = model.to_keras(saved.weights(model, own))
    keras_model.compile(loss=model.loss_fn())
    losses.append(
        keras_model.evaluate(
            data.dataset.x_train[positions],
            data.dataset.y_train[positions],
            verbose=0,
        )
    )
  last = result.rows[-1]
  assert last['client_train_loss'] == pytest.approx(np.mean(losses), rel=1e-5)
  # The clients' data have different losses, so it matters how they count.
  assert abs(np.average(losses, weights=sizes) / np.mean(losses) - 1) > 1e-3
  assert last['client_train_loss'] != last['train_loss']
  # All rounds have it, also the initial model.
  assert all(row['client_train_loss'] > 0 for row in result.rows)


def test_without_the_flag_there_is_no_loss_on_training_data(
    fake_model, tmp_path
):
  result = training_fakes.train(fake_model, tmp_path, _FAKE_CONFIG)
  assert 'client_train_loss' not in result.rows[-1]
