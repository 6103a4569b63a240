"""A computation that TensorFlow does not run."""

import copy

import numpy as np
import tensorflow_federated as tff


def build_xla_computation():
  """Builds a computation like `tff.jax.computation`, which needs old JAX."""

  @tff.tensorflow.computation(np.float32)
  def comp(x):
    return x + 1

  proto = copy.deepcopy(tff.framework.ConcreteComputation.get_proto(comp))
  proto.xla.SetInParent()  # Instead of `tensorflow`.
  return tff.framework.ConcreteComputation.from_building_block(
      tff.framework.CompiledComputation(proto)
  )
