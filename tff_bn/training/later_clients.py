"""Adapts a trained model to a client that joins after the training."""

from collections.abc import Callable

import keras

from tff_bn.common import progress
from tff_bn.data import federated
from tff_bn.keras_model import copying
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.layers import discovery
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.training import evaluation


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
  keras_model = model.to_keras(weights)
  of_batch_norm = {
      id(variable)
      for layer in discovery.batch_norm_layers(keras_model)
      for variable in layer.trainable_weights
  }
  if not of_batch_norm:
    raise ValueError(
        'The model has no batch normalization with trainable scale or shift.'
    )

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
  """
  return evaluation.reestimate_batch_norm_statistics(
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


def train_batch_norm(
    model: BatchNormModel,
    weights: ModelWeights,
    data: federated.FederatedData,
    client_id: str,
    build_local_training: Callable[[BatchNormModel], StatefulLearningProcess],
    *,
    epochs: int,
    batch_size: int,
    seed: int,
) -> ModelWeights:
  """Trains a client's own batch normalization on frozen shared weights.

  Its scale and shift are trained, and its running statistics move as in the
  training of the algorithm. They start from the statistics of the client's
  training data, see `own_statistics`. All other weights keep every bit.

  Example:
  ```
  adapted = train_batch_norm(
      model, merged_weights, data, 'paris',
      lambda frozen: algorithms.build_single(frozen, client_optimizer),
      epochs=10, batch_size=20, seed=0,
  )
  ```

  Args:
    model: The model.
    weights: The weights after the training, such as the merged ones of
      `evaluation.merge_client_weights`.
    data: The data, with the labels of the client's training data.
    client_id: The client.
    build_local_training: Builds a process, such as
      `tff_bn.algorithms.build_single`, for the model with frozen weights. It
      goes through the data once in each round.
    epochs: The number of passes over the client's training data.
    batch_size: The number of samples in a batch.
    seed: Determines the order of the samples.

  Returns:
    The weights of the client's model.

  Raises:
    ValueError: If the model has no batch normalization that can be trained, or
      the client is unknown.
  """
  start = own_statistics(
      model, weights, data, client_id, batch_size=batch_size, seed=seed
  )
  frozen = batch_norm_only(model, start)
  process = build_local_training(frozen)
  state = process.initialize()
  clients = [process.initialize_client(state)]
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
  return model.to_model_weights(frozen.from_model_weights(adapted))
