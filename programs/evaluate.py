"""`tff-bn-evaluate`: evaluates the model of a finished run."""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import functools
import itertools
import pathlib
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from absl import flags as absl_flags

from tff_bn.catalog import datasets
from tff_bn.catalog import table_options
from tff_bn.common import spelling
from tff_bn.data import splits
from tff_bn.imports import dependencies
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import parsers
from tff_bn.programs.flags import data_flags
from tff_bn.programs.flags import held_out_flags
from tff_bn.programs.flags import run_flags
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import finished_run
from tff_bn.programs.runs import run_folder
from tff_bn.programs.testing import keras_files
from tff_bn.training import folder_lock
from tff_bn.training import measures
from tff_bn.training import run_entries

if TYPE_CHECKING:
  from tff_bn import data as tff_bn_data
  from tff_bn.keras_model.batch_norm_model import BatchNormModel
  from tff_bn.training import saved_models

# The file has all rows.
_MAX_PRINTED_ROWS = 100
_ENCODING = "the run's encoding is used for all tables"
# Flags of the data that must not be given.
_DECIDED_BY_THE_RUN = {
    'pixel_scaling': "the run's scaling is used for all data",
    'task': 'the run decides the task',
    table_options.MISSING.name: _ENCODING,
    table_options.CATEGORIES.name: _ENCODING,
}


def define_flags(
    values: absl_flags.FlagValues,
) -> tuple[flag_groups.FlagGroup, ...]:
  """Defines the program's flags."""
  groups = (
      run_flags.EvaluationFlags.define(values),
      data_flags.DataFlags.define(values, inherited="the run's"),
  )
  # A client that did not train is a domain.
  values['dataset'].parser = parsers.Parser(
      datasets.DatasetName(fewest_domains=1)
  )
  return groups


class _Loaded(NamedTuple):
  """What is evaluated: the models of a run and the clients' data."""

  settings: settings_lib.RunSettings
  saved: 'saved_models.SavedModels'
  model: 'BatchNormModel'
  data: 'tff_bn_data.FederatedData'


class Request(NamedTuple):
  """What is evaluated: the run's settings, with the flags of the data.

  `client` is the name of the only client, if the command gives it.
  """

  settings: settings_lib.RunSettings
  client: Optional[str]


def read_request(flags: command_line.ParsedFlags) -> Request:
  """Reads a run's settings; data flags that are given overrule them.

  Raises:
    ValueError: If `--run` isn't the folder of a run, or the data flags
      contradict its flags.
  """
  run_flags.EvaluationFlags.check(flags)
  if flags.run is None:
    raise ValueError('--run=FOLDER is missing: the run to be evaluated.')
  folder = pathlib.Path(flags.run).expanduser()
  texts = finished_run.check(folder)
  if finished_run.is_comparison(texts):
    raise ValueError(
        f'--run={folder} is a comparison; choose one of the runs in'
        f' {folder / run_folder.RUNS}.'
    )
  for name, reason in _DECIDED_BY_THE_RUN.items():
    if flags.is_given(name):
      raise ValueError(
          f'{flags.text(name)} cannot be changed after the training; {reason}.'
      )
  instead = next(
      (n for n in ('export_client', 'predict') if flags.is_given(n)), None
  )
  given: dict[str, str] = {}
  for name in ('reestimate_statistics', *data_flags.DataFlags.specs()):
    if instead is not None:
      flags.refuse_unless_overruled(
          name,
          instead,
          f'has no effect with --{instead}, which evaluates nothing',
      )
    elif name != 'reestimate_statistics' and flags.is_given(name):
      given[name] = parsers.to_text(getattr(flags, name))
  # Other data has other clients.
  without = list(held_out_flags.HeldOutFlags.specs()) if given else []
  client = None
  if 'dataset' in given:
    split = flags.split or texts.get('split')
    if flags.dataset.startswith(datasets.DOMAINS.prefix):
      split = splits.chosen_split(flags)
      given['split'] = split
    has_origins = bool(
        split is not None
        and split in splits.SPLITS
        and splits.SPLITS[split].client
    )
    if has_origins and 'num_clients' not in given:
      without.append('num_clients')
    found = datasets.single_domain(flags.dataset)
    if found is not None:
      client, source = found
      given['dataset'] = source
  settings = finished_run.read_settings(
      folder, given, without, is_trusted=flags.trust_run
  )
  return Request(settings, client)


def main(flags: command_line.ParsedFlags) -> None:
  """Evaluates a run, adapts or exports models of clients, or predicts."""
  with contextlib.ExitStack() as stack:
    with command_line.checking_input():
      request = read_request(flags)
      run = pathlib.Path(flags.run).expanduser()
      folder = run
      if flags.output_dir is not None:
        folder = pathlib.Path(flags.output_dir).expanduser()
        run_folder.check_entries(folder)
      stack.enter_context(run_folder.created(folder))
      # No other program may write into it meanwhile.
      stack.enter_context(folder_lock.hold(run, shared=True))
    if flags.adapt is not None:
      _adapt(request, run, folder, flags)
    elif flags.export_client is not None:
      _export(
          request.settings, run, folder, flags.export_client, flags.kept_round
      )
    elif flags.predict is not None:
      _predict(
          request.settings,
          run,
          folder,
          flags.predict,
          flags.client,
          flags.kept_round,
      )
    else:
      evaluate(
          request.settings,
          run,
          folder,
          reestimates_statistics=flags.reestimate_statistics,
          balances_classes=flags.balance_classes,
          client=request.client,
          which=flags.kept_round,
          tests_each_source=flags.each_source,
      )


def evaluate(
    settings: settings_lib.RunSettings,
    run: pathlib.Path,
    folder: pathlib.Path,
    *,
    reestimates_statistics: bool,
    balances_classes: bool = False,
    client: Optional[str] = None,
    which: Optional[str] = None,
    tests_each_source: bool = False,
) -> None:
  """Evaluates a run, and writes and prints the results.

  Args:
    settings: The run's settings, with the flags of the data.
    run: The run's folder; no other program may write into it.
    folder: The folder for the results.
    reestimates_statistics: Whether BN statistics are computed again.
    balances_classes: Whether each class of a client counts alike in them.
    client: The name of the only client, see `Request`.
    which: The round, see `run_folder.models_folder`.
    tests_each_source: Whether each client's model is tested on each source.

  Raises:
    UsageError: If the data or the model can't be loaded.
  """
  dependencies.require_tff()
  # Imported late: this takes seconds, and wrong flags are found without it.
  from tff_bn.programs.results import report
  from tff_bn.programs.testing import adapted_clients
  from tff_bn.programs.testing import detailed_evaluation
  from tff_bn.programs.testing import evaluation_file
  from tff_bn.programs.testing import model_evaluation
  from tff_bn.programs.testing import source_evaluation

  path = folder / run_folder.EVALUATION
  with command_line.checking_input():
    evaluation_file.read(path)  # A damaged file is found before the work.
    settings, saved, model, data = _load(
        settings,
        run,
        client,
        which,
        '--reestimate_statistics' if reestimates_statistics else None,
        balances_classes=balances_classes,
    )
    evaluation_file.check(path, model_evaluation.numbers(model))
  if reestimates_statistics and not balances_classes:
    adapted_clients.say_label_shift(saved, data)
  folder.mkdir(parents=True, exist_ok=True)
  batch_size = settings.batch_size if reestimates_statistics else None
  with detailed_evaluation.writing(
      saved, folder, run_folder.EVALUATED
  ) as details:
    results = list(
        model_evaluation.evaluate_models(
            saved,
            model,
            data,
            data.client_ids,
            reestimation_batch_size=batch_size,
            visit=details.add,
        )
    )
  subject = evaluation_file.Subject.of(
      settings,
      run,
      saved.manifest['round'],
      reestimates_statistics=reestimates_statistics,
      balances_classes=balances_classes,
  )
  num_others = evaluation_file.add(path, subject, results)
  written = []
  if tests_each_source:
    written = source_evaluation.write(
        folder,
        model_evaluation.numbers(model),
        source_evaluation.evaluate(
            saved, model, data, reestimation_batch_size=batch_size
        ),
        settings.algorithm
        + subject.describe().removeprefix(subject.run).removesuffix(':'),
    )
  _print_round(saved)
  print(f'{subject.describe()}\n')
  print(
      report.evaluation_table(
          results[:_MAX_PRINTED_ROWS], reestimated=reestimates_statistics
      )
  )
  if len(results) > _MAX_PRINTED_ROWS:
    print(f'\n… and {len(results) - _MAX_PRINTED_ROWS} more rows in the table.')
  print(f'\n{report.describe_evaluation(results)}')
  print(f'\n{measures.GLOBAL_MODEL.capitalize()}:\n\n{details.describe()}')
  print(f'\nTable: {path}')
  if num_others:
    print(f'       (other evaluations in it: {num_others})')
  for name in details.names:
    print(f'       {folder / name}')
  for file in written:
    print(f'       {file}')


def _load(
    settings: settings_lib.RunSettings,
    run: pathlib.Path,
    client: Optional[str],
    which: Optional[str],
    statistics_flag: Optional[str],
    *,
    balances_classes: bool,
) -> _Loaded:
  """Loads what is evaluated.

  Args:
    settings: The run's settings, with the flags of the data.
    run: The run's folder.
    client: The name of the only client, see `Request`.
    which: The round, see `run_folder.models_folder`.
    statistics_flag: The flag that changes BN statistics, if one does.
    balances_classes: Whether each class of a client counts alike.

  Raises:
    ValueError: If the data or the model can't be loaded, or does not fit.
  """
  from tff_bn import data as tff_bn_data
  from tff_bn.data import table_encoding
  from tff_bn.programs.runs import run_building
  from tff_bn.programs.testing import adapted_clients
  from tff_bn.programs.testing import model_evaluation

  saved, model = run_building.load_models(settings, run, which)
  if statistics_flag is not None and not model.has_batch_norm:
    raise ValueError(
        f'{statistics_flag} has no effect: the model of --run={run} has no'
        ' batch normalization.'
    )
  settings, dataset = model_evaluation.as_domains(
      settings,
      # Other labels, such as 0 and 1, could be of another task.
      settings.replaced(task=saved.manifest['task']).load(
          model_evaluation.class_names(saved),
          table_encoding.of_manifest(saved.manifest),
      ),
      client,
  )
  data = model_evaluation.scale_as_in_training(
      saved,
      run_building.split_dataset(
          # How clients were sampled, what attackers did to labels, and which
          # samples chose a round, was for the training.
          settings.replaced(
              pixel_scaling=None,
              clients_per_round=None,
              attack=None,
              validation_share=None,
          ),
          dataset,
      ),
  )
  model_evaluation.check_data(saved, model, data)
  if balances_classes:
    try:
      data = tff_bn_data.with_balanced_classes(data, settings.seed)
    except ValueError as error:
      raise ValueError(f'--{run_flags.BALANCE_CLASSES}: {error}') from error
    adapted_clients.say_missing_classes(data)
  return _Loaded(settings, saved, model, data)


def _adapt(
    request: Request,
    run: pathlib.Path,
    folder: pathlib.Path,
    flags: command_line.ParsedFlags,
) -> None:
  """Adapts the model of a run to clients, and saves and tests the models."""
  dependencies.require_tff()
  from tff_bn.programs.runs import run_building
  from tff_bn.programs.testing import adapted_clients
  from tff_bn.programs.testing import evaluation_file
  from tff_bn.programs.testing import model_evaluation
  from tff_bn.training import final_models
  from tff_bn.training import later_clients
  from tff_bn.training import saved_inputs
  from tff_bn.training import saved_models

  path = folder / run_folder.EVALUATION
  with command_line.checking_input():
    evaluation_file.read(path)
    settings, saved, model, data = _load(
        request.settings,
        run,
        request.client,
        flags.kept_round,
        f'--adapt={flags.adapt}',
        balances_classes=flags.balance_classes,
    )
    evaluation_file.check(path, model_evaluation.numbers(model))
    if flags.adapt == run_flags.BATCH_NORM:
      try:
        later_clients.check_trainable(model)
      except ValueError as error:
        raise ValueError(
            f'--adapt={flags.adapt} is impossible with --run={run}: {error}'
        ) from error
  if flags.adapt == run_flags.STATISTICS and not flags.balance_classes:
    adapted_clients.say_label_shift(saved, data)
  # The files take the raw samples of the clients, which may differ from the
  # run's.
  manifest = {**saved.manifest, **final_models.describe(data)}
  manifest[saved_inputs.ENTRY] = saved_inputs.choose(
      manifest, manifest.get(saved_inputs.ENTRY, run_entries.TRAINING)
  )
  clients, left_out = adapted_clients.adapt(
      settings,
      saved,
      model,
      data,
      folder,
      flags.adapt,
      flags.adapt_epochs,
      functools.partial(run_building.build_epoch_training, settings),
      lambda client_id, weights, file: saved_models.export(
          model, weights, file, saved_inputs.preparation(manifest, client_id)
      ),
  )
  if not clients:
    raise command_line.UsageError(
        f'--adapt={flags.adapt} is impossible for each client of the data.'
        f' {next(iter(left_out.values()))}'
    )
  subject = evaluation_file.Subject.of(
      settings,
      run,
      saved.manifest['round'],
      reestimates_statistics=False,
      adapt=flags.adapt,
      balances_classes=flags.balance_classes,
  )
  evaluation_file.add(path, subject, [client.after for client in clients])
  _print_round(saved)
  print(f'{subject.describe()}\n')
  print(adapted_clients.table(clients, _MAX_PRINTED_ROWS))
  print()
  codes = (
      f'{c.client_id}: {"; ".join(keras_files.loading_code(c.path))}'
      for c in clients
  )
  _print_some(codes, len(clients), 'clients')
  reasons = (f'{c}: not adapted. {reason}' for c, reason in left_out.items())
  _print_some(reasons, len(left_out), 'clients: not adapted')
  _print_usage(settings, manifest, run, flags.kept_round)
  print(f'\nTable: {path}')


def _print_round(saved: 'saved_models.SavedModels') -> None:
  """Prints of which round the models are, if it was chosen."""
  from tff_bn.programs.results import report

  metric = saved.manifest.get('kept_for')
  if metric is not None:
    best = report.describe_validated(metric)
    print(f'Of round {saved.manifest["round"]}, with the best {best}:')


def _print_some(lines: Iterable[str], number: int, others: str) -> None:
  """Prints the first lines, and how many there are besides."""
  for line in itertools.islice(lines, _MAX_PRINTED_ROWS):
    print(line)
  if number > _MAX_PRINTED_ROWS:
    print(f'… and {number - _MAX_PRINTED_ROWS} more {others}.')


def _print_usage(
    settings: settings_lib.RunSettings,
    manifest: Mapping[str, Any],
    run: pathlib.Path,
    which: Optional[str],
) -> None:
  """Prints the code that predicts with the Keras file of a client."""
  code = keras_files.usage_code(
      run_folder.models_folder(run, which),
      manifest,
      settings.parsed_image_size,
  )
  if code:
    what = 'targets' if manifest['num_classes'] is None else 'classes'
    print(f'To predict the {what} of samples x with such a model:')
    print('\n'.join(f'  {line}' for line in code))


def _export(
    settings: settings_lib.RunSettings,
    run: pathlib.Path,
    folder: pathlib.Path,
    client_ids: Sequence[str],
    which: Optional[str],
) -> None:
  """Writes the models of clients as Keras files into a folder."""
  dependencies.require_tff()
  from tff_bn.programs.runs import run_building
  from tff_bn.training import saved_inputs
  from tff_bn.training import saved_models

  numbers = dict.fromkeys(client_ids, 0)
  with command_line.checking_input():
    saved, model = run_building.load_models(settings, run, which)
    if not saved.client_ids and saved_inputs.CLIENTS not in saved.manifest:
      raise ValueError(
          f'--export_client={parsers.to_text(tuple(client_ids))} has no effect:'
          f' the clients of --run={run} have no own models. All use'
          f' {run / run_folder.MODEL / run_folder.MODEL_FILE}.'
      )
    new = [c for c in client_ids if c not in saved.client_ids]
    # The data need not be there for clients that took part.
    if new:
      data = run_building.split_dataset(settings, settings.load())
      for client_id in new:
        _check_client(client_id, data.client_ids, run)
        numbers[client_id] = data.client_number(client_id)
  _print_round(saved)
  for client_id, number in numbers.items():
    weights = run_building.client_weights(
        settings, saved, model, client_id, number
    )
    path = (
        folder
        / run_folder.EXPORTED
        / f'{saved_models.client_file_stem(client_id)}.keras'
    )
    saved_models.export(
        model,
        weights,
        path,
        saved_inputs.preparation(saved.manifest, client_id),
    )
    note = ''
    if not saved.client_ids:
      note = " (the global model with the client's scaling)"
    elif client_id in new:
      note = ' (took no part in a round, so it uses the global model)'
    print(f'{client_id}{note}: {"; ".join(keras_files.loading_code(path))}')
  _print_usage(settings, saved.manifest, run, which)


def _predict(
    settings: settings_lib.RunSettings,
    run: pathlib.Path,
    folder: pathlib.Path,
    paths: Sequence[str],
    client: Optional[str],
    which: Optional[str],
) -> None:
  """Writes predictions for files, and prints the first ones."""
  dependencies.require_tff()
  from tff_bn.programs.runs import run_building
  from tff_bn.programs.testing import predictions

  with command_line.checking_input():
    saved, model = run_building.load_models(settings, run, which)
    predictions.check_task(saved.manifest['task'], run)
    predictions.check_client(saved, client, run)
    samples = predictions.read(paths, saved, settings.parsed_image_size, client)
  outputs = predictions.predict(saved, model, client, samples)
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / run_folder.PREDICTIONS
  predicted = predictions.write(path, samples, outputs, saved.manifest)
  _print_round(saved)
  lines = (
      f'{sample.file}{sample.row and f", row {sample.row}"}: {text}'
      for sample, text in zip(samples, predicted)
  )
  _print_some(lines, len(samples), 'in the table')
  print(f'\nTable: {path}')


def _check_client(
    client_id: str, known: Sequence[str], run: pathlib.Path
) -> None:
  """Checks that a run has a client."""
  if client_id in known:
    return
  raise ValueError(
      f'--export_client={client_id}: the run has no such client. Its number of'
      f' clients is {len(known)}: {spelling.name_some(known)}.'
      f'{spelling.suggestion(client_id, known, are_given=True)} tff-bn-evaluate'
      f' --run={run} lists all. A client that did not train has no own model:'
      f' use {run / run_folder.MODEL / run_folder.MODEL_FILE}, which'
      f' --dataset=domains:{client_id}=DATASET evaluates on its data.'
  )


PROGRAM = command_line.Program(
    name='tff-bn-evaluate',
    description=(
        'Evaluates the model of a finished run: the global model on the test'
        " set, and on each client's own test data the model that this client"
        ' uses. The data is the data of the run unless flags change it; a'
        ' client that did not train is --dataset=domains:NAME=DATASET.'
        f' {run_folder.EVALUATION} keeps evaluations on other data. With'
        " --export_client, writes clients' models as Keras files instead, and"
        ' with --predict the predictions of a model for files. With --adapt,'
        ' adapts the model to clients that join later, and saves theirs.'
    ),
    examples=(
        'tff-bn-evaluate --run=runs/train',
        'tff-bn-evaluate --run=runs/compare/runs/fedavg-seed0'
        ' --reestimate_statistics',
        'tff-bn-evaluate --run=runs/fedbn --dataset=domains:paris=folder:paris',
        'tff-bn-evaluate --run=runs/fedbn --dataset=domains:paris=folder:paris'
        ' --adapt=batch_norm',
        'tff-bn-evaluate --run=runs/fedbn --export_client=client_3,client_7',
        'tff-bn-evaluate --run=runs/fedbn --client=paris --predict=a.png,b.png',
    ),
    define_flags=define_flags,
    main=main,
)


def run(arguments: Optional[Sequence[str]] = None) -> int:
  """Runs the program; returns its exit code."""
  return command_line.run(PROGRAM, arguments)


if __name__ == '__main__':
  sys.exit(run())
