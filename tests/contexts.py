"""TFF's default context in tests."""

import contextlib


@contextlib.contextmanager
def default(context):
  """Makes a context the default one for a `with` block."""
  # Imported late: tests of what needs Keras only run without it.
  import tensorflow_federated as tff

  before = tff.framework.get_context_stack().current
  tff.framework.set_default_context(context)
  try:
    yield context
  finally:
    tff.framework.set_default_context(before)
