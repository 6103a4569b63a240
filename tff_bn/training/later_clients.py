"""Adapts a trained model to a client that joins after the training."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow_federated as tff

from tff_bn.common import progress
from tff_bn.data import federated
from tff_bn.keras_model import copying
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.partition import Role
from tff_bn.layers import discovery
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.training import evaluation


def check_trainable(model: BatchNormModel) -> None:
  """Checks that a model has batch normalization that can be trained.

  Raises:
    ValueError: If it has not.
  """
  if not any(v.trainable and v.batch_norm is not None for v in model.variables):
    raise ValueError(
        'The model has no batch normalization with trainable scale or shift.'
    )


def batch_norm_only(
    model: BatchNormModel, weights: ModelWeights
) -> BatchNormModel:
  """Returns a model of which only batch normalization can be trained.

  Args:
    model: The model.
    weights: Its weights, which are the initial weights of the new model.

  Returns:
    The same model, in which no variable outside of BN layers is trainable. BN
    layers that are frozen stay so.

  Raises:
    ValueError: If the model has no batch normalization that can be trained.
  """
  check_trainable(model)
  keras_model = model.to_keras(weights)
  of_batch_norm = {
      id(variable)
      for layer in discovery.batch_norm_layers(keras_model)
      for variable in layer.trainable_weights
  }

  def frozen_model_fn() -> keras.Model:
    copy = copying.copy_model(keras_model)
    pairs = zip(copy.weights, keras_model.weights, strict=True)
    for variable, original in pairs:
      if id(original) not in of_batch_norm and variable.trainable:
        variable.trainable = False
    return copy

  return BatchNormModel(
      frozen_model_fn,
      input_spec=model.input_spec,
      loss_fn=model.loss_fn,
      metrics_fn=model.metrics_fn,
  )


def own_statistics(
    model: BatchNormModel,
    weights: ModelWeights,
    data: federated.FederatedData,
    client_id: str,
    *,
    batch_size: int,
    seed: int,
) -> ModelWeights:
  """Gives a model the BN statistics of a client's training data.

  Labels are not used. See `evaluation.reestimate_batch_norm_statistics`.

  Args:
    model: The model.
    weights: Its weights.
    data: The clients' data.
    client_id: The client.
    batch_size: The number of samples in a batch.
    seed: Determines the order of the samples.

  Raises:
    ValueError: If the client is unknown, or a layer's inputs are the same
      throughout its training data: for a single sample, this is so where a
      layer gets one value for each channel.
  """
  adapted = evaluation.reestimate_batch_norm_statistics(
      model,
      weights,
      data.client_dataset(
          [client_id],
          seed=seed,
          round_num=0,
          batch_size=batch_size,
          local_epochs=1,
          augment=False,
      ),
  )
  values = model.from_model_weights(adapted)
  for info, value in zip(model.variables, values, strict=True):
    is_variance = info.is_statistic and info.role is Role.MOVING_VARIANCE
    if is_variance and not np.any(value):
      number = len(data.train_indices[client_id])
      raise ValueError(
          f'The inputs of {info.layer} do not vary in the training data of'
          f' client {client_id!r} (number of samples: {number}), so that the'
          ' layer could not normalize.'
      )
  return adapted


class BatchNormTraining:
  """Trains clients' own batch normalization on frozen shared weights.

  A client's scale and shift are trained, and its running statistics move as in
  the training of the algorithm. All other weights keep every bit. The training
  is traced once for all clients (FedBN, appendix G, first scenario).

  Example:
  ```
  training = BatchNormTraining(
      model, merged_weights,
      lambda frozen: algorithms.build_single(frozen, client_optimizer),
  )
  start = own_statistics(
      model, merged_weights, data, 'paris', batch_size=20, seed=0
  )
  adapted = training.train(
      start, data, 'paris', epochs=10, batch_size=20, seed=0
  )
  ```
  """

  def __init__(
      self,
      model: BatchNormModel,
      weights: ModelWeights,
      build_local_training: Callable[[BatchNormModel], StatefulLearningProcess],
  ):
    """Builds the training.

    Args:
      model: The model.
      weights: The weights after the federated training, such as the merged ones
        of `evaluation.merge_client_weights`.
      build_local_training: Builds a process, such as
        `tff_bn.algorithms.build_single`, for the model with frozen weights. It
        goes through the data once in each round.

    Raises:
      ValueError: If the model has no batch normalization that can be trained.
    """
    self._model = model
    self._frozen_model = batch_norm_only(model, weights)
    self._process = build_local_training(self._frozen_model)
    own_type = self._process.initialize_client.type_signature.result
    own = {name for name, _ in tff.structure.iter_elements(own_type)}
    self._is_own = [info.name in own for info in model.variables]
    self._frozen_values = self._frozen(weights)

  def fits(self, weights: ModelWeights) -> bool:
    """Whether the weights that are not trained are those of `__init__`."""
    pairs = zip(self._frozen_values, self._frozen(weights), strict=True)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)

  def train(
      self,
      weights: ModelWeights,
      data: federated.FederatedData,
      client_id: str,
      *,
      epochs: int,
      batch_size: int,
      seed: int,
  ) -> ModelWeights:
    """Trains a client's batch normalization.

    Args:
      weights: The initial weights, such as those of `own_statistics`.
        Outside of BN layers, they are the frozen ones.
      data: The data, with the labels of the client's training data.
      client_id: The client.
      epochs: The number of passes over the client's training data.
      batch_size: The number of samples in a batch.
      seed: Determines the order of the samples.

    Returns:
      The weights of the client's model.

    Raises:
      ValueError: If the client is unknown, or other weights are not the frozen
        ones.
    """
    if not self.fits(weights):
      raise ValueError(
          'Outside of batch normalization, the weights must be those with which'
          ' this training was built.'
      )
    process = self._process
    state = process.initialize()
    own = process.initialize_client(state)
    values = self._model.from_model_weights(weights)
    for info, value, is_own in zip(self._model.variables, values, self._is_own):
      if is_own:
        own[info.name] = value
    clients = [own]
    for epoch in progress.counting(epochs, f'{client_id}: epoch'):
      dataset = data.client_dataset(
          [client_id],
          seed=seed,
          round_num=epoch + 1,
          batch_size=batch_size,
          local_epochs=1,
      )
      output = process.next(state, clients, [dataset])
      state, clients = output.state, output.client_states
    adapted = process.get_client_model_weights(state, clients[0])
    # Other variables are trainable in the two models, in the same order.
    return self._model.to_model_weights(
        self._frozen_model.from_model_weights(adapted)
    )

  def _frozen(self, weights: ModelWeights) -> list[np.ndarray]:
    """Returns the values of the variables that stay as they are."""
    values = self._model.from_model_weights(weights)
    return [np.asarray(v) for v, own in zip(values, self._is_own) if not own]
