"""Tests of the builders' options."""

import dataclasses
import inspect

from tff_bn.catalog import local_training
from tff_bn.catalog import server
from tff_bn.processes.options import Options
from tff_bn.processes.options import ProcessConfig


def test_options_are_the_fields_of_the_config_and_documented():
  fields = {field.name for field in dataclasses.fields(ProcessConfig)}
  assert set(Options.__annotations__) == fields - {'client_optimizer'}
  explained = local_training.explain()
  for name in Options.__annotations__:
    in_docstring = f'\n  {name}: ' in inspect.getdoc(Options)
    # Each is explained once.
    assert in_docstring != (f'\n{name} (default: ' in f'\n{explained}'), name


def test_options_have_the_defaults_of_the_flags():
  fields = {field.name: field for field in dataclasses.fields(ProcessConfig)}
  shared = [
      option
      for option in (*local_training.OPTIONS, *server.OPTIONS)
      if option.argument and option.compute is None
  ]
  assert {option.argument for option in shared} <= set(fields)
  for option in shared:
    assert fields[option.argument].default == option.default, option.name
