"""Where TFF computations run."""

from tff_bn import dependencies

dependencies.require_tff()

from tff_bn.runtime.client_dataset import ClientDataset  # noqa: E402
from tff_bn.runtime.cluster import WorkerLostError  # noqa: E402
from tff_bn.runtime.in_process import AsyncInProcessContext  # noqa: E402
from tff_bn.runtime.in_process import InProcessContext  # noqa: E402
from tff_bn.runtime.in_process import in_process_runtime  # noqa: E402
from tff_bn.runtime.in_process import set_default_in_process_context  # noqa: E402
from tff_bn.runtime.native import end_worker_processes  # noqa: E402
from tff_bn.runtime.native import native_runtime  # noqa: E402
from tff_bn.runtime.remote_worker import HOST  # noqa: E402
from tff_bn.runtime.remote_worker import Worker  # noqa: E402
from tff_bn.runtime.server import Server  # noqa: E402
from tff_bn.runtime.server import WorkerFunction  # noqa: E402

__all__ = [
    'AsyncInProcessContext',
    'ClientDataset',
    'HOST',
    'InProcessContext',
    'Server',
    'Worker',
    'WorkerFunction',
    'WorkerLostError',
    'end_worker_processes',
    'in_process_runtime',
    'native_runtime',
    'set_default_in_process_context',
]
