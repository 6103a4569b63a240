"""Tests of the choice of devices."""

import pytest
import tensorflow as tf

from tff_bn import runtime
from tff_bn.common import cores
from tff_bn.runtime import devices

_CPU = '/job:localhost/replica:0/task:0/device:CPU:0'


@pytest.mark.parametrize('name', ['CPU:0', 'cpu:0', '/device:CPU:0', _CPU])
def test_names(name):
  assert devices.full_name(name) == _CPU


@pytest.mark.parametrize(
    'name',
    [
        *('TPU:0', 'CPU:1', '/device:CPU:1', '/job:worker/task:0/device:CPU:0'),
        *('CPU:x', ':', '/CPU', 'CPU:-1'),
    ],
)
def test_unknown_names_are_refused(name):
  with pytest.raises(ValueError, match=f'no device {name!r}; .* are CPU:0'):
    runtime.InProcessContext(client_devices=[name])
  with pytest.raises(ValueError, match=f'no device {name!r}; .* are CPU:0'):
    runtime.InProcessContext(server_device=name)


@pytest.mark.parametrize('names', [[], ['CPU:0', '/device:CPU:0']])
def test_client_devices_must_be_distinct_and_not_empty(names):
  with pytest.raises(ValueError, match='at least one device.* only once'):
    runtime.InProcessContext(client_devices=names)


@pytest.mark.parametrize('number', [0, -1])
def test_max_concurrent_clients_must_be_positive(number):
  with pytest.raises(
      ValueError, match=f'={number} must be a whole number, at least 1'
  ):
    runtime.InProcessContext(max_concurrent_clients=number)


@pytest.fixture
def three_gpus(monkeypatch):
  """Pretends that this machine has three GPUs."""
  gpus = [tf.config.LogicalDevice(f'/device:GPU:{i}', 'GPU') for i in range(3)]
  cpu = tf.config.LogicalDevice('/device:CPU:0', 'CPU')
  monkeypatch.setattr(
      tf.config,
      'list_logical_devices',
      lambda kind=None: gpus if kind == 'GPU' else [cpu, *gpus],
  )


@pytest.mark.usefixtures('three_gpus')
@pytest.mark.parametrize(
    ('names', 'number', 'expected'),
    [
        (['GPU:0', 'GPU:1'], None, [1, 1]),
        (['GPU:0', 'GPU:1', 'GPU:2'], 2, [1, 1]),
        (['GPU:0', 'GPU:1'], 4, [2, 2]),
        (['GPU:0', 'GPU:1'], 3, [2, 2]),
        (['CPU:0'], 1, [1]),
    ],
)
def test_threads_of_each_device(names, number, expected):
  found = devices.find_devices(names, number)
  assert [device.num_threads for device in found] == expected
  assert [device.name for device in found] == [
      _CPU.replace('CPU:0', name) for name in names[: len(expected)]
  ]
  for device in found:
    device.close()


@pytest.mark.parametrize(('num_concurrent', 'expected'), [(1, 2), (5, 5)])
def test_clients_keep_all_cores_busy(monkeypatch, num_concurrent, expected):
  monkeypatch.setattr(cores, 'num_concurrent', lambda: num_concurrent)
  (device,) = devices.find_devices(['CPU:0'], None)
  assert device.num_threads == expected
  device.close()


@pytest.mark.parametrize(
    ('names', 'expected'), [(None, ['CPU:0', 'CPU:1']), (['CPU:0'], ['CPU:0'])]
)
def test_the_default_stands_for_all_cpus(monkeypatch, names, expected):
  cpus = [tf.config.LogicalDevice(f'/device:CPU:{i}', 'CPU') for i in range(2)]
  monkeypatch.setattr(
      tf.config,
      'list_logical_devices',
      lambda kind=None: [] if kind == 'GPU' else cpus,
  )
  (device,) = devices.find_devices(names, None)
  device.close()
  assert device.name == _CPU
  assert list(device.all_names) == [
      _CPU.replace('CPU:0', name) for name in expected
  ]


@pytest.mark.usefixtures('three_gpus')
def test_gpus_are_the_default():
  found = devices.find_devices(None, None)
  assert [device.name for device in found] == [
      _CPU.replace('CPU:0', f'GPU:{i}') for i in range(3)
  ]
