"""Evaluates the models that a run has saved, with Keras."""

from typing import Optional

import keras
import numpy as np
import tensorflow as tf

from tff_bn import data as tff_bn_data
from tff_bn.keras_model import mixed_precision
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.programs import report
from tff_bn.training import evaluation
from tff_bn.training import saved_models

_BATCH_SIZE = 256


def compiled_model(
    weights: ModelWeights,
    model: BatchNormModel,
    data: tff_bn_data.FederatedData,
) -> keras.Model:
  """Builds a Keras model and checks that it can be evaluated on this data.

  Args:
    weights: Its weights.
    model: The model.
    data: The data.

  Returns:
    The model, compiled for cross-entropy of logits and accuracy.

  Raises:
    ValueError: If the data has another shape or more classes than the model.
  """
  keras_model = model.to_keras(weights)
  shape = data.dataset.input_shape
  try:
    logits = keras_model(tf.zeros((1, *shape)), training=False)
  # Keras raises errors of many kinds.
  except Exception as error:
    raise ValueError(
        f'--dataset={data.dataset.name} has samples of shape {shape}, which the'
        ' model of the run does not take.'
    ) from error
  if logits.shape[-1] < data.num_classes:
    raise ValueError(
        f'--dataset={data.dataset.name} has {data.num_classes} classes, but the'
        f' model of the run has only {logits.shape[-1]} outputs.'
    )
  keras_model.compile(
      loss=_loss,
      metrics=[keras.metrics.SparseCategoricalAccuracy(name='accuracy')],
      # On GPUs, Keras would compile it again for every size of a batch.
      jit_compile=False,
  )
  return keras_model


def _loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
  """Cross-entropy, in float32 whatever the model's --precision was."""
  return keras.losses.sparse_categorical_crossentropy(
      labels, mixed_precision.to_float32(logits), from_logits=True
  )


def evaluate_run(
    saved: saved_models.SavedModels,
    model: BatchNormModel,
    keras_model: keras.Model,
    data: tff_bn_data.FederatedData,
    *,
    reestimation_batch_size: Optional[int],
) -> list[report.Evaluation]:
  """Evaluates the global model, and the model that each client uses.

  Args:
    saved: The weights of the run's models.
    model: The model.
    keras_model: The model that `compiled_model` returned. Its weights change:
      one Keras model is used for all weights, because compiling takes long.
    data: The data.
    reestimation_batch_size: If given, BN statistics are computed again from
      training data, in batches of this size: for the global model from all
      data, for a client's own model from the data of this client.

  Returns:
    First the global model on the whole test set; then for each client its own
    model, or the global model if it has none, on the client's test data.
  """

  def values(client_id, training_ids):
    weights = saved.weights(model, client_id)
    if reestimation_batch_size is not None:
      weights = evaluation.reestimate_batch_norm_statistics(
          model,
          weights,
          data.client_dataset(
              training_ids,
              seed=0,
              round_num=0,
              batch_size=reestimation_batch_size,
              local_epochs=1,
          ),
      )
    return [np.asarray(value) for value in model.from_model_weights(weights)]

  global_values = values(None, data.client_ids)
  keras_model.set_weights(global_values)
  test_dataset = data.test_dataset(_BATCH_SIZE)
  results = [_evaluate('global', '', keras_model, test_dataset)]
  for client_id in data.client_ids:
    has_own = client_id in saved.client_ids
    keras_model.set_weights(
        values(client_id, [client_id]) if has_own else global_values
    )
    results.append(
        _evaluate(
            'own' if has_own else 'global',
            client_id,
            keras_model,
            data.client_test_dataset(client_id, _BATCH_SIZE),
        )
    )
  return results


def _evaluate(
    which: str, client_id: str, model: keras.Model, dataset: tf.data.Dataset
) -> report.Evaluation:
  num_examples = sum(len(y) for _, y in dataset)
  if not num_examples:
    return report.Evaluation(which, client_id, 0, None, None)
  metrics = model.evaluate(dataset, verbose=0, return_dict=True)
  return report.Evaluation(
      which, client_id, num_examples, metrics['accuracy'], metrics['loss']
  )
