"""MOON: local training with a model-contrastive loss.

Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.algorithms import fed_avg
from tff_bn.catalog import algorithms
from tff_bn.catalog import options as options_lib
from tff_bn.clients import drift_correction
from tff_bn.clients.drift_correction import State
from tff_bn.clients.drift_correction import Tensors
from tff_bn.keras_model import layer_features
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import averaging
from tff_bn.processes.stateful_process import Process
from tff_bn.processes.stateful_process import StatefulLearningProcess

__all__ = ['Moon', 'build_moon']


def build_moon(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    contrastive_weight: float = 1.0,
    temperature: float = 0.5,
    feature_layer: Optional[str] = None,
    build_process: Callable[..., Process] = fed_avg.build_fed_avg,
    **options: Any,
) -> StatefulLearningProcess:
  """Builds MOON, which trains with a model-contrastive loss.

  Args:
    model: The model.
    client_optimizer: The optimizer of local training.
    contrastive_weight: μ, see `Moon`.
    temperature: τ, see `Moon`.
    feature_layer: The name of the layer whose output is compared, see `Moon`.
    build_process: The builder that says how batch normalization is treated,
      such as `tff_bn.algorithms.build_fed_bn`. Default: `build_fed_avg`.
    **options: See `tff_bn.algorithms.Options`; and arguments of
      `build_process`. `drift_correction` must not be given.

  Returns:
    A process whose client state holds the shared variables of the client's
    last model.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed, the model has no
      layer `feature_layer` or no hidden layer, or `build_process` cannot be
      combined with MOON.
  """
  return averaging.build_corrected(
      build_process,
      model,
      client_optimizer,
      Moon(contrastive_weight, temperature, feature_layer),
      **options,
  )


@dataclasses.dataclass(frozen=True)
class Moon(drift_correction.DriftCorrection):
  """Adds μ times the model-contrastive loss to the loss of each batch.

  The model-contrastive loss (equation 3 of the paper) is the mean over the
  batch of

      -log( exp(sim(z, z_glob)/τ)
            / (exp(sim(z, z_glob)/τ) + exp(sim(z, z_prev)/τ)) )

  with the cosine similarity sim and the features of an input in three models: z
  in the trained model, z_glob in the model at the start of the round, and
  z_prev in the client's model at the end of its last round. The last two models
  are in inference mode and have no gradient. They use the client's local
  variables from the start of the round.

  Features are the flattened output of a layer. A new client has no previous
  model; it uses the server's, which makes the loss constant. A client without
  data, or that is dropped, keeps its previous model.

  Attributes:
    contrastive_weight: μ, at least 0.
    temperature: τ, greater than 0.
    feature_layer: The name of the layer, also in nested models. Default: the
      last hidden layer, whose output is the input of the last layer with
      weights.
  """

  contrastive_weight: float = 1.0
  temperature: float = 0.5
  feature_layer: Optional[str] = None

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
    return _Contrast(model, weights, self)


class _Contrast(drift_correction.BoundCorrection):
  """The contrastive loss of a model."""

  def __init__(
      self, model: BatchNormModel, weights: SharedWeights, settings: Moon
  ):
    drift_correction.check_shares(model, weights, 'MOON')
    self._settings = settings
    self._features = layer_features.LayerFeatures(
        model.keras_model, settings.feature_layer
    )
    self._frozen_models = [model.to_keras() for _ in range(2)]
    self._frozen_features = [
        layer_features.LayerFeatures(frozen, settings.feature_layer)
        for frozen in self._frozen_models
    ]
    self.variables = [v for m in self._frozen_models for v in m.weights]
    self._positions = weights.positions
    self._names = [
        f'previous_{model.variables[p].name}' for p in self._positions
    ]

  def _named(self, values: Sequence[Any]) -> State:
    return collections.OrderedDict(
        (name, values[position])
        for name, position in zip(self._names, self._positions, strict=True)
    )

  def initial_client_state(self, values: Tensors) -> State:
    """Returns the server's model as the previous one."""
    return self._named(values)

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """Returns the variables of the round's and of the previous model."""
    del server_state
    previous = list(before)
    for name, position in zip(self._names, self._positions, strict=True):
      previous[position] = client_state[name]
    return [*before, *previous]

  @contextlib.contextmanager
  def watching(self) -> Iterator[None]:
    """Records the features of the trained model."""
    with self._features.watched():
      yield

  def penalty(self, x: Any) -> tf.Tensor:
    """Computes μ times the mean contrastive loss of a batch."""
    z = _directions(self._features.value)
    of_global, of_previous = (
        tf.reduce_sum(z * _directions(tf.stop_gradient(z_frozen)), axis=1)
        for z_frozen in self._frozen_values(x)
    )
    temperature = tf.constant(self._settings.temperature, z.dtype)
    # -log(e^a / (e^a + e^b)) = log(1 + e^(b - a)), which does not overflow.
    losses = tf.math.softplus((of_previous - of_global) / temperature)
    weight = tf.constant(self._settings.contrastive_weight, z.dtype)
    return weight * tf.reduce_mean(losses)

  def _frozen_values(self, x: Any) -> Iterator[tf.Tensor]:
    for model, features in zip(self._frozen_models, self._frozen_features):
      with features.watched():
        model(x, training=False)
      yield features.value

  def finish(
      self,
      started: Tensors,
      before: Tensors,
      after: Tensors,
      collected: Tensors,
      client_state: State,
  ) -> tuple[State, State]:
    """Keeps the trained model as the previous one of the next round."""
    del started, before, collected, client_state
    return self._named(after), collections.OrderedDict()


def _directions(features: tf.Tensor) -> tf.Tensor:
  """Scales each example's features to a unit vector; 0 stays 0."""
  features = tf.reshape(features, [tf.shape(features)[0], -1])
  if features.dtype != tf.float64:
    features = tf.cast(features, tf.float32)
  return tf.math.l2_normalize(features, axis=1)
