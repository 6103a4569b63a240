"""Measurements on trained models and on what training sends."""

from tff_bn import dependencies

dependencies.require_tff()

from tff_bn.analysis.communication import Direction  # noqa: E402
from tff_bn.analysis.communication import Message  # noqa: E402
from tff_bn.analysis.communication import ProcessTraffic  # noqa: E402
from tff_bn.analysis.communication import Traffic  # noqa: E402
from tff_bn.analysis.communication import computation_traffic  # noqa: E402
from tff_bn.analysis.communication import messages  # noqa: E402

__all__ = [
    'Direction',
    'Message',
    'ProcessTraffic',
    'Traffic',
    'computation_traffic',
    'messages',
]
