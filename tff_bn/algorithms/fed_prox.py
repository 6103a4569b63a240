"""FedProx: local training with a proximal term.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, Federated Optimization in
Heterogeneous Networks, MLSys 2020.

`tff.learning.algorithms.build_weighted_fed_prox` trains with the same term, but
sends only trainable variables and cannot be combined with this package's
treatments of batch normalization.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.algorithms import fed_avg
from tff_bn.catalog import algorithms
from tff_bn.catalog import options as options_lib
from tff_bn.clients import drift_correction
from tff_bn.clients.drift_correction import State
from tff_bn.clients.drift_correction import Tensors
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import averaging
from tff_bn.processes.stateful_process import Process

__all__ = ['FedProx', 'build_fed_prox']


def build_fed_prox(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    proximal_strength: float = 1e-3,
    build_process: Callable[..., Process] = fed_avg.build_fed_avg,
    **options: Any,
) -> Process:
  """Builds FedProx, which keeps local models near the server's model.

  Args:
    model: The model.
    client_optimizer: The optimizer of local training.
    proximal_strength: μ, see `FedProx`.
    build_process: The builder that says how batch normalization is treated,
      such as `tff_bn.algorithms.build_fed_bn`. Default: `build_fed_avg`.
    **options: See `tff_bn.algorithms.Options`; and arguments of
      `build_process`. `drift_correction` must not be given.

  Returns:
    A process of the kind that `build_process` returns.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed, or `build_process`
      cannot be combined with FedProx.
  """
  return averaging.build_corrected(
      build_process,
      model,
      client_optimizer,
      FedProx(proximal_strength),
      **options,
  )


@dataclasses.dataclass(frozen=True)
class FedProx(drift_correction.DriftCorrection):
  """Adds μ/2 ‖w - w_t‖² to the loss of each batch (equation 2 of the paper).

  w are the shared trainable variables, and w_t are the server's values at the
  start of the round. Local variables are not penalized, because the server has
  no values for them.

  Attributes:
    proximal_strength: μ, at least 0.
  """

  proximal_strength: float

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
    return ProximalTerm(model, weights, self.proximal_strength)


class ProximalTerm(drift_correction.BoundCorrection):
  """The proximal term of a model."""

  def __init__(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      proximal_strength: float,
  ):
    """Creates a variable for each value of w_t."""
    drift_correction.check_shares(model, weights, 'FedProx')
    self.proximal_strength = proximal_strength
    self._positions = weights.trainable
    self._trained = [model.keras_model.weights[p] for p in self._positions]
    self._anchors = [
        tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
        for v in self._trained
    ]
    self.variables = self._anchors

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """Returns w_t."""
    del server_state, client_state
    return [before[p] for p in self._positions]

  def penalty(self, x: Any) -> tf.Tensor:
    """Returns μ/2 ‖w - w_t‖²."""
    del x
    squares = [
        tf.reduce_sum(tf.math.squared_difference(variable, anchor))
        for variable, anchor in zip(self._trained, self._anchors)
    ]
    half = tf.constant(self.proximal_strength / 2, squares[0].dtype)
    return half * tf.add_n(squares)
