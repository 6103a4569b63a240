"""Tests of the benchmarks' flags."""

import subprocess

import benchmark_files
import pytest

# Flags that are refused, at once and by name.
_WRONG = {
    'aggregators': ('--clients=2', '--tff_clients=many', '--size=0'),
    'corrections': ('--rows=small_cnn', '--rows=', '--repeats=0'),
    'fedtan': ('--rows=small_cnn', '--first_rounds=5', '--repeats=0'),
    'many_clients': (
        *('--rows=', '--rows=100', '--rows=10x11x4', '--rows=10x0x4'),
        *('--rows=10x5x3', '--rows=axbxc'),
    ),
    'one_exchange': ('--models=vgg9', '--models=', '--rounds=0'),
    'ray_runtime': (
        *('--rows=small_cnn', '--workers=0', '--clients=1', '--repeats=0'),
    ),
    'runtime': ('--rows=small_cnn', '--memory_clients=5', '--repeats=0'),
}


@pytest.mark.parametrize(
    ('name', 'flag'), [(name, flag) for name in _WRONG for flag in _WRONG[name]]
)
def test_wrong_flags_are_found_at_once(name, flag, tmp_path):
  result = subprocess.run(
      benchmark_files.command(name, tmp_path, flag),
      capture_output=True,
      text=True,
      check=False,
      timeout=60,
  )
  printed = result.stdout + result.stderr
  assert result.returncode == 1, printed
  assert flag.partition('=')[0] in printed
  assert not list(tmp_path.iterdir())


_SHARED = ('', 'small_cnn', 'mlp:1x1x1', 'small_cnn:1x2', 'small_cnn:1x0x1')


@pytest.mark.parametrize(
    ('name', 'texts'),
    [
        ('fedtan', _SHARED),
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
