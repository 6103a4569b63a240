"""Measurements on trained models and on what training sends."""

from tff_bn.analysis.communication import NO_TRAFFIC
from tff_bn.analysis.communication import Traffic
from tff_bn.analysis.communication import model_traffic

__all__ = ['NO_TRAFFIC', 'Traffic', 'model_traffic']
