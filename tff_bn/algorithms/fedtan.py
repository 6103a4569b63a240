"""FedTAN: federated learning with the batch statistics of all clients.

Wang, Shi, Chang, Why Batch Normalization Damage Federated Learning on Non-IID
Data?, arXiv:2301.02982, section 5 and algorithms 1 to 3.

If the clients' data differ, so do their batches' means and variances, and the
gradients of the loss with respect to them; then the mean of the clients'
gradients is not the gradient of the loss on all data. In FedTAN, clients and
server exchange both, layer by layer, during the first local step of a round. Of
that step the mean gradient is that of centralized training on the union of the
clients' batches, exactly. The further local steps are ordinary ones.

Nothing but statistics, sums of gradients of scale and shift, and at the end the
model leaves a client.
"""

from collections.abc import Sequence
import functools
from typing import Any

import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.algorithms import fed_prox
from tff_bn.clients import client_work
from tff_bn.fedtan import model_checks
from tff_bn.fedtan import work
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.processes import averaging
from tff_bn.processes import phased_process
from tff_bn.processes import requirements
from tff_bn.processes.options import Options

__all__ = ['build_fedtan', 'build_fedtan_ii']

SYNCHRONIZE = ('forward_and_backward', 'forward')
MOMENTS = ('two_pass', 'fused')


def build_fedtan(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    synchronize: str = 'forward_and_backward',
    moments: str = 'two_pass',
    **options: Unpack[Options],
) -> tff.learning.templates.LearningProcess:
  """Builds FedTAN for any functional or Sequential model.

  In a round, each client takes the first batch of its data. At each batch
  normalization layer of the forward pass, clients and server exchange the mean
  and the variance (equations 39 and 40), and clients normalize with those of
  all batches together. At each such layer of the backward pass they exchange
  the sums of the layer's gradients with respect to scale and shift, which
  determine those with respect to the statistics (equation 41). Then each client
  makes a step of its optimizer. The mean of the clients' gradients, weighted as
  the clients are, equals the gradient of the weighted mean loss on the union of
  the batches. Further steps are plain local ones, with the batch statistics of
  the client and the same optimizer. The server averages as in FedAvg.

  Layers that do not depend on each other, as in parallel branches, share an
  exchange. With D layers one after the other, a round has 3D + 1 exchanges with
  `moments='two_pass'` and 2D + 1 with `'fused'`; without one if no trainable
  variable comes before the first layer.

  Running statistics take the global mean and the biased global variance in the
  first step, as Keras's do of a batch.

  A client without data is left out of all exchanges. So is a client whose first
  batch has an input or a label that is not finite. A client whose statistics or
  gradients are not finite, or so large that sums over clients could overflow,
  is left out from that exchange on, and of the mean of the models.

  A dataset is read twice if there are several steps, and should give the same
  batches each time.

  Types: `initialize: ( -> S@SERVER)`, `next: (<S@SERVER, {B*}@CLIENTS> ->
  <state=S@SERVER, metrics=M@SERVER>)`.

  Args:
    model: The model: functional or Sequential, also with nested models, layers
      that are called several times, several inputs and outputs.
    client_optimizer: The optimizer of local training; it starts anew in each
      round.
    synchronize: `'forward_and_backward'`; or `'forward'`: the statistics are
      those of all clients, but each client takes its own gradient with respect
      to them ("FedAvg + Algorithm 2" in the paper).
    moments: `'two_pass'`, as in the paper: first the means are averaged, then
      the variances about their average, with the clients' weights. `'fused'`:
      one exchange for both, of (number of values, mean, variance), which the
      server combines by the law of total variance; exact also if the batches
      are not equally large or masked.
    **options: `server_optimizer`, `local_steps`, `local_epochs`,
      `client_weighting`, `client_weight_decay`,
      `client_learning_rate_schedule`, `model_aggregator`,
      `statistics_aggregator`, `seed`, `jit_compile`:
      see `tff_bn.algorithms.Options`.

  Returns:
    A `tff.learning.templates.LearningProcess`.

  Raises:
    TypeError: If an optimizer or aggregator has the wrong type.
    ValueError: If an option has a value that is not allowed; or the model has
      no batch normalization, is a subclass of `keras.Model` with its own
      `call`, has such a layer inside of a loop, a condition or a wrapper, has
      position encodings that are a client's own, or computes in float16. The
      message names the layer.
  """
  _check_choice('synchronize', synchronize, SYNCHRONIZE)
  _check_choice('moments', moments, MOMENTS)
  requirements.check_all_shared(
      'FedTAN',
      model,
      'in the first step of a round, the batch statistics and their gradients'
      ' are those of one model on the data of all clients',
  )
  model_checks.check_model(model.keras_model)
  correction = options.get('drift_correction')
  if not isinstance(correction, (fed_prox.FedProx, type(None))):
    raise ValueError(
        f"drift_correction={type(correction).__name__} can't be combined with"
        ' FedTAN, whose first step has the gradient of the mean loss of all'
        ' clients: other losses, gradients or weights of single clients would'
        ' undo that. Only FedProx can, whose term is 0 in the first step.'
    )
  return averaging.build_shared(
      model,
      client_optimizer,
      build_work=functools.partial(
          work.FedTanWork,
          fused_moments=moments == 'fused',
          synchronize_backward=synchronize == 'forward_and_backward',
      ),
      **options,
  )


def build_fedtan_ii(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    sync_rounds: int,
    synchronize: str = 'forward_and_backward',
    moments: str = 'two_pass',
    **options: Unpack[Options],
) -> tff.learning.templates.LearningProcess:
  """Builds FedTAN-II: FedTAN, then FedAvg with fixed running statistics.

  Section 5.4 of the paper: after `sync_rounds` rounds of FedTAN, the running
  statistics stay as they are, and batch normalization layers use them instead
  of those of the batch, so a round has one exchange only.

  Args:
    model: See `build_fedtan`.
    client_optimizer: See `build_fedtan`.
    sync_rounds: The number of rounds of FedTAN, at least 1.
    synchronize: See `build_fedtan`.
    moments: See `build_fedtan`.
    **options: See `build_fedtan`.

  Returns:
    A `tff.learning.templates.LearningProcess`, whose `next` runs the one or the
    other computation, see `tff_bn.processes.phased_process`.

  Raises:
    TypeError: See `build_fedtan`.
    ValueError: See `build_fedtan`; or `sync_rounds` is less than 1.
  """
  requirements.check_positive_integer('sync_rounds', sync_rounds)
  fedtan = build_fedtan(
      model,
      client_optimizer,
      synchronize=synchronize,
      moments=moments,
      **options,
  )
  fixed = averaging.build_shared(
      model,
      client_optimizer,
      build_work=client_work.FixedStatisticsWork,
      **options,
  )
  return phased_process.build_phased_process(
      [(sync_rounds, fedtan), (None, fixed)]
  )


def _check_choice(name: str, value: Any, allowed: Sequence[str]):
  if value not in allowed:
    raise ValueError(
        f'{name}={value!r} must be one of {", ".join(map(repr, allowed))}.'
    )
