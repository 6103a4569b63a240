"""How TensorFlow uses the CPU's cores."""

import math
import os

import tensorflow as tf

# TensorFlow reads it when it starts.
ENVIRONMENT_VARIABLE = 'TF_NUM_INTRAOP_THREADS'
# TensorFlow reads it when it starts. Then each of its devices has own threads.
_OWN_THREADS = 'TF_OVERRIDE_GLOBAL_THREADPOOL'
# XLA may compile the work of that many clients of a round.
MIN_COMPILED_CLIENTS = 100

# Each client that is computed needs memory for its activations.
_MAX_CONCURRENT_CLIENTS = 16


def num_cores() -> int:
  """Returns the number of cores that this process may use."""
  return len(os.sched_getaffinity(0))


def per_operation() -> int:
  """Returns the number of cores, and threads, that one operation uses.

  The bits of results depend on this number.
  """
  configured = tf.config.threading.get_intra_op_parallelism_threads()
  from_environment = os.environ.get(ENVIRONMENT_VARIABLE, '')
  if not configured and from_environment.isdecimal():
    configured = int(from_environment)
  return configured or num_cores()


def num_concurrent() -> int:
  """Returns the number of clients or batches that keep all cores busy."""
  return math.ceil(num_cores() / per_operation())


def divide(num_clients: int, jit_compile: bool = False) -> int:
  """Divides the CPU's cores among the clients of a round.

  By default, each TensorFlow operation uses all cores. A small model's
  operations are too short for that: waking the threads takes longer than the
  work. With this function, an operation uses `cores // num_clients` cores, at
  least 1, and the in-process runtime computes as many clients concurrently as
  there are cores, up to 16. It has to be called before TensorFlow is first
  used.

  All functions that XLA compiles for a CPU share the threads of one operation.
  So for `jit_compile`, and for rounds of at least 100 clients, which XLA may
  compile, too, TensorFlow gets as many logical CPUs as clients are computed
  concurrently. Each has its own threads.

  Nothing changes if this process has a GPU, or if the number of threads has
  been chosen already, by the environment variable `TF_NUM_INTRAOP_THREADS` or
  by `tf.config.threading.set_intra_op_parallelism_threads`. Logical CPUs that
  have been chosen already stay, too.

  Args:
    num_clients: The number of clients that a round computes.
    jit_compile: The option of the algorithms with this name.

  Returns:
    The number of cores that an operation uses from now on.

  Raises:
    ValueError: If `num_clients` is less than 1.
    RuntimeError: If TensorFlow has been used already.
  """
  if num_clients < 1:
    raise ValueError(f'num_clients={num_clients} must be at least 1.')
  is_chosen = (
      ENVIRONMENT_VARIABLE in os.environ
      or tf.config.threading.get_intra_op_parallelism_threads()
  )
  if not is_chosen and not tf.config.get_visible_devices('GPU'):
    number = num_cores() // min(num_clients, _MAX_CONCURRENT_CLIENTS)
    tf.config.threading.set_intra_op_parallelism_threads(max(1, number))
    is_compiled = jit_compile or num_clients >= MIN_COMPILED_CLIENTS
    if is_compiled and num_concurrent() > 1:
      _divide_cpu(num_concurrent())
  return per_operation()


def _divide_cpu(number: int) -> None:
  """Starts TensorFlow with several logical CPUs, each with own threads."""
  (cpu,) = tf.config.get_visible_devices('CPU')
  if tf.config.get_logical_device_configuration(cpu):
    return
  tf.config.set_logical_device_configuration(
      cpu, [tf.config.LogicalDeviceConfiguration()] * number
  )
  # Other processes must not inherit the environment variable.
  environment = dict(os.environ)
  os.environ[_OWN_THREADS] = 'true'
  try:
    tf.config.list_logical_devices()
  finally:
    os.environ.pop(_OWN_THREADS)
    os.environ.update(environment)
