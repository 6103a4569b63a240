"""Tests of the benchmarks' flags."""

import subprocess
import sys

from absl import app
from absl import flags
import benchmark_files
import pytest

# Flags that are refused by name.
_WRONG = {
    'aggregators': ('--clients=2', '--tff_clients=many', '--size=0'),
    'corrections': ('--rows=small_cnn', '--rows=', '--repeats=0'),
    'fedtan': ('--rows=small_cnn', '--first_rounds=5', '--repeats=0'),
    'first_round': ('--models=vgg9', '--models=', '--repeats=0'),
    'many_clients': (
        *('--rows=', '--rows=100', '--rows=10x11x4', '--rows=10x0x4'),
        *('--rows=10x5x3', '--rows=axbxc'),
    ),
    'local_steps': ('--steps=1', '--rounds=0', '--seeds=0'),
    'onednn': ('--rows=small_cnn', '--rows=', '--repeats=0'),
    'one_exchange': ('--models=vgg9', '--models=', '--rounds=0'),
    'privacy': (
        *('--epsilons=1,none', '--epsilons=0', '--epsilons=', '--clients=1'),
        *('--rounds=1', '--seeds=0'),
    ),
    'public_workloads': (
        *('--workloads=', '--workloads=mnist', '--rounds=1'),
        *('--peers=nvflare', '--peer_python=/no/python'),
    ),
    'ray_runtime': (
        *('--rows=small_cnn', '--workers=0', '--clients=1', '--repeats=0'),
    ),
    'runtime': ('--rows=small_cnn', '--memory_clients=5', '--repeats=0'),
}


@pytest.mark.parametrize('name', _WRONG)
def test_wrong_flags(name):
  benchmark = benchmark_files.import_benchmark(name)
  for flag in _WRONG[name]:
    with (
        pytest.raises(
            (app.UsageError, flags.IllegalFlagValueError),
            match=flag.partition('=')[0],
        ),
        benchmark_files.given(benchmark, flag),
    ):
      benchmark.main([name])


@pytest.mark.parametrize('name', _WRONG)
def test_wrong_flags_are_found_before_tensorflow_is_imported(name, tmp_path):
  program = [sys.executable, '-X', 'importtime', f'{name}.py', _WRONG[name][0]]
  result = subprocess.run(
      [*program, f'--output_dir={tmp_path}'],
      cwd=benchmark_files.FOLDER,
      capture_output=True,
      text=True,
      check=False,
  )
  assert result.returncode == 1, result.stderr
  assert 'tensorflow' not in result.stderr
  assert not list(tmp_path.iterdir())


_SHARED = ('', 'small_cnn', 'mlp:1x1x1', 'small_cnn:1x2', 'small_cnn:1x0x1')


@pytest.mark.parametrize(
    ('name', 'texts'),
    [
        ('fedtan', _SHARED),
        ('onednn', _SHARED),
        ('runtime', _SHARED),
        # A correction needs several clients and steps.
        ('corrections', (*_SHARED, 'small_cnn:1x2x1', 'small_cnn:2x1x1')),
    ],
)
def test_row_that_is_not_understood(name, texts):
  benchmark = benchmark_files.import_benchmark(name)
  for text in texts:
    with pytest.raises(ValueError, match='--rows'):
      benchmark.Row.parse(text)
