"""Tests of the builders' options."""

import dataclasses
import inspect

from tff_bn.processes.options import Options
from tff_bn.processes.options import ProcessConfig


def test_options_are_the_fields_of_the_config_and_documented():
  fields = {field.name for field in dataclasses.fields(ProcessConfig)}
  assert set(Options.__annotations__) == fields - {'client_optimizer'}
  for name in Options.__annotations__:
    assert f'\n  {name}: ' in inspect.getdoc(Options)
