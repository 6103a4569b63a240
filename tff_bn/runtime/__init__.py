"""Where TFF computations run."""

from tff_bn.runtime.native import end_worker_processes
from tff_bn.runtime.native import native_runtime

__all__ = ['end_worker_processes', 'native_runtime']
