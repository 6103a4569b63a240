"""Tests of the analyses of finished runs: their runs, files and errors."""

import re
import shutil

import csv_rows
import printed
import pytest
import tiny_runs

from tff_bn.imports import dependencies
from tff_bn.papers import analyze
from tff_bn.papers.run_analyses import analysis_programs
from tff_bn.programs.cli import command_line
from tff_bn.programs.runs import run_folder

_WITH_RUN = analysis_programs.PROGRAMS.keys() - analysis_programs.WITHOUT_RUN


def _write_run(folder, *flags):
  """Writes the files by which a finished run is recognized."""
  (folder / 'model').mkdir(parents=True)
  (folder / 'metrics.csv').write_text('')
  (folder / 'flags.txt').write_text(''.join(f'{flag}\n' for flag in flags))
  return folder


def _write_comparison(folder, algorithms, seeds):
  for algorithm in algorithms.split(','):
    for seed in seeds.split(','):
      _write_run(
          folder / 'runs' / f'{algorithm}-seed{seed}',
          f'--algorithm={algorithm}',
          f'--seed={seed}',
      )
  flags = f'--algorithms={algorithms}\n--seeds={seeds}\n--rounds=9\n'
  (folder / 'flags.txt').write_text(flags)
  return folder


def _named(*folders):
  found = analysis_programs.named_runs(tuple(map(str, folders)))
  return [
      (path, name, settings.algorithm, settings.seed)
      for path, (name, settings) in found.items()
  ]


def test_runs_have_the_names_of_their_folders(tmp_path, monkeypatch):
  a = _write_run(tmp_path / 'x' / 'a', '--seed=3', '--rounds=4')
  b = _write_run(tmp_path / 'b', '--algorithm=fedbn')
  assert _named(b, a) == [(b, 'b', 'fedbn', 0), (a, 'a', 'fedavg', 3)]
  found = analysis_programs.named_runs((str(a),))
  assert found[a][1].rounds == 4
  monkeypatch.chdir(a)
  ((_, name, _, _),) = _named('.')
  assert name == 'a'
  # Equal names get longer.
  folders = [
      _write_run(tmp_path / name, '--seed=0')
      for name in ('p/x/a', 'p/y/a', 'q/y/a')
  ]
  names = [name for _, name, _, _ in _named(*folders, b)]
  assert names == ['x/a', 'p/y/a', 'q/y/a', 'b']


def test_runs_of_comparisons(tmp_path):
  one = _write_comparison(tmp_path / 'one', 'fedbn+fedprox', '2,0')
  two = _write_comparison(tmp_path / 'two', 'fedavg,fbn', '5')
  alone = _write_run(tmp_path / 'alone', '--seed=7')
  assert _named(one, alone, two) == [
      (one / 'runs' / 'fedbn+fedprox-seed2', 'one', 'fedbn+fedprox', 2),
      (one / 'runs' / 'fedbn+fedprox-seed0', 'one', 'fedbn+fedprox', 0),
      (alone, 'alone', 'fedavg', 7),
      (two / 'runs' / 'fedavg-seed5', 'two fedavg', 'fedavg', 5),
      (two / 'runs' / 'fbn-seed5', 'two fbn', 'fbn', 5),
  ]


def test_runs_of_the_first_look(tmp_path):
  names = 'centralized,fedavg,fedtan,fbn,fedbn'
  first = _write_comparison(tmp_path / 'first', names, '0,1')
  expected = _named(first)
  (first / 'flags.txt').write_text('--seeds=0,1\n--rounds=200\n')
  assert _named(first) == expected
  assert len(expected) == 10


def test_a_run_cannot_be_given_twice(tmp_path, monkeypatch):
  run = _write_run(tmp_path / 'a', '--seed=0')
  comparison = _write_comparison(tmp_path / 'c', 'fedavg', '0,1')
  inside = comparison / 'runs' / 'fedavg-seed1'
  monkeypatch.chdir(tmp_path)
  for folders in (
      [run, 'a'],
      ['a/', 'a/../a'],
      [comparison, inside],
      ['c/runs/fedavg-seed1', comparison],
  ):
    with pytest.raises(ValueError, match='--run names the run .* twice'):
      _named(*folders)


def test_runs_that_are_not_finished(tmp_path):
  run = _write_run(tmp_path / 'a', '--seed=0')
  (run / 'model').rmdir()
  with pytest.raises(ValueError, match=f'--run={run} is not finished'):
    _named(run)
  comparison = _write_comparison(tmp_path / 'c', 'fedavg', '0,1')
  inside = comparison / 'runs' / 'fedavg-seed1'
  (inside / 'metrics.csv').unlink()
  with pytest.raises(ValueError, match=f'--run={inside} is not finished'):
    _named(comparison)
  with pytest.raises(ValueError, match='none holds no run'):
    _named(tmp_path / 'none')
  run = _write_run(tmp_path / 'wrong', '--algorithm=fedavgg')
  with pytest.raises((ValueError, command_line.UsageError), match='fedavgg'):
    _named(run)


def test_analyses_are_registered():
  names = set(analysis_programs.PROGRAMS)
  assert set(run_folder.RUN_ANALYSES) == names <= set(analyze.ANALYSES)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        *((name, '--run=FOLDER is missing') for name in sorted(_WITH_RUN)),
        ('fusion --run=none', 'none holds no run'),
        ('fusion --run=a,a', 'a is in the list twice'),
        ('fusion --run=a,./a', '--run names the run a twice'),
        ('fusion --run=unfinished', '--run=unfinished is not finished'),
        ('fusion --run=a --output_dir=a/flags.txt', '--output_dir='),
        ('fusion --run=a --epochs=0', '--epochs=0: '),
        ('fusion --run=a --coefficients=1.1', '--coefficients=1.1: '),
        ('shuffle_test --run=a --amplitudes=1', '--amplitudes=1: '),
        ('shuffle_test --run=a --periods=-1', '--periods=-1: '),
        ('shuffle_test --run=a --repeats=0', '--repeats=0: '),
        ('kept_share --num_units=0', '--num_units=0: '),
        ('kept_share --num_steps=0', '--num_steps=0: '),
        ('kept_share --shuffle_probabilities=2', '--shuffle_probabilities=2: '),
        ('weight_divergence --run=a --num_clients=1', 'at least 2'),
        ('matching --run=a --num_clients=0', '--num_clients=0: '),
        ('matching --run=a --num_examples=0', '--num_examples=0: '),
        ('matching --run=a --layer=x', 'Did you mean layers?'),
        ('matching --run=a --algorithm=fedavg', 'is not a flag'),
    ],
)
def test_wrong_flags(arguments, message, tmp_path, monkeypatch, capsys):
  _write_run(tmp_path / 'a', '--seed=0')
  _write_run(tmp_path / 'unfinished', '--seed=0')
  (tmp_path / 'unfinished' / 'metrics.csv').unlink()
  monkeypatch.chdir(tmp_path)
  before = csv_rows.contents(tmp_path)
  assert analyze.run(arguments.split()) == 2
  captured = capsys.readouterr()
  assert captured.err.startswith(f'tff-bn-analyze {arguments.split()[0]}: ')
  assert message in captured.err
  assert captured.err.count('\n') == 1
  assert not captured.out
  assert csv_rows.contents(tmp_path) == before


@pytest.mark.slow
def test_a_run_keeps_its_analyses_until_it_is_removed(fedavg, tmp_path):
  run = tiny_runs.with_flags(fedavg, tmp_path / 'run')
  before = csv_rows.contents(run)
  expected = set(before)
  for name, *arguments in (
      ('kept_share', '--repeats=1'),
      ('permutation', '--num_examples=4'),
  ):
    result = tiny_runs.analyze(name, run, *arguments)
    expected |= {f'{name}.csv', f'{name}.md'}
    expected |= {f'plots/{plot}.png' for plot in result.drawings}
  after = csv_rows.contents(run)
  assert set(after) == expected
  assert before.items() <= after.items()
  # As --overwrite does.
  run_folder.remove(run)
  assert not csv_rows.contents(run)


@pytest.mark.slow
def test_several_runs_share_a_folder_for_results(
    fedavg, tmp_path, monkeypatch, capsys
):
  for name in ('run', 'other'):
    tiny_runs.with_flags(fedavg, tmp_path / name)
  monkeypatch.chdir(tmp_path)
  before = csv_rows.contents(tmp_path)
  assert analyze.run(['permutation', '--run=run,other']) == 0
  folder = 'runs/permutation'
  assert csv_rows.contents(tmp_path).keys() - before.keys() == {
      f'{folder}/permutation.csv',
      f'{folder}/permutation.md',
      f'{folder}/plots/permutation.png',
  }
  capsys.readouterr()


@pytest.mark.slow
def test_seeds_of_a_comparison_have_its_name(comparison, tmp_path):
  copy = _write_comparison(tmp_path / 'cmp', 'fedavg', '0,1')
  shutil.rmtree(copy / 'runs')
  for name in ('fedavg-seed0', 'fedavg-seed1'):
    shutil.copytree(comparison / 'runs' / name, copy / 'runs' / name)
  result = tiny_runs.analyze('permutation', copy)
  assert [(row['run'], row['seed']) for row in result.rows] == [
      ('cmp', '0'),
      ('cmp', '1'),
  ]
  assert result.folder == copy


def _assert_fails(capsys, folder, arguments, pattern):
  before = csv_rows.contents(folder)
  assert analyze.run(arguments) == 2
  captured = capsys.readouterr()
  error = printed.error(captured.err)
  assert error.startswith(f'tff-bn-analyze {arguments[0]}: ')
  assert re.search(pattern, error)
  assert not captured.out
  assert csv_rows.contents(folder) == before


@pytest.mark.parametrize(
    ('model', 'name', 'words'),
    [
        ('subclassed', 'shuffle_test', '--run=.* not a functional model'),
        ('subclassed', 'kept_share', '--num_units must .* not a functional'),
        ('subclassed', 'matching', '--layers must .* not a functional model'),
        ('subclassed', 'fusion', '--run=.* not a functional model'),
        ('linear', 'shuffle_test', '--run=.* hidden'),
        ('linear', 'kept_share', 'no hidden units.* give --num_units'),
        ('linear', 'matching', '--layers must be given.* no hidden layer'),
        ('linear', 'fusion', '--run=.* no hidden units'),
        (
            'linear',
            'fusion --reestimate_statistics',
            '--run=.*: --reestimate_statistics has no effect: the model has no',
        ),
    ],
)
def test_models_that_an_analysis_refuses(
    user_models, model, name, words, capsys
):
  arguments = [*name.split(), f'--run={user_models / model}', '--trust_run']
  _assert_fails(capsys, user_models, arguments, words)


@pytest.mark.parametrize(
    ('arguments', 'column', 'value'),
    [
        (['weight_divergence'], 'layer', 'hidden'),
        (['matching', '--layers=hidden'], 'layer', 'hidden'),
        (['kept_share', '--num_units=4', '--repeats=1'], 'num_units', '4'),
    ],
)
def test_analyses_of_models_that_are_not_functional(
    user_models, arguments, column, value, tmp_path
):
  name, *flags = arguments
  run = user_models / 'subclassed'
  result = tiny_runs.analyze(name, run, '--trust_run', *flags, folder=tmp_path)
  assert result.rows[0][column] == value


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'words'),
    [
        ('shuffle_test', 'the task .* is regression, but .* classification'),
        ('preference', 'the task .* is regression, but .* classification'),
        ('fusion', 'accuracy, but .* task is regression, has .* mae, r2'),
        ('weight_divergence', 'accuracy, but .* task is regression, has'),
    ],
)
def test_runs_of_another_task(regression, name, words, capsys):
  arguments = [name, f'--run={regression}']
  _assert_fails(capsys, regression, arguments, f'--run={regression}: .*{words}')


@pytest.mark.parametrize(
    'arguments',
    [
        pytest.param(['kept_share', '--repeats=1'], marks=pytest.mark.slow),
        ['permutation', '--num_examples=4'],
        ['matching', '--num_examples=4'],
    ],
)
def test_analyses_without_classes(regression, arguments, tmp_path):
  name, *flags = arguments
  assert tiny_runs.analyze(name, regression, *flags, folder=tmp_path).rows


def test_weights_of_another_model(fedavg, tmp_path, capsys):
  run = tiny_runs.with_flags(fedavg, tmp_path / 'run', normalization='none')
  words = 'does not have the weights of the model'
  _assert_fails(capsys, tmp_path, ['fusion', f'--run={run}'], words)


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (
            'weight_divergence --num_clients=5',
            '--run=.*: --num_clients=5 is more than the 4 clients',
        ),
        ('matching --num_clients=5', '--num_clients=5 .* 4 clients'),
        ('matching --layers=relu,rule', "--layers='rule'"),
        (
            'kept_share --num_steps=4 --num_shuffles=2,5',
            '--num_shuffles has 5.* 4 local steps .*--num_steps',
        ),
        ('kept_share --num_shuffles=1.5', '--num_shuffles has 1.5'),
    ],
)
def test_flags_that_do_not_fit_a_run(fedavg, arguments, words, capsys):
  arguments = [*arguments.split(), f'--run={fedavg}']
  _assert_fails(capsys, fedavg, arguments, words)


def test_kept_share_takes_one_run(comparison, monkeypatch, capsys):
  # Nothing is imported or loaded to find this.
  monkeypatch.setattr(dependencies, 'require_tff', None)
  arguments = ['kept_share', f'--run={comparison}']
  _assert_fails(capsys, comparison, arguments, '--run names 4 runs')


def test_each_local_step_can_shuffle(tmp_path, capsys):
  arguments = ['kept_share', '--num_steps=4', '--num_shuffles=4']
  arguments += ['--repeats=1', '--num_units=3', f'--output_dir={tmp_path}']
  assert analyze.run(arguments) == 0
  capsys.readouterr()
