"""The analyses of finished runs: their flags, and how one is run."""

from collections.abc import Callable, Mapping
import contextlib
import functools
import importlib
import pathlib

from absl import flags as absl_flags

from tff_bn.catalog import local_training
from tff_bn.catalog import models
from tff_bn.catalog import value_types
from tff_bn.imports import dependencies
from tff_bn.papers.run_analyses import comparison_runs
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import named_code
from tff_bn.programs.flags import run_flags
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import finished_run
from tff_bn.programs.runs import run_folder
from tff_bn.training import folder_lock

# Analyses that do not need a run.
WITHOUT_RUN = ('kept_share',)
# What these numbers count is in memory at once.
_EXAMPLES = value_types.Number(int, minimum=1, maximum=10**6)
_REPEATS = value_types.Number(int, minimum=1, maximum=10**5)
_UNITS = value_types.Number(int, minimum=1, maximum=10**6)


def _define_run(define: flag_groups.Definer, default_text: str) -> None:
  define(
      'run',
      value_types.List(value_types.TEXT),
      'Folders of finished runs, separated by commas: the --output_dir of'
      ' tff-bn-train or tff-bn-compare. The seeds of a comparison are averaged',
      default_text=default_text,
  )
  define.boolean(named_code.TRUST_RUN, named_code.EXPLANATION_OF_TRUST)


def _define_seed(define: flag_groups.Definer, purpose: str) -> None:
  define(
      'seed',
      value_types.SEED,
      f'Random seed of {purpose}',
      0,
  )


def _define_num_examples(define: flag_groups.Definer) -> None:
  define('num_examples', _EXAMPLES, 'Maximum number of test examples', 500)


def _define_shuffle_probability(define: flag_groups.Definer) -> None:
  define(
      'shuffle_probability',
      value_types.SHARE,
      'P_sf, the probability that a unit is swapped with a random one after it',
      0.1,
  )


def _define_repeats(define: flag_groups.Definer, default: int) -> None:
  define('repeats', _REPEATS, 'Number of random draws for the mean', default)


def _define_shuffle_test(define: flag_groups.Definer) -> None:
  _define_shuffle_probability(define)
  define(
      'amplitudes',
      value_types.List(value_types.Number(float, minimum=0, below=1)),
      'Amplitudes A of the position encodings, separated by commas',
      (0.0, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75),
  )
  define(
      'periods',
      value_types.List(models.PAN_PERIOD.values),
      'Periods T of the position encodings, separated by commas',
      (1.0, 2.0, 4.0),
  )
  define(
      'inputs',
      value_types.Choice(('test', 'gaussian')),
      'Inputs for which the change of the outputs is measured: test examples,'
      ' or as many random ones from the standard normal distribution, as in'
      ' figure 3',
      'test',
  )
  define(
      'shuffle_probabilities',
      value_types.List(value_types.SHARE),
      'Values of P_sf for the accuracy on test examples after permuting the'
      ' units of each model with its own encodings, separated by commas',
      (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
  )
  _define_num_examples(define)
  _define_repeats(define, 10)
  _define_seed(define, 'the permutations and the examples')


def _define_permutation(define: flag_groups.Definer) -> None:
  _define_shuffle_probability(define)
  _define_num_examples(define)
  _define_seed(define, 'the permutations and the examples')


def _define_kept_share(define: flag_groups.Definer) -> None:
  define(
      'shuffle_probabilities',
      value_types.List(value_types.SHARE),
      'Values of P_sf for a single permutation, separated by commas',
      (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
  )
  _define_shuffle_probability(define)
  define(
      'num_shuffles',
      value_types.List(local_training.MEAN_STEPS),
      'Values of N_sf, the mean number of permutations in local training,'
      ' separated by commas',
      default_text='0,0.1,0.2,0.5,1,2,5,10 up to --num_steps',
  )
  define(
      'num_steps',
      local_training.STEPS,
      'Number of steps of local training',
      default_text="the mean over the run's clients; 100 without a run",
  )
  define(
      'num_units',
      value_types.List(_UNITS),
      'Numbers of units of a layer, separated by commas',
      default_text="the sizes of the run's layers; 1024 without a run",
  )
  # The number of permutations is random, too.
  _define_repeats(define, 200)
  _define_seed(define, 'the permutations')


def _define_weight_divergence(define: flag_groups.Definer) -> None:
  define(
      'num_clients',
      value_types.Number(int, minimum=2),
      'Number of clients that are drawn and trained',
      default_text='the number in a round of the run',
  )
  define(
      'num_rounds',
      value_types.POSITIVE_INTEGER,
      'Number of rounds for the mean; between two rounds, FedAvg averages the'
      " clients' models",
      1,
  )
  _define_seed(define, 'the draw of clients')


def _define_layers(define: flag_groups.Definer) -> None:
  define(
      'layers',
      value_types.List(value_types.TEXT),
      'Names of layers of the model, separated by commas',
      default_text='the activations of all hidden layers',
  )
  define(
      'num_clients',
      value_types.POSITIVE_INTEGER,
      'Number of clients that are drawn and trained',
      1,
  )
  _define_num_examples(define)
  _define_seed(define, 'the draws of clients and examples')


def _define_fusion(define: flag_groups.Definer) -> None:
  define(
      'epochs',
      local_training.EPOCHS,
      'Number of epochs of each model on its half of the training data',
      20,
  )
  define(
      'coefficients',
      value_types.List(value_types.SHARE),
      'Interpolation coefficients μ, separated by commas',
      (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
  )
  define.boolean(
      'reestimate_statistics',
      'Recomputes the BN statistics of each model before its evaluation, by'
      ' forward passes over the training data',
  )
  _define_num_examples(define)
  _define_seed(define, 'the halves, the initial weights and the examples')


def _define_flags(
    values: absl_flags.FlagValues,
    name: str,
    define_own: Callable[[flag_groups.Definer], None],
    needs_run: bool,
) -> tuple[flag_groups.FlagGroup, ...]:
  own = flag_groups.Definer(values)
  _define_run(own, 'none, it must be given' if needs_run else 'none')
  define_own(own)
  return (
      own.group('Analysis'),
      _define_output(values, name),
  )


def _define_output(
    values: absl_flags.FlagValues, name: str
) -> flag_groups.FlagGroup:
  define = flag_groups.Definer(values)
  define(
      'output_dir',
      value_types.TEXT,
      f'Folder for {name}.csv, {name}.md and plots/',
      default_text=f"the run's, if there is one; else runs/{name}",
  )
  verbosity = run_flags.OutputFlags.specs()['verbosity']
  flag_groups.define(define, verbosity, verbosity.default)
  return define.group(run_flags.OutputFlags.TITLE)


def named_runs(
    paths: tuple[str, ...], *, is_trusted: bool = False
) -> dict[pathlib.Path, tuple[str, settings_lib.RunSettings]]:
  """Names runs and reads their settings.

  Args:
    paths: Folders of finished runs and of comparisons.
    is_trusted: Whether they may name code that is not part of this package.

  Returns:
    The name and the settings of each run, by its folder. The name of a run is
    the name of its folder. In a comparison it is the name of the comparison's
    folder, and the algorithm if there are several.

  Raises:
    ValueError: If a folder has no finished run, or a run is given twice.
  """
  folders = [pathlib.Path(path).expanduser() for path in paths]
  _check_different(folders)
  found: dict[pathlib.Path, tuple[str, settings_lib.RunSettings]] = {}
  for folder, name in zip(folders, _short_names(folders)):
    texts = finished_run.check(folder)
    runs = {folder: ''}
    if finished_run.is_comparison(texts):
      runs = comparison_runs.runs_of(folder, texts)
    for run, algorithm in runs.items():
      _check_different([*found, run])
      found[run] = (
          f'{name} {algorithm}' if len(set(runs.values())) > 1 else name,
          finished_run.read_settings(run, is_trusted=is_trusted),
      )
  return found


def _check_different(folders: list[pathlib.Path]) -> None:
  resolved = [folder.resolve() for folder in folders]
  for folder, path in zip(folders, resolved):
    if resolved.count(path) > 1:
      raise ValueError(f'--run names the run {folder} twice.')


def _short_names(folders: list[pathlib.Path]) -> list[str]:
  """Returns the shortest ends of the paths that are different."""
  paths = [folder.resolve().parts for folder in folders]
  names = []
  for parts in paths:
    length = 1
    while sum(p[-length:] == parts[-length:] for p in paths) > 1:
      length += 1
    names.append('/'.join(parts[-length:]))
  return names


def _main(name: str, needs_run: bool, flags: command_line.ParsedFlags) -> None:
  with contextlib.ExitStack() as stack:
    with command_line.checking_input():
      if flags.run is None and needs_run:
        raise ValueError(
            '--run=FOLDER is missing; give the folder of a finished run.'
        )
      named = named_runs(flags.run or (), is_trusted=flags.trust_run)
      folder = _output_folder(name, flags)
      run_folder.check_entries(folder)
      stack.enter_context(run_folder.created(folder))
      for run in named:  # No other program may write into them meanwhile.
        stack.enter_context(folder_lock.hold(run, shared=True))
    analyze(name, named, folder, flags)


def analyze(
    name: str,
    named: Mapping[pathlib.Path, tuple[str, settings_lib.RunSettings]],
    folder: pathlib.Path,
    flags: command_line.ParsedFlags,
) -> None:
  """Analyzes runs, and writes and prints the report.

  Args:
    name: The analysis.
    named: The name and the settings of each run, by its folder; no other
      program may write into it. Runs with the same name differ in the seed.
    folder: The folder for the report.
    flags: The flags of the analysis.

  Raises:
    UsageError: If the analysis is impossible for the runs or the flags.
  """
  if name in WITHOUT_RUN and len(named) > 1:
    raise command_line.UsageError(
        f'--run names {len(named)} runs; {name} takes at most one, for the'
        ' numbers of units and local steps.'
    )
  dependencies.require_tff()
  # Imported late: it takes seconds, and wrong flags are found without it.
  from tff_bn import runtime
  from tff_bn.papers import analysis_report
  from tff_bn.papers.run_analyses import analyzed_run

  module = importlib.import_module(f'{__package__}.{name}_analysis')
  with runtime.in_process_runtime():
    with command_line.checking_input():
      analysis = module.Analysis(analyzed_run.load(named), flags)
      analysis.check()
    report = analysis.analyze()
  analysis_report.write(folder, name, report)


def _output_folder(name: str, flags: command_line.ParsedFlags) -> pathlib.Path:
  if flags.output_dir is not None:
    return pathlib.Path(flags.output_dir).expanduser()
  if flags.run is not None and len(flags.run) == 1:
    return pathlib.Path(flags.run[0]).expanduser()
  return pathlib.Path(f'runs/{name}')


def _program(
    name: str,
    description: str,
    source: str,
    define_own: Callable[[flag_groups.Definer], None],
    *examples: str,
    paper: str = 'FedPAN',
) -> command_line.Program:
  needs_run = name not in WITHOUT_RUN
  return command_line.Program(
      name=f'tff-bn-analyze {name}',
      description=f'{description} ({source} of the {paper} paper).',
      examples=tuple(
          f'tff-bn-analyze {name}{example and " "}{example}'
          for example in examples
      ),
      define_flags=functools.partial(
          _define_flags, name=name, define_own=define_own, needs_run=needs_run
      ),
      main=functools.partial(_main, name, needs_run),
  )


PROGRAMS = {
    'permutation': _program(
        'permutation',
        'Permutes the hidden units of models at random; units that are added'
        ' to each other, as in residual blocks, are permuted together. Shows'
        ' how many units stay in place and how much the outputs change',
        'algorithm 1 and figure 2',
        _define_permutation,
        '--run=runs/train --shuffle_probability=0.5',
    ),
    'shuffle_test': _program(
        'shuffle_test',
        'Replaces the position encodings of models by encodings of many'
        ' amplitudes, permutes the hidden units, and measures how much the'
        ' outputs change. Also permutes the units of each model with its own'
        ' encodings, and measures the accuracy',
        'figures 3 and 4',
        _define_shuffle_test,
        '--run=runs/train',
        '--run=runs/pan_off,runs/pan_on --inputs=gaussian',
    ),
    'kept_share': _program(
        'kept_share',
        'Simulates the share of units that stay in place after one random'
        ' permutation, and after the permutations of local training',
        'figures 2 and 5',
        _define_kept_share,
        '',
        '--run=runs/train --num_shuffles=0.1,0.2,0.5',
    ),
    'weight_divergence': _program(
        'weight_divergence',
        'Trains clients for one or more rounds after the last one of a run, and'
        ' measures how far the weights of each layer diverge',
        'figure 6',
        _define_weight_divergence,
        '--run=runs/pan_off,runs/pan_on --output_dir=runs/divergence',
    ),
    'matching': _program(
        'matching',
        'Trains a client for one round after the last one of a run, and matches'
        ' the units before and after it by their activations. The more units'
        ' stay in place, the better averaging works',
        'figure 7',
        _define_layers,
        '--run=runs/pan_off,runs/pan_on --output_dir=runs/matching',
    ),
    'preference': _program(
        'preference',
        'Trains a client for one round after the last one of a run, and'
        ' compares the classes to which the units contribute most before and'
        ' after it',
        'figure 8',
        _define_layers,
        '--run=runs/train --num_clients=5',
    ),
    'fusion': _program(
        'fusion',
        'Trains two models independently with the settings of a run, each on a'
        ' half of its data, and evaluates models between them, with and without'
        ' aligning their units by optimal transport',
        'appendix F.2',
        _define_fusion,
        '--run=runs/pan_off,runs/pan_on --output_dir=runs/fusion',
    ),
    'sources': _program(
        'sources',
        "Tests each client's model on the test data of each source: of each"
        ' domain if the data has domains, of each client otherwise',
        'figures 8 and 13',
        lambda define: None,
        '--run=runs/compare',
        paper='FedTAN',
    ),
}
