"""Tests of the papers' experiments: every file, at every scale."""

import pytest

from tff_bn.programs.experiments import files as experiment_files
from tff_bn.programs.experiments import plan as experiment_plan


@pytest.mark.parametrize('name', experiment_files.names())
def test_all_runs_of_all_scales_pass_the_checks(name):
  plans = experiment_plan.check_all(name)

  assert {'paper', 'smoke'} <= set(plans)


def test_every_paper_is_run_at_the_smoke_scale():
  papers = {name.partition('/')[0] for name in experiment_files.names()}

  assert papers <= {'fedpan', 'fedtan', 'fedbn', 'fbn', 'fedbs', 'tff_bn'}
