"""The questions of a staged function: values sent in exchange for an answer."""

import dataclasses
from typing import Any, Generic, NamedTuple, TypeVar

import tensorflow as tf

Kind = TypeVar('Kind')


@dataclasses.dataclass(frozen=True)
class Question(Generic[Kind]):
  """A question at the end of a stage.

  `value` has the `tf.TensorSpec`s of the values to send, a nested structure.
  The answer has the same structure and types.
  """

  kind: Kind
  value: Any


class Asked(NamedTuple):
  """The values to send for a question, and whether they may be used."""

  value: Any
  sound: tf.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Request(Generic[Kind]):
  """A question in the traced graph; `answer` consists of placeholders."""

  kind: Kind
  value: Any
  sound: tf.Tensor
  answer: Any

  @property
  def tensors(self) -> list[tf.Tensor]:
    """All tensors that the stage returns for the question."""
    return [*tf.nest.flatten(self.value), self.sound]

  def question(self) -> Question[Kind]:
    """Returns the question with specs in place of the graph's tensors."""
    return Question(
        self.kind, tf.nest.map_structure(tf.TensorSpec.from_tensor, self.value)
    )
