"""Measurements on trained models and on what training sends."""

from tff_bn.analysis.communication import model_traffic
from tff_bn.analysis.communication import Traffic
