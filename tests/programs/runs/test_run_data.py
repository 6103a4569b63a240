"""The data of a run."""

import pytest
import tiny_runs

from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.flags import data_flags
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import run_data


@pytest.mark.parametrize(
    ('split', 'message'),
    [
        (tiny_runs.split, '--validation_share=0.0001 leaves no validation'),
        (
            lambda: tiny_runs.split().with_validation(0.5, seed=0),
            'The data has validation_indices already',
        ),
    ],
)
def test_errors_about_validation_data(split, message, monkeypatch):
  arguments = ['--validation_share=0.0001']
  flags = command_line.parse(train.define_flags, arguments)
  settings = settings_lib.resolve(flags, flags.algorithm, flags.seed)
  monkeypatch.setattr(
      data_flags.DataFlags, 'split_over_clients', lambda *_: split()
  )
  with pytest.raises(ValueError, match=f'^{message}'):
    run_data.DataRecipe.of(settings).split(tiny_runs.split().dataset)
