"""Runs the experiments of FedPAN at the smoke scale."""

import shutil

import pytest
import smoke_runs

from tff_bn.programs import run_folder


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  folder = tmp_path_factory.mktemp('smoke')
  yield smoke_runs.SmokeRuns(folder)
  # The models of all runs take gigabytes.
  shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize('name', smoke_runs.names('fedpan'))
def test_experiment_finishes(runs, name):
  folder = runs.run(name)

  assert (folder / run_folder.EXPERIMENT_MARKDOWN).exists()
