"""Tests that a program ends cleanly on a signal."""

import signal
import sys
import threading

import pytest

from tff_bn.training import termination

_SIGNALS = [
    (signal.SIGINT, KeyboardInterrupt),
    (signal.SIGTERM, termination.Terminated),
]


@termination.on_signals()
def _run(program):
  program()


@pytest.mark.parametrize(('sent', 'expected'), _SIGNALS)
def test_a_signal_ends_the_program_at_once(sent, expected):
  def program():
    signal.raise_signal(sent)
    pytest.fail('The program went on.')

  with pytest.raises(KeyboardInterrupt) as raised:
    _run(program)
  assert raised.type is expected


@pytest.mark.parametrize(('sent', 'expected'), _SIGNALS)
def test_the_end_is_deferred(sent, expected):
  done = []

  def program():
    with termination.deferred():
      with termination.deferred():
        signal.raise_signal(sent)
        done.append('inner')
      done.append('outer')
    done.append('after')

  with pytest.raises(KeyboardInterrupt) as raised:
    _run(program)
  assert raised.type is expected
  assert done == ['inner', 'outer']


def test_the_end_is_allowed_inside_a_deferring_block():
  done = []

  def program():
    with termination.deferred():
      with termination.allowed():
        done.append('allowed')
      signal.raise_signal(signal.SIGINT)
      done.append('deferred')
      with termination.allowed():
        done.append('allowed again')

  with pytest.raises(KeyboardInterrupt):
    _run(program)
  assert done == ['allowed', 'deferred']


def test_a_signal_ends_only_the_allowed_block():
  done = []

  def program():
    with termination.deferred():
      try:
        with termination.allowed():
          signal.raise_signal(signal.SIGINT)
          done.append('allowed')
      finally:
        done.append('deferred')

  with pytest.raises(KeyboardInterrupt):
    _run(program)
  assert done == ['deferred']


def test_the_second_signal_does_not_wait():
  @termination.deferred()
  def program():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    pytest.fail('The program went on.')

  with pytest.raises(termination.Terminated):
    _run(program)


def test_an_error_is_not_replaced():
  @termination.deferred()
  def program():
    signal.raise_signal(signal.SIGINT)
    raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    _run(program)


def _raise_other_error():
  """Replaces a signal's exception, as TensorFlow's C++ code does."""
  try:
    signal.raise_signal(signal.SIGTERM)
  except termination.Terminated:
    raise RuntimeError from None


def test_an_error_that_a_signal_became_is_replaced():
  with pytest.raises(termination.Terminated):
    _run(_raise_other_error)


def test_an_allowed_block_raises_what_a_signal_raises():
  done = []

  @termination.deferred()
  def program():
    try:
      with termination.allowed():
        _raise_other_error()
    except termination.Terminated:
      done.append('deferred')
      raise

  with pytest.raises(termination.Terminated):
    _run(program)
  assert done == ['deferred']


@pytest.fixture
def ignored(monkeypatch):
  """The types of the exceptions that Python prints because it ignores them."""
  types = []
  monkeypatch.setattr(
      sys, 'unraisablehook', lambda ignored: types.append(ignored.exc_type)
  )
  return types


def test_an_exception_that_python_ignored_is_raised_again(ignored):
  done = []

  class Finalized:

    def __del__(self):
      signal.raise_signal(signal.SIGTERM)

  def program():
    finalized = Finalized()
    del finalized
    done.append('ignored')
    with termination.deferred():
      done.append('deferred')
    done.append('after')

  with pytest.raises(termination.Terminated):
    _run(program)
  assert done == ['ignored', 'deferred']
  assert not ignored


def test_other_ignored_exceptions_are_printed(ignored):
  hook = sys.unraisablehook

  class Finalized:

    def __del__(self):
      raise ZeroDivisionError

  def program():
    finalized = Finalized()
    del finalized

  _run(program)
  assert ignored == [ZeroDivisionError]
  assert sys.unraisablehook is hook


def test_signal_handlers_are_restored():
  before = [signal.getsignal(sent) for sent, _ in _SIGNALS]
  with pytest.raises(KeyboardInterrupt):
    _run(lambda: signal.raise_signal(signal.SIGINT))
  assert [signal.getsignal(sent) for sent, _ in _SIGNALS] == before
  _run(termination.check)


def test_other_threads_have_no_signals():
  before = signal.getsignal(signal.SIGTERM)
  found = []
  thread = threading.Thread(
      target=_run,
      args=[lambda: found.append(signal.getsignal(signal.SIGTERM))],
  )
  thread.start()
  thread.join()
  assert found == [before]
