"""Tests that the flags choose where TFF computations run."""

import contextlib
import functools

import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import runtime
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.flags import runtime_flags


def _resolve(*arguments):
  flags = command_line.parse(train.define_flags, arguments)
  runtime_flags.RuntimeFlags.check(flags)
  return runtime_flags.RuntimeFlags.read(flags)


def _current():
  return tff.framework.get_context_stack().current


def test_in_process_is_the_default():
  settings = _resolve()
  assert settings.runtime == 'in_process'
  assert settings.client_devices is None
  assert not settings.arguments()
  before = _current()
  with settings.enter():
    assert isinstance(_current(), runtime.InProcessContext)
  assert _current() is before


def test_native():
  with _resolve('--runtime=native').enter():
    context = _current()
    assert not isinstance(context, runtime.InProcessContext)
    with runtime.native_runtime() as native:
      assert type(context) is type(native)


def test_clients_are_computed_on_the_devices(monkeypatch):
  calls = []
  in_process_runtime = runtime.in_process_runtime

  def record(**options):
    calls.append(options)
    return in_process_runtime()

  monkeypatch.setattr(runtime, 'in_process_runtime', record)
  with _resolve('--client_devices=GPU:1, GPU:0').enter():
    pass
  with _resolve().enter():
    pass
  assert [call['client_devices'] for call in calls] == [
      ('GPU:1', 'GPU:0'),
      None,
  ]


def test_error_inside_is_not_taken_for_a_wrong_device():
  with pytest.raises(ValueError, match='^wrong$'), _resolve().enter():
    raise ValueError('wrong')


def test_jit_compile_of_a_flagfile_is_not_overruled(tmp_path):
  path = tmp_path / 'flags.txt'
  path.write_text('--jit_compile=true\n')
  with pytest.raises(
      ValueError, match='--jit_compile is only for --runtime=in_process'
  ):
    _resolve(f'--flagfile={path}', '--runtime=native')
  path.write_text('--jit_compile=false\n')
  _resolve(f'--flagfile={path}', '--runtime=native')


def test_native_runtime_ignores_xla(native_runtime):
  # Why --jit_compile is refused with it. As soon as this fails, it need not be.
  del native_runtime

  @tff.tensorflow.computation
  def computation():
    # XLA has no such operation.
    return tf.function(
        lambda x: tf.strings.to_number(tf.strings.as_string(x)),
        jit_compile=True,
    )(tf.constant(2.0))

  assert computation() == 2.0


@contextlib.contextmanager
def _recording(calls, **options):
  calls.append(options)
  yield


def test_ray_flags_are_handed_on(monkeypatch):
  calls = []
  monkeypatch.setattr(
      runtime, 'ray_runtime', functools.partial(_recording, calls)
  )
  with _resolve('--runtime=ray').enter():
    pass
  arguments = [
      '--ray_address=10.0.0.5:6379',
      '--num_workers=3',
      '--cpus_per_worker=4',
      '--gpus_per_worker=0.5',
      '--client_timeout=60',
      '--worker_timeout=7.5',
  ]
  with _resolve('--runtime=ray', *arguments).enter():
    pass
  assert calls == [
      dict(address='local', worker_timeout=300.0),
      dict(
          address='10.0.0.5:6379',
          num_workers=3,
          cpus_per_worker=4,
          gpus_per_worker=0.5,
          client_timeout=60.0,
          worker_timeout=7.5,
      ),
  ]


def test_cluster_that_can_not_be_used_is_named(monkeypatch):
  @contextlib.contextmanager
  def refuse(**_):
    raise ValueError('No Ray cluster can be used at a:1: no.')
    yield

  monkeypatch.setattr(runtime, 'ray_runtime', refuse)
  settings = _resolve('--runtime=ray', '--ray_address=a:1')
  with (
      pytest.raises(ValueError, match='--runtime=ray is impossible. No.*a:1'),
      settings.enter(),
  ):
    pass


def test_lost_workers_are_an_error_that_says_how_to_go_on(monkeypatch):
  monkeypatch.setattr(
      runtime, 'ray_runtime', lambda **_: contextlib.nullcontext()
  )
  with (
      pytest.raises(RuntimeError, match='Nobody.*same command continues from'),
      _resolve('--runtime=ray').enter(),
  ):
    raise runtime.WorkersLostError('Nobody is left.')


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['--num_workers=2'], '--num_workers=2 is only for --runtime=ray'),
        (
            ['--runtime=native', '--ray_address=auto'],
            '--ray_address=auto is only for --runtime=ray',
        ),
        (
            ['--runtime=ray', '--client_devices=GPU:0'],
            '--client_devices=GPU:0 is only for --runtime=in_process',
        ),
    ],
)
def test_flags_that_contradict_one_another(arguments, message):
  with pytest.raises(ValueError, match=message):
    _resolve(*arguments)


@pytest.mark.parametrize('device', ['banana', 'GPU', 'GPU:x', ''])
def test_text_that_is_no_device(device):
  with pytest.raises(
      command_line.UsageError, match='be a device such as CPU:0 or GPU'
  ):
    _resolve(f'--client_devices={device}')


def test_devices_with_their_full_names():
  name = '/job:localhost/replica:0/task:0/device:GPU:1'
  devices = _resolve(f'--client_devices={name},/GPU:0,cpu:0').client_devices
  assert devices == (name, '/GPU:0', 'cpu:0')
