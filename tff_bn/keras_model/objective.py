"""The loss of a batch: what training minimizes, as Keras's `compile` has it."""

from collections.abc import Callable, Mapping, Sequence
import functools
import numbers
from typing import Any, Optional, TypeAlias

import keras
from keras.src.trainers import compile_utils
import numpy as np
import tensorflow as tf

from tff_bn.keras_model import outputs as outputs_lib
from tff_bn.keras_model.batch import Batch

# What Keras's `compile` takes as the loss of an output.
LossLike: TypeAlias = str | keras.losses.Loss | Callable[..., Any]
# The losses of all outputs.
Losses: TypeAlias = (
    LossLike | Sequence[Optional[LossLike]] | Mapping[str, Optional[LossLike]]
)
LossWeights: TypeAlias = float | Sequence[float] | Mapping[str, float]


class Objective:
  """The weighted sum of the losses of a model's outputs for a batch.

  Attributes:
    parts: The outputs that have a loss, each with its loss.
  """

  def __init__(
      self,
      losses: Losses,
      loss_weights: Optional[LossWeights],
      outputs: Sequence[outputs_lib.Output],
      specs: Batch,
  ):
    """Builds the loss.

    Args:
      losses: The losses. A single one is the loss of each output.
      loss_weights: The factors of the losses, in the same form.
      outputs: The outputs of the model.
      specs: The specs of a batch.

    Raises:
      ValueError: If the losses or their weights do not fit the outputs, or a
        loss cannot be computed from the specs or does not average over the
        batch. It names the output.
    """
    factors = _by_output('loss_weights', loss_weights, outputs)
    self.parts: list[tuple[outputs_lib.Output, keras.losses.Loss]] = []
    self._factors: list[Optional[float]] = []
    for output, loss, factor in zip(
        outputs, _by_output('loss_fn', losses, outputs), factors, strict=True
    ):
      if loss is None:
        if factor is not None:
          raise ValueError(
              f'loss_weights has a weight for {output.description}, which has'
              ' no loss in loss_fn.'
          )
        continue
      if factor is not None and not _is_number(factor):
        raise ValueError(
            f'loss_weights has {factor!r} for {output.description}; it must be'
            ' a finite number.'
        )
      self.parts.append((output, _check(output, loss, specs)))
      self._factors.append(factor)
    if not self.parts:
      raise ValueError('loss_fn returns no loss for any output of the model.')

  def __call__(
      self, y: Any, outputs: Any, sample_weight: Optional[Any] = None
  ) -> tf.Tensor:
    """Computes the loss of a batch, a scalar.

    Args:
      y: The labels.
      outputs: The outputs of the model.
      sample_weight: The weights of the examples.
    """
    total = None
    for (output, loss), factor in zip(self.parts, self._factors):
      value = compute(
          loss,
          output.of(y),
          output.of(outputs),
          **weight_of(output, sample_weight),
      )
      if factor is not None:
        value *= tf.constant(factor, value.dtype)
      total = value if total is None else total + tf.cast(value, total.dtype)
    return total


def compute(
    loss: keras.losses.Loss, y: Any, output: Any, **weight: Any
) -> tf.Tensor:
  """Computes the loss of one output; see `weight_of` for `weight`."""
  # Inside of a scope, a loss's name may begin with an underscore.
  with tf.name_scope('loss'):
    return loss(y, output, **weight)


def weight_of(
    output: outputs_lib.Output, sample_weight: Optional[Any]
) -> dict[str, Any]:
  """Returns the argument `sample_weight` of an output's loss or metric.

  As in Keras, a single tensor holds the weights for all outputs.
  """
  if sample_weight is None:
    return {}
  if tf.nest.is_nested(sample_weight):
    sample_weight = output.of(sample_weight)
  return {} if sample_weight is None else {'sample_weight': sample_weight}


def class_weights(y: tf.Tensor, weights: Sequence[float]) -> tf.Tensor:
  """Returns the weights of labels according to their classes.

  Args:
    y: Classes: whole numbers of shape `[batch]` or `[batch, 1]`, or one-hot
      vectors `[batch, classes]`.
    weights: The weight of each class.

  Returns:
    The weights, float32 of shape `[batch]`.
  """
  if y.shape.rank > 1:
    y = tf.argmax(y, -1) if y.shape[-1] != 1 else tf.squeeze(y, -1)
  if y.dtype.is_floating:
    y = tf.round(y)
  return tf.gather(tf.constant(weights, tf.float32), tf.cast(y, tf.int32))


def check_class_weight(
    class_weight: Mapping[int, float], specs: Batch
) -> list[float]:
  """Checks the weights of classes and returns them in the order of classes.

  Raises:
    TypeError: If `class_weight` is no mapping from integers to numbers.
    ValueError: If the labels are not of one output, they have weights already,
      a class is missing, or a weight is negative or not finite.
  """
  if not isinstance(class_weight, Mapping) or not class_weight:
    raise TypeError(
        'class_weight must map each class to its weight, such as {0: 1.0, 1:'
        f' 2.5}}, but is {class_weight!r}.'
    )
  # As in `fit`.
  if specs.sample_weight is not None:
    raise ValueError(
        'class_weight is impossible for batches (x, y, sample_weight); multiply'
        ' sample_weight by the weights of the classes.'
    )
  if tf.nest.is_nested(specs.y) or specs.y.shape.rank > 2:
    raise ValueError(
        'class_weight needs one class for each example: y must be a tensor of'
        f' shape [batch], [batch, 1] or [batch, classes], but is {specs.y}.'
    )
  if set(class_weight) != set(range(len(class_weight))):
    raise ValueError(
        'class_weight must have a weight for each class from 0 on, but has'
        f' weights for {sorted(class_weight, key=str)}.'
    )
  wrong = [w for w in class_weight.values() if not _is_number(w) or w < 0]
  if wrong:
    raise ValueError(
        f'class_weight has the weight {wrong[0]!r}; weights must be finite'
        ' numbers of at least 0.'
    )
  return [float(class_weight[number]) for number in range(len(class_weight))]


def _by_output(
    argument: str, values: Any, outputs: Sequence[outputs_lib.Output]
) -> list[Any]:
  """Returns the value of each output; a single value is for each of them."""
  if not isinstance(values, (list, tuple, Mapping)):
    return [values] * len(outputs)
  if len(outputs) > 1:
    return outputs_lib.assign(argument, values, outputs)
  (output,) = outputs
  flat = list(values.values()) if isinstance(values, Mapping) else list(values)
  if len(flat) != 1:
    raise ValueError(
        f'{argument} has {len(flat)} entries, but the model has one output, or'
        ' y is a single tensor for all of its outputs.'
    )
  if isinstance(values, Mapping) and set(values) != {output.key}:
    raise ValueError(
        f'{argument} has the entry {next(iter(values))!r}, but the output of'
        f' the model is {output.key!r}.'
    )
  return flat


def _is_number(value: Any) -> bool:
  return (
      isinstance(value, numbers.Real)
      and not isinstance(value, bool)
      and bool(np.isfinite(value))
  )


def _check(
    output: outputs_lib.Output, loss: LossLike, specs: Batch
) -> keras.losses.Loss:
  """Returns Keras's loss of an output, or raises a `ValueError`."""
  place = f'loss_fn: the loss of {output.description}'
  try:
    labels = output.of(specs.y)
    weight = weight_of(output, specs.sample_weight)
  except KeyError as error:
    raise ValueError(
        f'{place} needs labels, and weights if batches have some: the dataset'
        f' has no part of y or sample_weight for {output.description}.'
    ) from error
  try:
    loss = compile_utils.get_loss(loss, labels, output.spec)
    with keras.StatelessScope():
      traced = tf.function(functools.partial(compute, loss), autograph=False)
      value = traced.get_concrete_function(labels, output.spec, **weight)
  # Losses raise errors of many kinds.
  except Exception as error:
    name = loss if isinstance(loss, str) else getattr(loss, 'name', loss)
    raise ValueError(
        f'{place} ({name}) cannot be computed from labels of'
        f' {outputs_lib.describe(labels)} and outputs of'
        f' {outputs_lib.describe(output.spec)}: {error}'
    ) from error
  shape = value.structured_outputs.shape
  found = ''
  if shape.rank != 0:
    found = f'shape {shape} for a batch'
  # The server averages the losses of the clients.
  elif getattr(loss, 'reduction', None) == 'sum':
    found = "reduction 'sum'"
  if found:
    raise ValueError(
        f'{place} has the {found}; it must average over the batch'
        ' (reduction="sum_over_batch_size").'
    )
  return loss
