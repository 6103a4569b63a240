"""Tests on a Ray cluster whose nodes end, hang and join."""

import signal
import time

import contexts
import psutil
import pytest
import ray_contexts
import ray_example
import ray_nodes

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def nodes():
  """Two nodes with room for one worker each."""
  with ray_nodes.started(1, 1) as nodes:
    yield nodes


@pytest.fixture(scope='module')
def context(nodes):
  """A worker on each node."""
  context = ray_contexts.make(address=nodes.address, num_workers=None)
  with contexts.default(context):
    yield context
  context.close()


def _tree(pid):
  root = psutil.Process(pid)
  return [root, *root.children(recursive=True)]


def _has_ended(process):
  try:
    return process.status() == psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return True


def _wait_for_nodes(number):
  import ray

  while sum(node['Alive'] for node in ray.nodes()) > number:
    time.sleep(0.1)


def _rounds(fed_bn, event):
  """Runs three rounds and calls `event` before the second one."""

  def datasets_of_round(number):
    if number == 1:
      event()
    return ray_example.traps()(number)

  return ray_example.rounds(fed_bn, datasets_of_round, num_rounds=3)


@pytest.mark.usefixtures('quick_to_notice')
def test_nodes_hang_end_and_join(context, nodes, fed_bn, expected):
  assert len(ray_contexts.pids(context)) == 2
  second = _tree(nodes.raylets[1])

  def stop():
    for process in second:
      process.send_signal(signal.SIGSTOP)

  assert _rounds(fed_bn, stop) == expected
  _wait_for_nodes(1)
  assert len(ray_contexts.pids(context)) == 1
  # Ray has given up the node, which ends as soon as it continues.
  for process in second:
    process.send_signal(signal.SIGCONT)
  while not all(map(_has_ended, second)):
    time.sleep(0.1)

  nodes.add(1)
  ray_contexts.wait_for(context, 2)
  assert ray_example.rounds(fed_bn, ray_example.traps()) == expected
  assert len(ray_contexts.pids(context)) == 2

  assert _rounds(fed_bn, lambda: nodes.remove(2)) == expected
  _wait_for_nodes(1)
  assert len(ray_contexts.pids(context)) == 1


def test_node_joins_in_the_middle(context, nodes, fed_bn, expected):
  def add():
    nodes.add(1)
    ray_contexts.wait_for(context, 2)

  assert len(ray_contexts.pids(context)) == 1
  assert _rounds(fed_bn, add) == expected
  assert len(ray_contexts.pids(context)) == 2
