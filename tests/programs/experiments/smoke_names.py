"""Names of the experiments that the tests run at the smoke scale."""

from tff_bn.programs.experiments import files as experiment_files


def names(*papers):
  """Returns the names of the experiments of some papers."""
  return [
      name
      for name in experiment_files.names()
      if name.partition('/')[0] in papers
  ]
