"""Checks that a model fits an algorithm."""

from collections.abc import Iterable, Mapping
import types
from typing import Any, Optional

import keras
import tensorflow_federated as tff

from tff_bn.aggregators import moments_factories
from tff_bn.catalog import algorithms
from tff_bn.common import checks
from tff_bn.keras_model import freezing
from tff_bn.keras_model import fused_batch_norm
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import Partition
from tff_bn.keras_model.partition import Role
from tff_bn.layers import discovery
from tff_bn.layers.batch_renormalization import BatchRenormalization
from tff_bn.layers.federated_batch_normalization import (
    FederatedBatchNormalization,
)
from tff_bn.layers.hybrid_batch_normalization import HybridBatchNormalization

# The layers that algorithms compute in another way. `SharedWeights` refuses
# hybrid layers, with another message.
_REPLACEABLE = (
    keras.layers.BatchNormalization,
    FederatedBatchNormalization,
    HybridBatchNormalization,
)


def check_model(model: Any) -> None:
  """Raises a `TypeError` if `model` is not a `BatchNormModel`."""
  checks.check_type(
      'model',
      model,
      BatchNormModel,
      'be a tff_bn.BatchNormModel, which takes a function that returns a Keras'
      ' model',
  )


def check_all_shared(
    algorithm: str, model: BatchNormModel, reason: str
) -> None:
  """Raises a `ValueError` if the model has personal position encodings.

  The message names the `algorithm`, and the `reason` why all clients must have
  the same model.
  """
  check_model(model)
  layers = [v.layer for v in model.variables if v.role is Role.PERSONAL_PHASE]
  if layers:
    raise ValueError(
        f'{algorithm} is impossible with personal position encodings, as in'
        f" the layers {', '.join(layers)} of the model"
        f' {model.keras_model.name!r}: {reason}. Use personal_share=0, or'
        ' fedavg.'
    )


def check_no_renorm(
    what: str,
    model: BatchNormModel,
    reason: str,
    instead: str = 'tff_bn.layers.BatchRenormalization',
) -> None:
  """Raises a `ValueError` if a trained layer has `renorm=True`.

  Such a layer of Keras keeps three further running statistics, from which it
  computes its running variance.

  Args:
    what: The algorithm or the argument that cannot treat it, for the message.
    model: The model.
    reason: Why it cannot, for the message.
    instead: The layer to use instead, for the message.
  """
  check_model(model)
  for layer in _renorm_layers(model).values():
    raise _renorm_error(what, model, layer, reason, instead)


def _renorm_layers(model: BatchNormModel) -> dict[str, keras.layers.Layer]:
  """Returns the trained layers with `renorm=True`, by their paths."""
  return {
      path: layer
      for path, layer in freezing.layer_paths(model.keras_model)
      if discovery.is_batch_norm(layer) and layer.renorm and layer.trainable
  }


def _renorm_error(
    what: str,
    model: BatchNormModel,
    layer: keras.layers.Layer,
    reason: str,
    instead: str = 'tff_bn.layers.BatchRenormalization',
) -> ValueError:
  return ValueError(
      f'{what} is impossible with renorm=True, as in the layer {layer.name!r}'
      f' of the model {model.keras_model.name!r}: {reason}. Use {instead}, or'
      ' fedavg.'
  )


def check_renorm(
    model: BatchNormModel,
    partition: Partition,
    statistics_aggregator: Optional[
        tff.aggregators.UnweightedAggregationFactory
    ],
) -> None:
  """Checks that the running statistics of layers with `renorm=True` fit.

  Layers that are local, or fixed, as a whole fit.

  Raises:
    ValueError: If some of a layer's running statistics would be local and
      others shared, or an aggregator would treat them differently.
  """
  # The naive mean treats all running statistics alike.
  is_naive = isinstance(
      statistics_aggregator,
      (moments_factories.NaiveMomentsFactory, type(None)),
  )
  for path, layer in _renorm_layers(model).items():
    if partition.is_fixed(Role.MOVING_MEAN, path):
      continue
    is_local = partition.is_local(Role.MOVING_MEAN, path)
    if is_local and not partition.is_local(Role.OTHER_STATE, path):
      raise _renorm_error(
          partition.name,
          model,
          layer,
          'running means and variances stay with the client, but the further'
          ' running statistics of the layer would be shared',
      )
    if not is_local and not is_naive:
      raise _renorm_error(
          'statistics_aggregator',
          model,
          layer,
          'it aggregates running means and variances, but the layer computes'
          ' its variance from further running statistics',
      )


def check_replaceable(
    algorithm: str,
    model: BatchNormModel,
    layers: Iterable[keras.layers.Layer],
    reason: str,
) -> None:
  """Checks that an algorithm can replace the computation of layers.

  Args:
    algorithm: The algorithm, for messages.
    model: The model.
    layers: Its trained batch normalization layers.
    reason: What the algorithm computes instead, for messages.

  Raises:
    ValueError: If a layer has `renorm=True`, is a batch renormalization, or of
      a class with its own computation.
  """
  check_no_renorm(
      algorithm,
      model,
      f'{reason}, so renormalization would have no effect',
      'keras.layers.BatchNormalization without it',
  )
  for layer in layers:
    if isinstance(layer, BatchRenormalization):
      raise ValueError(
          f'{algorithm} is impossible with the batch renormalization of the'
          f' layer {layer.name!r} of the model {model.keras_model.name!r}:'
          f' {reason}. Use keras.layers.BatchNormalization'
          " (tff_bn.convert_batch_norm(model, to='batch')), or fedavg."
      )
    own = fused_batch_norm.own_method(layer, _REPLACEABLE)
    if own:
      raise ValueError(
          f'The batch normalization layer {layer.name!r} is a'
          f' {type(layer).__name__}, whose method {own} may change the'
          f' computation, so {algorithm} cannot replace it. Use'
          ' keras.layers.BatchNormalization, or fedavg.'
      )


def check_no_shuffles(algorithm: str, options: Mapping[str, Any]) -> None:
  """Raises a `ValueError` if `shuffle_times` is not 0."""
  algorithms.SAME_UNITS.check(
      algorithm,
      types.SimpleNamespace(shuffle_times=options.get('shuffle_times')),
  )


def check_fixed_units(algorithm: str, options: Mapping[str, Any]) -> None:
  """Raises a `ValueError` if shuffles of units would change fixed layers."""
  algorithms.FIXED_UNITS.check(
      algorithm,
      types.SimpleNamespace(shuffle_times=options.get('shuffle_times')),
  )


def trained_batch_norm_layers(
    algorithm: str, model: BatchNormModel
) -> list[keras.layers.Layer]:
  """Returns the trainable batch normalization layers, in weight order.

  Raises:
    ValueError: If there is none; the message names the `algorithm`.
  """
  check_model(model)
  layer_of = {
      id(layer.moving_mean): layer
      for layer in discovery.batch_norm_layers(model.keras_model)
      if layer.trainable
  }
  if not layer_of:
    raise ValueError(
        f'{algorithm} changes the statistics of batch normalization layers,'
        f' but the model {model.keras_model.name!r} has no trainable layer of'
        ' this kind. Use a model with batch normalization, or fedavg.'
    )
  return [
      layer_of[id(variable)]
      for variable in model.keras_model.weights
      if id(variable) in layer_of
  ]
