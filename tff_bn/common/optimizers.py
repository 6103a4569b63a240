"""Functions of TFF's optimizers, for clients and the server."""

import collections
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

LEARNING_RATE = tff.learning.optimizers.LEARNING_RATE_KEY


class AveragedGradients(tff.learning.optimizers.Optimizer):
  """Makes the steps of an optimizer with a running average of the gradients.

  The average starts from 0, and each step moves it to the new gradient g:

      m ← μ m + (1-μ) g.

  Hyperparameters such as the learning rate act on the average. So with SGD, a
  new learning rate has its full effect at once.
  """

  def __init__(
      self, optimizer: tff.learning.optimizers.Optimizer, momentum: float
  ):
    """Averages the gradients of `optimizer` with the momentum μ in [0, 1)."""
    self._optimizer = optimizer
    self._momentum = momentum

  def initialize(self, specs: Any) -> Any:
    """See the base class."""
    return collections.OrderedDict(
        optimizer=self._optimizer.initialize(specs),
        average=tf.nest.map_structure(
            lambda spec: tf.zeros(spec.shape, spec.dtype), specs
        ),
    )

  def next(self, state: Any, weights: Any, gradients: Any) -> tuple[Any, Any]:
    """See the base class."""
    average = tf.nest.map_structure(
        lambda old, gradient: averaged(old, gradient, self._momentum),
        state['average'],
        gradients,
    )
    new_state, new_weights = self._optimizer.next(
        state['optimizer'], weights, average
    )
    return (
        collections.OrderedDict(optimizer=new_state, average=average),
        new_weights,
    )

  def get_hparams(self, state: Any) -> Any:
    """See the base class."""
    return self._optimizer.get_hparams(state['optimizer'])

  def set_hparams(self, state: Any, hparams: Any) -> Any:
    """See the base class."""
    return collections.OrderedDict(
        state,
        optimizer=self._optimizer.set_hparams(state['optimizer'], hparams),
    )


def averaged(old: Any, gradient: tf.Tensor, momentum: float) -> tf.Tensor:
  """Returns μ m + (1-μ) g, for the average m and the gradient g."""
  old_share, new_share = (
      tf.constant(share, gradient.dtype) for share in (momentum, 1 - momentum)
  )
  return old_share * old + new_share * gradient


def is_sgd(optimizer: tff.learning.optimizers.Optimizer) -> bool:
  """Whether an optimizer is TFF's SGD, with or without momentum."""
  return isinstance(optimizer, type(tff.learning.optimizers.build_sgdm()))


def default_hyperparameters(
    optimizer: tff.learning.optimizers.Optimizer,
) -> Any:
  """Returns the hyperparameters that an optimizer starts with, by name."""
  spec = tf.TensorSpec([], tf.float32)
  return optimizer.get_hparams(optimizer.initialize(spec))


def hyperparameter_dtype(
    optimizer: tff.learning.optimizers.Optimizer, specs: Any
) -> tf.DType:
  """Returns the dtype that an optimizer's hyperparameters must have.

  It is the weights' dtype if possible, else float32. TFF's optimizers keep
  hyperparameters as Python floats, which become float32 tensors in a state.
  With float64 weights, some optimizers (SGD with momentum) need float64
  hyperparameters, while others (Yogi) need float32.
  """
  dtype = next((spec.dtype for spec in tf.nest.flatten(specs)), tf.float32)
  if dtype == tf.float32:
    return dtype

  def step(weights):
    state = initialize_optimizer(optimizer, specs, dtype)
    return optimizer.next(state, weights, weights)

  try:
    tf.function(step, autograph=False).get_concrete_function(specs)
  except TypeError:
    return tf.float32
  return dtype


def check_hyperparameters(
    name: str, optimizer: tff.learning.optimizers.Optimizer, dtype: tf.DType
) -> None:
  """Raises a `ValueError` if a hyperparameter, in `dtype`, is not finite.

  1e300, for example, is not finite in float32. `name` is the argument with the
  optimizer.
  """
  for hparam, value in default_hyperparameters(optimizer).items():
    with np.errstate(over='ignore'):
      converted = np.asarray(value).astype(dtype.as_numpy_dtype)
    if not np.all(np.isfinite(converted)):
      raise ValueError(
          f'{name} has {hparam}={value}, which is not finite in {dtype.name}.'
      )


def initialize_optimizer(
    optimizer: tff.learning.optimizers.Optimizer, specs: Any, dtype: tf.DType
) -> Any:
  """Returns the initial state, with hyperparameters as tensors of `dtype`."""
  return tf.nest.map_structure(
      lambda x: x if tf.is_tensor(x) else tf.constant(x, dtype),
      optimizer.initialize(specs),
  )
