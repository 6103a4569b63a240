"""Lets TensorFlow use oneDNN, whose convolutions are the fastest on CPUs.

By itself, TensorFlow uses it only on processors with AVX512_VNNI and newer
ones. The last digits of results depend on it.
"""

import os
import sys

VARIABLE = 'TF_ENABLE_ONEDNN_OPTS'


def switch_on() -> None:
  """Sets TensorFlow's variable, unless it is set or has been read already."""
  if 'tensorflow' not in sys.modules:
    os.environ.setdefault(VARIABLE, '1')


def setting() -> str:
  """Returns the value of TensorFlow's variable, for records of runs."""
  return os.environ.get(VARIABLE, 'not set')
