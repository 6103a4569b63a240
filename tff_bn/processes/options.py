"""The keyword arguments of all builders, with their defaults and checks."""

from collections.abc import Callable, Iterable
import dataclasses
from typing import Any, Optional, TypedDict

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import model_update
from tff_bn.aggregators import moments_factories
from tff_bn.aggregators import robust_rule
from tff_bn.aggregators import weighted_mean
from tff_bn.clients.drift_correction import DriftCorrection
from tff_bn.clients.drift_correction import RoundVariants
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.common import checks
from tff_bn.common import optimizers
from tff_bn.common import spelling


class LocalTrainingOptions(TypedDict, total=False):
  """The options about local training; `Options` documents them."""

  local_steps: Optional[int]
  local_epochs: int
  client_weight_decay: float
  client_learning_rate_schedule: Optional[Callable[[tf.Tensor], Any]]
  client_warmup_rounds: int
  client_warmup_steps: int
  client_gradient_clip_norm: Optional[float]
  shuffle_times: float
  shuffle_probability: float
  seed: int
  jit_compile: bool


class Options(LocalTrainingOptions, total=False):
  """The keyword arguments of all builders.

  Attributes:
    server_optimizer: The optimizer that applies the averaged update of the
      trainable variables at the server. Default: SGD with learning rate 1, so
      the average is the new model.
    server_clip_norm: The largest global norm of the averaged update of the
      trainable variables. A longer update is scaled down to it, before the
      server optimizer. After one step of plain SGD at each client, the update
      is the mean gradient times the client's learning rate, so the result does
      not depend on how the data are split. Default `None`: no clipping.
    local_steps: The number of batches that each client takes from the front of
      its dataset in a round. Default `None`: all.
    local_epochs: The number of passes of each client over its dataset in a
      round, instead of `local_steps`. Default: 1.
    client_weighting: `'num_examples'` (default) weights clients by the number
      of examples that they trained on, `'uniform'` weights them equally.
    client_weight_decay: λ of the coupled L2 decay, which adds λ times the
      variable to the gradient of every trainable variable. Default: 0.
    client_learning_rate_schedule: Maps the number of finished rounds (an int32
      scalar tensor) to the client's learning rate. Default: the rate of the
      client optimizer.
    client_warmup_rounds: The number of rounds at the start of the training over
      which the client's learning rate rises linearly: round n, counted from 1,
      multiplies it by min(1, n / client_warmup_rounds). Default: 0.
    client_warmup_steps: The number of local steps at the start of each round
      over which the client's learning rate rises linearly: step n, counted from
      1, multiplies it by min(1, n / client_warmup_steps). Default: 0.
    client_gradient_clip_norm: The largest global norm of a batch's gradient. A
      longer gradient is scaled down to it, before weight decay. Default `None`:
      no clipping.
    shuffle_times: N_sf, the mean number of times that a client permutes the
      hidden units of its model at random in a round, at most the number of its
      steps: it makes averaging worse, and is for measuring how much alignment
      matters (FedPAN, algorithm 2). Each of a client's r steps permutes them
      with probability N_sf / r (always, if that is more than 1). Default: 0.
    shuffle_probability: P_sf of these permutations, see
      `tff_bn.position_aware.random_permutation`. Default: 0.1.
    drift_correction: Keeps the clients' models from drifting apart, such as
      `tff_bn.algorithms.FedProx(0.001)`, see `tff_bn.drift_correction`.
      Default: none.
    model_aggregator: A `tff.aggregators` factory for everything that clients
      send except running statistics: the updates of trainable variables, of
      other state and of the drift correction. Default: the weighted mean.
    statistics_aggregator: An unweighted factory over moments for the running
      statistics, such as `tff_bn.aggregators.PooledMomentsFactory()`; or a
      `tff_bn.aggregators.Rule` that replaces the mean. Default: the naive mean
      of the means and of the variances.
    seed: Determines dropout and other random layers, together with the round
      and the client's first batch. Determines also the phases of personal
      position encodings, together with the client's number, see
      `tff_bn.StatefulLearningProcess.personalize`. Default: 0.
    jit_compile: Whether XLA compiles the clients' steps. XLA rounds
      differently, and training amplifies the differences. TFF's native runtime
      has no XLA compiler and ignores it.
      Default: false.
  """

  server_optimizer: Optional[tff.learning.optimizers.Optimizer]
  server_clip_norm: Optional[float]
  client_weighting: str
  drift_correction: Optional[DriftCorrection]
  model_aggregator: Optional[model_update.AggregationFactory]
  statistics_aggregator: Optional[tff.aggregators.UnweightedAggregationFactory]


def check_names(known: type, given: Iterable[str]) -> None:
  """Raises a `TypeError` if a keyword argument is not an option of a builder.

  Args:
    known: `Options` or `LocalTrainingOptions`.
    given: The names of the arguments.
  """
  names = list(known.__annotations__)
  for name in given:
    if name not in names:
      raise TypeError(
          f'{name!r} is not an argument of this builder.'
          f'{spelling.suggestion(name, names)} See help of the builder and of'
          ' tff_bn.algorithms.Options.'
      )


@dataclasses.dataclass(frozen=True)
class ProcessConfig(LocalTrainingConfig):
  """The options of a process, checked and with their defaults.

  Attributes:
    client_optimizer: The optimizer of local training.
    others: See `Options`.
  """

  server_optimizer: Optional[tff.learning.optimizers.Optimizer] = None
  server_clip_norm: Optional[float] = None
  drift_correction: Optional[DriftCorrection] = None
  model_aggregator: Optional[model_update.AggregationFactory] = None
  statistics_aggregator: Optional[
      tff.aggregators.UnweightedAggregationFactory
  ] = None

  def __post_init__(self):
    super().__post_init__()
    if self.server_clip_norm is not None:
      checks.check_number('server_clip_norm', self.server_clip_norm)
      if not self.server_clip_norm > 0:
        raise ValueError(
            f'server_clip_norm={self.server_clip_norm} must be greater than 0.'
        )
    weighted = tff.aggregators.WeightedAggregationFactory
    unweighted = tff.aggregators.UnweightedAggregationFactory
    checks.check_type(
        'model_aggregator',
        self.model_aggregator,
        (weighted, unweighted, type(None)),
        'be a tff.aggregators factory',
    )
    if self.client_weighting != 'uniform' and not isinstance(
        self.model_aggregator, (weighted, type(None))
    ):
      raise ValueError(
          f'model_aggregator {type(self.model_aggregator).__name__} takes no'
          f' weights, so client_weighting={self.client_weighting!r} must be'
          " 'uniform'."
      )
    checks.check_type(
        'statistics_aggregator',
        self.statistics_aggregator,
        (unweighted, type(None)),
        'be an unweighted factory over moments, such as'
        ' tff_bn.aggregators.PooledMomentsFactory()',
    )
    checks.check_type(
        'drift_correction',
        self.drift_correction,
        (DriftCorrection, type(None)),
        'be a DriftCorrection, such as tff_bn.algorithms.FedProx(0.001)',
    )

  def round_variants(self) -> Optional[RoundVariants]:
    """Returns the variants of the drift correction, if they can be used."""
    if self.drift_correction is None or not self._averages_models():
      return None
    return self.drift_correction.round_variants()

  def _averages_models(self) -> bool:
    """Whether the server's new model is the mean of the clients' models."""
    if self.server_clip_norm is not None or not isinstance(
        self.model_aggregator,
        (weighted_mean.WeightedMeanFactory, type(None)),
    ):
      return False
    if self.server_optimizer is None:
      return True
    averaging = tff.learning.optimizers.build_sgdm(1.0)
    return isinstance(
        self.server_optimizer, type(averaging)
    ) and optimizers.default_hyperparameters(
        self.server_optimizer
    ) == optimizers.default_hyperparameters(
        averaging
    )

  def update_factory(self) -> model_update.ModelUpdateFactory:
    """Returns the factory that aggregates the clients' updates."""
    model = self.model_aggregator
    if model is None:
      model = weighted_mean.WeightedMeanFactory()
    statistics = self.statistics_aggregator
    if statistics is None or isinstance(statistics, robust_rule.Rule):
      statistics = moments_factories.NaiveMomentsFactory(statistics)
    return model_update.ModelUpdateFactory(model, statistics)
