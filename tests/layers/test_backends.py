"""The layers on several backends of Keras."""

import json
import os
import subprocess
import sys

import backends_example
import numpy as np
import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    'models',
    [
        ['functional'],
        pytest.param(['alternatives'], marks=pytest.mark.slow),
    ],
)
def test_backends_agree(models):
  """Keras on JAX, in a child process, gives the results of TensorFlow."""
  process = subprocess.Popen(
      [sys.executable, backends_example.__file__, *models],
      env={
          **os.environ,
          'KERAS_BACKEND': 'jax',
          'TF_CPP_MIN_LOG_LEVEL': '3',
          'JAX_PLATFORMS': 'cpu',
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
  )
  expected = backends_example.check(models)
  stdout, stderr = process.communicate()
  assert process.returncode == 0, stderr
  found = json.loads(stdout.splitlines()[-1])
  assert len(expected) > 10
  assert list(found) == list(expected)
  for name, wanted in expected.items():
    for a, b in zip(found[name], wanted, strict=True):
      np.testing.assert_allclose(
          a, np.asarray(b), rtol=1e-5, atol=1e-5, err_msg=name
      )
