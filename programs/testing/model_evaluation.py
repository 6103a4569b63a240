"""Evaluates the models that a run has saved."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import functools
from typing import Any, Optional

import numpy as np
import tensorflow as tf

from tff_bn import data as tff_bn_data
from tff_bn.catalog import columns
from tff_bn.catalog import datasets
from tff_bn.catalog import tasks
from tff_bn.common import progress
from tff_bn.data import classes
from tff_bn.data import dataset as dataset_lib
from tff_bn.keras_model import model_metrics
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.results import report
from tff_bn.training import evaluation
from tff_bn.training import saved_inputs
from tff_bn.training import saved_models

_BATCH_SIZE = 256
# Called with the first two attributes of `report.Evaluation`, and the labels
# and the outputs of each batch.
Visitor = Callable[[str, str, Iterable[tuple[Any, Any]]], None]


def class_names(saved: saved_models.SavedModels) -> Optional[tuple[str, ...]]:
  """Returns the classes of a run's models in the order of their outputs.

  Classes without names have numbers. It is None without classes, and for models
  of an earlier version, which does not record the names.
  """
  names = saved.manifest.get('class_names')
  num_classes = saved.manifest['num_classes']
  if names is None or num_classes is None:
    return None
  return tuple(names) or classes.numbers(num_classes)


def numbers(model: BatchNormModel) -> list[str]:
  """Returns the names in `report.Evaluation.metrics`: the loss is the last."""
  return [
      *(
          name
          for result in model.metric_shapes.items()
          for name in model_metrics.entry_names(*result)
      ),
      columns.LOSS.name,
  ]


def scale_as_in_training(
    saved: saved_models.SavedModels, data: tff_bn_data.FederatedData
) -> tff_bn_data.FederatedData:
  """Returns data with the scaling of the pixels that a run was trained with.

  If clients have their own scaling, new clients get theirs from their training
  data, and nothing is drawn.

  Raises:
    ValueError: If a new client has no scaling.
  """
  numbers = saved_inputs.scaling(saved.manifest)
  if numbers is None:
    return data
  scaling = dataset_lib.Scaling.from_json(numbers)
  own = saved.manifest.get(saved_inputs.CLIENTS)
  if own is None:
    return data.with_scaling(scaling)
  known = {c: dataset_lib.Scaling.from_json(own[c]) for c in own}
  try:
    return data.with_client_scalings(known, are_drawn=False, default=scaling)
  except ValueError as error:
    raise ValueError(f'--{error}') from error


def as_domains(
    settings: settings_lib.RunSettings,
    dataset: tff_bn_data.Dataset,
    client: Optional[str],
) -> tuple[settings_lib.RunSettings, tff_bn_data.Dataset]:
  """Makes data without domains, or clients, the data of a single client.

  So a run with `split=domains` or `split=natural` can be evaluated on the data
  of a client that came after the training.

  Args:
    settings: The run's settings, with the flags of the data.
    dataset: The data.
    client: The client's name, if the command gives it.

  Returns:
    The settings and the data. They are unchanged if the data has the domains or
    the clients that the split needs, or if the split needs none.
  """
  origins = {
      'domains': None if client else dataset.domain_train,
      'natural': dataset.client_train,
  }
  if origins.get(settings.split, ()) is not None:
    return settings, dataset
  name = client or datasets.short_name(settings.dataset)
  changes: dict[str, Any] = {'split': 'domains', 'num_clients': None}
  if client is not None:
    changes['dataset'] = f'{datasets.DOMAINS.prefix}{client}={settings.dataset}'
  return dataclasses.replace(settings, **changes), dataclasses.replace(
      dataset,
      domain_train=np.zeros(len(dataset.y_train), np.int32),
      domain_test=np.zeros(len(dataset.y_test), np.int32),
      domain_names=(name,),
  )


def check_data(
    saved: saved_models.SavedModels,
    model: BatchNormModel,
    data: tff_bn_data.FederatedData,
) -> None:
  """Checks that the models of a run can be evaluated on this data.

  Raises:
    ValueError: If the model has not the inputs or outputs that the data needs,
      or if the saved weights do not fit the model.
  """
  channels = data.dataset.input_shape[-1]
  if data.dataset.scaling is not None and channels != len(
      data.dataset.scaling.mean
  ):
    noun = 'channels' if len(data.dataset.input_shape) == 3 else 'features'
    raise ValueError(
        f'--dataset={data.dataset.name} has {channels} {noun}, but the run'
        f' scales {len(data.dataset.scaling.mean)}.'
    )
  keras_model = model.to_keras(saved.weights(model))
  shape = data.dataset.input_shape
  try:
    keras_model(tf.zeros((1, *shape)), training=False)
  # Keras raises errors of many kinds.
  except Exception as error:
    raise ValueError(
        f'--dataset={data.dataset.name} has samples of shape {shape}, which the'
        ' model of the run does not take.'
    ) from error
  num_outputs = saved.manifest['num_outputs']
  if data.task in tasks.EXCLUSIVE and num_outputs < data.num_outputs:
    raise ValueError(
        f'--dataset={data.dataset.name} has {data.num_classes} classes, but the'
        f' model of the run has only {num_outputs} outputs.'
    )
  if data.task not in tasks.EXCLUSIVE and num_outputs != data.num_outputs:
    raise ValueError(
        f'--dataset={data.dataset.name} needs {data.num_outputs} outputs, but'
        f' the model of the run has {num_outputs}.'
    )


def evaluate_weights(
    evaluator: evaluation.Evaluator,
    weights: ModelWeights,
    dataset: tf.data.Dataset,
    kind: str,
    client_id: str,
) -> report.Evaluation:
  """Evaluates weights on a dataset; `kind` and `client_id` describe them."""
  return described(evaluator.evaluate(weights, dataset), kind, client_id)


def described(
    metrics: evaluation.Metrics, kind: str, client_id: str
) -> report.Evaluation:
  """Returns the result of an evaluation, see `report.Evaluation`."""
  found = evaluation.numbers(metrics)
  num_examples = found.pop('num_examples')
  # The loss is the last.
  found.move_to_end(columns.LOSS.name)
  if not num_examples:
    found = collections.OrderedDict.fromkeys(found)
  return report.Evaluation(kind, client_id, num_examples, dict(found))


class EvaluatedModels:
  """The models of a run, with the BN statistics with which they are evaluated.

  One model is in memory at a time, besides the global one.
  """

  def __init__(
      self,
      saved: saved_models.SavedModels,
      model: BatchNormModel,
      data: tff_bn_data.FederatedData,
      reestimation_batch_size: Optional[int] = None,
  ):
    """Initializes the models, see `evaluate_models` for the arguments."""
    self._saved = saved
    self._model = model
    self._data = data
    self._batch_size = reestimation_batch_size
    self._global = saved.weights(model)
    self._own = set(saved.client_ids)

  def global_model(self) -> ModelWeights:
    """Returns the model for the whole test set."""
    return self._reestimated(self._global, self._data.client_ids)

  def of_client(self, client_id: str) -> ModelWeights:
    """Returns the model that a client uses."""
    weights = self._global
    if client_id in self._own:
      weights = self._saved.weights(self._model, client_id)
    return self._reestimated(weights, [client_id])

  def kind(self, client_id: str) -> str:
    """Returns the kind of a client's model, see `report.Evaluation`."""
    return 'own' if client_id in self._own else 'global'

  def has_other_weights(self, client_id: str) -> bool:
    """Whether a client's model, or its scaling, is not the global one."""
    return (
        client_id in self._own
        or self._batch_size is not None
        or self._data.client_scalings is not None
    )

  def _reestimated(
      self, weights: ModelWeights, client_ids: Sequence[str]
  ) -> ModelWeights:
    if self._batch_size is None:
      return weights
    return evaluation.reestimate_batch_norm_statistics(
        self._model,
        weights,
        self._data.client_dataset(
            client_ids,
            seed=0,
            round_num=0,
            batch_size=self._batch_size,
            local_epochs=1,
            augment=False,
        ),
    )


def evaluate_models(
    saved: saved_models.SavedModels,
    model: BatchNormModel,
    data: tff_bn_data.FederatedData,
    client_ids: Sequence[str],
    *,
    reestimation_batch_size: Optional[int] = None,
    visit: Visitor,
) -> Iterator[report.Evaluation]:
  """Evaluates the global model, and the model that each client uses.

  However many clients there are, only the weights and outputs of some of them
  are in memory at a time.

  Args:
    saved: The run's models.
    model: The model with which the run was trained.
    data: The data.
    client_ids: The clients.
    reestimation_batch_size: If given, BN statistics are computed again from
      training data, in batches of this size: for the whole test set from the
      data of all clients, for a client's test data from the client's data.
    visit: Called for each evaluated model before its result is yielded.

  Yields:
    First the global model on the whole test set, then each client's model on
    the client's own test data. A client without an own model uses the global
    model.
  """
  evaluator = evaluation.Evaluator(model)
  models = EvaluatedModels(saved, model, data, reestimation_batch_size)

  def client_weights() -> Iterator[tuple[str, ModelWeights]]:
    for number in progress.counting(len(client_ids), 'Evaluated client'):
      client_id = client_ids[number]
      yield client_id, models.of_client(client_id)

  yield described(
      evaluator.evaluate_and_read(
          models.global_model(),
          data.test_dataset(_BATCH_SIZE),
          functools.partial(visit, 'global', ''),
      ),
      'global',
      '',
  )
  for client_id, metrics in evaluator.evaluate_each(
      client_weights(),
      lambda client_id: data.lazy_client_test_dataset(client_id, _BATCH_SIZE),
      lambda client_id, batches: visit(
          models.kind(client_id), client_id, batches
      ),
  ):
    yield described(metrics, models.kind(client_id), client_id)
