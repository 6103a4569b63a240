"""Models for clients that took no part in training."""

import collections

import numpy as np
import tensorflow as tf

from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.partition import Role
from tff_bn.training import evaluation

# Where the BN statistics of a client's model come from.
AVERAGED = 'averaged'
REESTIMATED = 'reestimated'
MIXED = 'mixed'


def mix_batch_norm_statistics(
    model: BatchNormModel,
    averaged: ModelWeights,
    own: ModelWeights,
    own_share: float,
) -> ModelWeights:
  """Mixes the running statistics of two models.

  A running mean becomes the weighted mean of both. A running variance becomes
  the variance of the mixture: with the weights w and 1 - w, it is
  w v₁ + (1 - w) v₂ + w (1 - w) (m₁ - m₂)², which is the weighted mean of E[x²]
  minus the square of the mean. It is computed in float64.

  Args:
    model: The model.
    averaged: Weights with the statistics of the clients that trained.
    own: Weights with the client's own statistics.
    own_share: The weight w of these, in [0, 1]. With a prior of N samples and n
      samples of the client, it is n / (n + N).

  Returns:
    The first weights with mixed running statistics.

  Raises:
    ValueError: If the share is outside of [0, 1].
  """
  if not 0 <= own_share <= 1:
    raise ValueError(f'own_share={own_share} must be between 0 and 1.')
  averaged_values = model.from_model_weights(averaged)
  pairs = [
      (np.asarray(a, np.float64), np.asarray(b, np.float64))
      for a, b in zip(averaged_values, model.from_model_weights(own))
  ]
  difference = {
      info.batch_norm: b - a
      for info, (a, b) in zip(model.variables, pairs)
      if info.role is Role.MOVING_MEAN
  }
  mixed = []
  for info, value, (a, b) in zip(model.variables, averaged_values, pairs):
    if info.role in (Role.MOVING_MEAN, Role.MOVING_VARIANCE):
      mixture = (1 - own_share) * a + own_share * b
      if info.role is Role.MOVING_VARIANCE:
        mixture += (
            own_share * (1 - own_share) * np.square(difference[info.batch_norm])
        )
      value = mixture.astype(np.asarray(value).dtype)
    mixed.append(value)
  return model.to_model_weights(mixed)


def unseen_client_weights(
    model: BatchNormModel,
    weights: ModelWeights,
    dataset: tf.data.Dataset,
    num_samples: int,
    prior: float,
) -> collections.OrderedDict[str, ModelWeights]:
  """Returns models for a client that took no part in training.

  Args:
    model: The model.
    weights: The final weights of the training. If the clients have own models,
      they are merged from these, see `evaluation.merge_client_weights`.
    dataset: The client's data, batches of `(x, y)`; `y` is not used.
    num_samples: The number n of samples in it.
    prior: The weight N > 0 of the averaged statistics, in samples.

  Returns:
    `averaged`: the final weights. `reestimated`: with BN statistics from the
    client's data, see `evaluation.reestimate_batch_norm_statistics` (FedBN,
    appendix G). `mixed`: with n / (n + N) of the latter and the rest of the
    former.
  """
  own = evaluation.reestimate_batch_norm_statistics(model, weights, dataset)
  share = num_samples / (num_samples + prior)
  return collections.OrderedDict(
      [
          (AVERAGED, weights),
          (REESTIMATED, own),
          (MIXED, mix_batch_norm_statistics(model, weights, own, share)),
      ]
  )
