"""The server's model of a client's first step, as a function of its pictures.

The server knows the model and the algorithm. With guessed pictures it computes
the gradients and the statistics that a client with these pictures would have.
Unlike the client's own computation, this one can be differentiated again.
"""

from collections.abc import Sequence
import enum
from typing import NamedTuple, Optional

import keras
import numpy as np
import tensorflow as tf

from tff_bn.keras_model import batch_norm_calls
from tff_bn.layers import discovery
from tff_bn.papers.privacy import client_message


class Normalization(enum.Enum):
  """The statistics by which a client normalizes in training."""

  BATCH = 'the statistics of its own batch'
  RUNNING = 'the running statistics, which the server knows'
  SHARED = 'the statistics of all clients, which the server computes'


class Simulated(NamedTuple):
  """What a client would compute from pictures.

  Attributes:
    gradients: The gradient of each trainable variable.
    statistics: `[2, channels]` for each layer: the statistics of the batch, in
      units of the running statistics.
  """

  gradients: Sequence[tf.Tensor]
  statistics: Sequence[tf.Tensor]


class ClientSimulation:
  """A client's first step with a model's initial weights.

  Attributes:
    model: The model, with logits as outputs.
    running: The running statistics of its layers.
  """

  def __init__(self, model: keras.Model):
    """Initializes the simulation with a model."""
    self.model = model
    self._affine = [
        position
        for layer in discovery.batch_norm_layers(model)
        for position, variable in enumerate(model.trainable_variables)
        if variable is layer.gamma or variable is layer.beta
    ]
    self.running = client_message.running_statistics(model)

  def fixed_statistics(
      self, exchanges: Optional[client_message.Exchanges]
  ) -> list[client_message.Shared]:
    """Returns the `shared` for `run`: FedTAN's, or the running statistics."""
    if exchanges is not None:
      return list(exchanges.shared)
    return [
        client_message.Shared(
            running.mean,
            running.variance,
            np.zeros_like(running.mean),
            np.zeros_like(running.mean),
            np.ones((), np.float32),
        )
        for running in self.running
    ]

  def zero_statistics(self) -> list[np.ndarray]:
    """Returns statistics for a client that sends none."""
    return [
        np.zeros((2, *layer.mean.shape), np.float32) for layer in self.running
    ]

  def place(
      self, gradients: Sequence[tuple[np.ndarray, np.ndarray]]
  ) -> list[Optional[np.ndarray]]:
    """Returns the gradient of each trainable variable; `None`: unknown.

    Args:
      gradients: The gradients of the scale and the shift of each layer.
    """
    placed: list[Optional[np.ndarray]] = [None] * len(
        self.model.trainable_variables
    )
    for position, gradient in zip(
        self._affine, (g for pair in gradients for g in pair), strict=True
    ):
      placed[position] = gradient
    return placed

  def run(
      self,
      pictures: tf.Tensor,
      labels: tf.Tensor,
      shared: Optional[Sequence[client_message.Shared]],
  ) -> Simulated:
    """Computes the step.

    Args:
      pictures: The client's batch.
      labels: Its labels.
      shared: The statistics by which each layer normalizes, and the sums of the
        gradients with respect to them. `None`: the batch's own statistics.
    """
    found: list[tf.Tensor] = []
    losses: list[tf.Tensor] = []

    def normalize(layer, inputs, mask):
      del mask  # Pictures have none.
      mean, variance = tf.nn.moments(inputs, [0, 1, 2])
      number = len(found)
      found.append(self.running[number].relative(mean, variance))
      if shared is not None:
        mean, variance = shared[number].mean, shared[number].variance
      normalized = (inputs - mean) * tf.math.rsqrt(variance + layer.epsilon)
      if shared is not None:
        losses.append(_loss_of_statistics(layer, normalized, shared[number]))
      return layer.gamma * normalized + layer.beta

    with (
        tf.GradientTape() as tape,
        batch_norm_calls.replaced(self.model, normalize),
    ):
      logits = self.model(pictures, training=True)
      loss = tf.reduce_mean(
          tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
      )
      loss += tf.add_n(losses) if losses else 0.0
    return Simulated(
        tape.gradient(loss, self.model.trainable_variables),
        found,
    )


def _loss_of_statistics(
    layer: keras.layers.BatchNormalization,
    normalized: tf.Tensor,
    shared: client_message.Shared,
) -> tf.Tensor:
  """Returns a loss whose gradient is the one through shared statistics.

  In FedTAN the cotangent of a layer's input x has the summand
  −γ·r·q·(Dζ + x̂·Dγ), see `tff_bn.fedtan.synchronized_batch_norm`. It is the
  gradient of −q·γ·(Dζ·x̂ + Dγ·x̂²/2) with respect to x. With running
  statistics, Dζ and Dγ are 0.
  """
  num_values = tf.size(normalized) / tf.shape(normalized)[-1]
  weight = 1 / (shared.weight * tf.cast(num_values, normalized.dtype))
  gamma = tf.stop_gradient(tf.convert_to_tensor(layer.gamma))
  return -weight * tf.reduce_sum(
      gamma
      * (
          shared.shift * normalized
          + shared.scale * tf.math.square(normalized) / 2
      )
  )
