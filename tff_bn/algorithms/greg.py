"""GReg: local training with a consistency term of two kinds of statistics.

Improving Batch Normalization in Federated Learning with Non-IID Features,
submission 17440 to ICLR 2026 (anonymous). Only its abstract was read.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
from typing import Any, Optional

import keras
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.algorithms import fed_avg
from tff_bn.catalog import algorithms
from tff_bn.catalog import options as options_lib
from tff_bn.clients import drift_correction
from tff_bn.clients.drift_correction import State
from tff_bn.clients.drift_correction import Tensors
from tff_bn.keras_model import batch_norm_calls
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model import mixed_precision
from tff_bn.keras_model import outputs as outputs_lib
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.layers import discovery
from tff_bn.layers.federated_batch_normalization import (
    FederatedBatchNormalization,
)
from tff_bn.layers.hybrid_batch_normalization import HybridBatchNormalization
from tff_bn.processes import averaging
from tff_bn.processes.stateful_process import Process

__all__ = ['GReg', 'build_greg']

# Losses of the softmax of logits.
_SOFTMAX_LOSSES = (
    keras.losses.SparseCategoricalCrossentropy,
    keras.losses.CategoricalCrossentropy,
    keras.losses.CategoricalFocalCrossentropy,
)
# Layers that use running statistics in training, too.
_RUNNING_LAYERS = (FederatedBatchNormalization, HybridBatchNormalization)


def build_greg(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    consistency_weight: float = 0.1,
    build_process: Callable[..., Process] = fed_avg.build_fed_avg,
    **options: Any,
) -> Process:
  """Builds GReg, which trains for the running statistics of the test, too.

  Args:
    model: The model. Its losses must be Keras's categorical cross-entropies
      with `from_logits=True`.
    client_optimizer: The optimizer of local training.
    consistency_weight: λ, see `GReg`.
    build_process: The builder that says how batch normalization is treated,
      such as `tff_bn.algorithms.build_local_affine`. It must share the running
      statistics, and normalize with the batch in training. Default:
      `build_fed_avg`.
    **options: See `tff_bn.algorithms.Options`; and arguments of
      `build_process`. `drift_correction` must not be given.

  Returns:
    A process of the kind that `build_process` returns.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed, the model has
      another loss or no trainable batch normalization layer that uses the
      statistics of the batch, or `build_process` cannot be combined with GReg.
  """
  return averaging.build_corrected(
      build_process,
      model,
      client_optimizer,
      GReg(consistency_weight),
      **options,
  )


@dataclasses.dataclass(frozen=True)
class GReg(drift_correction.DriftCorrection):
  """Adds λ KL(p ‖ q) to the loss of each batch.

  p and q are the class probabilities of the trained model in two modes:

  *   p in training mode, with the statistics of the batch,
  *   q in inference mode, with the server's running statistics at the start of
      the round, as in a test.

  KL(p ‖ q) = Σ_c p_c (log p_c - log q_c) is averaged over the batch (in
  segmentation over its pixels, too) and added over the outputs that have a
  loss. Gradients flow through both modes, in p also through the statistics of
  the batch; the running statistics are constants and are not moved.

  The abstract of the paper says only that a "KL-based regularization term"
  aligns local training with global statistics.

  Attributes:
    consistency_weight: λ, at least 0.
  """

  consistency_weight: float = 0.1

  def __post_init__(self):
    options_lib.check_fields(self, algorithms.OPTIONS)

  def bind(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      client_optimizer: tff.learning.optimizers.Optimizer,
  ) -> drift_correction.BoundCorrection:
    """See the base class."""
    del client_optimizer
    return _Consistency(model, weights, self.consistency_weight)


class _Consistency(drift_correction.BoundCorrection):
  """The consistency term of a model."""

  def __init__(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      consistency_weight: float,
  ):
    """Creates a variable for each of the server's running statistics."""
    layers = _trained_layers(model)
    self._outputs = _softmax_outputs(model)
    keras_weights = model.keras_model.weights
    self._positions = [p for pair in weights.statistics for p in pair]
    self._statistics = [keras_weights[p] for p in self._positions]
    shared = {id(variable) for variable in self._statistics}
    for layer in layers:
      if id(layer.moving_mean) not in shared:
        raise ValueError(
            "GReg compares with the server's running statistics, but the"
            f' running statistics of the layer {layer.name!r} of the model'
            f' {model.keras_model.name!r} stay with the client.'
        )
    self._weight = consistency_weight
    self._keras_model = model.keras_model
    self._anchors = [
        tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
        for v in self._statistics
    ]
    self.variables = self._anchors
    self._output: Optional[Any] = None

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """Returns the server's running statistics."""
    del server_state, client_state
    return [before[p] for p in self._positions]

  @contextlib.contextmanager
  def watching(self) -> Iterator[None]:
    """Records the output of the trained model."""
    original = self._keras_model.call

    def call(*args: Any, **kwargs: Any) -> Any:
      self._output = original(*args, **kwargs)
      return self._output

    with batch_norm_calls.replaced_call(self._keras_model, call):
      yield

  def penalty(self, x: Any) -> tf.Tensor:
    """Computes λ times the mean divergence of a batch."""
    anchors = list(zip(self._statistics, self._anchors, strict=True))
    with (
        keras.StatelessScope(anchors),
        batch_norm_calls.replaced(
            self._keras_model, fused_batch_norm.inference, in_inference=True
        ),
    ):
      in_inference = self._keras_model(x, training=False)
    divergence = tf.add_n(
        [
            _divergence(output.of(self._output), output.of(in_inference))
            for output in self._outputs
        ]
    )
    return tf.constant(self._weight, divergence.dtype) * divergence


def _divergence(p_logits: tf.Tensor, q_logits: tf.Tensor) -> tf.Tensor:
  """Returns the mean of KL(p ‖ q), from the logits of p and of q."""
  log_p, log_q = (
      tf.nn.log_softmax(mixed_precision.to_float32(logits))
      for logits in (p_logits, q_logits)
  )
  return tf.reduce_mean(tf.reduce_sum(tf.exp(log_p) * (log_p - log_q), axis=-1))


def _trained_layers(model: BatchNormModel) -> list[keras.layers.Layer]:
  """Returns the trainable batch normalization layers.

  Raises:
    ValueError: If there is none, or one of them normalizes with running
      statistics in training, too.
  """
  layers = [
      layer
      for layer in discovery.batch_norm_layers(model.keras_model)
      if layer.trainable
  ]
  if not layers:
    raise ValueError(
        'GReg compares two kinds of batch normalization statistics, but the'
        f' model {model.keras_model.name!r} has no trainable layer of batch'
        ' normalization. Use a model with batch normalization, or fedavg.'
    )
  for layer in layers:
    if isinstance(layer, _RUNNING_LAYERS):
      raise ValueError(
          'GReg compares batch statistics with running statistics, but the'
          f' layer {layer.name!r} of the model {model.keras_model.name!r} is a'
          f' {type(layer).__name__}, which uses running statistics in training,'
          ' too. Use keras.layers.BatchNormalization, or fedavg.'
      )
  return layers


def _softmax_outputs(model: BatchNormModel) -> list[outputs_lib.Output]:
  """Returns the outputs that have a loss; raises if it has no softmax."""
  found = []
  for output, loss in model.batch_loss.parts:
    if not (isinstance(loss, _SOFTMAX_LOSSES) and loss.from_logits):
      raise ValueError(
          'GReg compares probabilities of exclusive classes, so the loss of'
          f" {output.description} must be one of Keras's categorical"
          ' cross-entropies with from_logits=True, but is'
          f' {type(loss).__name__}.'
      )
    found.append(output)
  return found
