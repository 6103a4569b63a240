"""Names the variables of a model that messages are about."""

from collections.abc import Sequence
import re
from typing import NamedTuple, Optional

from tff_bn.analysis.communication import Message
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import VariableInfo
from tff_bn.keras_model.partition import Role

# Places in the weights and updates of processes: a variable by its name or its
# position, or a layer's statistics by the layer's position.
_BY_NAME = re.compile(r'(?:^|\.)(?:non_)?trainable\.(\w+)$')
_BY_POSITION = re.compile(r'(?:^|\.)(trainable|non_trainable)\[(\d+)\]$')
_STATISTICS = re.compile(r'(?:^|\.)statistics\[(\d+)\]\.(\w+)$')


class _Variable(NamedTuple):
  info: VariableInfo
  path: str


def sent_variables(
    model: BatchNormModel, messages: Sequence[Message]
) -> list[str]:
  """Names the variables whose values, or whose changes, messages hold.

  Args:
    model: The model of the process.
    messages: Messages of its rounds.

  Returns:
    For each message Keras's path of the variable, such as `conv_1/kernel`; for
    a layer's statistics its path with `mean`, `variance` or `count`. Empty if
    the message is about no single variable, or if the process keeps some
    variables fixed, so that positions don't say which ones are sent.
  """
  sent = [
      _Variable(info, variable.path)
      for position, (info, variable) in enumerate(
          zip(model.variables, model.keras_model.weights, strict=True)
      )
      if position not in model.constants
  ]
  by_name = {variable.info.name: variable for variable in sent}
  by_position = {
      'trainable': [v for v in sent if v.info.trainable],
      'non_trainable': [v for v in sent if not v.info.trainable],
  }
  layers = [
      variable.path.rpartition('/')[0]
      for variable in by_position['non_trainable']
      if variable.info.is_statistic and variable.info.role is Role.MOVING_MEAN
  ]

  def at(variables: Sequence[_Variable], place: int) -> Optional[_Variable]:
    return variables[place] if place < len(variables) else None

  def path(message: Message) -> str:
    if found := _STATISTICS.search(message.name):
      place = int(found[1])
      return f'{layers[place]}/{found[2]}' if place < len(layers) else ''
    variable = None
    if found := _BY_NAME.search(message.name):
      variable = by_name.get(found[1])
    elif found := _BY_POSITION.search(message.name):
      variable = at(by_position[found[1]], int(found[2]))
    if variable is None or variable.info.shape != message.shape:
      return ''
    return variable.path

  return [path(message) for message in messages]
