"""Runs the experiments of FedPAN at the smoke scale."""

import shutil

import experiment_runs
import pytest
import smoke_names

from tff_bn.programs import run_folder
from tff_bn.programs.experiments import files as experiment_files


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  folder = tmp_path_factory.mktemp('smoke')
  yield experiment_runs.ExperimentRuns(folder, experiment_files.SMOKE)
  # The models of all runs take gigabytes.
  shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize('name', smoke_names.names('fedpan'))
def test_experiment_finishes(runs, name):
  folder = runs.run(name)

  assert (folder / run_folder.EXPERIMENT_MARKDOWN).exists()
