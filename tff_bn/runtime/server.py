"""The worker's side: serves this machine's devices to another's program.

TensorFlow's server runs the operations that the program sends. Besides, the
program can call Python functions of this process, which `Server` is given. They
build the clients' data where it is used.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import platform
import socket
from typing import Any, Optional

import tensorflow as tf

import tff_bn
from tff_bn.runtime import loopback

# Under this name TensorFlow finds the first Python function of a process that
# it is to call as an operation. The caller, in another process, has to know it.
_TOKEN = 'pyfunc_0'
# Asks a worker for its `versions`, as JSON.
HELLO = 'hello'

# Makes arrays, or strings, of a request that was JSON.
WorkerFunction = Callable[[Any], Sequence[Any]]


def versions() -> dict[str, str]:
  """What has to be the same in the program and in its workers."""
  return {
      'tff_bn': tff_bn.__version__,
      'TensorFlow': tf.__version__,
      'Python': '.'.join(platform.python_version_tuple()[:2]),
  }


def encode_call(name: str, request: Any) -> tf.Tensor:
  """The string that asks a worker's function for something.

  Args:
    name: The function's name.
    request: Its argument, anything that JSON knows.

  Returns:
    A string scalar, for `call`.
  """
  return tf.constant(json.dumps([name, request]))


def call(text: tf.Tensor, dtypes: Sequence[tf.DType]) -> list[tf.Tensor]:
  """Calls a Python function of the worker on whose device this is.

  Args:
    text: What `encode_call` returned, on the worker's device.
    dtypes: The dtypes of the results.

  Returns:
    The results.
  """
  return tf.raw_ops.PyFunc(input=[text], token=_TOKEN, Tout=list(dtypes))


def _answer_hello(request: Any) -> Sequence[Any]:
  del request  # There is only one thing to say.
  return [json.dumps(versions()).encode()]


class _Functions:
  """Calls the worker's functions by name."""

  def __init__(self, functions: Mapping[str, WorkerFunction]):
    self._functions = {HELLO: _answer_hello, **functions}
    # Keeps the function registered.
    self._registered = tf.function(
        lambda text: tf.numpy_function(self._call, [text], tf.string)
    ).get_concrete_function(tf.TensorSpec([], tf.string))
    tokens = [
        node.attr['token'].s.decode()
        for node in self._registered.graph.as_graph_def().node
        if 'token' in node.attr
    ]
    if tokens != [_TOKEN]:
      raise RuntimeError(
          'A process that has used tf.numpy_function or tf.py_function can not'
          ' become a worker; make the Server first.'
      )

  def _call(self, text: bytes) -> list[Any]:
    name, request = json.loads(text)
    return list(self._functions[name](request))


class Server:
  """A worker's server.

  Attributes:
    port: Its port.
    devices: The names of the devices that it serves.
  """

  def __init__(
      self,
      port: int,
      functions: Optional[Mapping[str, WorkerFunction]] = None,
      *,
      allow_remote: bool = False,
  ):
    """Starts to serve; the server ends with the process.

    Args:
      port: The port.
      functions: What the program may call by name.
      allow_remote: Whether other machines may connect, through any network
        interface. Default: only this machine. There is no encryption and no
        authentication: whoever can connect can run anything in this process.

    Raises:
      ValueError: If the port is in use.
      RuntimeError: If the server can't be restricted to this machine.
    """
    self._functions = _Functions(functions or {})
    self.port = port
    self.devices = [
        device.name.rpartition('device:')[2]
        for kind in ('CPU', 'GPU')
        for device in tf.config.list_logical_devices(kind)
    ]
    _check_free(port)
    if allow_remote:
      self._server = _start(port)
      return
    try:
      with loopback.restrict_new_servers():
        self._server = _start(port)
    except OSError as error:
      raise RuntimeError(
          f'The server at port {port} could not be restricted to this machine:'
          f' {error}. If the network is trusted, allow connections from other'
          ' machines.'
      ) from error


def _start(port: int) -> tf.distribute.Server:
  return tf.distribute.Server(
      tf.train.ClusterSpec({'worker': [f'127.0.0.1:{port}']}),
      job_name='worker',
      task_index=0,
      protocol='grpc',
  )


def _check_free(port: int) -> None:
  # gRPC would share the port with another worker.
  with socket.socket(socket.AF_INET6) as probe:
    try:
      probe.bind(('::', port))
    except OSError as error:
      raise ValueError(f'--port={port} can not be used: {error}.') from error
