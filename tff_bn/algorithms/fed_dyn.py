"""FedDyn: local training with a dynamic regularizer.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, Federated Learning
Based on Dynamic Regularization, ICLR 2021, algorithm 1.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import summed_update
from tff_bn.aggregators import weighted_mean
from tff_bn.algorithms import fed_avg
from tff_bn.algorithms import fed_prox
from tff_bn.catalog import algorithms
from tff_bn.catalog import options as options_lib
from tff_bn.catalog import value_types
from tff_bn.clients import drift_correction
from tff_bn.clients.drift_correction import State
from tff_bn.clients.drift_correction import Tensors
from tff_bn.keras_model import shared_weights
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import averaging
from tff_bn.processes.stateful_process import Process
from tff_bn.processes.stateful_process import StatefulLearningProcess

__all__ = ['FedDyn', 'build_fed_dyn']


def build_fed_dyn(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    feddyn_strength: float = 0.01,
    num_clients: Optional[int] = None,
    build_process: Callable[..., Process] = fed_avg.build_fed_avg,
    model_aggregator: Optional[
        tff.aggregators.WeightedAggregationFactory
    ] = None,
    **options: Any,
) -> StatefulLearningProcess:
  """Builds FedDyn, which aligns the clients' optima with the common one.

  Args:
    model: The model.
    client_optimizer: The optimizer of local training.
    feddyn_strength: α, see `FedDyn`.
    num_clients: m, the number of all clients, see `FedDyn`.
    build_process: The builder that says how batch normalization is treated,
      such as `tff_bn.algorithms.build_fed_bn`. Default: `build_fed_avg`.
    model_aggregator: A weighted mean. Default:
      `tff_bn.aggregators.WeightedMeanFactory()`.
    **options: See `tff_bn.algorithms.Options`; and arguments of
      `build_process`. `client_weighting` is `'uniform'` by default, as in the
      paper. `drift_correction` must not be given.

  Returns:
    A process whose client state holds the client's gradient.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type, or
      `model_aggregator` is no weighted mean.
    ValueError: If an option has a value that is not allowed, `sum_aggregator`
      clips what the clients send, or `build_process` cannot be combined with
      FedDyn.
  """
  weighted_mean.check_mean('FedDyn', model_aggregator)
  sums = options.get('sum_aggregator')
  if isinstance(sums, summed_update.RoundSums) and sums.num_clients is not None:
    raise ValueError(
        f'sum_aggregator={type(sums).__name__} is impossible with FedDyn: the'
        " server's state must be the mean of the clients' states, but clipping"
        ' and noise would change it.'
    )
  options.setdefault('client_weighting', 'uniform')
  return averaging.build_corrected(
      build_process,
      model,
      client_optimizer,
      FedDyn(feddyn_strength, num_clients),
      model_aggregator=model_aggregator,
      **options,
  )


@dataclasses.dataclass(frozen=True)
class FedDyn(drift_correction.DriftCorrection):
  """Adds -⟨g_k, w⟩ + α/2 ‖w - w_t‖² to the loss of each batch.

  w are the shared trainable variables, w_t are the server's values at the start
  of the round, and g_k is the state of the client k, the paper's ∇L_k. It
  starts from 0. After local training, with the model w_k, the client sets

      g_k ← g_k - α (w_k - w_t).

  With the clients S of the round, the server sets

      h ← h - α |S|/m · mean_S(w_k - w_t)
      w ← mean_S(w_k) - h / α,

  so h is the mean of g_k over all m clients. The server optimizer's gradient is
  w_t - w. A client without data, or that is dropped, keeps its state.

  mean_S has the weights of `client_weighting`. With `'uniform'` it is the
  paper's mean. With weights by the number of examples, h is the mean of g_k
  only if all clients have the same number of examples.

  Local variables have neither term. The running statistics of batch
  normalization are averaged as without FedDyn.

  Attributes:
    feddyn_strength: α, greater than 0.
    num_clients: m, the number of all clients. Default: the number of clients of
      the round that have data.
  """

  feddyn_strength: float
  num_clients: Optional[int] = None

  def __post_init__(self):
    options_lib.check_fields(self, algorithms.OPTIONS)
    if self.num_clients is not None:
      value_types.POSITIVE_INTEGER.check('num_clients', self.num_clients)

  def bind(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      client_optimizer: tff.learning.optimizers.Optimizer,
  ) -> drift_correction.BoundCorrection:
    """See the base class."""
    del client_optimizer
    return _DynamicRegularizer(model, weights, self)


class _DynamicRegularizer(drift_correction.BoundCorrection):
  """FedDyn of a model."""

  def __init__(
      self, model: BatchNormModel, weights: SharedWeights, settings: FedDyn
  ):
    drift_correction.check_shares(model, weights, 'FedDyn')
    self._settings = settings
    self._weights = weights
    self._positions = weights.trainable
    self._names = [
        f'feddyn_gradient_{model.variables[p].name}' for p in self._positions
    ]
    self._trained = [model.keras_model.weights[p] for p in self._positions]
    self._term = fed_prox.ProximalTerm(model, weights, settings.feddyn_strength)
    self._gradients = [
        tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
        for v in self._trained
    ]
    self.variables = [*self._gradients, *self._term.variables]

  def _named(self, values: Sequence[Any]) -> State:
    return collections.OrderedDict(zip(self._names, values, strict=True))

  def _zeros(self) -> State:
    return self._named([tf.zeros(v.shape, v.dtype) for v in self._gradients])

  def _strength(self, dtype: tf.DType) -> tf.Tensor:
    return tf.constant(self._settings.feddyn_strength, dtype)

  def initial_client_state(self, values: Tensors) -> State:
    """Returns g_k = 0."""
    del values
    return self._zeros()

  def initial_server_state(self) -> State:
    """Returns h = 0."""
    return self._zeros()

  def state_for_clients(self, server_state: State) -> State:
    """Returns nothing: clients need no h."""
    del server_state
    return collections.OrderedDict()

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """Returns g_k and w_t."""
    return [
        *(client_state[name] for name in self._names),
        *self._term.start(before, server_state, client_state),
    ]

  def penalty(self, x: Any) -> tf.Tensor:
    """Returns -⟨g_k, w⟩ + α/2 ‖w - w_t‖²."""
    products = [
        tf.reduce_sum(gradient * tf.convert_to_tensor(variable))
        for gradient, variable in zip(self._gradients, self._trained)
    ]
    return self._term.penalty(x) - tf.add_n(products)

  def finish(
      self,
      started: Tensors,
      before: Tensors,
      after: Tensors,
      collected: Tensors,
      client_state: State,
  ) -> tuple[State, State]:
    """Returns the new g_k, and sends nothing besides the model."""
    del started, collected
    kept = [
        client_state[name] + self._strength(b.dtype) * (b - a)
        for name, b, a in zip(
            self._names,
            (before[p] for p in self._positions),
            (after[p] for p in self._positions),
            strict=True,
        )
    ]
    return self._named(kept), collections.OrderedDict()

  def server_update(self, server_state: State, aggregated: State) -> State:
    """Returns the gradient mean_S(w_t - w_k) + h / α, with the new h."""
    new_state = self._next_state(server_state, aggregated)
    changes = [
        difference + new_state[name] / self._strength(difference.dtype)
        for name, difference in zip(
            self._names,
            shared_weights.part_values(aggregated['trainable']),
            strict=True,
        )
    ]
    return collections.OrderedDict(
        trainable=self._weights.trainable_part(changes)
    )

  def next_server_state(
      self,
      server_state: State,
      total: State,
      aggregated: State,
      learning_rate: Optional[tf.Tensor],
  ) -> State:
    """Returns the new h."""
    del total, learning_rate
    return self._next_state(server_state, aggregated)

  def _next_state(self, server_state: State, aggregated: State) -> State:
    """Returns h + α |S|/m · mean_S(w_t - w_k)."""
    num_participants = aggregated['num_participants']
    num_clients = drift_correction.num_all_clients(
        'FedDyn',
        self._settings.num_clients,
        num_participants + aggregated['num_dropped'],
    )
    share = tf.math.divide_no_nan(
        tf.cast(num_participants, tf.float64), tf.cast(num_clients, tf.float64)
    )
    return self._named(
        [
            server_state[name]
            + self._strength(difference.dtype)
            * tf.cast(share, difference.dtype)
            * difference
            for name, difference in zip(
                self._names,
                shared_weights.part_values(aggregated['trainable']),
                strict=True,
            )
        ]
    )
