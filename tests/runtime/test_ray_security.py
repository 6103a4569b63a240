"""Tests of who can reach a Ray cluster."""

import psutil
import ray_contexts


def _listening(processes):
  return {
      connection.laddr.ip
      for process in processes
      for connection in process.net_connections('tcp')
      if connection.status == psutil.CONN_LISTEN
  }


def test_a_cluster_of_ours_listens_on_loopback_only():
  this = psutil.Process()
  children_before = this.children(recursive=True)
  before = _listening([this])
  context = ray_contexts.make(num_workers=1)
  children = [
      child
      for child in this.children(recursive=True)
      if child not in children_before
  ]
  names = ' '.join(process.name() for process in children)
  found = _listening([this, *children]) - before
  context.close()
  assert 'raylet' in names and 'gcs_server' in names
  assert found <= {'127.0.0.1', '::ffff:127.0.0.1'}
  _, alive = psutil.wait_procs(children, timeout=30)
  assert not alive
