"""Tests that the flags choose where TFF computations run."""

import contextlib

import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import runtime
from tff_bn.programs import cli
from tff_bn.programs import runtime_flags
from tff_bn.programs import train


def _resolve(*arguments):
  return runtime_flags.resolve(cli.parse(train.define_flags, arguments))


def _current():
  return tff.framework.get_context_stack().current


def test_in_process_is_the_default():
  settings = _resolve()
  assert settings == runtime_flags.RuntimeSettings(
      'in_process', None, None, 'continue'
  )
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


def test_command_line_overrules_devices_of_a_flagfile(tmp_path):
  path = tmp_path / 'flags'
  path.write_text('--client_devices=GPU:0\n')
  settings = _resolve(f'--flagfile={path}', '--runtime=native')
  assert settings == runtime_flags.RuntimeSettings(
      'native', None, None, 'continue'
  )


def test_jit_compile_of_a_flagfile_is_not_overruled(tmp_path):
  path = tmp_path / 'flags.txt'
  path.write_text('--jit_compile=true\n')
  with pytest.raises(ValueError, match='--jit_compile is only for'):
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


def test_cluster_and_what_happens_at_a_loss_are_handed_on(monkeypatch):
  calls = []

  @contextlib.contextmanager
  def record(**options):
    calls.append(options)
    yield

  monkeypatch.setattr(runtime, 'in_process_runtime', record)
  arguments = ['--cluster=a:1,b:2', '--on_worker_loss=stop']
  with _resolve(*arguments).enter():
    pass
  assert calls == [
      dict(client_devices=None, cluster=('a:1', 'b:2'), on_worker_loss='stop')
  ]


def test_lost_worker_is_an_error_that_says_how_to_go_on(monkeypatch):
  monkeypatch.setattr(
      runtime, 'in_process_runtime', lambda **_: contextlib.nullcontext()
  )
  with (
      pytest.raises(RuntimeError, match='a:1.*left.*continues from the last'),
      _resolve('--cluster=a:1').enter(),
  ):
    raise runtime.WorkerLostError('Lost the worker a:1.')


@pytest.mark.parametrize(
    'arguments, message',
    [
        (
            ['--on_worker_loss=stop'],
            '--on_worker_loss=stop is only for --cluster',
        ),
        (
            ['--cluster=a:1', '--runtime=native'],
            '--cluster=a:1 is only for --runtime=in_process',
        ),
    ],
)
def test_flags_that_contradict_one_another(arguments, message):
  with pytest.raises(ValueError, match=message):
    _resolve(*arguments)


@pytest.mark.parametrize(
    'cluster, message',
    [
        ('nowhere', "'nowhere' is not understood; a worker is host:port"),
        (':7000', "':7000' is not understood"),
        ('host:', "'host:' is not understood"),
        ('host:x', "'host:x' is not understood"),
        ('127.0.0.1:99999', '127.0.0.1:99999 can not be reached'),
        ('no.such.host.invalid:7000', 'can not be reached'),
    ],
)
def test_cluster_that_can_not_be(cluster, message):
  with (
      pytest.raises(ValueError, match=f'--cluster={cluster} is imp.*{message}'),
      _resolve(f'--cluster={cluster}').enter(),
  ):
    pass
