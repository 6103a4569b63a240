"""What tests that run programs need."""

from absl import logging
import pytest


@pytest.fixture(autouse=True)
def keep_log_settings(monkeypatch):
  """Programs change them for their process."""
  monkeypatch.setenv('TF_CPP_MIN_LOG_LEVEL', '3')
  verbosity = logging.get_verbosity()
  yield
  logging.set_verbosity(verbosity)
