"""Replaces the `call` method of single Keras layers."""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

import keras


@contextlib.contextmanager
def replaced_call(
    layer: keras.layers.Layer, call: Callable[..., Any]
) -> Iterator[None]:
  """Replaces the `call` method of one layer while the context lasts.

  Unlike a new functional model, this works inside nested and subclassed models
  and wrappers. Contexts can be nested.

  Args:
    layer: The layer.
    call: The function to call instead. It can call `layer.call` as read before.

  Yields:
    Nothing.
  """
  replaced = vars(layer).get('call')
  # An attribute of the object hides the method of its class. The layer's own
  # `__setattr__` would track the function.
  object.__setattr__(layer, 'call', call)
  try:
    yield
  finally:
    if replaced is None:
      object.__delattr__(layer, 'call')
    else:
      object.__setattr__(layer, 'call', replaced)
