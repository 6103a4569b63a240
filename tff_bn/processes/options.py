"""The keyword arguments of all builders, with their defaults and checks."""

from collections.abc import Iterable
import dataclasses
from typing import Optional, Union

import tensorflow_federated as tff

from tff_bn.aggregators import model_update
from tff_bn.aggregators import moments_factories
from tff_bn.aggregators import summed_update
from tff_bn.aggregators import weighted_mean
from tff_bn.catalog import local_training
from tff_bn.catalog import options as catalog_options
from tff_bn.catalog import rules
from tff_bn.catalog import server
from tff_bn.clients.drift_correction import DriftCorrection
from tff_bn.clients.drift_correction import RoundVariants
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.clients.local_training_config import LocalTrainingOptions
from tff_bn.common import checks
from tff_bn.common import optimizers
from tff_bn.common import spelling


class Options(LocalTrainingOptions, total=False):
  """The keyword arguments of all builders.

  Attributes:
    server_optimizer: The optimizer that applies the averaged update of the
      trainable variables at the server. Default: SGD with learning rate 1, so
      the average is the new model.
    client_learning_rate_schedule: Maps the number of finished rounds (an int32
      scalar tensor) to the client's learning rate. Default: the rate of the
      client optimizer.
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
    sum_aggregator: An unweighted `tff.aggregators` factory of sums for
      everything that a round's model is computed from: weights, updates,
      statistics and the exchanges of FedTAN, such as
      `tff.aggregators.SecureSumFactory(10.0)`, see
      `tff_bn.aggregators.SummedUpdate`. Instead of `model_aggregator`, and of
      a rule for the statistics. Default: none.
    client_filter: `'bnguard'`: the server averages only a part of the clients,
      see `tff_bn.aggregators.BnGuardFactory`. It excludes rules,
      `sum_aggregator` and `drift_correction`. Default: all clients.
    seed: Determines dropout and other random layers, together with the round
      and the client's first batch. Determines also the phases of personal
      position encodings, together with the client's number, see
      `tff_bn.StatefulLearningProcess.personalize`. Default: 0.
    others: Flags of the programs, too, which `tff-bn-train --help` describes,
      and `print(explain())` with `explain` of `tff_bn.catalog.local_training`.
      Without `local_steps`, a client passes `local_epochs` times over its
      dataset. Default: once.
  """

  server_optimizer: Optional[tff.learning.optimizers.Optimizer]
  server_clip_norm: Optional[float]
  client_weighting: str
  drift_correction: Optional[DriftCorrection]
  model_aggregator: Optional[model_update.AggregationFactory]
  statistics_aggregator: Optional[tff.aggregators.UnweightedAggregationFactory]
  sum_aggregator: Optional[tff.aggregators.UnweightedAggregationFactory]
  client_filter: Optional[str]


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
  sum_aggregator: Optional[tff.aggregators.UnweightedAggregationFactory] = None
  client_filter: Optional[str] = None

  def __post_init__(self):
    super().__post_init__()
    catalog_options.check_fields(self, (*server.OPTIONS, rules.CLIENT_FILTER))
    weighted = tff.aggregators.WeightedAggregationFactory
    unweighted = tff.aggregators.UnweightedAggregationFactory
    checks.check_type(
        'model_aggregator',
        self.model_aggregator,
        (weighted, unweighted, type(None)),
        'be a tff.aggregators factory',
    )
    local_training.check_weighting(
        self.client_weighting,
        f'model_aggregator={type(self.model_aggregator).__name__}',
        isinstance(self.model_aggregator, (weighted, type(None))),
    )
    checks.check_type(
        'statistics_aggregator',
        self.statistics_aggregator,
        (unweighted, type(None)),
        'be an unweighted factory over moments, such as'
        ' tff_bn.aggregators.PooledMomentsFactory()',
    )
    self._check_sum_aggregator()
    checks.check_type(
        'drift_correction',
        self.drift_correction,
        (DriftCorrection, type(None)),
        'be a DriftCorrection, such as tff_bn.algorithms.FedProx(0.001)',
    )
    if self.client_filter is not None:
      self._check_filter()

  def _check_filter(self) -> None:
    """Checks that the clients that a filter leaves are averaged."""
    statistics = self.statistics_aggregator
    has_moments = statistics is None or (
        isinstance(statistics, moments_factories.MomentsFactory)
        and statistics.rule is None
    )
    for name, is_possible in (
        ('model_aggregator', self._has_mean()),
        ('statistics_aggregator', has_moments),
        ('drift_correction', self.drift_correction is None),
        ('sum_aggregator', self.sum_aggregator is None),
    ):
      if not is_possible:
        raise ValueError(
            f'client_filter={self.client_filter!r} is impossible with'
            f' {name}={type(getattr(self, name)).__name__}: it averages the'
            ' models and the statistics of the clients that are left.'
        )

  def _check_sum_aggregator(self) -> None:
    """Checks `sum_aggregator`, and what can't be given together with it."""
    factory = self.sum_aggregator
    if factory is None:
      return
    checks.check_type(
        'sum_aggregator',
        factory,
        tff.aggregators.UnweightedAggregationFactory,
        'be an unweighted factory of sums, such as'
        ' tff.aggregators.SecureSumFactory(10.0)',
    )
    if isinstance(factory, model_update.ParticipatingFactory):
      raise ValueError(
          f'sum_aggregator={type(factory).__name__} is a rule, which needs the'
          ' values of all clients; give a factory of sums, or use'
          ' model_aggregator and statistics_aggregator.'
      )
    if self.model_aggregator is not None:
      raise ValueError(
          catalog_options.exclusion('model_aggregator', 'sum_aggregator')
      )
    statistics = self.statistics_aggregator
    if statistics is not None and (
        not isinstance(statistics, moments_factories.MomentsFactory)
        or statistics.rule is not None
    ):
      raise ValueError(
          f'statistics_aggregator={type(statistics).__name__} and'
          ' sum_aggregator exclude each other, except for a moments factory'
          ' without a rule, such as'
          ' tff_bn.aggregators.PooledMomentsFactory().'
      )
    local_training.check_weighting(
        self.client_weighting,
        f'sum_aggregator={type(factory).__name__}',
        summed_update.of_round(factory).num_clients is None,
    )

  def round_variants(self) -> Optional[RoundVariants]:
    """Returns the variants of the drift correction, if they can be used."""
    if self.drift_correction is None or not self._averages_models():
      return None
    return self.drift_correction.round_variants()

  def _averages_models(self) -> bool:
    """Whether the server's new model is the mean of the clients' models."""
    if (
        self.server_clip_norm is not None
        or self.sum_aggregator is not None
        or not self._has_mean()
    ):
      return False
    if self.server_optimizer is None:
      return True
    averaging = tff.learning.optimizers.build_sgdm(1.0)
    return optimizers.is_sgd(
        self.server_optimizer
    ) and optimizers.default_hyperparameters(
        self.server_optimizer
    ) == optimizers.default_hyperparameters(
        averaging
    )

  def _has_mean(self) -> bool:
    return isinstance(
        self.model_aggregator, (weighted_mean.WeightedMeanFactory, type(None))
    )

  def update_aggregator(
      self,
      update_type: tff.StructType,
      weight_type: tff.Type,
      num_exchanges: int,
  ) -> Union[tff.templates.AggregationProcess, summed_update.SummedUpdate]:
    """Returns the process that aggregates the clients' updates.

    Args:
      update_type: The type of a client's update.
      weight_type: The type of a client's weight.
      num_exchanges: The number of exchanges before the update.
    """
    if self.sum_aggregator is not None:
      return summed_update.SummedUpdate(
          summed_update.of_round(self.sum_aggregator),
          self.statistics_aggregator or moments_factories.NaiveMomentsFactory(),
          update_type,
          weight_type,
          num_exchanges,
      )
    if self.client_filter is not None:
      factory = rules.FILTERS[self.client_filter].load()
      return factory(self.statistics_aggregator).create(
          update_type, weight_type
      )
    model = self.model_aggregator
    if model is None:
      model = weighted_mean.WeightedMeanFactory()
    statistics = self.statistics_aggregator
    if statistics is None or isinstance(
        statistics, model_update.ParticipatingFactory
    ):
      statistics = moments_factories.NaiveMomentsFactory(statistics)
    return model_update.ModelUpdateFactory(model, statistics).create(
        update_type, weight_type
    )
