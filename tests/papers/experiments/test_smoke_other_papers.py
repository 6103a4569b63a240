"""Runs the experiments of all papers but FedPAN, at the smoke scale."""

import pytest
import smoke_runs

from tff_bn.programs.runs import run_folder


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  with smoke_runs.in_other_processes(tmp_path_factory) as runs:
    yield runs


@pytest.mark.slow
@pytest.mark.parametrize(
    'name', smoke_runs.names('fedtan', 'fedbn', 'fbn', 'fedbs', 'tff_bn')
)
def test_experiment_finishes(runs, name):
  folder = runs.run(name)

  assert (folder / run_folder.EXPERIMENT_MARKDOWN).exists()
