"""Tests for `tff-bn-analyze`."""

import re
import subprocess
import sys

from absl import flags as absl_flags
import csv_rows
import matplotlib.image
import pytest

from tff_bn.analysis import normalization_error
from tff_bn.papers import analyze
from tff_bn.papers.simulations import normalization_error_report
from tff_bn.programs.cli import command_line

_SMALL = (
    '--rounds=6',
    '--num_clients=4',
    '--points_per_client=5',
    '--beta=0.3',
    '--seed=7',
)
_FILES = {
    'flags.txt',
    'normalization_error.csv',
    'normalization_error.md',
    'normalization_error_by_round.csv',
    'plots/normalization_error.png',
    'plots/normalized_points.png',
}


def _run(folder, *arguments):
  return analyze.run(
      ['normalization_error', f'--output_dir={folder}', *_SMALL, *arguments]
  )


def _files(folder):
  return {
      path.relative_to(folder).as_posix(): path.read_bytes()
      for path in folder.rglob('*')
      if path.is_file()
  }


@pytest.fixture(scope='module')
def results():
  settings = normalization_error.Settings(4, 5, 0.3, 6, 7)
  return normalization_error.run_levels(settings, [0, 0.5])


def test_writes_tables_and_plots(tmp_path, results, capsys):
  folder = tmp_path / 'a' / 'b'
  assert _run(folder, '--gammas=0.5,0') == 0
  captured = capsys.readouterr()
  files = _files(folder)
  assert files.keys() == _FILES
  expected = [
      (result.gamma, name, result.mean_error(name), result.final_error(name))
      for result in results
      for name in ('naive', 'fixbn', 'fbn')
  ]
  rows = csv_rows.read(folder / 'normalization_error.csv')
  assert [
      (
          float(row['gamma']),
          row['algorithm'],
          float(row['mean_error']),
          float(row['final_error']),
      )
      for row in rows
  ] == [
      (gamma, name, pytest.approx(mean, rel=1e-7), pytest.approx(final))
      for gamma, name, mean, final in expected
  ]
  by_round = csv_rows.read(folder / 'normalization_error_by_round.csv')
  assert len(by_round) == 2 * 3 * 6
  assert by_round[-1].items() >= dict(algorithm='fbn', round='6').items()
  assert float(by_round[-2]['error']) == pytest.approx(
      results[1].errors['fbn'][4]
  )
  table = files['normalization_error.md'].decode()
  assert table in captured.out
  assert not captured.err
  for path in (folder / 'plots').iterdir():
    pixels = matplotlib.image.imread(path)
    assert min(pixels.shape[:2]) > 250
    assert pixels[..., :3].std() > 0.01  # Something is drawn.


def test_markdown(results):
  lines = normalization_error_report.results_markdown(results).splitlines()
  cells = [
      [cell.strip() for cell in line.strip('|').split('|')]
      for line in lines[:4]
  ]
  assert cells[0] == [
      'γ',
      *('naive', 'fixbn', 'fbn'),
      *('naive, last', 'fixbn, last', 'fbn, last'),
  ]
  assert cells[3][0] == '0.5'
  assert cells[3][2] == f'{results[1].mean_error("fixbn"):.4f}'
  assert cells[3][6] == f'{results[1].final_error("fbn"):.4f}'
  notes = '\n'.join(lines[4:])
  assert 'over all 6 rounds' in notes
  # The share of the initial running statistics in the error.
  first = results[0].errors['fbn']
  assert f'{first[0]:.4f}, {100 * first[0] / first.sum():.0f}%' in notes


def test_error_figure(results):
  drawing = normalization_error_report.error_figure(results, 'my title')
  assert 'my title' in drawing.get_suptitle()
  for axes, error in zip(drawing.axes, ('mean_error', 'final_error')):
    lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    assert lines.keys() == {'naive', 'fixbn', 'fbn'}
    for name, values in lines.items():
      # The most heterogeneous level is at the right.
      assert list(values) == [
          getattr(results[1], error)(name),
          getattr(results[0], error)(name),
      ]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ['0.5', '0']
    assert axes.get_yscale() == 'log'
  (legend,) = drawing.legends
  assert len(legend.get_texts()) == 3


def test_points_figure(results):
  drawing = normalization_error_report.points_figure(results[0], 'my title')
  assert 'round 6' in drawing.get_suptitle()
  assert 'γ = 0)' in drawing.get_suptitle()
  last = results[0].last_round
  expected = dict(
      before=last.points, centralized=last.centralized, **last.normalized
  )
  assert [axes.get_title() for axes in drawing.axes] == list(expected)
  colors = set()
  for axes, points in zip(drawing.axes, expected.values()):
    *reference, clients = [
        axes.collections[:-4],
        axes.collections[-4:],
    ]
    assert len(reference[0]) == (axes.get_title() in last.normalized)
    for collection in reference[0]:
      assert (collection.get_offsets() == last.centralized.reshape(-1, 2)).all()
    for client, drawn in enumerate(clients):
      assert (drawn.get_offsets() == points[client]).all()
    colors.add(tuple(tuple(drawn.get_facecolor()[0]) for drawn in clients))
  # Each client has one color in all panels, different from all others.
  (by_client,) = colors
  assert len(set(by_client)) == 4


def test_points_of_the_most_heterogeneous_level(results, monkeypatch):
  drawn = []
  original = normalization_error_report.points_figure

  def points_figure(result, title):
    drawn.append(result.gamma)
    return original(result, title)

  monkeypatch.setattr(
      normalization_error_report, 'points_figure', points_figure
  )
  normalization_error_report.report(results[::-1], '')
  assert drawn == [0]


def test_a_folder_is_written_again_with_the_same_flags_only(tmp_path, capsys):
  assert _run(tmp_path, '--gammas=0.5') == 0
  first = _files(tmp_path)
  # As after an interrupted program.
  (tmp_path / 'normalization_error.csv').unlink()
  (tmp_path / 'plots' / 'normalized_points.png').unlink()
  capsys.readouterr()
  assert _run(tmp_path, '--gammas=0.3') == 2
  assert '--gammas (0.5, now 0.3)' in capsys.readouterr().err
  assert _run(tmp_path, f'--flagfile={tmp_path / "flags.txt"}') == 0
  assert _files(tmp_path) == first
  assert _run(tmp_path, '--gammas=0.3', '--overwrite') == 0
  second = _files(tmp_path)
  assert second.keys() == _FILES
  assert second != first
  assert b'--gammas=0.3\n' in second['flags.txt']


def test_other_files_stay(tmp_path, capsys):
  (tmp_path / 'metrics.csv').write_text('mine')
  assert _run(tmp_path) == 2
  assert '--output_dir=' in capsys.readouterr().err
  assert list(_files(tmp_path)) == ['metrics.csv']
  assert _run(tmp_path / 'metrics.csv' / 'x') == 2
  assert 'is not a folder' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('argument', 'message'),
    [
        ('--gammas=0,1.5', "--gammas=0,1.5: '1.5': must be a number"),
        ('--gammas=0.5,0.50', 'twice'),
        ('--rounds=0', '--rounds=0: must be a whole number, at least 1'),
        ('--num_clients=0', '--num_clients=0: '),
        ('--points_per_client=1', '--points_per_client=1: '),
        (
            '--points_per_client=2500001',
            '--num_clients=4 and --points_per_client=2500001 make 10000004'
            ' points in a round; at most 10000000 are possible.',
        ),
        ('--beta=0', '--beta=0: must be a number, '),
        ('--beta=1.1', '--beta=1.1: '),
        ('--seed=-1', '--seed=-1: '),
        ('--gamma=0.5', '--gamma is not a flag of this program. Did you mean'),
    ],
)
def test_wrong_flags(argument, message, tmp_path, capsys):
  assert _run(tmp_path, argument) == 2
  err = capsys.readouterr().err
  assert err.startswith('tff-bn-analyze normalization_error: ')
  assert message in err
  assert err.count('\n') == 1
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([], 'the first argument must name an analysis'),
        (['--seed=1', 'normalization_error'], 'the first argument must'),
        (
            ['normalisation_error'],
            "'normalisation_error' is not an analysis; there is"
            f' {", ".join(analyze.ANALYSES)}. Did you mean'
            ' normalization_error?',
        ),
    ],
)
def test_the_analysis_must_be_named(arguments, message, capsys):
  assert analyze.run(arguments) == 2
  captured = capsys.readouterr()
  assert not captured.out
  assert captured.err.startswith('tff-bn-analyze: ')
  assert message in captured.err
  assert captured.err.count('\n') == 1


@pytest.mark.parametrize('spelling', ['--help', '-h'])
def test_help_lists_the_analyses(spelling, capsys):
  assert analyze.run([spelling]) == 0
  out = capsys.readouterr().out
  assert out.startswith('usage: tff-bn-analyze ANALYSIS ')
  one_line = ' '.join(out.split())
  for name, program in analyze.ANALYSES.items():
    assert f'\n  {name}\n' in out
    assert program.description in one_line
    for example in program.examples:
      assert f'\n  {example}\n' in out


@pytest.mark.parametrize('name', analyze.ANALYSES)
def test_help_of_an_analysis(name, capsys):
  program = analyze.ANALYSES[name]
  assert program.name == f'tff-bn-analyze {name}'
  assert analyze.run([name, '--help']) == 0
  out = capsys.readouterr().out
  assert out == command_line.help_text(program)
  values = absl_flags.FlagValues()
  groups = program.define_flags(values)
  assert sorted(flag for group in groups for flag in group.names) == sorted(
      values
  )
  for flag in values:
    assert re.search(r'\(default: .+\)\.?$', values[flag].help)


@pytest.mark.parametrize('name', analyze.ANALYSES)
def test_examples_are_parsed(name):
  program = analyze.ANALYSES[name]
  for example in program.examples:
    command, analysis, *arguments = example.split()
    assert (command, analysis) == ('tff-bn-analyze', name)
    command_line.parse(program.define_flags, arguments)


def test_defaults_of_the_paper():
  program = analyze.ANALYSES['normalization_error']
  flags = command_line.parse(program.define_flags, [])
  settings = normalization_error.Settings()
  for name in ('num_clients', 'points_per_client', 'beta', 'rounds', 'seed'):
    assert getattr(flags, name) == getattr(settings, name)


def test_needs_no_tensorflow(tmp_path):
  script = f"""
import sys
from tff_bn.papers import analyze
assert analyze.run(['--help']) == 0
assert analyze.run(['normalization_error', '--help']) == 0
assert analyze.run(['normalization_error', '--beta=2']) == 2
for name in ('tensorflow', 'matplotlib'):
  assert name not in sys.modules, name
folder = {str(tmp_path / 'out')!r}
arguments = ['normalization_error', '--rounds=2', f'--output_dir={{folder}}']
assert analyze.run(arguments) == 0
assert 'tensorflow' not in sys.modules
"""
  completed = subprocess.run(
      [sys.executable, '-c', script], capture_output=True, text=True
  )
  assert completed.returncode == 0, completed.stderr
