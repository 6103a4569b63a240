"""Tests for `tff-bn-analyze leakage`."""

import csv_rows
import numpy as np
import pytest
import tiny_runs

from tff_bn.papers import analyze
from tff_bn.papers.privacy import leakage
from tff_bn.papers.privacy import leakage_analysis
from tff_bn.papers.privacy import leakage_report
from tff_bn.papers.privacy import message_noise
from tff_bn.programs.runs import run_folder

_SIZES = (
    *('--batch_sizes=1,3', '--num_clients=3', '--attacked_clients=2'),
    *('--label_clients=20', '--attack_steps=2'),
)


def _means(rows, **wanted):
  """Returns the mean value and chance of the rows with some entries."""
  chosen = [r for r in rows if all(r[k] == v for k, v in wanted.items())]
  return [
      np.mean([float(row[column]) for row in chosen])
      for column in ('value', 'chance')
  ]


@pytest.mark.slow
def test_attacks(tmp_path):
  result = tiny_runs.analyze(
      'leakage',
      [],
      '--algorithms=fedbn,fedtan',
      '--dp_noise_multiplier=100',
      *_SIZES,
      folder=tmp_path,
  )
  assert set(result.drawings) == {'leakage_batch_1', 'leakage_batch_3'}
  labels = [row for row in result.rows if row['attack'] == 'labels']
  pictures = [row for row in result.rows if row['attack'] == 'pictures']
  assert {(r['algorithm'], r['noise'], r['source']) for r in labels} == {
      *(('fedbn', noise, 'update') for noise in ('no', 'yes')),
      *(
          ('fedtan', noise, source)
          for noise in ('no', 'yes')
          for source in ('update', 'statistics', 'everything')
      ),
  }
  assert len(labels) == 8 * 20
  assert len(pictures) == 2 * 2 * 2 * 2
  for algorithm in ('fedbn', 'fedtan'):
    error, chance = _means(
        labels, algorithm=algorithm, noise='no', source='update'
    )
    assert error < 0.1 < 0.3 < chance
    error, chance = _means(
        labels, algorithm=algorithm, noise='yes', source='update'
    )
    assert error == pytest.approx(chance, abs=0.1)
  # The exchanges are protected, too.
  (unprotected, _), protected = (
      _means(labels, algorithm='fedtan', noise=noise, source='statistics')
      for noise in ('no', 'yes')
  )
  assert unprotected < protected[0]
  assert protected[0] == pytest.approx(protected[1], abs=0.1)
  of_labels, of_pictures = (
      csv_rows.cells(part) for part in result.markdown.split('| PSNR')
  )
  assert of_labels[0] == [
      *('Labels', 'DP', 'Update', 'Statistics', 'Everything', 'Chance')
  ]
  assert of_labels[2][:2] == ['fedbn', 'no']
  assert of_labels[2][3:5] == ['–', '–']
  assert of_labels[5][3] == f'{protected[0]:.3f}'
  rows = {tuple(cells[:2]): cells[2:] for cells in of_pictures[1:]}
  for size, cell in zip(('1', '3'), rows['fedtan', 'yes'], strict=True):
    mean, _ = _means(pictures, algorithm='fedtan', noise='yes', batch_size=size)
    assert cell.split(' ± ')[0] == f'{mean:.1f}'
  run_folder.remove(tmp_path)
  assert not list(tmp_path.glob('leakage*'))


def test_figure():
  """It has the true pictures, and those of each result with their PSNR."""
  true = np.zeros((2, 5, 8, 8, 1))
  found = np.ones((2, 5, 8, 8, 1))
  psnr = np.arange(10.0).reshape(2, 5)
  drawing = leakage_report.pictures_figure(
      [
          leakage.PictureResult('fbn', has_noise, true, found, psnr, psnr)
          for has_noise in (False, True)
      ]
  )
  axes = np.array(drawing.axes).reshape(3, 8)
  assert [a.get_ylabel() for a in axes[:, 0]] == ['true', 'fbn', 'fbn, DP']
  assert [a.get_xlabel() for a in axes[1]] == [f'{n} dB' for n in range(8)]
  assert not axes[0, 0].images[0].get_array().any()
  assert axes[1, 0].images[0].get_array().all()


def test_choices_are_the_algorithms_that_can_be_attacked():
  values = leakage_analysis.absl_flags.FlagValues()
  leakage_analysis.define_flags(values)
  assert values['algorithms'].default == tuple(leakage.NORMALIZATIONS)


@pytest.mark.parametrize(
    ('flag', 'message'),
    [
        ('--algorithms=fedavg,moon', "--algorithms=fedavg,moon: 'moon': must"),
        ('--batch_sizes=0', 'at least 1'),
        (
            '--attacked_clients=9',
            '--attacked_clients=9 is more than --num_clients=8',
        ),
        ('--dp_noise_multiplier=0', 'greater than 0'),
        ('--dp_clip_norm=-1', '--dp_clip_norm=-1'),
        ('--dp_statistics_clip_norm=x', '--dp_statistics_clip_norm=x'),
        ('--seed=-1', '--seed=-1'),
    ],
)
def test_wrong_flags(flag, message, tmp_path, capsys):
  assert analyze.run(['leakage', f'--output_dir={tmp_path}', flag]) == 2
  assert message in capsys.readouterr().err
  assert not list(tmp_path.iterdir())


def test_the_seed_decides_the_clients():
  settings, other = (
      leakage.Settings(
          ('fedavg',),
          (1,),
          1,
          1,
          2,
          1,
          1,
          message_noise.Noise(1.0, 1.0, 1.0),
          seed,
      )
      for seed in (0, 1)
  )
  pictures = leakage._Pictures(np.arange(40).reshape(40, 1), np.arange(40) % 4)

  def draw(chosen):
    return leakage._draw_skewed(pictures, 5, leakage._generator(chosen, 2))

  first = draw(settings)
  np.testing.assert_array_equal(first.x, draw(settings).x)
  assert not np.array_equal(first.x, draw(other).x)
  assert first.x.shape == (5, 32, 1)
  np.testing.assert_array_equal(first.x[..., 0] % 4, first.y)
