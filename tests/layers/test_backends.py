"""The layers on several backends of Keras."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

_EXAMPLE = pathlib.Path(__file__).with_name('backends_example.py')
_BACKENDS = ('tensorflow', 'jax')


@pytest.mark.parametrize(
    'models',
    [['functional', 'alternatives'], pytest.param([], marks=pytest.mark.slow)],
)
def test_backends_agree(models):
  # The processes run in parallel, because the imports take seconds.
  processes = [
      subprocess.Popen(
          [sys.executable, _EXAMPLE, *models],
          env={
              **os.environ,
              'KERAS_BACKEND': backend,
              'TF_CPP_MIN_LOG_LEVEL': '3',
              'JAX_PLATFORMS': 'cpu',
          },
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          text=True,
      )
      for backend in _BACKENDS
  ]
  results = []
  for process, backend in zip(processes, _BACKENDS, strict=True):
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    result = json.loads(stdout.splitlines()[-1])
    assert result['backend'] == backend
    results.append(result['found'])
  expected, found = results
  assert len(expected) > (15 if models else 25)
  assert list(found) == list(expected)
  for name, wanted in expected.items():
    for a, b in zip(found[name], wanted, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)
