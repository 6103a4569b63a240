"""Types and computations for the cases of `test_in_process_intrinsics`.

In the modules `federated_cases` and `tensorflow_cases`, each public function is
a case: it returns a computation, its arguments and its result.
"""

import collections

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

_OD = collections.OrderedDict

INT = tff.TensorType(np.int32)
FLOAT = tff.TensorType(np.float32)
STRING = tff.TensorType(np.str_)
VECTOR = tff.TensorType(np.float32, [2])
ANY_VECTOR = tff.TensorType(np.int32, [None])
INTS = tff.SequenceType(INT)
# Not in alphabetical order: `tf.data` sorts names, TFF doesn't.
ROW = tff.to_type(_OD(z=np.int32, a=np.float32))
EMPTY = tff.StructType([])


def not_native(case):
  """Marks a case that TFF's own runtime refuses or computes wrongly."""
  case.is_native = False
  return case


def clients(member):
  return tff.FederatedType(member, tff.CLIENTS)


def same_at_clients(member):
  return tff.FederatedType(member, tff.CLIENTS, all_equal=True)


def server(member):
  return tff.FederatedType(member, tff.SERVER)


def row(z, a):
  return _OD(z=z, a=a)


def rows(n):
  """Returns a dataset of the rows (0, 0.5), (1, 1.5), ..."""
  numbers = np.arange(n, dtype=np.int32)
  return tf.data.Dataset.from_tensor_slices(
      _OD(z=numbers, a=numbers.astype(np.float32) + 0.5)
  )


@tff.tensorflow.computation(FLOAT)
def double(x):
  return 2 * x


@tff.tensorflow.computation(FLOAT, FLOAT)
def add(x, y):
  return x + y


@tff.tensorflow.computation(INT, INT)
def append_digit(x, digit):
  return 10 * x + digit


@tff.tensorflow.computation(INT)
def same_int(x):
  return tf.identity(x)


@tff.tensorflow.computation(INTS)
def total(numbers):
  return numbers.reduce(0, lambda a, b: a + b)


@tff.tensorflow.computation(INT)
def count_up(n):
  return tf.data.Dataset.range(tf.cast(n, tf.int64)).map(
      lambda i: row(tf.cast(i, tf.int32), 0.5 + tf.cast(i, tf.float32))
  )
