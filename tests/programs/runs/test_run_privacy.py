"""Tests of the sums that `--privacy` builds."""

import types

import keras
import numpy as np
import pytest

from tff_bn.analysis import privacy_accounting
from tff_bn.analysis.privacy_accounting import Sampling
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import run_privacy

# Clients with 3 and 20 examples.
_DATA = types.SimpleNamespace(
    client_ids=('a', 'b'),
    train_indices={'a': np.arange(3), 'b': np.arange(20)},
)


def _settings(*arguments):
  flags = command_line.parse(train.define_flags, arguments)
  settings_lib.check(flags)
  return settings_lib.resolve(flags, flags.algorithm, flags.seed)


def _model(*sizes):
  keras_model = keras.Sequential(
      [keras.Input((*sizes, 2)), keras.layers.BatchNormalization()]
  )
  return types.SimpleNamespace(keras_model=keras_model)


def _sums(monkeypatch, *arguments, model=None):
  """Returns the name of the factory and its arguments."""
  calls = []
  for name in ('dp_sums.DpSums', 'secure_sums.SecureSums'):
    monkeypatch.setattr(
        f'tff_bn.aggregators.{name}',
        lambda *args, name=name, **options: calls.append((name, args, options)),
    )
  run_privacy.build_sums(_settings(*arguments), model or _model(4, 5), _DATA)
  ((name, args, options),) = calls
  return name, args, options


def test_nothing_without_privacy():
  assert run_privacy.build_sums(_settings(), _model(), _DATA) is None
  assert run_privacy.round_columns(_settings(), _DATA) == {}


@pytest.mark.parametrize(
    ('flags', 'weight', 'count'),
    [
        (['--local_epochs=3'], 60, 60 * 20),
        (['--local_steps=2', '--batch_size=8'], 16, 16 * 20),
        (['--local_epochs=1', '--client_weighting=uniform'], 1, 20 * 20),
        (['--local_epochs=1', '--secure_weight_bound=7'], 7, 20 * 20),
        (['--local_epochs=1', '--secure_count_bound=9'], 20, 9),
    ],
)
def test_bounds_follow_from_data_and_model(monkeypatch, flags, weight, count):
  name, _, options = _sums(monkeypatch, '--privacy=secure_sum', *flags)
  assert name == 'secure_sums.SecureSums'
  assert options == dict(
      weight_bound=weight,
      count_bound=count,
      update_bound=1.0,
      statistics_bound=100.0,
  )


def test_bounds_that_are_not_known(monkeypatch):
  arguments = ['--privacy=secure_sum', '--local_epochs=1']
  with pytest.raises(ValueError, match='needs --secure_count_bound'):
    _sums(monkeypatch, *arguments, model=_model(None))
  _, _, options = _sums(
      monkeypatch, *arguments, '--secure_count_bound=5', model=_model(None)
  )
  assert options['count_bound'] == 5
  arguments.append('--client_weighting=sample_weights')
  with pytest.raises(ValueError, match='needs --secure_weight_bound'):
    _sums(monkeypatch, *arguments)


def test_noise_and_its_options(monkeypatch):
  flags = [
      *('--privacy=dp', '--dp_noise_multiplier=2', '--dp_clip_norm=3'),
      *('--dp_statistics_clip_norm=4', '--dp_statistics_share=0.5'),
      *('--dp_clip_quantile=0.25', '--seed=6', '--dp_delta=1e-3'),
  ]
  name, args, options = _sums(monkeypatch, *flags)
  assert (name, args) == ('dp_sums.DpSums', (2,))
  assert options == dict(
      num_clients=2,
      clip_norm=3,
      statistics_clip_norm=4,
      statistics_share=0.5,
      clip_quantile=0.25,
      seed=6,
  )


@pytest.mark.slow
def test_noise_for_an_epsilon(monkeypatch):
  flags = [
      *('--privacy=dp', '--dp_epsilon=9', '--dp_delta=1e-3'),
      *('--rounds=7', '--clients_per_round=1'),
  ]
  _, args, options = _sums(monkeypatch, *flags)
  expected = privacy_accounting.noise_multiplier(9, Sampling(2, 1), 7, 1e-3)
  assert args == (expected,)
  assert options['num_clients'] == 1
  assert 'clip_quantile' not in options
  columns = run_privacy.round_columns(_settings(*flags), _DATA)
  assert columns['epsilon'](7, {}) == pytest.approx(9, rel=0.01)
  assert columns['epsilon'](0, {}) == 0


def test_clipped_clients_of_all_sums_are_counted():
  (of_round,) = run_privacy.round_columns(
      _settings('--privacy=secure_sum'), _DATA
  ).values()

  def measured(upper, lower):
    return dict(
        secure_upper_clipped_count=np.int32(upper),
        secure_lower_clipped_count=np.int32(lower),
        secure_upper_threshold=np.float32(9),
    )

  metrics = dict(
      aggregator=dict(a=measured(1, 2), b=measured(0, 0)),
      distributor=[dict(a=measured(10, 0)), dict(b=measured(0, 20))],
  )
  assert of_round(0, {}) is None
  assert of_round(1, metrics) == 33
