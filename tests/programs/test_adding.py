"""Tests that a user can add each kind of part.

A rule is named as `module:NAME`; the others have an entry in a registry.
CONTRIBUTING.md and docs/extending.md explain the same examples.
"""

import dataclasses
import pathlib

import catalog_tables
import csv_rows
import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn import algorithms
from tff_bn.aggregators import robust_rule
from tff_bn.catalog import algorithms as catalog
from tff_bn.catalog import columns
from tff_bn.catalog import options
from tff_bn.catalog import tasks
from tff_bn.catalog import value_types
from tff_bn.papers import analyze
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.flags import algorithm_flags
from tff_bn.programs.flags import run_flags
from tff_bn.programs.flags import training_flags
from tff_bn.programs.plan import settings
from tff_bn.programs.runs import finished_run
from tff_bn.programs.runs import run_building


class Midrange(robust_rule.CheckedRule):
  """The mean of the largest and the smallest value."""

  def aggregate_some(self, values, num_byzantine, num_dropped, state):
    del num_byzantine, num_dropped
    largest, smallest = tf.reduce_max(values, 0), tf.reduce_min(values, 0)
    return (largest + smallest) / 2, state


_CLIENT_DROPOUT = options.Option(
    'client_dropout',
    value_types.SHARE,
    'Share of the inputs that clients drop',
    default_text='none',
    argument=options.OWN_NAME,
)
_NEW_STRENGTH = options.Option(
    'new_strength',
    value_types.POSITIVE,
    'Strength of fed_new',
    1.0,
    argument='strength',
    feature=options.OWN_NAME,
)


@dataclasses.dataclass(frozen=True)
class _TrainingFlags(
    flag_groups.base_class(_CLIENT_DROPOUT), training_flags.TrainingFlags
):
  pass


@dataclasses.dataclass(frozen=True)
class _AlgorithmFlags(
    flag_groups.base_class(_NEW_STRENGTH), algorithm_flags.AlgorithmFlags
):
  pass


@dataclasses.dataclass(frozen=True)
class _RunSettings(_TrainingFlags, _AlgorithmFlags, settings.RunSettings):
  pass


def by_parity(task):
  """Gives the first clients even labels and the last ones odd labels."""
  order = np.argsort(task.labels % 2, kind='stable')
  return np.array_split(order, task.num_clients)


def _print_label_shares(flags):
  run_settings = finished_run.read_settings(
      pathlib.Path(flags.run), is_trusted=flags.trust_run
  )
  data = run_building.split_dataset(run_settings, run_settings.load())
  counts = data.label_distribution()
  print('Even labels:', *(counts[:, ::2].sum(axis=1) / counts.sum(axis=1)))


_ANALYSIS = command_line.Program(
    'tff-bn-analyze label_shares',
    'Prints the share of even labels of each client.',
    (),
    lambda values: (run_flags.EvaluationFlags.define(values),),
    _print_label_shares,
)
_NAMES = ['--algorithm=fed_new']


@pytest.mark.slow
def test_added_parts_run_and_go(tmp_path, monkeypatch, capsys):
  given = []

  def build(model, client_optimizer, *, strength, client_dropout=None, **more):
    given.append((strength, client_dropout))
    assert type(more['model_aggregator']) is Midrange
    return algorithms.build_fed_avg(model, client_optimizer, **more)

  arguments = [
      *_NAMES,
      f'--model_aggregator={__name__}:Midrange',
      f'--split={__name__}:by_parity',
      '--client_dropout=0.25',
      '--model=mlp3',
      '--metrics=accuracy,top3',
      '--num_clients=2',
      '--rounds=1',
      '--local_steps=1',
      f'--output_dir={tmp_path / "run"}',
  ]
  with monkeypatch.context() as added:
    fedavg = catalog.ALGORITHMS['fedavg']
    added.setitem(
        catalog.ALGORITHMS._entries,
        'fed_new',
        catalog.Algorithm(
            'fed_new',
            'a new algorithm',
            build,
            (*fedavg.options, _NEW_STRENGTH),
            features=fedavg.features,
        ),
    )
    added.setattr(training_flags, 'TrainingFlags', _TrainingFlags)
    added.setattr(algorithm_flags, 'AlgorithmFlags', _AlgorithmFlags)
    added.setattr(settings, 'RunSettings', _RunSettings)
    added.setitem(
        tasks.METRICS._entries,
        'top3',
        tasks.Metric(
            'top3',
            'share of samples whose class is among 3',
            lambda task, num_outputs: (
                keras.metrics.SparseTopKCategoricalAccuracy(3, name='top3')
            ),
            kind=columns.share('top3', 'top-3 accuracy'),
        ),
    )
    added.setitem(analyze.ANALYSES, 'label_shares', _ANALYSIS)

    help_text = command_line.help_text(train.PROGRAM)
    assert 'fed_new: a new algorithm' in help_text
    assert '--client_dropout\n      Share of the inputs' in help_text

    assert '--new_strength\n      Strength of fed_new (default: 1)' in help_text

    assert train.run(arguments) == command_line.OK
    assert given == [(1.0, 0.25)]
    wrong = [*arguments, '--algorithm=fedavg', '--new_strength=2']
    assert train.run(wrong) == command_line.USAGE_ERROR
    assert '; it is for fed_new.' in capsys.readouterr().err.replace('\n', ' ')
    assert '--client_dropout=0.25\n' in (
        tmp_path / 'run' / 'flags.txt'
    ).read_text(encoding='utf-8')
    last = csv_rows.read(tmp_path / 'run' / 'metrics.csv')[-1]
    for prefix in ('train', 'test', 'client_test'):
      assert float(last[f'{prefix}_top3']) >= float(last[f'{prefix}_accuracy'])
    page = (tmp_path / 'run' / 'report.html').read_text(encoding='utf-8')
    assert '>Top-3 accuracy, %<' in page and 'data-chart="test_top3"' in page
    assert catalog_tables.table('metrics').count('`top3`') == 1

    assert (
        analyze.run(
            ['label_shares', f'--run={tmp_path / "run"}', '--trust_run']
        )
        == command_line.OK
    )
    first, second = capsys.readouterr().out.split('Even labels: ')[1].split()
    assert float(first) > 0.9 and float(second) < 0.1

  for argument in [*_NAMES, '--client_dropout=0.25']:
    assert train.run([argument]) == command_line.USAGE_ERROR
