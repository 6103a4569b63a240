"""Where TFF computations run."""

from tff_bn import dependencies

dependencies.require_tff()

from tff_bn.runtime.native import end_worker_processes  # noqa: E402
from tff_bn.runtime.native import native_runtime  # noqa: E402

__all__ = ['end_worker_processes', 'native_runtime']
