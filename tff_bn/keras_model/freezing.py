"""Freezes layers of a Keras model by their names."""

from collections.abc import Iterator
import re

import keras

from tff_bn.common import checks
from tff_bn.common import spelling
from tff_bn.keras_model import partition


def freeze_layers(model: keras.Model, layers: str) -> list[str]:
  """Freezes the layers of a model whose names match a regular expression.

  It sets `trainable = False`, also for all layers inside of a layer. As always
  in Keras, a frozen batch normalization layer normalizes by its running
  statistics, also in training, and does not update them. Federated algorithms
  neither train nor send weights of frozen layers, see
  `BatchNormModel.constants`.

  Example:
  ```
  def keras_model_fn():
    model = tff_bn.copy_model(pretrained)
    tff_bn.freeze_layers(model, 'backbone')
    return model
  ```

  Args:
    model: A Keras model with weights. It changes in place.
    layers: A regular expression for the whole name of a layer, such as
      `'block_[12]_.*'`. In nested models, it may also match the whole path,
      such as `'backbone/block_1_.*'`.

  Returns:
    The paths of the layers with weights that the expression matches. Layers
    inside of a frozen layer are not listed.

  Raises:
    TypeError: If `model` is not a Keras model, or `layers` is no text.
    ValueError: If `layers` is no regular expression, matches no layer with
      weights, or freezes all trainable weights.
  """
  checks.check_type('model', model, keras.Model, 'be a keras.Model')
  checks.check_type('layers', layers, str, 'be a regular expression')
  try:
    re.compile(layers)
  except re.error as error:
    raise ValueError(
        f'layers={layers!r} is no regular expression: {error}.'
    ) from error
  found = {
      path: layer
      for path, layer in _matching(model, layers)
      # Freezing others has no effect.
      if layer.weights
  }
  if not found:
    paths = [path for path, layer in layer_paths(model) if layer.weights]
    raise ValueError(
        f'layers={layers!r} matches the name or path of no layer with weights;'
        f' the model {model.name!r} has {spelling.name_some(paths) or "none"}.'
    )
  frozen = {id(v) for layer in found.values() for v in layer.weights}
  if all(id(v) in frozen for v in model.trainable_weights):
    raise ValueError(
        f'layers={layers!r} leaves no trainable weight in the model'
        f' {model.name!r}: it matches {spelling.name_some(list(found))}.'
    )
  for layer in found.values():
    layer.trainable = False
  return list(found)


def layer_paths(model: keras.Layer) -> list[tuple[str, keras.Layer]]:
  """Returns all layers of a model, each with its path.

  The path of a layer in nested models or wrappers begins with their names, as
  in `'backbone/conv1'`. A layer that occurs several times is listed once.
  """
  seen: set[int] = set()
  paths = []
  pending = _inside(model, '')
  while pending:
    path, layer = pending.pop(0)
    if id(layer) not in seen:
      seen.add(id(layer))
      paths.append((path, layer))
      pending[:0] = _inside(layer, f'{path}/')
  return paths


def _inside(layer: keras.Layer, prefix: str) -> list[tuple[str, keras.Layer]]:
  """Returns the layers directly inside a layer, with their paths."""
  # Keras has no public method for this.
  inside = layer._flatten_layers(include_self=False, recursive=False)
  return [(f'{prefix}{each.name}', each) for each in inside]


def _matching(
    model: keras.Layer, pattern: str, prefix: str = ''
) -> Iterator[tuple[str, keras.Layer]]:
  """Yields the outermost layers whose name or path matches."""
  for path, layer in _inside(model, prefix):
    if partition.matches(pattern, path):
      yield path, layer
    else:
      yield from _matching(layer, pattern, f'{path}/')
