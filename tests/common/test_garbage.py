"""Tests of the pace of Python's garbage collector."""

import gc
import threading

import pytest

from tff_bn.common import garbage


@pytest.fixture(autouse=True)
def usual():
  """Sets thresholds of a user's, and restores the old ones."""
  before = gc.get_threshold()
  gc.set_threshold(500, 5, 5)
  yield (500, 5, 5)
  gc.set_threshold(*before)


def test_collections_are_rare_in_the_block(usual):
  with garbage.collected_rarely():
    assert gc.get_threshold()[0] > 100 * usual[0]
    assert gc.isenabled()
  assert gc.get_threshold() == usual


def test_the_outermost_block_restores_the_pace(usual):
  with garbage.collected_rarely():
    rare = gc.get_threshold()
    with garbage.collected_rarely():
      pass
    assert gc.get_threshold() == rare
  assert gc.get_threshold() == usual


def test_an_error_restores_the_pace(usual):
  with pytest.raises(ZeroDivisionError), garbage.collected_rarely():
    _ = 1 / 0
  assert gc.get_threshold() == usual


def test_blocks_of_threads_can_overlap(usual):
  """The first thread leaves its block before the second one does."""
  entered, left = threading.Event(), threading.Event()
  found = []

  def second():
    with garbage.collected_rarely():
      entered.set()
      left.wait()
      found.append(gc.get_threshold())

  thread = threading.Thread(target=second)
  with garbage.collected_rarely():
    rare = gc.get_threshold()
    thread.start()
    entered.wait()
  left.set()
  thread.join()
  assert found == [rare]
  assert gc.get_threshold() == usual
