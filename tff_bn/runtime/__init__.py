"""Runtimes that execute TFF computations."""

from tff_bn.imports import dependencies

dependencies.require_tff()

from tff_bn.common.batch_arrays import BatchArrays  # noqa: E402
from tff_bn.common.cores import divide as divide_cores  # noqa: E402
from tff_bn.runtime.client_dataset import ClientDataset  # noqa: E402
from tff_bn.runtime.devices import HOST  # noqa: E402
from tff_bn.runtime.in_process import AsyncInProcessContext  # noqa: E402
from tff_bn.runtime.in_process import InProcessContext  # noqa: E402
from tff_bn.runtime.in_process import in_process_runtime  # noqa: E402
from tff_bn.runtime.in_process import set_default_in_process_context  # noqa: E402
from tff_bn.runtime.native import end_worker_processes  # noqa: E402
from tff_bn.runtime.native import native_runtime  # noqa: E402
from tff_bn.runtime.on_ray.ray_context import RayContext  # noqa: E402
from tff_bn.runtime.on_ray.ray_context import ray_runtime  # noqa: E402
from tff_bn.runtime.on_ray.ray_options import WorkersLostError  # noqa: E402
from tff_bn.runtime.plan_context import PlanContext  # noqa: E402

__all__ = [
    'AsyncInProcessContext',
    'BatchArrays',
    'ClientDataset',
    'HOST',
    'InProcessContext',
    'PlanContext',
    'RayContext',
    'WorkersLostError',
    'divide_cores',
    'end_worker_processes',
    'in_process_runtime',
    'native_runtime',
    'ray_runtime',
    'set_default_in_process_context',
]
