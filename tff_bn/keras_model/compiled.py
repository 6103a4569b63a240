"""What a Keras model is compiled with, as arguments of `BatchNormModel`."""

from collections.abc import Mapping
from typing import Any

import keras

from tff_bn.common import checks
from tff_bn.keras_model import copying


def arguments(keras_model: keras.Model) -> dict[str, Any]:
  """Returns the arguments of `BatchNormModel` except for `input_spec`.

  Raises:
    TypeError: If `keras_model` is not a Keras model.
    ValueError: If it is not compiled with a loss.
  """
  checks.check_type(
      'keras_model', keras_model, keras.Model, 'be a compiled keras.Model'
  )
  config = getattr(keras_model, '_compile_config', None)
  given = {} if config is None else config.config
  if not keras_model.compiled or given.get('loss') is None:
    raise ValueError(
        f'keras_model={keras_model.name!r} is not compiled with a loss; call'
        ' keras_model.compile(loss=...) first.'
    )
  return dict(
      keras_model_fn=lambda: copying.copy_model(keras_model),
      loss_fn=lambda: given['loss'],
      loss_weights=given.get('loss_weights'),
      metrics_fn=lambda: _new(given.get('metrics') or []),
      weighted_metrics_fn=lambda: _new(given.get('weighted_metrics') or []),
  )


def _new(metrics: Any) -> Any:
  """Returns metrics with new variables."""
  if isinstance(metrics, Mapping):
    return {name: _new(metric) for name, metric in metrics.items()}
  if isinstance(metrics, (list, tuple)):
    return [_new(metric) for metric in metrics]
  if not isinstance(metrics, keras.metrics.Metric):
    return metrics
  try:
    return type(metrics).from_config(metrics.get_config())
  # Metrics of users may lack a configuration, or have a wrong one.
  except Exception as error:
    raise ValueError(
        f'keras_model is compiled with the metric {metrics.name!r}'
        f' ({type(metrics).__name__}), which cannot be copied: {error} Give it'
        ' a get_config, or use BatchNormModel with metrics_fn.'
    ) from error
