"""The constraints of a model's variables, such as `kernel_constraint`."""

from collections.abc import Collection, Sequence
from typing import Any, Optional

import keras
import tensorflow as tf

from tff_bn.keras_model.stateless_function import StatelessFunction


class Constraints:
  """Applies the constraints of trainable variables, as Keras's optimizers do.

  Attributes:
    positions: The positions of the variables that have a constraint.
  """

  def __init__(self, variables: Sequence[keras.Variable]):
    """Finds the constraints of the trainable variables."""
    self.positions: Collection[int] = [
        position
        for position, variable in enumerate(variables)
        if variable.constraint is not None
    ]
    self._num_variables = len(variables)
    self._constrained = [variables[p] for p in self.positions]
    if self._constrained:
      # Constraints may use variables or constants of their own.
      self._function = StatelessFunction(self._values, self._constrained)

  def assign(self, is_trained: Optional[Sequence[bool]] = None) -> None:
    """Changes the variables, in a function that Keras's variables belong to.

    Args:
      is_trained: Which of the trainable variables are trained; the others do
        not change. Default: all are.
    """
    for position, variable in zip(self.positions, self._constrained):
      if is_trained is None or is_trained[position]:
        variable.assign(variable.constraint(variable))

  def _values(self) -> list[tf.Tensor]:
    self.assign()
    return [tf.convert_to_tensor(variable) for variable in self._constrained]

  def apply(self, values: Sequence[Any]) -> list[Any]:
    """Returns values that satisfy the constraints, in a TFF computation.

    Args:
      values: A value for each trainable variable. The values of variables
        without a constraint do not change.
    """
    result = list(values)
    if not self._constrained:
      return result
    if len(result) != self._num_variables:
      raise ValueError(
          f'There are constraints for {self._num_variables} trainable'
          f' variables, but {len(result)} values.'
      )
    found = self._function([result[p] for p in self.positions])
    for position, value in zip(self.positions, found, strict=True):
      result[position] = value
    return result
