"""Tests of the check of sizes against the machine's memory."""

import psutil
import pytest

from tff_bn.common import memory


def test_total():
  assert memory.total_bytes() == psutil.virtual_memory().total


def test_check(monkeypatch):
  monkeypatch.setattr(memory, 'total_bytes', lambda: 5 * 10**9)
  memory.check_fits('10 images', 5 * 10**9)
  with pytest.raises(
      ValueError,
      match='^10 images take 1,000 GB of memory, but this machine has 5 GB.$',
  ):
    memory.check_fits('10 images', 10**12)
  with pytest.raises(ValueError, match='GB of memory'):
    memory.check_fits('10 images', 10**400)
