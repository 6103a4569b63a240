"""Clients that take as long as their values say."""

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff


def computation():
  """Returns a computation in which client i multiplies `values[i]` times."""

  @tff.tensorflow.computation(np.int32)
  def multiply(number):
    def body(step, x):
      return step + 1, tf.math.l2_normalize(tf.linalg.matmul(x, x))

    return tf.while_loop(
        lambda step, x: step < number, body, [0, tf.ones([200, 200])]
    )[0]

  @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
  def compute(values):
    return tff.federated_map(multiply, values)

  return compute
