"""Tests for the time that clients take."""

import csv
import dataclasses

import multiplications
import numpy as np
import tensorflow_federated as tff
import training_fakes

from tff_bn import runtime
from tff_bn.training import client_seconds

_CONFIG = dataclasses.replace(training_fakes.CONFIG, rounds=2)


def test_context_measures_each_client():
  compute = multiplications.computation()
  with runtime.in_process_runtime(max_concurrent_clients=1) as context:
    assert context.client_seconds is None
    compute([np.int32(0), np.int32(1)])
    compute([np.int32(1), np.int32(2000)])
    first, second = context.client_seconds
  assert second > 10 * first > 0


def test_means_over_rounds(monkeypatch, tmp_path):
  measured = client_seconds.ClientSeconds()
  measured.write(tmp_path)
  assert not list(tmp_path.iterdir())

  class Context:
    client_seconds = None

  class Stack:
    current = Context

  monkeypatch.setattr(tff.framework, 'get_context_stack', lambda: Stack)
  for ids, seconds in (
      (['a', 'b'], [1.0, 2.0]),
      (['b'], [4.0]),
      (['a', 'b'], [9.0]),  # All clients as one.
      (['a'], None),
  ):
    Context.client_seconds = seconds
    measured.add_round(ids)
  measured.write(tmp_path)
  with open(tmp_path / 'client_seconds.csv', encoding='utf-8') as file:
    assert list(csv.reader(file)) == [
        ['client', 'rounds', 'seconds_per_round'],
        ['b', '2', '3'],
        ['a', '1', '1'],
    ]


def test_unmeasured_clients_have_no_file(model, tmp_path):
  training_fakes.train(model, tmp_path, _CONFIG)
  assert not (tmp_path / 'client_seconds.csv').exists()
