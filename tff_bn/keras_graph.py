"""Walks through functional Keras models."""

from typing import Any

import tensorflow as tf


def calls(model: tf.keras.Model) -> list[Any]:
  """The calls of layers in a functional model, in an order that can be run.

  Args:
    model: A functional model, or a `Sequential` that is connected to an input.

  Returns:
    Keras's nodes, without those of the model's inputs. A node has the `layer`
    that is called, `keras_inputs`, `call_args`, `call_kwargs` and `outputs`.
  """
  seen = {id(tensor.node) for tensor in model.inputs}
  found = []
  stack = [(tensor.node, False) for tensor in reversed(model.outputs)]
  while stack:
    node, is_done = stack.pop()
    if is_done:
      found.append(node)
    elif id(node) not in seen:
      seen.add(id(node))
      stack.append((node, True))
      stack += [(x.node, False) for x in reversed(node.keras_inputs)]
  return found
