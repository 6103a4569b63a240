"""Tests for the computation of portions of clients."""

import cases
import numpy as np
import pytest
import tensorflow_federated as tff

from tff_bn.runtime import client_portions


@pytest.mark.usefixtures('in_process_runtime')
def test_clients_keep_only_what_later_passes_need(monkeypatch):
  @tff.federated_computation(cases.clients(cases.FLOAT))
  def comp(x):
    doubled = tff.federated_map(cases.double, x)
    total = tff.federated_sum(doubled)
    shifted = tff.federated_map(cases.add, (x, tff.federated_broadcast(total)))
    return tff.federated_sum(shifted)

  kept = []
  compute = client_portions.OneClient.compute

  def noting_compute(self, number):
    output = compute(self, number)
    kept.append((number, len(self._tensors)))
    return output

  monkeypatch.setattr(client_portions.OneClient, 'compute', noting_compute)
  assert comp([np.float32(1), np.float32(2)]) == 15
  # Of x, the doubled and the shifted value, x is needed in the second pass.
  assert sorted(kept) == [(0, 1), (0, 1), (1, 0), (1, 0)]
