"""What a client trains on in a round, made on the machine that uses it."""

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import functools
from typing import Any, Optional

import numpy as np
import tensorflow as tf

from tff_bn import runtime
from tff_bn.data import batches as batches_lib
from tff_bn.data import federated
from tff_bn.runtime import server

_BATCHES = 'client_batches'
_FINGERPRINT = 'fingerprint'
# Workers keep the data of so many recipes.
_NUM_RECIPES = 4


class RoundDataset(runtime.ClientDataset):
  """The batches of `FederatedData.client_dataset`, made when they are needed.

  A worker on another machine makes them itself, if the data has a recipe; only
  the recipe, the client and the round are sent. Else the client's samples are
  sent when they are used for the first time, and stay there; later only their
  order is sent.
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
    if data.recipe is None:
      self.home = data.client_ids.index(self._client_ids[0])

  @property
  def element_spec(self) -> Any:
    """See `tff_bn.runtime.ClientDataset`."""
    return self._data.element_spec

  def build(self, worker: Optional[runtime.Worker]) -> tf.Tensor:
    """See `tff_bn.runtime.ClientDataset`."""
    if worker is not None and self._data.recipe is not None:
      return self._build_there(worker)
    dataset = self._data.dataset
    samples, *order = self._data.client_batches(
        self._client_ids, **self._draw
    ).gather_order()
    kind = dataset.x_train.dtype.name, dataset.x_train.shape[1:]
    if worker is None:
      x, y = dataset.x_train[samples], dataset.y_train[samples]
      gather, device = _local_gather(*kind), runtime.HOST
    else:
      x, y, all_samples = self._send_samples(worker)
      places = np.searchsorted(all_samples, samples).astype(np.int32)
      order[0] = places[order[0]]
      gather = worker.keep(('gather', *kind), lambda: _trace_gather(*kind))
      device = worker.host_device
    with tf.device(device):
      return gather(*(tf.identity(array) for array in (x, y, *order)))

  def _build_there(self, worker: runtime.Worker) -> tf.Tensor:
    """Lets the worker's functions make the batches."""
    dtypes = (
        self._data.dataset.x_train.dtype.name,
        *('int32', 'int32', 'int64', 'int64'),
    )
    make = worker.keep(('make', dtypes), lambda: _trace_make(dtypes))
    request = dict(
        recipe=self._data.recipe, client_ids=self._client_ids, **self._draw
    )
    text = server.encode_call(_BATCHES, request)
    with tf.device(worker.host_device):
      return make(tf.identity(text))

  def _send_samples(
      self, worker: runtime.Worker
  ) -> tuple[tf.Tensor, tf.Tensor, np.ndarray]:
    """Sends the clients' samples, once.

    Args:
      worker: The worker.

    Returns:
      The samples and their classes, there, and their positions in the training
      data, here.
    """
    dataset = self._data.dataset

    def send():
      x, y, positions = _samples(self._data, self._client_ids)
      # With the dataset, so that its identity stays its own.
      return tf.identity(x), tf.identity(y), positions, dataset

    return worker.keep(('samples', id(dataset), self._client_ids), send)[:3]


def _samples(
    data: federated.FederatedData, client_ids: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """All samples of clients, their classes, and positions in all data."""
  positions = np.unique(
      np.concatenate([data.train_indices[c] for c in client_ids])
  )
  dataset = data.dataset
  return dataset.x_train[positions], dataset.y_train[positions], positions


@functools.lru_cache
def _local_gather(dtype: str, shape: tuple[int, ...]) -> Callable[..., Any]:
  with tf.device(runtime.HOST):
    return _trace_gather(dtype, shape)


def _trace_gather(dtype: str, shape: tuple[int, ...]) -> Callable[..., Any]:
  """`batches.gather`, traced once, as a function that returns the variant."""

  def gather(*arrays):
    return tf.data.experimental.to_variant(batches_lib.gather(*arrays))

  return tf.function(gather, autograph=False).get_concrete_function(
      tf.TensorSpec((None, *shape), dtype),
      tf.TensorSpec((None,), tf.int32),
      tf.TensorSpec((None,), tf.int32),
      tf.TensorSpec((None,), tf.int64),
      tf.TensorSpec((None,), tf.int64),
  )


def _trace_make(dtypes: Sequence[str]) -> Callable[..., Any]:
  """The same of what a worker's function returns."""

  def make(text):
    arrays = server.call(text, dtypes)
    return tf.data.experimental.to_variant(batches_lib.gather(*arrays))

  return tf.function(make, autograph=False).get_concrete_function(
      tf.TensorSpec([], tf.string)
  )


def worker_functions(
    make_data: Callable[[str], federated.FederatedData],
) -> Mapping[str, runtime.WorkerFunction]:
  """What a worker needs to make `RoundDataset`s itself.

  Args:
    make_data: Makes the data of a recipe.

  Returns:
    The functions for `tff_bn.runtime.Server`.
  """
  make_data = functools.lru_cache(maxsize=_NUM_RECIPES)(make_data)

  def fingerprint(request):
    return [make_data(request['recipe']).fingerprint().encode()]

  def client_batches(request):
    data = make_data(request.pop('recipe'))
    samples, *order = data.client_batches(**request).gather_order()
    dataset = data.dataset
    return [dataset.x_train[samples], dataset.y_train[samples], *order]

  return {_FINGERPRINT: fingerprint, _BATCHES: client_batches}


def check_workers(
    context: runtime.InProcessContext, data: federated.FederatedData
) -> None:
  """Checks that workers that make the data themselves make the same.

  Args:
    context: The context in which clients are computed.
    data: The clients' data.

  Raises:
    ValueError: If a worker has other data, or can't make it.
  """
  if data.recipe is None or not context.workers:
    return
  expected = data.fingerprint()
  request = dict(recipe=data.recipe)
  # At the same time: each may have to load the data first.
  with concurrent.futures.ThreadPoolExecutor(len(context.workers)) as pool:
    futures = {
        worker.address: pool.submit(worker.ask, _FINGERPRINT, request)
        for worker in context.workers
    }
  for address, future in futures.items():
    try:
      fingerprint = future.result()
    except RuntimeError as error:
      raise ValueError(str(error)) from error
    if fingerprint != expected:
      raise ValueError(
          f'The worker {address} has other data under the name'
          f' --dataset={data.dataset.name} than this machine.'
      )
