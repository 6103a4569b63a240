"""Tests for the runs of a comparison."""

import re

import pytest

from tff_bn.programs import compare
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import axes as axes_lib
from tff_bn.programs.plan import comparison


def _flags(*arguments):
  return command_line.parse(compare.define_flags, arguments)


def _plan(*arguments):
  return compare.plan(_flags(*arguments))


def _folders(plan):
  return [run.folder for run in plan.runs]


def _axis(name, **points):
  return axes_lib.Axis(
      name, tuple(axes_lib.Point(k, flags) for k, flags in points.items())
  )


def test_runs_without_sweeps():
  plan = _plan('--algorithms=fbn,fedbn+moon', '--seeds=3,0')
  assert _folders(plan) == [
      'fbn-seed3',
      'fedbn+moon-seed3',
      'fbn-seed0',
      'fedbn+moon-seed0',
  ]
  assert [run.title for run in plan.runs][:2] == [
      'fbn, seed 3',
      'fedbn+moon, seed 3',
  ]
  assert [(r.settings.algorithm, r.settings.seed) for r in plan.runs] == [
      ('fbn', 3),
      ('fedbn+moon', 3),
      ('fbn', 0),
      ('fedbn+moon', 0),
  ]


def test_product_of_sweeps():
  plan = _plan(
      '--algorithms=fbn,fedavg',
      '--seeds=1',
      '--sweep=local_steps=1,5',
      '--sweep=gamma=0,1',
      '--split=gamma',
  )
  assert [tuple(run.labels.values()) for run in plan.runs] == [
      (steps, gamma, algorithm)
      for steps in '15'
      for gamma in '01'
      for algorithm in ('fbn', 'fedavg')
  ]
  first, *_, last = plan.runs
  assert last.folder == 'fedavg-local_steps=5-gamma=1-seed1'
  assert last.title == 'fedavg, local_steps=5, gamma=1, seed 1'
  assert (last.settings.local_steps, last.settings.gamma) == (5, 1.0)
  assert (first.settings.local_steps, first.settings.gamma) == (1, 0.0)
  assert len({run.settings for run in plan.runs}) == 8
  assert plan.varied_flags == ('local_steps', 'gamma', 'algorithm')


def test_runs_with_equal_settings_are_one():
  plan = _plan(
      '--algorithms=fedavg,fedtan',
      '--seeds=0',
      '--sweep=moments=two_pass,fused',
      '--sweep=split=iid,dirichlet',
      '--sweep=dirichlet_alpha=0.1,1',
  )
  assert len(plan.runs) == 16
  trained = plan.trained()
  assert [run.folder for run in trained] == list(dict.fromkeys(_folders(plan)))
  # Not repeated: moments for fedavg, and α for iid.
  assert len(trained) == (1 + 2) * (1 + 2)
  assert trained[0].folder == 'fedavg-split=iid-seed0'
  assert trained[0].labels is plan.runs[0].labels
  assert len({run.settings for run in trained}) == 9


def test_folders_do_not_depend_on_other_runs():
  arguments = ('--algorithms=fedavg,fedtan', '--seeds=0')
  few = _plan(*arguments, '--sweep=moments=fused')
  many = _plan(*arguments, '--sweep=moments=two_pass,fused')
  assert set(_folders(few)) < set(_folders(many))


def test_folders_have_safe_names():
  plan = _plan(
      '--algorithms=fedavg', '--sweep=dataset=npz:/a b,npz:/a_b', '--seeds=0'
  )
  folders = _folders(plan)
  assert len(set(folders)) == 2
  for folder in folders:
    assert re.fullmatch('fedavg-dataset=npz__a_b-[0-9a-f]{8}-seed0', folder)
  axis = _axis('scheme', **{'FedAvg+GN (' + 300 * 'x': {'algorithm': 'fedavg'}})
  (run,) = comparison.plan(_flags(), [axis], [7]).runs
  assert re.fullmatch(r'scheme=FedAvg\+GN__x+-[0-9a-f]{8}-seed7', run.folder)
  assert len(run.folder) < 200


def test_points_with_several_flags():
  plan = comparison.plan(
      _flags('--dirichlet_alpha=2', '--model=mlp3'),
      [
          _axis(
              'data',
              even={'split': 'iid'},
              skewed={'split': 'dirichlet', 'num_clients': '4', 'rounds': '60'},
          ),
          _axis(
              'scheme',
              plain={'algorithm': 'fedavg'},
              fused={'algorithm': 'fedtan', 'moments': 'fused'},
          ),
      ],
      [0],
  )
  assert _folders(plan) == [
      'data=even-scheme=plain-seed0',
      'data=even-scheme=fused-seed0',
      'data=skewed-scheme=plain-seed0',
      'data=skewed-scheme=fused-seed0',
  ]
  assert [r.settings.dirichlet_alpha for r in plan.runs] == [None, None, 2, 2]
  assert plan.further_flags(plan.runs[0]) == {
      'split': 'iid',
      'num_clients': '10',
      'algorithm': 'fedavg',
      'moments': '',
  }
  assert plan.further_flags(plan.runs[3]) == {
      'split': 'dirichlet',
      'num_clients': '4',
      'algorithm': 'fedtan',
      'moments': 'fused',
  }


def test_equal_names_of_different_runs():
  """The flag of the axis is without effect, but the other label has one."""
  axes = [
      _axis('algorithm', x={'algorithm': 'fbn'}),
      _axis('a', y={'rounds': '3'}),
  ]
  plan = comparison.plan(_flags(), axes, [0])
  assert _folders(plan) == ['x-a=y-seed0']
  # Two labels that differ in a character that is not safe.
  axes[1] = _axis('a', **{'y z': {'rounds': '3'}, 'y_z': {'rounds': '4'}})
  assert len(set(_folders(comparison.plan(_flags(), axes, [0])))) == 2


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--sweep=gamma=0,1'], '--gamma=0.0 is only for --split=gamma.'),
        (
            ['--sweep=split=iid,classes', '--dirichlet_alpha=1'],
            '--dirichlet_alpha=1.0 is only for --split=dirichlet.',
        ),
        (
            ['--sweep=local_steps=1,2', '--moments=fused'],
            '--moments=fused has no effect with --algorithms=fedavg,fedbn',
        ),
        (
            ['--sweep=num_clients=20,5', '--clients_per_round=10'],
            '--clients_per_round=10 asks for more clients than --num_clients=5',
        ),
    ],
)
def test_combinations_that_are_impossible(arguments, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    _plan('--algorithms=fedavg,fedbn', *arguments)


def test_flags_of_a_comparison_with_sweeps():
  arguments = (
      '--algorithms=fedavg,fedtan',
      '--seeds=0,1',
      '--sweep=split=iid,natural',
      '--sweep=rounds=3,4',
      '--dataset=emnist',
  )
  flags = _flags(*arguments)
  plan = compare.plan(flags)
  texts = compare.comparison_flags(flags, plan)
  assert texts['sweep'] == 'split=iid,natural\nrounds=3,4'
  assert (texts['algorithms'], texts['seeds']) == ('fedavg,fedtan', '0,1')
  # What the axes vary. The number of clients is known for one split only.
  assert not {'split', 'rounds', 'seed', 'algorithm'} & set(texts)
  assert texts['moments'] == 'two_pass'
  lines = [
      f'--{name}={line}'
      for name, text in texts.items()
      for line in text.split('\n')
  ]
  again = _flags(*lines)
  assert compare.comparison_flags(again, compare.plan(again)) == texts


def test_flags_with_several_values_are_not_common():
  plan = _plan('--sweep=rounds=20,40', '--algorithms=fixbn', '--seeds=0')
  assert [run.settings.fixbn_rounds for run in plan.runs] == [10, 20]
  assert 'fixbn_rounds' not in comparison.flag_texts(plan)


_OLD = {
    'algorithms': 'fedavg,fbn',
    'seeds': '0,1',
    'sweep': 'gamma=0,1\nsplit=gamma',
    'rounds': '10',
    'pooled': 'true',
}


@pytest.mark.parametrize(
    ('changes', 'grown'),
    [
        ({}, {'rounds'}),
        ({'algorithms': 'fedbn,fbn,fedavg'}, {'algorithms', 'rounds'}),
        ({'seeds': '1,0,2'}, {'seeds', 'rounds'}),
        ({'seeds': '1'}, {'rounds'}),
        ({'algorithms': 'fbn'}, {'rounds'}),
        ({'sweep': 'gamma=0,0.5,1\nsplit=gamma'}, {'sweep', 'rounds'}),
        ({'sweep': 'gamma=0,1'}, {'rounds'}),
        ({'sweep': 'gamma=0,1\nsplit=gamma\nrounds=1'}, {'rounds'}),
        ({'sweep': None}, {'rounds'}),
        ({'rounds': '11'}, {'rounds'}),
        ({'rounds': '9'}, set()),
        ({'pooled': 'false'}, {'rounds'}),
        ({'pooled': None}, {'rounds'}),
        # New runs have other flags.
        (
            {'seeds': '0,1,2', 'moments': 'fused', 'pooled': None},
            {'seeds', 'moments', 'pooled', 'rounds'},
        ),
        ({'seeds': '0,1,2', 'sweep': None}, {'seeds', 'rounds'}),
    ],
)
def test_how_a_comparison_may_grow(changes, grown):
  new = {k: v for k, v in {**_OLD, **changes}.items() if v is not None}
  assert set(comparison.grown_flags(_OLD, new)) == grown
