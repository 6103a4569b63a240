"""Tests of what becomes of the answers of Ray's workers, without a cluster."""

import types

import tensorflow as tf

from tff_bn.runtime import client_portions
from tff_bn.runtime.on_ray import ray_clients

_FORMS = {True: object(), False: object()}
_ERROR = types.SimpleNamespace(
    cause=tf.errors.UnimplementedError(None, None, 'XLA does not know it.')
)


def _clients():
  """Returns two clients in a portion, which XLA shall compile first."""
  bulk_plans = [
      types.SimpleNamespace(is_compiled=value, has_failed=False)
      for value in (True, False)
  ]
  clients = ray_clients.RayClients(
      types.SimpleNamespace(plan=None, values=[[], []], server={}),
      number=0,
      computation=types.SimpleNamespace(forms=_FORMS.get),
      portions=[client_portions.Portion(None, range(2), bulk_plans)],
      workers=None,
      sender=None,
  )
  clients._pass_number = 0
  return clients


def _call(is_compiled, error=None):
  task = types.SimpleNamespace(
      portion=0, pass_number=0, forms=_FORMS[is_compiled]
  )
  return types.SimpleNamespace(
      task=task,
      error=error,
      is_done=error is None,
      is_late=False,
      worker=None,
      life=0,
  )


def test_second_worker_that_can_not_compile():
  """A late worker's portion is computed twice."""
  clients = _clients()
  for _ in range(2):
    clients.on_answer(_call(True, _ERROR))
    assert clients._queue == [0]
    assert not clients._answers
  clients.on_loss(_call(True), was_running=True)
  assert clients._queue == [0]
  # Now it is an error of the round.
  last = _call(False, _ERROR)
  clients.on_answer(last)
  assert clients._answers == {0: last}


def test_error_after_the_first_pass_is_no_failed_compilation():
  clients = _clients()
  clients._is_first_pass = False
  call = _call(True, _ERROR)
  clients.on_answer(call)
  assert clients._answers == {0: call}
