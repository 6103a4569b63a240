"""What a client trains on in a round, made where it is used."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import runtime
from tff_bn.data import batches as batches_lib
from tff_bn.data import federated

# A process keeps the data of so many recipes.
_NUM_RECIPES = 4


class RoundDataset(runtime.ClientDataset):
  """The batches of `FederatedData.client_dataset`, made when they are needed.

  Another process makes them itself, if the data has a recipe; only the recipe,
  the client and the round are sent. Else all training data is sent to each
  machine once; later only the positions of the samples are.
  """

  def __init__(
      self,
      data: federated.FederatedData,
      client_ids: Sequence[str],
      **draw: Optional[int],
  ):
    """Initializes the dataset.

    Args:
      data: The clients' data.
      client_ids: The client; several stand for the union of their samples.
      **draw: The other arguments of `FederatedData.client_dataset`.
    """
    self._data = data
    self._client_ids = tuple(client_ids)
    self._draw = draw

  @property
  def element_spec(self) -> Any:
    """See `tff_bn.runtime.ClientDataset`."""
    return self._data.element_spec

  def build(self) -> tf.Tensor:
    """See `tff_bn.runtime.ClientDataset`."""
    return self._gathered().build()

  def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Pickles no data that can be made, or that is sent already."""
    if self._data.recipe is not None:
      return _from_recipe, (self._data.recipe, self._client_ids, self._draw)
    gathered = self._gathered()
    return _Gathered, (
        gathered.x,
        gathered.y,
        gathered.order,
        self.element_spec,
    )

  def _gathered(self) -> '_Gathered':
    dataset = self._data.dataset
    order = self._data.client_batches(
        self._client_ids, **self._draw
    ).gather_order()
    return _Gathered(dataset.x_train, dataset.y_train, order, self.element_spec)


class _Gathered(runtime.ClientDataset):
  """Batches of some of all samples."""

  def __init__(
      self,
      x: np.ndarray,
      y: np.ndarray,
      order: Sequence[np.ndarray],
      element_spec: Any,
  ):
    self.x = x
    self.y = y
    self.order = order
    self._element_spec = element_spec

  @property
  def element_spec(self) -> Any:
    """See `tff_bn.runtime.ClientDataset`."""
    return self._element_spec

  def build(self) -> tf.Tensor:
    """See `tff_bn.runtime.ClientDataset`."""
    samples, *order = self.order
    gather = _traced_gather(self.x.dtype.name, self.x.shape[1:])
    with tf.device(runtime.HOST):
      return gather(
          *(
              tf.identity(array)
              for array in (self.x[samples], self.y[samples], *order)
          )
      )


def _from_recipe(
    recipe: federated.Recipe,
    client_ids: Sequence[str],
    draw: dict[str, Optional[int]],
) -> RoundDataset:
  return RoundDataset(_make(recipe), client_ids, **draw)


@functools.lru_cache(maxsize=_NUM_RECIPES)
def _make(recipe: federated.Recipe) -> federated.FederatedData:
  return recipe()


@functools.lru_cache
def _traced_gather(dtype: str, shape: tuple[int, ...]) -> Callable[..., Any]:
  """`batches.gather`, traced once, as a function that returns the variant."""

  def gather(*arrays):
    return tf.data.experimental.to_variant(batches_lib.gather(*arrays))

  with tf.device(runtime.HOST):
    return tf.function(gather, autograph=False).get_concrete_function(
        tf.TensorSpec((None, *shape), dtype),
        tf.TensorSpec((None,), tf.int32),
        tf.TensorSpec((None,), tf.int32),
        tf.TensorSpec((None,), tf.int64),
        tf.TensorSpec((None,), tf.int64),
    )


def _fingerprint(recipe: federated.Recipe) -> str:
  return _make(recipe).fingerprint()


def check_workers(data: federated.FederatedData) -> None:
  """Checks that workers that make the data themselves make the same.

  They are the workers of the thread's default context, if it has any.

  Args:
    data: The clients' data.

  Raises:
    ValueError: If a worker has other data, or can't make it.
  """
  context = tff.framework.get_context_stack().current
  if data.recipe is None or not isinstance(context, runtime.RayContext):
    return
  context.check_workers(
      f'the fingerprint of the data {data.dataset.name!r}',
      functools.partial(_fingerprint, data.recipe),
      data.fingerprint(),
  )
