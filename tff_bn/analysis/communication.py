"""Counts what an algorithm sends.

As in the FedTAN paper (section 5.3): the server's message to its clients is one
multicast, which is counted once; every client's answer is counted.
"""

import dataclasses

from tff_bn.batch_norm_model import BatchNormModel
from tff_bn.partition import Partition

_MEGABYTE = 2**20


@dataclasses.dataclass(frozen=True)
class Traffic:
  """What one round of an algorithm sends.

  Attributes:
    exchanges: How often all clients and the server exchange messages: one
      exchange goes down and up.
    download_bytes: What the server sends to every client.
    upload_bytes: What one client sends.
  """

  exchanges: int
  download_bytes: int
  upload_bytes: int

  def megabytes(self, num_clients: int) -> float:
    """All that is sent in a round.

    Args:
      num_clients: The number of clients that take part.

    Returns:
      Megabytes of 2^20 bytes: one multicast down, and every client's upload.
    """
    num_bytes = self.download_bytes + num_clients * self.upload_bytes
    return num_bytes / _MEGABYTE


NO_TRAFFIC = Traffic(exchanges=0, download_bytes=0, upload_bytes=0)


def model_traffic(model: BatchNormModel, partition: Partition) -> Traffic:
  """Counts an algorithm that sends the shared variables down and up once.

  Args:
    model: The model.
    partition: Which variables are shared.

  Returns:
    One exchange of all shared variables; no exchange if none is shared.
  """
  shared = sum(
      variable.num_bytes
      for variable in model.variables
      if not partition.is_local(variable.role)
  )
  if not shared:
    return NO_TRAFFIC
  return Traffic(exchanges=1, download_bytes=shared, upload_bytes=shared)
