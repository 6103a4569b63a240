"""Runs code as somebody with Keras and JAX, but without TensorFlow."""

import os
import subprocess
import sys

_MISSING = ('tensorflow', 'tff_bn')
_START = f"""
import sys

class Missing:

  @staticmethod
  def find_spec(name, path=None, target=None):
    if name in {_MISSING}:
      raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing)
import keras
import numpy as np

assert keras.backend.backend() == 'jax'
"""


def run(code, folder, *arguments):
  """Runs code in a folder, without TensorFlow and this package.

  It may use `keras`, `np` and `sys.argv`.
  """
  subprocess.run(
      [sys.executable, '-c', _START + code, *map(str, arguments)],
      env={**os.environ, 'KERAS_BACKEND': 'jax'},
      cwd=folder,
      check=True,
  )
