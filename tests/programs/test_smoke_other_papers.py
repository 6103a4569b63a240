"""Runs the experiments of all papers but FedPAN at the smoke scale."""

import pytest
import smoke_runs

from tff_bn.programs import run_folder


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  return smoke_runs.SmokeRuns(tmp_path_factory.mktemp('smoke'))


@pytest.mark.slow
@pytest.mark.parametrize(
    'name', smoke_runs.names('fedtan', 'fedbn', 'fbn', 'fedbs')
)
def test_experiment_finishes(runs, name):
  folder = runs.run(name)

  assert (folder / run_folder.EXPERIMENT_MARKDOWN).exists()
