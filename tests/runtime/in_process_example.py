"""Measurements of memory and on two logical devices in a separate process.

Run as a program, this prints the measurements as one line of JSON.
"""

import gc
import hashlib
import json
import resource

import numpy as np
import psutil
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import runtime
from tff_bn.runtime import plan_stage

_MEGABYTE = 2**20
_VECTOR_SIZE = 2 * _MEGABYTE  # Of float32: 8 MB.


def _clients(type_spec):
  return tff.FederatedType(type_spec, tff.CLIENTS)


def build_round():
  """Builds three exchanges with sums whose last bits depend on the order."""

  @tff.tensorflow.computation(
      tff.SequenceType(tff.TensorType(np.float32, [None, 3]))
  )
  def work(batches):
    return batches.reduce(
        tf.zeros([3]),
        lambda total, batch: tf.sin(3 * total + tf.reduce_mean(batch, 0)),
    )

  @tff.tensorflow.computation(
      tff.TensorType(np.float32, [3]), tff.TensorType(np.float32, [3])
  )
  def mix(x, y):
    return tf.tanh(x * y + 0.1)

  @tff.federated_computation(_clients(work.type_signature.parameter))
  def comp(data):
    local = tff.federated_map(work, data)
    mean = tff.federated_mean(local)
    mixed = tff.federated_map(mix, (local, tff.federated_broadcast(mean)))
    total = tff.federated_sum(mixed)
    last = tff.federated_map(mix, (mixed, tff.federated_broadcast(total)))
    return mean, total, last

  return comp


def round_data(num_clients=11):
  rng = np.random.default_rng(0)
  return [
      tf.data.Dataset.from_tensor_slices(
          rng.normal(size=[4 + i, 3]).astype(np.float32)
      ).batch(2)
      for i in range(num_clients)
  ]


def digest(context, comp):
  """Returns a hash of all bits of the result."""
  mean, total, last = context.invoke(comp, round_data())
  return hashlib.sha256(
      b''.join(a.tobytes() for a in (mean, total, *last))
  ).hexdigest()


def _digests():
  """Returns digests of the same round, and the devices of its clients."""
  comp = build_round()
  digests, devices = [], []
  for kwargs in [
      dict(client_devices=['CPU:1']),
      dict(client_devices=['CPU:0', 'CPU:1']),
      dict(client_devices=['CPU:1', 'CPU:0'], max_concurrent_clients=1),
      dict(client_devices=['cpu:0', '/device:CPU:1'], max_concurrent_clients=4),
      dict(client_devices=['CPU:0', 'CPU:1'], server_device='CPU:1'),
  ]:
    context = runtime.InProcessContext(**kwargs)
    digests.append(digest(context, comp))
    devices.append(_devices_of_clients(context))
    context.close()
  return dict(digests=digests, devices=devices)


def _devices_of_clients(context):
  """Returns for each of four clients the number of its device."""
  add = tff.tensorflow.computation(lambda x, y: x + y, np.float32, np.float32)
  comp = tff.federated_computation(
      lambda x: tff.federated_map(add, (x, x)), _clients(np.float32)
  )
  found = {}
  call = plan_stage.Stage.__call__

  def noting_call(stage, *args, **kwargs):
    outputs = call(stage, *args, **kwargs)
    for output in outputs:
      found[float(output)] = int(output.device[-1])
    return outputs

  plan_stage.Stage.__call__ = noting_call
  try:
    context.invoke(comp, [1.0, 2.0, 3.0, 4.0])
  finally:
    plan_stage.Stage.__call__ = call
  return [found[x] for x in (2, 4, 6, 8)]


def _peak():
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _peaks():
  """Returns the peak memory in MB after 8 and 80 clients with 8 MB each."""
  vector = tff.TensorType(np.float32, [_VECTOR_SIZE])

  @tff.tensorflow.computation(np.float32)
  def grow(x):
    return tf.fill([_VECTOR_SIZE], x)

  @tff.tensorflow.computation(np.float32, vector)
  def first(x, y):
    return x + y[0]

  @tff.federated_computation(_clients(np.float32))
  def comp(x):
    mean = tff.federated_mean(tff.federated_map(grow, x))
    one = tff.federated_map(first, (x, tff.federated_broadcast(mean)))
    return tff.federated_sum(one)

  context = runtime.InProcessContext(max_concurrent_clients=2)
  peaks = {}
  for num_clients in (8, 8, 80):
    assert context.invoke(comp, [1.0] * num_clients) == 2 * num_clients
    peaks[num_clients] = _peak()
  return peaks


def _variables():
  """Returns the memory in MB before and after 300 calls with 4 MB each."""

  @tff.tensorflow.computation(np.float32)
  def assign(x):
    variable = tf.Variable(tf.zeros([_MEGABYTE]))
    table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 0.0)
    with tf.control_dependencies(
        [variable.assign_add(tf.fill([_MEGABYTE], x)), table.insert(1, x)]
    ):
      return variable.read_value()[0] + table.lookup(1)

  comp = tff.federated_computation(
      lambda x: tff.federated_sum(tff.federated_map(assign, x)),
      _clients(np.float32),
  )
  context = runtime.InProcessContext(max_concurrent_clients=2)
  sizes = []
  for _ in range(2):
    for _ in range(15):
      assert context.invoke(comp, [1.0] * 20) == 40.0
    gc.collect()
    sizes.append(psutil.Process().memory_info().rss / _MEGABYTE)
  return sizes


def _long_computation(number):
  @tff.tensorflow.computation(np.float32)
  def compute(x):
    for _ in range(1000):
      x = tf.sin(x + number)
    return x

  return tff.federated_computation(
      lambda x: tff.federated_sum(tff.federated_map(compute, x)),
      _clients(np.float32),
  )


def _runtimes():
  """Returns the memory in MB after two and after five consecutive runtimes."""
  sizes = []
  for number in range(5):
    with runtime.in_process_runtime():
      _long_computation(number)([1.0, 2.0])
    gc.collect()
    if number in (1, 4):
      sizes.append(psutil.Process().memory_info().rss / _MEGABYTE)
  return sizes


def main():
  (cpu,) = tf.config.list_physical_devices('CPU')
  tf.config.set_logical_device_configuration(
      cpu, [tf.config.LogicalDeviceConfiguration()] * 2
  )
  # The peak never falls, so the measurements with the least memory come first.
  results = dict(
      **_digests(),
      runtimes=_runtimes(),
      variables=_variables(),
      peaks=_peaks(),
  )
  print(json.dumps(results))


if __name__ == '__main__':
  main()
