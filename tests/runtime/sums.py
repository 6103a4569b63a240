"""Computations that sum up the clients' datasets of int64 numbers."""

import cases
import numpy as np
import tensorflow_federated as tff

INTS = tff.SequenceType(tff.TensorType(np.int64))


@tff.tensorflow.computation(INTS)
def total(numbers):
  return numbers.reduce(np.int64(0), lambda a, b: a + b)


@tff.tensorflow.computation(np.int64, np.int64)
def add(x, y):
  return x + y


@tff.federated_computation(cases.clients(INTS))
def sum_of_totals(data):
  return tff.federated_sum(tff.federated_map(total, data))


def build_shifted_sum(constant=1):
  """Builds the sum of the totals, each shifted twice by a constant."""

  @tff.tensorflow.computation(np.int64)
  def shift(x):
    return x + constant

  @tff.federated_computation(cases.clients(INTS))
  def comp(data):
    totals = tff.federated_map(shift, tff.federated_map(total, data))
    return tff.federated_sum(tff.federated_map(shift, totals))

  return comp
