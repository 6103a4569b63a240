"""Tests of the papers' experiments: every file, at every scale."""

import experiments_page
import pytest

from tff_bn.catalog import datasets
from tff_bn.papers import compare_with_experiments
from tff_bn.papers.experiments import experiment_files
from tff_bn.papers.experiments import experiment_plan
from tff_bn.programs.cli import command_line


@pytest.mark.parametrize('name', experiment_files.names())
def test_all_runs_of_all_scales_pass_the_checks(name):
  plans = experiment_plan.check_all(name)

  assert {'paper', 'smoke'} <= set(plans)
  # The labels of a built-in dataset fit the task.
  for plan in plans.values():
    for run in plan.comparison.runs if plan.comparison else ():
      task = datasets.find(run.settings.dataset).task
      assert run.settings.task == task or task is None


@pytest.mark.slow
def test_models_fit_the_data_and_have_the_layers_of_analyses():
  """What the smoke scale leaves out: its models are small."""
  cases = {}
  flags = command_line.parse(compare_with_experiments.define_flags, [])
  for name in experiment_files.names():
    plan = experiment_plan.plan(flags, name, experiment_files.PAPER)
    for run in plan.comparison.trained() if plan.comparison else ():
      settings = run.settings
      try:
        model, *data = experiments_page.model_and_shape(name, settings)
      except ValueError:  # Nobody knows the shape of the user's data.
        continue
      # The number of classes only changes the last layer's size.
      shape, num_classes = data
      key = model, settings.normalization, settings.pan == 'off', shape
      *_, layers = cases.setdefault(key, (settings, num_classes, set()))
      for analysis in plan.experiment.analyses:
        layers.update(analysis.flags.get('layers', '').split(','))
  assert {key[0] for key in cases} > {'alexnet_bn', 'resnet20', 'vgg9'}

  for (*_, shape), (settings, num_classes, layers) in cases.items():
    input_shape = tuple(map(int, shape.split('x')))
    model = settings.build_model_fn(input_shape, num_classes)()

    assert model.output_shape == (None, num_classes)
    assert layers - {''} <= {layer.name for layer in model.layers}
