"""Sums over clients with differential privacy at client level.

McMahan, Ramage, Talwar, Zhang, Learning Differentially Private Recurrent
Language Models, ICLR 2018, arXiv:1710.06963, and for adaptive clipping Andrew,
Thakkar, McMahan, Ramaswamy, Differentially Private Learning with Adaptive
Clipping, NeurIPS 2021, arXiv:1905.03871.
"""

import collections
from collections.abc import Mapping, Sequence
import math
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import summed_update
from tff_bn.catalog import privacy
from tff_bn.catalog import value_types
from tff_bn.common import numerics

# Other random numbers of a round have other streams, see `pre_aggregation`.
_NOISE_STREAM = 0x64700000
# The part of a round's privacy that adaptive clipping uses.
_SHARE_OF_CLIPPING = 0.1
# The learning rate of the norms, as in the paper.
_CLIP_LEARNING_RATE = 0.2
# With noise, a variance shrinks at most to this part in a round.
_SMALLEST_VARIANCE = 0.1
_UPDATE = 'update'


class DpSums(summed_update.RoundSums):
  """Sums with the Gaussian mechanism over all messages of a round.

  Each message has one or two parts: an update of the variables, statistics, or
  the values of an exchange. A client scales each part down to its largest norm
  C, and the server adds normal noise with the deviation z_part · C to the sum.
  With z for `noise_multiplier`, the noise multipliers of all parts of a round
  satisfy

      1/z² = Σ 1/z_part².

  So the parts are together one Gaussian mechanism with the noise multiplier z,
  for messages with the norm 1: 1/z_part² is a share of 1/z². Statistics and
  exchanges have `statistics_share` in equal parts, and the update the rest; a
  part that is alone has all. See `tff_bn.analysis.privacy_accounting` for
  (ε, δ).

  All clients have weight 1, and means are sums divided by `num_clients`, so the
  server learns nothing from the number of clients with data. A message that is
  not finite, or whose norm is not, counts as zeros.

  With `clip_quantile` γ, the norm of each part follows this quantile: clients
  also send whether their norm was at most C, and with the noisy share b of
  those, C becomes C · exp(-0.2 (b - γ)). These bits use a tenth of 1/z².

  The noise depends on the seed, the round and the message only, so a continued
  run repeats it. That is for simulations: who knows the seed can remove it.

  The state is the number of rounds, z and the norms. The measurements are the
  norms.

  Attributes:
    num_clients: The number of clients in a round.
    noise_multiplier: z.
  """

  def __init__(
      self,
      noise_multiplier: float,
      *,
      num_clients: int,
      clip_norm: float = privacy.CLIP_NORM.default,
      statistics_clip_norm: float = privacy.STATISTICS_CLIP_NORM.default,
      statistics_share: float = privacy.STATISTICS_SHARE.default,
      clip_quantile: Optional[float] = None,
      seed: int = 0,
  ):
    """Initializes the factory.

    Args:
      noise_multiplier: z, at least 0.
      num_clients: The number of clients in a round.
      clip_norm: C of the update, or its first value.
      statistics_clip_norm: C of the relative statistics, see
        `tff_bn.aggregators.relative_statistics`, and of each exchange, or the
        first value.
      statistics_share: The share of 1/z² of all statistics and exchanges.
      clip_quantile: γ of adaptive clipping. Default: the norms are fixed.
      seed: Determines the noise, together with the round.

    Raises:
      TypeError: If an argument is no number.
      ValueError: If an argument is out of its range.
    """
    privacy.NOISE_MULTIPLIER.check(noise_multiplier, self)
    value_types.POSITIVE_INTEGER.check('num_clients', num_clients, self)
    privacy.CLIP_NORM.check(clip_norm, self)
    privacy.STATISTICS_CLIP_NORM.check(statistics_clip_norm, self)
    privacy.STATISTICS_SHARE.check(statistics_share, self)
    if clip_quantile is not None:
      privacy.CLIP_QUANTILE.check(clip_quantile, self)
    value_types.SEED.check('seed', seed, self)
    self.noise_multiplier = noise_multiplier
    self.num_clients = num_clients
    self.smallest_variance = _SMALLEST_VARIANCE if noise_multiplier else 0.0
    self._clip_norm = clip_norm
    self._statistics_clip_norm = statistics_clip_norm
    self._statistics_share = statistics_share
    self._clip_quantile = clip_quantile
    self._seed = seed

  def exchange_factories(self, num_exchanges):
    """See the base class."""
    return [
        _Message(self, number, num_exchanges)
        for number in range(1, num_exchanges + 1)
    ]

  def update_factory(self, num_exchanges):
    """See the base class."""
    return _Message(self, 0, num_exchanges)

  def multipliers(
      self, parts: Sequence[str], num_exchanges: int
  ) -> dict[str, float]:
    """Returns z_part / z of each part of a message.

    Args:
      parts: The parts: `update` and `statistics`, or `exchange`.
      num_exchanges: The number of exchanges of the round before the update.
    """
    shares = dict.fromkeys(parts, self._statistics_share / (num_exchanges + 1))
    if _UPDATE in shares:
      shares[_UPDATE] = 1 - self._statistics_share
    if len(parts) == 1 and not num_exchanges:
      shares = {parts[0]: 1.0}
    if self._clip_quantile is not None:
      shares = {
          part: share * (1 - _SHARE_OF_CLIPPING)
          for part, share in shares.items()
      }
    return {part: 1 / math.sqrt(share) for part, share in shares.items()}

  def _bit_deviation(self, num_exchanges: int) -> float:
    """Returns the deviation of the noise of each sum of bits, divided by z."""
    # A bit is -1/2 or 1/2. An update has at most two parts.
    num_bits = num_exchanges + 2
    share = _SHARE_OF_CLIPPING / num_bits
    return 1 / math.sqrt(share) / 2


class _Message(tff.aggregators.UnweightedAggregationFactory):
  """Sums one message of a round with noise."""

  def __init__(self, sums: DpSums, number: int, num_exchanges: int):
    """Initializes it with the number of the message, 0 for the update."""
    self._sums = sums
    self._number = number
    self._num_exchanges = num_exchanges

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """Creates the process for an `OrderedDict` of parts."""
    parts = [name for name, _ in tff.structure.iter_elements(value_type)]

    @tff.tensorflow.computation
    def initial_state():
      return self._initial_state(parts)

    state_type = initial_state.type_signature.result

    @tff.tensorflow.computation(value_type, state_type['clip_norms'])
    def clip(value, clip_norms):
      return self._clip(value, clip_norms)

    clipped_type = clip.type_signature.result

    @tff.tensorflow.computation(clipped_type, state_type)
    def add_noise(total, state):
      return self._add_noise(total, state)

    @tff.tensorflow.computation(clipped_type, state_type)
    def next_state(noisy, state):
      return self._next_state(noisy, state)

    @tff.federated_computation
    def initialize():
      return tff.federated_eval(initial_state, tff.SERVER)

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
    )
    def next_fn(state, value):
      clipped = tff.federated_map(
          clip, (value, tff.federated_broadcast(state['clip_norms']))
      )
      noisy = tff.federated_map(add_noise, (tff.federated_sum(clipped), state))
      return tff.templates.MeasuredProcessOutput(
          tff.federated_map(next_state, (noisy, state)),
          noisy['value'],
          tff.federated_zip(
              collections.OrderedDict(clip_norms=state['clip_norms'])
          ),
      )

    return tff.templates.AggregationProcess(initialize, next_fn)

  def _initial_state(
      self, parts: list[str]
  ) -> collections.OrderedDict[str, Any]:
    sums = self._sums
    return collections.OrderedDict(
        round_num=tf.zeros([], tf.int32),
        noise_multiplier=tf.constant(sums.noise_multiplier, tf.float32),
        clip_norms=collections.OrderedDict(
            (
                part,
                tf.constant(
                    sums._clip_norm
                    if part == _UPDATE
                    else sums._statistics_clip_norm,
                    tf.float32,
                ),
            )
            for part in parts
        ),
    )

  def _clip(
      self, value: Mapping[str, Any], clip_norms: Mapping[str, tf.Tensor]
  ) -> collections.OrderedDict[str, Any]:
    """Returns a client's clipped parts and, for adaptive clipping, its bits."""
    clipped: collections.OrderedDict[str, Any] = collections.OrderedDict()
    bits: collections.OrderedDict[str, Any] = collections.OrderedDict()
    for name, part in value.items():
      norm = _norm(part)
      is_finite = tf.math.is_finite(norm)
      factor = tf.minimum(1.0, tf.math.divide_no_nan(clip_norms[name], norm))
      factor = tf.where(norm > 0, factor, 1.0)
      clipped[name] = numerics.where_or_zero(is_finite, _scaled(part, factor))
      bits[name] = tf.where(norm <= clip_norms[name], 0.5, -0.5)
    if self._sums._clip_quantile is None:
      return collections.OrderedDict(value=clipped)
    return collections.OrderedDict(value=clipped, bits=bits)

  def _add_noise(
      self, total: Mapping[str, Any], state: Mapping[str, Any]
  ) -> collections.OrderedDict[str, Any]:
    """Adds the noise to the sums over the clients."""
    sums = self._sums
    multipliers = sums.multipliers(list(total['value']), self._num_exchanges)
    deviations: collections.OrderedDict[str, Any] = collections.OrderedDict()
    deviations['value'] = collections.OrderedDict(
        (
            name,
            tf.nest.map_structure(
                lambda v, name=name: multipliers[name]
                * state['clip_norms'][name],
                part,
            ),
        )
        for name, part in total['value'].items()
    )
    if 'bits' in total:
      deviation = sums._bit_deviation(self._num_exchanges)
      deviations['bits'] = tf.nest.map_structure(
          lambda _: deviation, total['bits']
      )
    seed = tf.stack(
        [
            tf.constant(sums._seed, tf.int64),
            tf.cast(state['round_num'], tf.int64),
        ]
    )
    seed = tf.random.experimental.stateless_fold_in(
        seed, _NOISE_STREAM + self._number
    )
    tensors = tf.nest.flatten(total)
    seeds = tf.random.experimental.stateless_split(seed, len(tensors))
    noisy = [
        tensor
        + tf.cast(state['noise_multiplier'] * deviation, tensor.dtype)
        * tf.random.stateless_normal(
            tensor.shape, seeds[number], dtype=tensor.dtype
        )
        for number, (tensor, deviation) in enumerate(
            zip(tensors, tf.nest.flatten(deviations), strict=True)
        )
    ]
    return tf.nest.pack_sequence_as(total, noisy)

  def _next_state(
      self, noisy: Mapping[str, Any], state: Mapping[str, Any]
  ) -> collections.OrderedDict[str, Any]:
    """Counts the round, and moves the norms towards the quantile."""
    sums = self._sums
    clip_norms = state['clip_norms']
    if sums._clip_quantile is not None:
      clip_norms = collections.OrderedDict(
          (
              name,
              norm
              * tf.exp(
                  -_CLIP_LEARNING_RATE
                  * (
                      noisy['bits'][name] / sums.num_clients
                      + 0.5
                      - sums._clip_quantile
                  )
              ),
          )
          for name, norm in clip_norms.items()
      )
    return collections.OrderedDict(
        state, round_num=state['round_num'] + 1, clip_norms=clip_norms
    )


def _scaled(part: Any, factor: tf.Tensor) -> Any:
  return tf.nest.map_structure(lambda v: tf.cast(factor, v.dtype) * v, part)


def _norm(part: Any) -> tf.Tensor:
  """Returns the norm of all values of a part, in float32."""
  return tf.linalg.global_norm(
      [tf.cast(v, tf.float32) for v in tf.nest.flatten(part)]
  )
