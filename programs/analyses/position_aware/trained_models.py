"""The analyses of finished runs: their flags, and what they have in common."""

from collections.abc import Callable, Mapping
import contextlib
import functools
import importlib
import pathlib

from absl import flags as absl_flags

from tff_bn.common import files
from tff_bn.imports import dependencies
from tff_bn.programs import cli
from tff_bn.programs import finished_run
from tff_bn.programs import flag_groups
from tff_bn.programs import parsers
from tff_bn.programs import run_flags
from tff_bn.programs import run_folder
from tff_bn.programs import settings as settings_lib
from tff_bn.training import folder_lock

_COUNT = parsers.NumberParser(int, minimum=1)
_SHARE = parsers.NumberParser(float, minimum=0, maximum=1)
_NOT_NEGATIVE = parsers.NumberParser(float, minimum=0)


def _define_run(define: flag_groups.Definer, default_text: str) -> None:
  define(
      'run',
      parsers.TupleParser(absl_flags.ArgumentParser()),
      'Folders of finished runs, separated by commas: the --output_dir of'
      ' tff-bn-train or of tff-bn-compare, whose runs with several seeds are'
      ' taken together',
      default_text=default_text,
  )


def _define_seed(define: flag_groups.Definer, decides: str) -> None:
  define(
      'seed',
      parsers.NumberParser(int, minimum=0, maximum=2**32 - 1),
      f'Decides {decides}',
      0,
  )


def _define_num_examples(define: flag_groups.Definer) -> None:
  define(
      'num_examples',
      _COUNT,
      'How many examples of the test set, at most, the models are given',
      500,
  )


def _define_shuffle_probability(define: flag_groups.Definer) -> None:
  define(
      'shuffle_probability',
      _SHARE,
      'P_sf, the probability with which each unit is swapped with a random one'
      ' of those after it',
      0.1,
  )


def _define_repeats(define: flag_groups.Definer, default: int) -> None:
  define(
      'repeats', _COUNT, 'Over how many random draws the mean is taken', default
  )


def _define_shuffle_test(define: flag_groups.Definer) -> None:
  _define_shuffle_probability(define)
  define(
      'amplitudes',
      parsers.TupleParser(parsers.NumberParser(float, minimum=0, below=1)),
      'Amplitudes A of the position encodings, separated by commas',
      (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
  )
  define(
      'periods',
      parsers.TupleParser(_NOT_NEGATIVE),
      'Periods T of the position encodings, separated by commas',
      (1.0, 2.0, 4.0),
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
      parsers.TupleParser(_SHARE),
      'Values of P_sf for a single permutation, separated by commas',
      (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
  )
  _define_shuffle_probability(define)
  define(
      'num_shuffles',
      parsers.TupleParser(_NOT_NEGATIVE),
      'Values of N_sf: how often units are permuted in local training, on'
      ' average, separated by commas',
      default_text='those of 0,0.1,0.2,0.5,1,2,5,10 that --num_steps allows',
  )
  define(
      'num_steps',
      _COUNT,
      'Number of steps of local training',
      default_text="the run's, the mean over its clients; 100 without a run",
  )
  define(
      'num_units',
      parsers.TupleParser(_COUNT),
      'Numbers of units of a layer, separated by commas',
      default_text="those of the run's model; 1024 without a run",
  )
  # How often local training permutes units is random, too.
  _define_repeats(define, 200)
  _define_seed(define, 'the permutations')


def _define_weight_divergence(define: flag_groups.Definer) -> None:
  define(
      'num_clients',
      parsers.NumberParser(int, minimum=2),
      'Number of clients that are drawn and trained',
      default_text='as many as take part in a round of the run',
  )
  define(
      'num_rounds',
      _COUNT,
      'Over how many rounds the mean is taken; between two of them, FedAvg'
      " makes one model of the clients'",
      1,
  )
  _define_seed(define, 'which clients are drawn')


def _define_layers(define: flag_groups.Definer) -> None:
  define(
      'layers',
      parsers.TupleParser(absl_flags.ArgumentParser()),
      'Names of layers of the model, separated by commas',
      default_text='the activations of all hidden layers',
  )
  define(
      'num_clients',
      _COUNT,
      'Number of clients that are drawn and trained',
      1,
  )
  _define_num_examples(define)
  _define_seed(define, 'which clients and examples are drawn')


def _define_fusion(define: flag_groups.Definer) -> None:
  define(
      'epochs',
      _COUNT,
      'How many times each model goes through its half of the training data',
      20,
  )
  define(
      'coefficients',
      parsers.TupleParser(_SHARE),
      'Interpolation coefficients μ, separated by commas',
      (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
  )
  define.boolean(
      'reestimate_statistics',
      'Computes the BN statistics of each model anew before its evaluation, by'
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
      run_flags.define_analysis_output_flags(values, name),
  )


def named_runs(
    paths: tuple[str, ...],
) -> dict[pathlib.Path, tuple[str, settings_lib.RunSettings]]:
  """Reads the settings of runs, and names them.

  Args:
    paths: Folders of finished runs and of comparisons.

  Returns:
    For each run's folder its name and its settings. A run is called after its
    folder; the runs of a comparison after its folder and the algorithm, if
    there are several.

  Raises:
    ValueError: If a folder holds no run, or one that is not finished; or if a
      run is named twice.
  """
  folders = [pathlib.Path(path).expanduser() for path in paths]
  _check_different(folders)
  found = {}
  for folder, name in zip(folders, _short_names(folders)):
    texts = finished_run.check(folder)
    if not finished_run.is_comparison(texts):
      _check_different([*found, folder])
      found[folder] = name, finished_run.read_settings(folder)
      continue
    algorithms = texts['algorithms'].split(',')
    for algorithm in algorithms:
      for seed in texts['seeds'].split(','):
        run = folder / run_folder.RUNS / f'{algorithm}-seed{seed}'
        finished_run.check(run)
        _check_different([*found, run])
        found[run] = (
            f'{name} {algorithm}' if len(algorithms) > 1 else name,
            finished_run.read_settings(run),
        )
  return found


def _check_different(folders: list[pathlib.Path]) -> None:
  resolved = [folder.resolve() for folder in folders]
  for folder, path in zip(folders, resolved):
    if resolved.count(path) > 1:
      raise ValueError(f'--run names the run {folder} twice.')


def _short_names(folders: list[pathlib.Path]) -> list[str]:
  """The ends of the paths that tell them from each other."""
  paths = [folder.resolve().parts for folder in folders]
  names = []
  for parts in paths:
    length = 1
    while sum(p[-length:] == parts[-length:] for p in paths) > 1:
      length += 1
    names.append('/'.join(parts[-length:]))
  return names


def _main(name: str, needs_run: bool, flags: cli.ParsedFlags) -> None:
  with contextlib.ExitStack() as stack:
    with cli.checking_input():
      if flags.run is None and needs_run:
        raise ValueError(
            '--run=FOLDER is missing: which run is to be analyzed?'
        )
      named = named_runs(flags.run or ())
      folder = _output_folder(name, flags)
      run_folder.check_writable(folder)
      for run in named:  # Nobody may write into them meanwhile.
        stack.enter_context(folder_lock.hold(run, shared=True))
    _analyze(name, named, folder, flags)


def _analyze(
    name: str,
    named: Mapping[pathlib.Path, tuple[str, settings_lib.RunSettings]],
    folder: pathlib.Path,
    flags: cli.ParsedFlags,
) -> None:
  """Analyzes runs and writes the report into a folder."""
  dependencies.require_tff()
  # Imported late: it takes seconds, and wrong flags are found without it.
  # pylint: disable=g-import-not-at-top
  from tff_bn import runtime
  from tff_bn.programs import figures
  from tff_bn.programs.analyses.position_aware import analyzed_run

  # pylint: enable=g-import-not-at-top
  module = importlib.import_module(
      f'tff_bn.programs.analyses.position_aware.{name}'
  )
  with runtime.in_process_runtime():
    with cli.checking_input():
      runs = analyzed_run.load(named)
      module.check(runs, flags)
    report = module.analyze(runs, flags)
  folder.mkdir(parents=True, exist_ok=True)
  files.replace(folder / f'{name}.csv', report.csv)
  files.replace(folder / f'{name}.md', report.markdown)
  figures.save(folder / run_folder.PLOTS, report.drawings)
  print(report.markdown)
  print(f'Table: {folder / name}.md, {folder / name}.csv')
  for drawing in report.drawings:
    print(f'Plot:  {folder / run_folder.PLOTS / drawing}.png')


def _output_folder(name: str, flags: cli.ParsedFlags) -> pathlib.Path:
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
    needs_run: bool = True,
) -> cli.Program:
  return cli.Program(
      name=f'tff-bn-analyze {name}',
      description=f'{description} ({source} of the FedPAN paper).',
      examples=tuple(
          f'tff-bn-analyze {name}{example and " "}{example}'
          for example in examples
      ),
      define_flags=functools.partial(
          _define_flags,
          name=name,
          define_own=define_own,
          needs_run=needs_run,
      ),
      main=functools.partial(_main, name, needs_run),
  )


PROGRAMS = {
    'permutation': _program(
        'permutation',
        'Permutes the hidden units of models at random, those that are tied'
        ' together, as by residual additions, together; shows how many stay'
        ' where they are and how much the outputs change',
        'algorithm 1 and figure 2',
        _define_permutation,
        '--run=runs/train --shuffle_probability=0.5',
    ),
    'shuffle_test': _program(
        'shuffle_test',
        'Permutes the hidden units of models, with position encodings of many'
        ' amplitudes in place of their own, and measures how much the outputs'
        ' change',
        'figure 3',
        _define_shuffle_test,
        '--run=runs/train',
    ),
    'kept_share': _program(
        'kept_share',
        'Simulates how many units random permutations leave where they are, of'
        ' one permutation and of those in local training',
        'figures 2 and 5',
        _define_kept_share,
        '',
        '--run=runs/train --num_shuffles=0.1,0.2,0.5',
        needs_run=False,
    ),
    'weight_divergence': _program(
        'weight_divergence',
        'Trains clients for the round after the last one of a run, or for more'
        ' rounds, and measures how far the weights of each layer diverge',
        'figure 6',
        _define_weight_divergence,
        '--run=runs/pan_off,runs/pan_on --output_dir=runs/divergence',
    ),
    'matching': _program(
        'matching',
        'Trains a client for the round after the last one of a run, and matches'
        ' the units before and after it by their activations: the more units'
        ' stay where they are, the better averaging works',
        'figure 7',
        _define_layers,
        '--run=runs/pan_off,runs/pan_on --output_dir=runs/matching',
    ),
    'preference': _program(
        'preference',
        'Trains a client for the round after the last one of a run, and'
        ' compares which classes the units contribute to most before and after'
        ' it',
        'figure 8',
        _define_layers,
        '--run=runs/train --num_clients=5',
    ),
    'fusion': _program(
        'fusion',
        'Trains two models with the settings of a run, independently, each on a'
        ' half of its data, and evaluates models between them, without and with'
        ' aligning their units by optimal transport',
        'appendix F.2',
        _define_fusion,
        '--run=runs/pan_off,runs/pan_on --output_dir=runs/fusion',
    ),
}
