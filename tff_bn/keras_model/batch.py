"""A batch of a client's data: examples, labels and the examples' weights."""

from typing import Any, NamedTuple, Optional

import tensorflow as tf


class Batch(NamedTuple):
  """The parts of an element `(x, y)` or `(x, y, sample_weight)` of a dataset.

  Each part is a tensor, its spec, or a nested structure of them. The first axis
  of all tensors is the examples'. Without weights, `sample_weight` is `None`.
  """

  x: Any
  y: Any
  sample_weight: Optional[Any] = None


def num_examples(element: Any) -> tf.Tensor:
  """Returns the number of examples in a batch, an int64 scalar."""
  return tf.shape(tf.nest.flatten(Batch(*element).y)[0], tf.int64)[0]
