"""The final models of a run."""

from collections.abc import Mapping
import contextlib
import functools
import pathlib
from typing import Any, Optional

from absl import logging
import numpy as np
import tensorflow as tf

from tff_bn.catalog import tasks
from tff_bn.data import federated
from tff_bn.imports import versions
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.training import finished
from tff_bn.training import run_entries
from tff_bn.training import saved_inputs
from tff_bn.training import saved_models
from tff_bn.training.training_config import TrainingConfig


class FinalModels:
  """The folder `model/` of a run."""

  def __init__(
      self,
      run_dir: pathlib.Path,
      run: str,
      settings: Mapping[str, str],
      model: BatchNormModel,
      data: federated.FederatedData,
      config: TrainingConfig,
  ):
    """Initializes the models; `run` is the checksum of the run's identity."""
    self._run_dir = run_dir
    self._model_dir = run_dir / run_entries.MODEL
    self._model = model
    self._data = data
    self._run = run
    self._settings = dict(settings)
    self._config = config

  def _identity(self, round_num: int) -> dict[str, Any]:
    """Returns entries of the manifest: the same models have the same."""
    return dict(
        run=self._run,
        round=round_num,
        settings=self._settings,
        save_client_models=self._config.save_client_models,
        export=self._config.export,
    )

  def remove(self) -> None:
    """Removes the final results, because the run will have others."""
    saved_models.remove(self._model_dir)
    if not self._config.client_metrics_over_time:
      (self._run_dir / run_entries.CLIENT_METRICS).unlink(missing_ok=True)

  def find(self, round_num: int) -> Optional[saved_models.SavedModels]:
    """Returns the models after a round, if they are saved and intact."""
    if not self._model_dir.exists():
      return None
    try:
      models = saved_models.SavedModels(self._model_dir)
      models.check()
      finished.check_results(self._run_dir, models.manifest)
    except ValueError as error:
      logging.warning(
          '%s The models are written again from the last checkpoint.', error
      )
      return None
    is_same = self._identity(round_num).items() <= models.manifest.items()
    return models if is_same else None

  def writing(
      self,
      server_weights: ModelWeights,
      num_clients: int,
      round_num: int,
      *,
      kept_for: Optional[str] = None,
      inside: Optional[saved_models.Writer] = None,
  ) -> contextlib.AbstractContextManager[saved_models.Writer]:
    """Writes the models in a `with` block.

    Args:
      server_weights: See `saved_models.writing`.
      num_clients: See there.
      round_num: The round after which they are.
      kept_for: The metric for which they are kept, if they are not the last.
      inside: The writer in whose folder these models get one.

    Returns:
      See `saved_models.writing`.
    """
    data = self._data
    described = {}
    if isinstance(data, federated.FederatedData):
      described = describe(data)
      if tasks.has_sample_classes(data.task):
        described['class_counts'] = data.class_counts().tolist()
    manifest = dict(
        **self._identity(round_num),
        kept_for=kept_for,
        results=finished.results_checksums(self._run_dir),
        versions=versions.versions(),
        input_shape=_input_shape(self._model),
        num_classes=getattr(data, 'num_classes', None),
        **described,
    )
    manifest[saved_inputs.ENTRY] = saved_inputs.choose(
        manifest, self._config.export
    )
    return saved_models.writing(
        self._model_dir if inside is None else inside.best_folder,
        self._model,
        server_weights,
        num_clients,
        manifest,
        saves_keras_clients=self._config.save_client_models != 'none',
        prepare=functools.partial(saved_inputs.preparation, manifest),
        like=inside,
    )


def describe(data: federated.FederatedData) -> dict[str, Any]:
  """Returns the manifest's entries about the training data.

  These are the task, the number of outputs of the models, the names of the
  classes in the order of the outputs, the size to which pictures were resized,
  whether their values are of type uint8, the number by which the original
  values were divided, the scaling after that, also of single clients, and how
  the columns of a table became features.
  """
  dataset = data.dataset
  description: dict[str, Any] = dict(
      task=dataset.task,
      num_outputs=dataset.num_outputs,
      class_names=list(dataset.class_names),
      image_size=dataset.image_size and list(dataset.image_size),
      is_uint8=dataset.x_train.dtype == np.uint8,
      divisor=dataset.total_divisor,
  )
  if dataset.scaling is not None:
    description[saved_inputs.SCALING] = dataset.scaling.to_json()
  if data.client_scalings is not None:
    description[saved_inputs.CLIENTS] = data.client_scalings.to_json()
  if dataset.table is not None:
    description['table'] = dataset.table.to_json()
  return description


def _input_shape(model: BatchNormModel) -> Optional[list[int]]:
  """Returns the shape of a sample; `None` if it has several parts."""
  spec = model.input_spec[0]
  return list(spec.shape[1:]) if isinstance(spec, tf.TensorSpec) else None
