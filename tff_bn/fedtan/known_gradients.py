"""Gradients that the server of FedTAN knows before clients send their models.

In the backward pass of the first step, clients send the gradients dγ and dζ of
the scales and shifts of batch normalization. If this step is the only one, and
is a step of SGD, the server can compute the mean change of these variables, so
clients leave them out of their updates.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.fedtan import staged_function
from tff_bn.fedtan.synchronized_batch_norm import GradientSums


class Place(NamedTuple):
  """The place of a sum of gradients among the answers of the server.

  Attributes:
    stage: The stage that gets the answer.
    question: The question's position among the questions of that stage.
    name: `'scale'` or `'shift'`.
  """

  stage: int
  question: int
  name: str


def determine_changes(config: LocalTrainingConfig) -> bool:
  """Whether mean gradients of the first step determine the model's mean change.

  Args:
    config: The settings of local training.
  """
  sgd = tff.learning.optimizers.build_sgdm(1.0)
  return (
      config.local_steps == 1
      and config.client_gradient_clip_norm is None
      # A momentum starts from 0, so it has no effect on the first step.
      and isinstance(config.client_optimizer, type(sgd))
  )


def find(
    gradients: Sequence[tf.Tensor],
    sums: Iterable[GradientSums],
    function: staged_function.StagedFunction[Any],
) -> dict[int, Place]:
  """Finds the trainable variables whose mean gradients the server gets.

  A variable that is used elsewhere, too, such as in a regularization or in
  another call of the layer, has another gradient than the one that is sent. So
  has a variable whose gradient is cast.

  Args:
    gradients: The gradients of the trainable variables, as traced.
    sums: What the calls of batch normalization sent, as traced.
    function: The staged function.

  Returns:
    The places by the variables' positions.
  """
  places = {}
  sent = {
      id(_source(gradient)): (name, one.answer)
      for one in sums
      for name, gradient in (('scale', one.scale), ('shift', one.shift))
  }
  for position, gradient in enumerate(gradients):
    name, answer = sent.get(id(_source(gradient)), ('', {}))
    found = function.find(answer[name]) if name else None
    if found is not None:
      places[position] = Place(*found, name)
  return places


def _source(tensor: tf.Tensor) -> tf.Tensor:
  """Returns the tensor that was given to the last of several identities."""
  while tensor.op.type in ('Identity', 'IdentityN'):
    tensor = tensor.op.inputs[tensor.value_index]
  return tensor


def mean_change(
    answer: Mapping[str, tf.Tensor],
    name: str,
    before: tf.Tensor,
    learning_rate: tf.Tensor,
    weight_decay: float,
) -> tf.Tensor:
  """Computes the mean over the clients of a variable's change.

  Args:
    answer: The sums, see `GradientSums`.
    name: `'scale'` or `'shift'`.
    before: The variable before the step.
    learning_rate: The step's learning rate.
    weight_decay: The factor of the coupled L2 decay.

  Returns:
    The value before minus the mean value after the step; 0 if no client has
    weight.
  """
  weight = answer['weight']
  gradient = tf.math.divide_no_nan(answer[name], weight)
  if weight_decay:
    gradient += tf.constant(weight_decay, before.dtype) * before
  change = tf.cast(learning_rate, before.dtype) * gradient
  return tf.where(weight > 0, change, tf.zeros_like(change))


def left_out(values: Iterable[Any], places: Mapping[int, Place]) -> list[Any]:
  """Returns the values of the variables that the server does not know."""
  return [v for position, v in enumerate(values) if position not in places]


def completed(
    values: Sequence[Any], changes: Mapping[int, tf.Tensor]
) -> list[Any]:
  """Puts changes back between values from which they were left out."""
  remaining = iter(values)
  return [
      changes[position] if position in changes else next(remaining)
      for position in range(len(values) + len(changes))
  ]
