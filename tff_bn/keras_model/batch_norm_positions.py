"""How many values of a channel batch normalization gets from an example."""

from typing import Optional

import keras

from tff_bn.layers import discovery


def most_values_per_example(model: keras.Model) -> Optional[int]:
  """Returns the largest number of values of a channel for an example.

  Calls of a layer in the same model are added up.

  Args:
    model: A built model.

  Returns:
    The largest number over all trainable batch normalization layers; 1 if there
    is none, and `None` if it is not known: a size is not fixed, or a layer is
    called in Python code of a subclass.
  """
  most = 1
  for layer in discovery.batch_norm_layers(model):
    if not layer.trainable:
      continue
    shapes = [
        tensor.shape
        for node in layer._inbound_nodes
        for tensor in node.input_tensors[:1]
    ]
    if not shapes:
      return None
    count = 0
    for shape in shapes:
      positions = _positions(shape, layer.axis)
      if positions is None:
        return None
      count += positions
    most = max(most, count)
  return most


def _positions(
    shape: tuple[Optional[int], ...], channels: int
) -> Optional[int]:
  number = 1
  for axis, size in enumerate(shape):
    if axis in (0, channels % len(shape)):
      continue
    if size is None:
      return None
    number *= size
  return number
