"""A client's batches as tensors, which take the place of a `tf.data.Dataset`.

To make an iterator over a dataset and to read it takes longer than a step of a
small model. A runtime that has the data of clients in memory gives their
batches to the clients' work in this form instead.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Optional, TypeVar, Union

import tensorflow as tf

_State = TypeVar('_State')


class ClientBatches(NamedTuple):
  """The batches of one client.

  The methods do what the methods of a `tf.data.Dataset` with their names do.
  `repeat` must come before `take` and `skip`.

  Attributes:
    samples: The structure of a batch. Its tensors have the samples of one or
      several clients, one after another; with `equal_sizes`, its tensors have
      the batches along their first axis.
    bounds: int64 vector. Batch k has the samples from bounds[k] up to, but
      without, bounds[k + 1]. `()` with `equal_sizes`.
    first: int64 scalar, the number of the client's first batch.
    size: int64 scalar, the number of the client's batches.
    start: int64 scalar. If the client's batches are repeated for ever, the
      batches of this dataset are those from number `start`
    stop: int64 scalar, up to, but without, number `stop`.
  """

  samples: Any
  bounds: Any
  first: tf.Tensor
  size: tf.Tensor
  start: tf.Tensor
  stop: tf.Tensor

  @property
  def equal_sizes(self) -> bool:
    """Whether each client has a batch, and all batches have the same size."""
    return not tf.is_tensor(self.bounds)

  @classmethod
  def of_client(
      cls, samples: Any, bounds: Any, first: tf.Tensor, size: tf.Tensor
  ) -> 'ClientBatches':
    """Returns all batches of a client, each once; see the attributes."""
    return cls(samples, bounds, first, size, tf.zeros_like(size), size)

  @classmethod
  def spec(cls, input_spec: Any, equal_sizes: bool) -> 'ClientBatches':
    """Returns the specs of all tensors.

    Args:
      input_spec: A batch's structure of specs.
      equal_sizes: Whether all batches have the same size.
    """
    return cls(
        samples_spec(input_spec, equal_sizes),
        () if equal_sizes else tf.TensorSpec([None], tf.int64),
        *(4 * [tf.TensorSpec([], tf.int64)]),
    )

  def repeat(self, count: Optional[int] = None) -> 'ClientBatches':
    """Repeats the batches; for ever without `count`."""
    endless = tf.constant(tf.int64.max, tf.int64)
    if count is None:
      return self._replace(stop=tf.where(self.size > 0, endless, self.stop))
    return self._replace(
        stop=tf.where(self.stop < endless, self.stop * count, endless)
    )

  def take(self, count: int) -> 'ClientBatches':
    """Takes the first batches."""
    return self._replace(stop=tf.minimum(self.stop, self.start + count))

  def skip(self, count: int) -> 'ClientBatches':
    """Leaves out the first batches."""
    return self._replace(start=tf.minimum(self.stop, self.start + count))

  def reduce(
      self, initial_state: _State, reduce_func: Callable[[_State, Any], _State]
  ) -> _State:
    """Combines a state with each batch."""
    return fold(self, initial_state, reduce_func)

  def batch(self, number: tf.Tensor) -> Any:
    """Returns the batch with a number from `start` up to `stop`."""
    place = self.first + number % self.size
    if self.equal_sizes:
      return tf.nest.map_structure(lambda part: part[place], self.samples)
    begin, end = self.bounds[place], self.bounds[place + 1]
    return tf.nest.map_structure(lambda part: part[begin:end], self.samples)


def samples_spec(input_spec: Any, equal_sizes: bool) -> Any:
  """Returns the specs of `ClientBatches.samples`, see `ClientBatches.spec`."""
  axes = [None, None] if equal_sizes else [None]
  return tf.nest.map_structure(
      lambda spec: tf.TensorSpec([*axes, *spec.shape[1:]], spec.dtype),
      input_spec,
  )


# What the work of a client takes as its data.
Data = Union[tf.data.Dataset, ClientBatches]


def fold(
    data: Data, state: _State, step: Callable[[_State, Any], _State]
) -> _State:
  """Combines a state with each batch, for use in a `tf.function`.

  Args:
    data: The batches.
    state: A nested structure of tensors.
    step: A function from a state and a batch to the next state.

  Returns:
    The last state.
  """
  if isinstance(data, ClientBatches):
    _, state = tf.while_loop(
        lambda number, _: number < data.stop,
        lambda number, state: (number + 1, step(state, data.batch(number))),
        (data.start, state),
        # Steps assign variables.
        parallel_iterations=1,
    )
    return state
  # Not `Dataset.reduce`, which instantiates its function again at each call.
  iterator = iter(data)

  def advance(_, state):
    element = iterator.get_next_as_optional()
    has_value = element.has_value()
    return has_value, tf.cond(
        has_value, lambda: step(state, element.get_value()), lambda: state
    )

  _, state = tf.while_loop(
      lambda has_value, _: has_value, advance, (tf.constant(True), state)
  )
  return state
