"""Clients' data in memory."""

import numpy as np
import tensorflow as tf

from tff_bn import runtime


class Client(runtime.ClientDataset):
  """Batches of given sizes of a toy problem, see `client`."""

  def __init__(self, problem, samples, sizes):
    self.problem = problem
    self.samples = samples
    self.sizes = np.asarray(sizes, np.int64)

  @property
  def element_spec(self):
    return self.problem.input_spec

  def arrays(self):
    return runtime.BatchArrays(self.sizes, lambda: self.samples)

  def batches(self):
    """Returns the batches, as tuples of arrays."""
    ends = np.cumsum(self.sizes)
    return [
        tuple(array[end - size : end] for array in self.samples)
        for end, size in zip(ends, self.sizes)
    ]

  def build(self):
    return tf.data.experimental.to_variant(dataset(self))


def client(problem, sizes, seed):
  """Returns a client with batches of the given sizes."""
  return Client(problem, list(problem.arrays(sum(sizes), seed)), sizes)


def dataset(client):
  """Returns a client's batches as a dataset."""
  return tf.data.Dataset.from_generator(
      client.batches, output_signature=client.element_spec
  )
