"""The data of a client in a round, built where it is used."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NotRequired, Optional, TypedDict

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn import runtime
from tff_bn.data import batches as batches_lib
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import federated

# The number of recipes whose data a process keeps in memory.
_NUM_RECIPES = 4


class Draw(TypedDict):
  """The arguments of `FederatedData.client_dataset` other than the clients."""

  seed: int
  round_num: int
  batch_size: int
  local_steps: NotRequired[Optional[int]]
  local_epochs: NotRequired[Optional[int]]
  augment: NotRequired[bool]


class RoundDataset(runtime.ClientDataset):
  """The batches of `FederatedData.client_dataset`, built when they are needed.

  Several clients are treated as one that has the union of their samples.

  If the data has a recipe, only the recipe, the client and the round are sent
  to another process, which builds the batches itself. Otherwise all training
  data is sent to each machine once, and after that only positions of samples.
  """

  def __init__(
      self,
      data: federated.FederatedData,
      client_ids: Sequence[str],
      **draw: Unpack[Draw],
  ):
    self._data = data
    self._client_ids = tuple(client_ids)
    self._draw = draw

  @property
  def element_spec(self) -> Any:
    """See `tff_bn.runtime.ClientDataset`."""
    return self._data.element_spec

  def build(self) -> tf.Tensor:
    """See `tff_bn.runtime.ClientDataset`."""
    return self._selected().build()

  def arrays(self) -> Optional[runtime.BatchArrays]:
    """See `tff_bn.runtime.ClientDataset`."""
    return self._selected().arrays()

  def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Avoids pickling data that a recipe loads or that was already sent."""
    if self._data.recipe is not None:
      return _from_recipe, (self._data.recipe, self._client_ids, self._draw)
    selected = self._selected()
    return _Selected, (
        selected.x,
        selected.y,
        selected.batches,
        selected.scaling,
        self.element_spec,
    )

  def _selected(self) -> '_Selected':
    dataset = self._data.dataset
    batches = self._data.client_batches(self._client_ids, **self._draw)
    return _Selected(
        dataset.x_train,
        dataset.y_train,
        batches,
        dataset.scaling,
        self.element_spec,
    )


class _Selected(runtime.ClientDataset):
  """Batches of given samples."""

  def __init__(
      self,
      x: np.ndarray,
      y: np.ndarray,
      batches: batches_lib.Batches,
      scaling: Optional[dataset_lib.Scaling],
      element_spec: Any,
  ):
    self.x = x
    self.y = y
    self.batches = batches
    self.scaling = scaling
    self._element_spec = element_spec

  @property
  def element_spec(self) -> Any:
    """See `tff_bn.runtime.ClientDataset`."""
    return self._element_spec

  def build(self) -> tf.Tensor:
    """See `tff_bn.runtime.ClientDataset`."""
    return self.batches.to_variant(self.x, self.y, self.scaling)

  def arrays(self) -> Optional[runtime.BatchArrays]:
    """See `tff_bn.runtime.ClientDataset`."""
    return self.batches.to_arrays(self.x, self.y, self.scaling)


def _from_recipe(
    recipe: federated.Recipe,
    client_ids: Sequence[str],
    draw: Draw,
) -> RoundDataset:
  return RoundDataset(_load(recipe), client_ids, **draw)


@functools.lru_cache(maxsize=_NUM_RECIPES)
def _load(recipe: federated.Recipe) -> federated.FederatedData:
  return recipe()


def _fingerprint(recipe: federated.Recipe) -> str:
  return _load(recipe).fingerprint()


def check_workers(data: federated.FederatedData) -> None:
  """Checks that Ray workers load the same data from the data's recipe.

  The workers are those of the thread's default context, if it has any. If one
  has different data, or can't load it, a `ValueError` is raised.
  """
  context = tff.framework.get_context_stack().current
  if data.recipe is None or not isinstance(context, runtime.RayContext):
    return
  context.check_workers(
      f'the fingerprint of the data {data.dataset.name!r}',
      functools.partial(_fingerprint, data.recipe),
      data.fingerprint(),
  )
