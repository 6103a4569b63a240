"""`tff-bn-analyze pixel_values`: FedBN's figure 6."""

import contextlib

from absl import flags as absl_flags

from tff_bn.catalog import datasets
from tff_bn.catalog import value_types
from tff_bn.common import progress
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import parsers
from tff_bn.programs.flags import run_flags
from tff_bn.programs.runs import output_folder
from tff_bn.programs.runs import run_folder

NAME = 'pixel_values'
OUTPUT_DIR = f'runs/{NAME}'


def define_flags(
    values: absl_flags.FlagValues,
) -> tuple[flag_groups.FlagGroup, ...]:
  """Defines the program's flags."""
  return (
      _define_data_flags(values),
      run_flags.OutputFlags.define(values, output_dir=OUTPUT_DIR),
  )


def _define_data_flags(
    values: absl_flags.FlagValues,
) -> flag_groups.FlagGroup:
  define = flag_groups.Definer(values)
  define(
      datasets.DATASET.name,
      datasets.DATASET.values,
      'Images of several domains: a dataset of tff-bn-train that has domains',
      'digits_domains',
  )
  for option in (datasets.DATA_DIR, datasets.IMAGE_SIZE):
    define(
        option.name,
        option.values,
        option.explain(),
        option.default,
        option.default_text,
    )
  define(
      'num_pictures',
      value_types.Number(int, minimum=1, maximum=20),
      'Number of pictures of a domain that are shown, each of another class as'
      ' long as there are classes',
      10,
  )
  define(
      'num_bins',
      value_types.Number(int, minimum=2, maximum=256),
      'Number of intervals of the histograms',
      16,
  )
  return define.group('Data')


def main(flags: command_line.ParsedFlags) -> None:
  """Measures the pixel values and writes the table and plots."""
  group = _define_data_flags(absl_flags.FlagValues())
  texts = {
      name: parsers.to_text(getattr(flags, name))
      for name in group.names
      if getattr(flags, name) is not None
  }
  with contextlib.ExitStack() as stack:
    with command_line.checking_input():
      if not datasets.has_domains(flags.dataset):
        raise ValueError(
            f'--dataset={flags.dataset} has no domains; use one that has, such'
            ' as digits_domains or domains:A=…,B=….'
        )
      folder = output_folder.choose(flags, texts)
      stack.enter_context(run_folder.claim(folder))
      run_folder.check(folder, texts, overwrite=flags.overwrite)
      # Imported late because it takes long.
      from tff_bn import data
      from tff_bn.papers import analysis_report
      from tff_bn.papers.simulations import pixel_values

      size = flags.image_size
      with progress.saying(f'Loading {flags.dataset}'):
        dataset = data.load_dataset(
            flags.dataset,
            data_dir=flags.data_dir,
            image_size=size and datasets.parse_image_size(size),
        )
      report = pixel_values.report(
          dataset, num_pictures=flags.num_pictures, num_bins=flags.num_bins
      )
    run_folder.begin(folder, PROGRAM.name, texts, overwrite=flags.overwrite)
    analysis_report.write(folder, NAME, report)


PROGRAM = command_line.Program(
    name=f'tff-bn-analyze {NAME}',
    description=(
        'Shows how the images of domains differ: pictures of each domain, and'
        ' the distribution of its pixel values (figure 6 of the FedBN paper).'
    ),
    examples=(
        f'tff-bn-analyze {NAME}',
        f'tff-bn-analyze {NAME} --num_bins=8 --output_dir=runs/few_bins',
    ),
    define_flags=define_flags,
    main=main,
)
