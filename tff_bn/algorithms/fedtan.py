"""FedTAN: federated learning with the batch statistics of all clients.

Wang, Shi, Chang, Why Batch Normalization Damage Federated Learning on Non-IID
Data?, arXiv:2301.02982, section 5 and algorithms 1 to 3.

If the clients' data differ, then so do the means and variances of their
batches, and the gradients of the loss with respect to them. The mean of the
clients' gradients is then not the gradient of the loss on all data. In FedTAN,
clients and server exchange these statistics and gradients, layer by layer,
during the first local step of a round. The mean gradient of that step equals
the gradient of centralized training on the union of the clients' batches. The
other local steps are ordinary ones.

A client sends only statistics, sums of gradients of scale and shift, and, at
the end of the round, its model.
"""

import functools
from typing import Any, Optional

import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.aggregators import model_update
from tff_bn.aggregators import summed_update
from tff_bn.algorithms import fed_prox
from tff_bn.catalog import algorithms
from tff_bn.catalog import options as catalog_options
from tff_bn.catalog import value_types
from tff_bn.clients.client_work import Moves
from tff_bn.clients.local_training import FixedStatisticsWork
from tff_bn.clients.local_training import LocalTrainingWork
from tff_bn.common import checks
from tff_bn.fedtan import model_checks
from tff_bn.fedtan import work
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.processes import averaging
from tff_bn.processes import phased_process
from tff_bn.processes import requirements
from tff_bn.processes.options import Options

__all__ = ['build_fedtan', 'build_fedtan_ii']

_SYNCHRONIZE = value_types.Choice(('forward_and_backward', 'forward'))


class _KeptStatisticsWork(LocalTrainingWork):
  """Ordinary local training in a round that keeps the running statistics."""

  _moves = Moves.NEVER


def build_fedtan(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    synchronize: str = 'forward_and_backward',
    moments: str = 'two_pass',
    running_statistics: str = 'all_steps',
    synchronize_every: int = 1,
    exchange_aggregator: Optional[model_update.ParticipatingFactory] = None,
    **options: Unpack[Options],
) -> tff.learning.templates.LearningProcess:
  """Builds FedTAN for any functional or Sequential model.

  In the first step of a round, each client uses the first batch of its data:

  *   Forward: at each batch normalization layer, clients and server exchange
      the mean and the variance (equations 39 and 40), and clients normalize
      with the statistics of all batches together.
  *   Backward: at each such layer, they exchange the sums of the layer's
      gradients with respect to scale and shift, which determine the gradients
      with respect to the statistics (equation 41).
  *   Each client makes a step of its optimizer. The weighted mean of the
      clients' gradients equals the gradient of the weighted mean loss on the
      union of the batches.

  The following steps are ordinary local ones, with the client's batch
  statistics and the same optimizer. The server averages as in FedAvg.

  Layers that do not depend on each other, as in parallel branches, share an
  exchange. With D layers in a chain, a round has 3D + 1 exchanges with
  `moments='two_pass'` and 2D + 1 with `'fused'`, and one less if no trainable
  variable comes before the first layer.

  In the first step, running statistics are updated with the global mean and the
  biased global variance. In the others, they follow the client's batches, so if
  the clients' labels differ, the mean of the running variances is too small
  for the model. Steps in training do not depend on it, but evaluation does.
  `running_statistics='first_step'` leaves these updates out.

  With `synchronize_every=n`, only the rounds 1, n + 1, 2n + 1, … are such
  rounds. The others are rounds of FedAvg, with a single exchange. This is not
  in the paper.

  Three kinds of clients are left out: a client without data from all
  exchanges; a client whose first batch has an input or a label that is not
  finite from all exchanges, too; and a client whose statistics or gradients are
  not finite, or so large that sums over clients could overflow, from that
  exchange on, and from the mean of the models.

  With several steps, a dataset is read twice and should give the same batches
  each time.

  Types: `initialize: ( -> S@SERVER)`, `next: (<S@SERVER, {B*}@CLIENTS> ->
  <state=S@SERVER, metrics=M@SERVER>)`.

  Args:
    model: The model, functional or Sequential. It may have nested models,
      layers that are called several times, and several inputs and outputs.
    client_optimizer: The optimizer of local training. Its state starts afresh
      in each round.
    synchronize: `'forward_and_backward'`, or `'forward'`: clients share the
      statistics, but each uses its own gradient with respect to them
      ("FedAvg + Algorithm 2" in the paper).
    moments: `'two_pass'`, as in the paper: first the means are averaged, then
      the variances about the global mean, with the clients' weights. `'fused'`:
      one exchange of (number of values, mean, variance), which the server
      combines by the law of total variance. It is also exact for batches that
      differ in size or are masked.
    running_statistics: `'all_steps'` updates the running statistics in each
      local step, as in the paper; `'first_step'` in the first one alone, and
      not in rounds of FedAvg.
    synchronize_every: The number n above, at least 1; 1 is FedTAN of the paper.
    exchange_aggregator: A `tff_bn.aggregators.Rule` that combines what clients
      send in the exchanges, with `moments='fused'`; for FedTAN that withstands
      attackers, next to rules as `model_aggregator` and
      `statistics_aggregator`. It gives all clients the same weight. With
      κ-robust rules, each answer is as near to the honest clients' as the rule
      promises, see `tff_bn.fedtan.robust_exchange`. Default: sums.
    **options: See `tff_bn.algorithms.Options`. `drift_correction` must be
      `None` or `tff_bn.algorithms.FedProx`, whose term is 0 in the first step.

  Returns:
    A `tff.learning.templates.LearningProcess`. With `synchronize_every`, its
    `next` runs the computation of the current phase, see
    `tff_bn.processes.phased_process`.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed, or the model has
      no batch normalization, is a subclass of `keras.Model` with its own
      `call`, has a batch normalization layer inside a loop, a condition or a
      wrapper, has personal position encodings, or computes in float16. The
      message names the layer.
  """
  _SYNCHRONIZE.check('synchronize', synchronize)
  algorithms.MOMENTS.check(moments)
  algorithms.FEDTAN_STATISTICS.check(running_statistics)
  algorithms.FEDTAN_EVERY.check(synchronize_every)
  _check_rule(exchange_aggregator, moments, options)
  requirements.check_all_shared(
      'FedTAN',
      model,
      'in the first step of a round, all clients together compute the batch'
      ' statistics and their gradients of one model',
  )
  model_checks.check_model(model.keras_model)
  requirements.check_no_shuffles('FedTAN', options)
  correction = options.get('drift_correction')
  if not isinstance(correction, (fed_prox.FedProx, type(None))):
    raise ValueError(
        f"drift_correction={type(correction).__name__} can't be combined with"
        f' FedTAN: {algorithms.FIRST_STEP}. Only FedProx can, because its term'
        ' is 0 in the first step.'
    )
  factory = options.get('sum_aggregator')
  fedtan = averaging.build_shared(
      model,
      client_optimizer,
      build_work=functools.partial(
          work.FedTanWork,
          fused_moments=moments == 'fused',
          synchronize_backward=synchronize == 'forward_and_backward',
          moves_later=running_statistics == 'all_steps',
          sums=None if factory is None else summed_update.of_round(factory),
          rule=exchange_aggregator,
      ),
      **options,
  )
  if synchronize_every == 1:
    return fedtan
  between: dict[str, Any] = {}
  if running_statistics == 'first_step':
    between = dict(
        build_work=_KeptStatisticsWork,
        move_statistics=lambda number, before, moments: before,
    )
  fed_avg = averaging.build_shared(
      model, client_optimizer, exchanges_of=fedtan, **between, **options
  )
  return phased_process.build_phased_process(
      [(1, fedtan), (synchronize_every - 1, fed_avg)]
  )


def _check_rule(
    rule: Optional[model_update.ParticipatingFactory],
    moments: str,
    options: Options,
) -> None:
  """Checks `exchange_aggregator` against the other arguments."""
  if rule is None:
    return
  checks.check_type(
      'exchange_aggregator',
      rule,
      model_update.ParticipatingFactory,
      'be a tff_bn.aggregators.Rule, such as'
      ' tff_bn.aggregators.CoordinateMedian()',
  )
  if options.get('sum_aggregator') is not None:
    raise ValueError(
        catalog_options.exclusion('exchange_aggregator', 'sum_aggregator')
    )
  if moments != 'fused':
    raise ValueError(
        f'moments={moments!r} is impossible with'
        f' exchange_aggregator={type(rule).__name__}, which aggregates means'
        ' and variances in one exchange; use moments=fused.'
    )


def build_fedtan_ii(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    sync_rounds: int,
    synchronize: str = 'forward_and_backward',
    moments: str = 'two_pass',
    running_statistics: str = 'all_steps',
    exchange_aggregator: Optional[model_update.ParticipatingFactory] = None,
    **options: Unpack[Options],
) -> tff.learning.templates.LearningProcess:
  """Builds FedTAN-II: FedTAN, then FedAvg with fixed running statistics.

  After `sync_rounds` rounds of FedTAN, batch normalization layers normalize
  with the running statistics, which no longer change. A round then has a single
  exchange (section 5.4 of the paper).

  Args:
    model: See `build_fedtan`.
    client_optimizer: See `build_fedtan`.
    sync_rounds: The number of rounds of FedTAN, at least 1.
    synchronize: See `build_fedtan`.
    moments: See `build_fedtan`.
    running_statistics: See `build_fedtan`.
    exchange_aggregator: See `build_fedtan`.
    **options: See `build_fedtan`.

  Returns:
    A `tff.learning.templates.LearningProcess`. Its `next` runs the computation
    of the current phase, see `tff_bn.processes.phased_process`.

  Raises:
    TypeError: See `build_fedtan`.
    ValueError: See `build_fedtan`; or if `sync_rounds` is less than 1.
  """
  algorithms.SYNC_ROUNDS.check(sync_rounds)
  fedtan = build_fedtan(
      model,
      client_optimizer,
      synchronize=synchronize,
      moments=moments,
      running_statistics=running_statistics,
      exchange_aggregator=exchange_aggregator,
      **options,
  )
  fixed = averaging.build_shared(
      model,
      client_optimizer,
      build_work=FixedStatisticsWork,
      exchanges_of=fedtan,
      **options,
  )
  return phased_process.build_phased_process(
      [(sync_rounds, fedtan), (None, fixed)]
  )
