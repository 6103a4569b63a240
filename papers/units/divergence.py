"""Measures how far the clients' weights diverge.

Weight divergence (Zhao et al., Federated Learning with Non-IID Data, 2018) as
in section 5.2 of Li et al., Federated Learning with Position-Aware Neurons,
CVPR 2022: with the weights W_k of clients k of S and their mean W̄,

  `1/|S| Σ_k ‖W_k − W̄‖₂`,

which is smaller if units at the same position have the same function.
"""

from collections.abc import Iterator, Sequence

import keras
import numpy as np

from tff_bn.common import checks


def weight_divergence(clients: Sequence[Sequence[np.ndarray]]) -> list[float]:
  """Computes the weight divergence of each variable.

  Args:
    clients: The weights of each client in the same order, for example from
      `model.get_weights()`.

  Returns:
    For each variable the mean Euclidean (Frobenius) distance of the clients'
    values from their mean, computed in float64.

  Raises:
    ValueError: If there are fewer than two clients, or the numbers or shapes of
      their weights differ.
  """
  clients = [[np.asarray(value) for value in weights] for weights in clients]
  _check_number(len(clients), 'clients')
  for number, weights in enumerate(clients):
    if len(weights) != len(clients[0]):
      raise ValueError(
          f'clients[{number}] has {len(weights)} weights, but clients[0] has'
          f' {len(clients[0])}; all must have the same number.'
      )
    for index, (value, first) in enumerate(zip(weights, clients[0])):
      if value.shape != first.shape:
        raise ValueError(
            f'clients[{number}][{index}] has the shape {value.shape}, but'
            f' clients[0][{index}] has {first.shape}; they must be the same.'
        )
  return [_divergence(values) for values in zip(*clients)]


def weight_divergence_by_layer(
    models: Sequence[keras.Model],
) -> dict[str, float]:
  """Computes the weight divergence of each layer's trainable weights.

  The weights of a layer form one vector. The layers of nested models are
  separate layers; a wrapper, such as `TimeDistributed`, counts as one layer.

  Args:
    models: The clients' models. The names of their layers may differ.

  Returns:
    The divergence by the name of the layer in the first model, with the names
    of nested models as prefix (`inner/dense`). Layers without trainable weights
    are left out.

  Raises:
    TypeError: If `models` is no list.
    ValueError: If there are fewer than two models, their architectures differ,
      or two layers have the same name.
  """
  checks.check_type('models', models, Sequence, 'be a list of models')
  _check_number(len(models), 'models')
  layers = [list(_trainable_layers(model)) for model in models]
  for number, found in enumerate(layers):
    if len(found) != len(layers[0]):
      raise ValueError(
          f'models[{number}] ({models[number].name!r}) has {len(found)} layers'
          f' with trainable weights, but models[0] ({models[0].name!r}) has'
          f' {len(layers[0])}; all must have the same architecture.'
      )
    for (name, weights), (first_name, first) in zip(found, layers[0]):
      shapes, first_shapes = _shapes(weights), _shapes(first)
      if shapes != first_shapes:
        raise ValueError(
            f'The layer {name!r} of models[{number}] has trainable weights of'
            f' the shapes {shapes}, but {first_name!r} of models[0] has'
            f' {first_shapes}; all must have the same architecture.'
        )
  divergences = {}
  for same_layer in zip(*layers):
    name = same_layer[0][0]
    if name in divergences:
      raise ValueError(
          f'models[0] ({models[0].name!r}) has several layers with the name'
          f' {name!r}; give them different names.'
      )
    divergences[name] = _divergence(
        [_as_vector(weights) for _, weights in same_layer]
    )
  return divergences


def _divergence(values: Sequence[np.ndarray]) -> float:
  vectors = np.stack([np.ravel(value).astype(np.float64) for value in values])
  return float(np.linalg.norm(vectors - vectors.mean(axis=0), axis=1).mean())


def _trainable_layers(
    model: keras.Model,
) -> Iterator[tuple[str, list[keras.Variable]]]:
  """Yields the names and trainable weights of the layers that have any."""
  seen = set()
  stack = [(layer, '') for layer in reversed(model.layers)]
  while stack:
    layer, prefix = stack.pop()
    # Layers of a nested model may be used outside of it, too.
    if id(layer) in seen:
      continue
    seen.add(id(layer))
    if isinstance(layer, keras.Model):
      prefix += f'{layer.name}/'
      stack += [(inner, prefix) for inner in reversed(layer.layers)]
    elif layer.trainable_weights:
      yield prefix + layer.name, layer.trainable_weights


def _check_number(number: int, what: str) -> None:
  if number < 2:
    raise ValueError(
        f'{what} has {number} elements; weight divergence needs at least 2.'
    )


def _shapes(weights: Sequence[keras.Variable]) -> list[tuple[int, ...]]:
  return [tuple(weight.shape) for weight in weights]


def _as_vector(weights: Sequence[keras.Variable]) -> np.ndarray:
  return np.concatenate([weight.numpy().ravel() for weight in weights])
