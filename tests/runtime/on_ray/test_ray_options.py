"""Tests of the options of the Ray runtime."""

import sys

import pytest
import ray_contexts

from tff_bn import runtime
from tff_bn.common import cores


@pytest.mark.parametrize(
    'name, value',
    [
        ('address', ''),
        ('num_workers', 0),
        ('cpus_per_worker', 0),
        ('gpus_per_worker', -0.5),
        ('gpus_per_worker', 2),
        ('gpus_per_worker', float('nan')),
        ('client_timeout', 0),
        ('client_timeout', float('nan')),
        ('worker_timeout', -1),
    ],
)
def test_invalid_options_are_refused(name, value):
  with (
      pytest.raises(ValueError, match=f'^{name}={value!r} '),
      runtime.ray_runtime(**{name: value}),
  ):
    pass


@pytest.mark.parametrize(
    'num_gpus, given, expected',
    [
        (0, {}, {'CPU': 3}),
        (2, {}, {'CPU': 1, 'GPU': 1}),
        (2, dict(gpus_per_worker=0), {'CPU': 3}),
        (2, dict(gpus_per_worker=0.5), {'CPU': 1, 'GPU': 0.5}),
        (0, dict(cpus_per_worker=2), {'CPU': 2}),
        (1, dict(cpus_per_worker=2), {'CPU': 2, 'GPU': 1}),
    ],
)
def test_resources_of_a_worker(monkeypatch, num_gpus, given, expected):
  monkeypatch.setattr(cores, 'num_cores', lambda: 5)
  monkeypatch.setattr(cores, 'per_operation', lambda: 5)
  assert ray_contexts.options(**given).for_cluster(num_gpus).needs == expected


@pytest.mark.parametrize(
    ('per_operation', 'expected'), [(1, 1), (2, 2), (4, 4), (8, 4)]
)
def test_a_worker_has_the_cores_of_a_client(
    monkeypatch, per_operation, expected
):
  monkeypatch.setattr(cores, 'num_cores', lambda: 8)
  monkeypatch.setattr(cores, 'per_operation', lambda: per_operation)
  options = ray_contexts.options().for_cluster(0)
  assert options.needs == {'CPU': expected}


def test_resources_in_words():
  options = ray_contexts.options(gpus_per_worker=0.5).for_cluster(1)
  assert options.describe_needs() == 'a worker needs 1 CPU and 0.5 GPU'


def test_without_ray(monkeypatch):
  monkeypatch.setitem(sys.modules, 'ray', None)
  with (
      pytest.raises(ImportError, match=r"Ray.*not installed.*'\.\[ray\]'"),
      runtime.ray_runtime(),
  ):
    pass


@pytest.mark.parametrize('address', ['127.0.0.1:1', 'nowhere.invalid:6379'])
def test_unknown_cluster_is_an_error(monkeypatch, address):
  from tff_bn.runtime.on_ray import ray_cluster

  monkeypatch.setattr(ray_cluster, '_ANSWER_SECONDS', 1)
  with (
      pytest.raises(
          ValueError,
          match=f'No Ray cluster can be used at {address}.*RAY_USE_TLS',
      ),
      runtime.ray_runtime(address),
  ):
    pass
