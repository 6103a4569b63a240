"""The final models of a run."""

from collections.abc import Iterator, Mapping
import contextlib
import pathlib
from typing import Any, Optional

from absl import logging
import tensorflow as tf

from tff_bn.data import dataset as dataset_lib
from tff_bn.imports import versions
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.training import finished
from tff_bn.training import run_entries
from tff_bn.training import saved_models


class FinalModels:
  """The folder `model/` of a run."""

  def __init__(
      self, run_dir: pathlib.Path, run: str, settings: Mapping[str, str]
  ):
    """Initializes the models.

    Args:
      run_dir: The run's folder.
      run: The checksum of the run's identity.
      settings: The settings of the caller, see `train`.
    """
    self._run_dir = run_dir
    self._model_dir = run_dir / run_entries.MODEL
    self._run = run
    self._settings = dict(settings)

  def remove(self) -> None:
    """Removes the final results, because the run will have others."""
    saved_models.remove(self._model_dir)
    (self._run_dir / run_entries.CLIENT_METRICS).unlink(missing_ok=True)

  def find(
      self, round_num: int, save_client_models: str
  ) -> Optional[saved_models.SavedModels]:
    """Finds the models of this run, if they are already saved and intact.

    Args:
      round_num: The number of the last round.
      save_client_models: See `TrainingConfig`.

    Returns:
      The models; `None` if they have to be written.
    """
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
    expected = dict(
        run=self._run,
        round=round_num,
        save_client_models=save_client_models,
        settings=self._settings,
    )
    if any(models.manifest[name] != value for name, value in expected.items()):
      return None
    return models

  @contextlib.contextmanager
  def writing(
      self,
      model: BatchNormModel,
      server_weights: ModelWeights,
      num_clients: int,
      *,
      round_num: int,
      num_classes: Optional[int],
      save_client_models: str,
      dataset: Optional[dataset_lib.Dataset] = None,
  ) -> Iterator[saved_models.Writer]:
    """Writes the models. The folder appears when it is complete.

    Args:
      model: The model.
      server_weights: The server's weights.
      num_clients: The number of clients that have own models.
      round_num: The number of the last round.
      num_classes: The number of classes, if it is known.
      save_client_models: See `TrainingConfig`.
      dataset: The training data, if its classes and scaling are known.

    Yields:
      The writer.
    """
    with saved_models.writing(
        self._model_dir,
        model,
        server_weights,
        num_clients,
        dict(
            run=self._run,
            round=round_num,
            settings=self._settings,
            results=finished.results_checksums(self._run_dir),
            versions=versions.versions(),
            input_shape=_input_shape(model),
            num_classes=num_classes,
            save_client_models=save_client_models,
            **({} if dataset is None else describe(dataset)),
        ),
        saves_keras_clients=save_client_models != 'none',
    ) as writer:
      yield writer


def describe(dataset: dataset_lib.Dataset) -> dict[str, Any]:
  """Returns the manifest's entries about the training data.

  Args:
    dataset: The training data.

  Returns:
    The names of the classes in the order of the models' outputs, by which
    number the original values were divided, and the scaling after that.
  """
  description: dict[str, Any] = dict(
      class_names=list(dataset.class_names), divisor=dataset.total_divisor
  )
  if dataset.scaling is not None:
    description['pixel_scaling'] = dataset.scaling.to_json()
  return description


def _input_shape(model: BatchNormModel) -> Optional[list[int]]:
  """Returns the shape of a sample; `None` if it has several parts."""
  spec = model.input_spec[0]
  return list(spec.shape[1:]) if isinstance(spec, tf.TensorSpec) else None
