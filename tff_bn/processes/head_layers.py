"""The head of a model: the layers that personalization treats differently."""

import re
from typing import Optional

from tff_bn.catalog import algorithms
from tff_bn.keras_model import shared_weights
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import Role
from tff_bn.keras_model.partition import matches
from tff_bn.processes import requirements


def find(model: BatchNormModel, head_layers: Optional[str]) -> str:
  """Returns a regular expression for the layers of the head.

  Args:
    model: The model.
    head_layers: The regular expression that the user gave. `None`: the last
      layer with a trained kernel, in the order of the model's weights.

  Raises:
    TypeError: If an argument has the wrong type.
    ValueError: If no layer matches, or there is no default.
  """
  requirements.check_model(model)
  if head_layers is not None:
    algorithms.HEAD_LAYERS.check(head_layers)
    shared_weights.check_layers(model, 'head_layers', head_layers)
    return head_layers
  paths = [
      v.path
      for v in model.variables
      if v.role is Role.KERNEL and len(v.shape) > 1
  ]
  if not paths:
    raise ValueError(
        f'The model {model.keras_model.name!r} has no trained layer with a'
        ' kernel, which would be the head; give head_layers.'
    )
  pattern = re.escape(paths[-1])
  others = [
      v.path
      for v in model.variables
      if v.path != paths[-1] and matches(pattern, v.path)
  ]
  if others:
    raise ValueError(
        f'The last layer {paths[-1]!r} of the model {model.keras_model.name!r}'
        f' is not the only one of its name: there is {others[0]!r}. Give'
        ' head_layers.'
    )
  return pattern


def positions(model: BatchNormModel, head_layers: str) -> frozenset[int]:
  """Returns the positions of the head's variables in `model.variables`."""
  return frozenset(
      position
      for position, v in enumerate(model.variables)
      if matches(head_layers, v.path)
  )
