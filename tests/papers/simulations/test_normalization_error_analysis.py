"""Tests for `tff-bn-analyze normalization_error`."""

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


@pytest.fixture(scope='module')
def results():
  settings = normalization_error.Settings(4, 5, 0.3, 6, 7)
  return normalization_error.run_levels(settings, [0, 0.5])


def test_writes_tables_and_plots(tmp_path, results, capsys):
  folder = tmp_path / 'a' / 'b'
  assert _run(folder, '--gammas=0.5,0') == 0
  captured = capsys.readouterr()
  files = csv_rows.contents(folder)
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
  text = normalization_error_report.results_markdown(results)
  cells = csv_rows.cells(text)
  assert cells[0] == [
      'γ',
      *('naive', 'fixbn', 'fbn'),
      *('naive, last', 'fixbn, last', 'fbn, last'),
  ]
  assert cells[3][0] == '0.5'
  assert cells[3][2] == f'{results[1].mean_error("fixbn"):.4f}'
  assert cells[3][6] == f'{results[1].final_error("fbn"):.4f}'
  assert 'over all 6 rounds' in text
  # The share of the initial running statistics in the error.
  first = results[0].errors['fbn']
  assert f'{first[0]:.4f}, {100 * first[0] / first.sum():.0f}%' in text


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
  first = csv_rows.contents(tmp_path)
  # As after an interrupted program.
  (tmp_path / 'normalization_error.csv').unlink()
  (tmp_path / 'plots' / 'normalized_points.png').unlink()
  capsys.readouterr()
  assert _run(tmp_path, '--gammas=0.3') == 2
  assert '--gammas (0.5, now 0.3)' in capsys.readouterr().err
  assert _run(tmp_path, f'--flagfile={tmp_path / "flags.txt"}') == 0
  assert csv_rows.contents(tmp_path) == first
  assert _run(tmp_path, '--gammas=0.3', '--overwrite') == 0
  second = csv_rows.contents(tmp_path)
  assert second.keys() == _FILES
  assert second != first
  assert b'--gammas=0.3\n' in second['flags.txt']


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


def test_defaults_of_the_paper():
  program = analyze.ANALYSES['normalization_error']
  flags = command_line.parse(program.define_flags, [])
  settings = normalization_error.Settings()
  for name in ('num_clients', 'points_per_client', 'beta', 'rounds', 'seed'):
    assert getattr(flags, name) == getattr(settings, name)
