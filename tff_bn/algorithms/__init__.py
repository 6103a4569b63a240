"""Federated algorithms, one module each: functions that build a process."""

from tff_bn.imports import dependencies

dependencies.require_tff()

from tff_bn.algorithms.centralized import build_centralized  # noqa: E402
from tff_bn.algorithms.dsgd import build_dsgd  # noqa: E402
from tff_bn.algorithms.fbn import build_fbn  # noqa: E402
from tff_bn.algorithms.fed_avg import build_fed_avg  # noqa: E402
from tff_bn.algorithms.fed_bn import build_fed_bn  # noqa: E402
from tff_bn.algorithms.fed_bs import FedBs  # noqa: E402
from tff_bn.algorithms.fed_bs import build_fed_bs  # noqa: E402
from tff_bn.algorithms.fed_prox import FedProx  # noqa: E402
from tff_bn.algorithms.fed_prox import build_fed_prox  # noqa: E402
from tff_bn.algorithms.fedtan import build_fedtan  # noqa: E402
from tff_bn.algorithms.fedtan import build_fedtan_ii  # noqa: E402
from tff_bn.algorithms.fixbn import build_fixbn  # noqa: E402
from tff_bn.algorithms.local_affine import build_local_affine  # noqa: E402
from tff_bn.algorithms.moon import Moon  # noqa: E402
from tff_bn.algorithms.moon import build_moon  # noqa: E402
from tff_bn.algorithms.scaffold import Scaffold  # noqa: E402
from tff_bn.algorithms.scaffold import build_scaffold  # noqa: E402
from tff_bn.algorithms.silo_bn import build_silo_bn  # noqa: E402
from tff_bn.algorithms.single import build_single  # noqa: E402
from tff_bn.processes.options import Options  # noqa: E402

__all__ = [
    'FedBs',
    'FedProx',
    'Moon',
    'Options',
    'Scaffold',
    'build_centralized',
    'build_dsgd',
    'build_fbn',
    'build_fed_avg',
    'build_fed_bn',
    'build_fed_bs',
    'build_fed_prox',
    'build_fedtan',
    'build_fedtan_ii',
    'build_fixbn',
    'build_local_affine',
    'build_moon',
    'build_scaffold',
    'build_silo_bn',
    'build_single',
]
