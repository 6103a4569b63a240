"""The flags of a run's seed, evaluations, checkpoints and files."""

import dataclasses

from tff_bn.catalog import algorithms
from tff_bn.catalog import parts
from tff_bn.catalog import value_types
from tff_bn.catalog.options import OWN_NAME
from tff_bn.catalog.options import Condition
from tff_bn.catalog.options import Option
from tff_bn.catalog.options import only_for
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import named_code
from tff_bn.programs.cli.parsed_flags import ParsedFlags
from tff_bn.programs.runs import run_folder
from tff_bn.training import best_round
from tff_bn.training import run_entries

_SEED = Option(
    'seed',
    value_types.SEED,
    'Decides every random choice: split, initial weights, sampled clients,'
    ' order of the batches',
    0,
    argument=OWN_NAME,
)
_SEEDS = Option(
    'seeds',
    value_types.List(value_types.SEED),
    'Seeds, separated by commas. Each algorithm is trained once with each seed;'
    ' with the same seed all have the same split, initial weights and sampled'
    ' clients',
    (0, 1),
)
_OF_ALL_RUNS = (
    Option(
        'evaluate_every',
        value_types.POSITIVE_INTEGER,
        'Number of rounds from one evaluation to the next; the initial and the'
        ' final model are always evaluated',
        5,
    ),
    Option(
        'validation_share',
        value_types.PART,
        "Share of each client's training data that is set apart for validation:"
        ' no client trains on it, and each evaluation measures it, too',
        default_text='none',
    ),
    Option(
        'keep_best',
        value_types.TEXT,
        'Metric, or loss, that chooses the best round by the mean over the'
        " clients' validation data. Its models are saved in"
        f' {run_folder.MODEL}/{run_entries.BEST}/, and tables, tff-bn-evaluate'
        ' and the tests of held-out clients use this round',
        default_text='none',
        conditions=(
            Condition(
                'validation_share',
                lambda flags: flags.validation_share is not None,
                'has no effect without --validation_share',
            ),
        ),
    ),
    Option(
        'patience',
        value_types.POSITIVE_INTEGER,
        'Number of evaluations in a row without a better value of --keep_best'
        ' after which a run ends early',
        default_text='none, a run has all rounds',
        conditions=(
            Condition(
                'keep_best',
                lambda flags: flags.keep_best is not None,
                'has no effect without --keep_best',
            ),
        ),
    ),
    Option(
        'client_metrics_over_time',
        value_types.BOOLEAN,
        f'Writes the metrics of single clients into {run_folder.CLIENT_METRICS}'
        ' at each evaluation, not only at the end',
        False,
        convert=lambda is_over_time: is_over_time or None,
    ),
    Option(
        'evaluate_train_loss',
        value_types.BOOLEAN,
        "Evaluates each client's model on all its training data, too: column"
        ' client_train_loss of metrics.csv. train_loss is the loss in training,'
        ' on the batches of the round',
        False,
        convert=lambda is_evaluated: is_evaluated or None,
    ),
    Option(
        'checkpoint_every',
        value_types.POSITIVE_INTEGER,
        'Number of rounds from one checkpoint to the next. The same command'
        ' continues a run that was stopped from its last checkpoint',
        10,
    ),
    Option(
        'save_client_models',
        value_types.Choice(run_entries.SAVE_CLIENT_MODELS),
        lambda: (
            'Whose own models are saved as Keras files at the end, with'
            f' {", ".join(algorithms.users(algorithms.CLIENT_MODELS))},'
            ' --local_layers or --pan_personal_share; tff-bn-evaluate'
            ' --export_client also does it later:\n'
            + parts.listing(run_entries.SAVE_CLIENT_MODELS)
        ),
        'none',
        convert=lambda choice: None if choice == 'none' else choice,
        feature=algorithms.CLIENT_MODELS,
    ),
    Option(
        'export',
        value_types.Choice(run_entries.EXPORT),
        'What the Keras files of the run take as input, also the files that'
        ' tff-bn-evaluate --export_client and --adapt write:\n'
        + parts.listing(run_entries.EXPORT),
        run_entries.RAW,
        convert=lambda choice: None if choice == run_entries.RAW else choice,
    ),
)
_VERBOSITY = Option(
    'verbosity',
    value_types.Number(int, minimum=-2, maximum=1),
    'What is printed besides results: -2 errors only, -1 also warnings and the'
    ' progress, 0 also information, 1 everything, with the tracebacks of'
    ' errors',
    -1,
)
_OUTPUT = (
    Option(
        'output_dir',
        value_types.TEXT,
        'Folder for all files. If it holds a run with the same flags, that run'
        ' is continued (an analysis is repeated); a run with other flags is'
        ' never touched: the default is then FOLDER-2, FOLDER-3, …',
    ),
    Option(
        'overwrite',
        value_types.BOOLEAN,
        'Removes the run in --output_dir and starts from scratch',
        False,
    ),
)
STATISTICS = 'statistics'
BATCH_NORM = 'batch_norm'
# Name -> how a model is adapted to a client that joins later.
ADAPT = {
    STATISTICS: (
        "the BN statistics are computed again from the client's training data,"
        ' without its labels'
    ),
    BATCH_NORM: (
        "then the client's own scale, shift and statistics are trained on its"
        ' labeled training data; all other weights stay as they are'
    ),
}
BALANCE_CLASSES = 'balance_classes'


def _without(name: str, description: str) -> Condition:
  """Returns the condition that another option, which is none, is not given."""
  return Condition(
      name,
      lambda flags: not getattr(flags, name),
      f'has no effect with --{name}, {description}',
  )


_EVALUATION = (
    Option(
        'run',
        value_types.TEXT,
        'Folder of the finished run: the --output_dir of tff-bn-train, or a'
        ' folder in the runs/ of a comparison',
        default_text='none, it must be given',
    ),
    Option(
        named_code.TRUST_RUN,
        value_types.BOOLEAN,
        named_code.EXPLANATION_OF_TRUST,
        False,
    ),
    Option(
        'kept_round',
        value_types.Choice(run_folder.KEPT_ROUNDS),
        f'Whose models are used:\n{parts.listing(run_folder.KEPT_ROUNDS)}',
        default_text='best if the run has it, or last',
    ),
    Option(
        'reestimate_statistics',
        value_types.BOOLEAN,
        'Computes the BN statistics again before the evaluation, by forward'
        ' passes over training data without its labels: for the whole test set'
        " over the data of all clients, for a client's test data over the data"
        ' of this client',
        False,
        conditions=(_without('adapt', 'which decides what is adapted'),),
    ),
    Option(
        'each_source',
        value_types.BOOLEAN,
        "Tests each client's model on the test data of each source, too: of"
        ' each domain if the data has domains, of each client otherwise. Writes'
        f' {run_folder.SOURCES_CSV} and a heat map',
        False,
        conditions=(
            _without('export_client', 'which evaluates nothing'),
            _without('predict', 'which evaluates nothing'),
            _without('adapt', 'which tests a client on its own test data'),
        ),
    ),
    Option(
        'adapt',
        value_types.Choice(ADAPT),
        'Adapts the model of the run to each client of the data, tests it'
        f' before and after, and saves it in {run_folder.ADAPTED}/. It uses'
        ' the settings of the run, such as the learning rate:\n'
        + parts.listing(ADAPT),
        default_text='none',
        conditions=(
            _without('export_client', 'which evaluates nothing'),
            _without('predict', 'which evaluates nothing'),
        ),
    ),
    Option(
        'adapt_epochs',
        value_types.POSITIVE_INTEGER,
        f"Number of passes over a client's training data, with"
        f' --adapt={BATCH_NORM}',
        10,
        conditions=(only_for('adapt', BATCH_NORM),),
    ),
    Option(
        BALANCE_CLASSES,
        value_types.BOOLEAN,
        'Computes BN statistics as if a client had equally many training'
        ' samples of each of its classes, which uses their labels: against'
        ' label shift, see docs/programs.md',
        False,
        conditions=(
            Condition(
                'adapt',
                lambda flags: (
                    flags.reestimate_statistics or flags.adapt == STATISTICS
                ),
                'has an effect with --reestimate_statistics and'
                f' --adapt={STATISTICS} only',
            ),
        ),
    ),
    Option(
        'export_client',
        value_types.List(value_types.TEXT),
        'Ids of clients, separated by commas. The program writes the models'
        ' that these clients use as Keras files in'
        f' {run_folder.EXPORTED}/, and evaluates nothing',
        default_text='none',
    ),
    Option(
        'predict',
        value_types.List(value_types.TEXT),
        'Files, separated by commas: pictures (PNG or JPEG), CSV tables for a'
        ' run on a table, or arrays of samples (.npy). The program writes the'
        f" model's predictions for them into {run_folder.PREDICTIONS}, and"
        ' evaluates nothing',
        default_text='none',
        excludes='export_client',
    ),
    Option(
        'client',
        value_types.TEXT,
        'Id of the client whose own model predicts',
        default_text='the global model',
        conditions=(
            Condition(
                'predict',
                lambda options: options.predict is not None,
                'has an effect with --predict only',
            ),
        ),
    ),
    Option(
        'output_dir',
        value_types.TEXT,
        f'Folder for {run_folder.EVALUATION}, {run_folder.EXPORTED}/,'
        f' {run_folder.ADAPTED}/ and {run_folder.PREDICTIONS}',
        default_text="the run's",
    ),
)


@dataclasses.dataclass(frozen=True)
class RunFlags(flag_groups.base_class(_SEED, *_OF_ALL_RUNS)):  # type: ignore[misc]
  """The seed of a run, and how often it is evaluated and saved."""

  TITLE = 'Run'

  @classmethod
  def check(cls, flags: ParsedFlags) -> None:
    """See `Flags.check`."""
    super().check(flags)
    if flags.keep_best is not None:
      best_round.BestRound(flags.keep_best)


@dataclasses.dataclass(frozen=True)
class RunsFlags(flag_groups.base_class(_SEEDS, *_OF_ALL_RUNS)):  # type: ignore[misc]
  """The seeds of a comparison, and how often its runs are evaluated."""

  TITLE = 'Runs'


@dataclasses.dataclass(frozen=True)
class OutputFlags(flag_groups.base_class(*_OUTPUT, _VERBOSITY)):  # type: ignore[misc]
  """Where a run's files go, and what is logged."""

  TITLE = 'Output'


@dataclasses.dataclass(frozen=True)
class VerbosityFlags(flag_groups.base_class(_VERBOSITY)):  # type: ignore[misc]
  """What a process of `tff-bn-compare --jobs` prints."""

  TITLE = 'Output'


@dataclasses.dataclass(frozen=True)
class EvaluationFlags(flag_groups.base_class(*_EVALUATION, _VERBOSITY)):  # type: ignore[misc]
  """Which run is evaluated, how, and where the result goes."""

  TITLE = 'Evaluation'
