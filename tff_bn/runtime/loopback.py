"""Restricts TensorFlow's servers, which listen on all network interfaces."""

from collections.abc import Iterator
import contextlib
import os
import socket

import psutil


def _listening() -> set[tuple[int, int]]:
  """The file descriptors and ports at which this process listens."""
  return {
      (connection.fd, connection.laddr.port)
      for connection in psutil.Process().net_connections('tcp')
      if connection.status == psutil.CONN_LISTEN
  }


@contextlib.contextmanager
def restrict_new_servers() -> Iterator[None]:
  """Binds the servers that start in a `with` block to the loopback interface.

  Other machines can't connect to them. TensorFlow has no setting for it.

  Raises:
    OSError: If the system does not allow it.
  """
  before = _listening()
  yield
  for descriptor, _ in _listening() - before:
    with socket.socket(fileno=os.dup(descriptor)) as listening:
      listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b'lo\0')
