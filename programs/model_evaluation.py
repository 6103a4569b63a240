"""Evaluates the models that a run has saved, with Keras."""

import pathlib
from typing import Optional

import numpy as np
import tensorflow as tf

from tff_bn import data as tff_bn_data
from tff_bn import evaluation
from tff_bn import mixed_precision
from tff_bn import training
from tff_bn.batch_norm_model import BatchNormModel
from tff_bn.programs import report
from tff_bn.programs import run_folder

_BATCH_SIZE = 256


def load_model(
    path: pathlib.Path, data: tff_bn_data.FederatedData
) -> tf.keras.Model:
  """Loads a model and checks that it can be evaluated on this data.

  Args:
    path: The model's file.
    data: The data.

  Returns:
    The model, compiled for cross-entropy of logits and accuracy.

  Raises:
    ValueError: If it can't be loaded, or the data has another shape or more
      classes than the model.
  """
  try:
    model = tf.keras.models.load_model(path, compile=False)
  # Keras raises errors of many kinds.
  except Exception as error:
    raise ValueError(f'{path} can not be loaded: {error}') from error
  shape = data.dataset.input_shape
  try:
    logits = model(tf.zeros((1, *shape)), training=False)
  except Exception as error:
    raise ValueError(
        f'--dataset={data.dataset.name} has samples of shape {shape}, for which'
        f' the model in {path} is not made.'
    ) from error
  if logits.shape[-1] < data.num_classes:
    raise ValueError(
        f'--dataset={data.dataset.name} has {data.num_classes} classes, but the'
        f' model in {path} knows only {logits.shape[-1]}.'
    )
  model.compile(
      loss=_loss,
      metrics=[tf.keras.metrics.SparseCategoricalAccuracy(name='accuracy')],
  )
  return model


def _loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
  """Cross-entropy, in float32 whatever the model's --precision was."""
  return tf.keras.losses.sparse_categorical_crossentropy(
      labels, mixed_precision.to_float32(logits), from_logits=True
  )


def evaluate_run(
    model_dir: pathlib.Path,
    model: tf.keras.Model,
    data: tff_bn_data.FederatedData,
    *,
    reestimation_model: Optional[BatchNormModel],
    reestimation_batch_size: int,
) -> list[report.Evaluation]:
  """Evaluates the global model, and the model that each client uses.

  Args:
    model_dir: The folder of the run's models.
    model: The global model, from `load_model`; its weights change.
    data: The data.
    reestimation_model: The models' architecture, if their BN statistics are to
      be computed anew: the global model's on all training data, a client's own
      model's on that client's.
    reestimation_batch_size: The batch size for that.

  Returns:
    First the global model on the whole test set, then each client's model on
    the client's own test data.
  """

  def reestimate(client_ids):
    if reestimation_model is None:
      return
    weights = evaluation.reestimate_batch_norm_statistics(
        reestimation_model,
        reestimation_model.from_keras(model),
        data.client_dataset(
            client_ids,
            seed=0,
            round_num=0,
            batch_size=reestimation_batch_size,
            local_epochs=1,
        ),
    )
    values = reestimation_model.from_model_weights(weights)
    model.set_weights([np.asarray(value) for value in values])

  reestimate(data.client_ids)
  global_weights = model.get_weights()
  results = [_evaluate('global', '', model, data.test_dataset(_BATCH_SIZE))]
  for client_id in data.client_ids:
    path = model_dir / run_folder.CLIENTS / training.client_file_name(client_id)
    if path.exists():
      which = 'own'
      # One Keras model for all, because it is compiled once.
      own = tf.keras.models.load_model(path, compile=False)
      model.set_weights(own.get_weights())
      reestimate([client_id])
    else:
      which = 'global'
      model.set_weights(global_weights)
    dataset = data.client_test_dataset(client_id, _BATCH_SIZE)
    results.append(_evaluate(which, client_id, model, dataset))
  return results


def _evaluate(
    which: str, client_id: str, model: tf.keras.Model, dataset: tf.data.Dataset
) -> report.Evaluation:
  num_examples = sum(len(y) for _, y in dataset)
  if not num_examples:
    return report.Evaluation(which, client_id, 0, None, None)
  metrics = model.evaluate(dataset, verbose=0, return_dict=True)
  return report.Evaluation(
      which, client_id, num_examples, metrics['accuracy'], metrics['loss']
  )
