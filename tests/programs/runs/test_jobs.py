"""Tests for building runs one after another."""

import gc
import pathlib
import re
import types
import warnings
import weakref

from absl import logging
import pytest

from tff_bn import training
from tff_bn.programs import compare
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import repeated_warnings
from tff_bn.programs.runs import jobs
from tff_bn.programs.runs import run_building
from tff_bn.programs.runs import run_data

_FOLDER = pathlib.Path('unused')


def _runs(*arguments):
  defaults = [
      f'--{name}={value}'
      for name, value in dict(model='mlp3', num_clients=4, seeds=0).items()
      if f'--sweep={name}=' not in ' '.join(arguments)
  ]
  flags = command_line.parse(compare.define_flags, [*defaults, *arguments])
  return [run.settings for run in compare.plan(flags).runs]


@pytest.fixture
def counted(monkeypatch):
  """The numbers of things that were built, by function."""
  counts = {}

  def count(owner, name):
    function = getattr(owner, name)

    def counting(*args, **kwargs):
      counts[name] = counts.get(name, 0) + 1
      return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, counting)

  count(run_building, 'build_model')
  count(run_data.DataRecipe, 'split_and_hold_out')
  count(type(_runs()[0]), 'load')
  monkeypatch.setattr(
      run_building,
      'build_process',
      lambda settings, *_: counts.setdefault('processes', []).append(settings),
  )
  return counts


def test_consecutive_runs_share_what_is_equal(counted):
  builder = jobs.Builder()
  for settings in _runs('--algorithms=fedavg,fbn', '--sweep=local_steps=1,2'):
    builder.build(settings, _FOLDER)
  assert counted.pop('processes')
  assert counted == dict(load=1, split_and_hold_out=1, build_model=1)


@pytest.mark.parametrize(
    ('sweep', 'loads', 'splits', 'models'),
    [
        ('dataset=digits,generated:8x8x1:10', 2, 2, 2),
        ('image_size=8x8,4x4', 2, 2, 2),
        ('num_clients=4,5', 1, 2, 2),
        ('split=iid,unbalanced', 1, 2, 2),
        ('model=mlp3,mlp4', 1, 1, 2),
        ('batch_norm_momentum=0.9,0.99', 1, 1, 2),
    ],
)
def test_what_differs_is_built_again(counted, sweep, loads, splits, models):
  builder = jobs.Builder()
  built = [
      builder.build(settings, _FOLDER)
      for settings in _runs('--algorithms=fedavg', f'--sweep={sweep}')
  ]
  assert len(counted.pop('processes')) == 2
  assert counted == dict(
      load=loads, split_and_hold_out=splits, build_model=models
  )
  assert built[0].model is not built[1].model
  assert (built[0].data is built[1].data) == (splits == 1)


def test_domains_of_another_strength_are_loaded_again(counted):
  builder = jobs.Builder()
  images = [
      builder.data(settings).dataset.x_train
      for settings in _runs(
          '--dataset=digits_domains',
          '--split=domains',
          '--num_clients=5',
          '--sweep=domain_strength=0,1',
      )
  ]
  assert counted['load'] == 2
  assert (images[0] != images[-1]).any()


def test_seeds_have_own_splits_and_models(counted):
  builder = jobs.Builder()
  for settings in _runs('--algorithms=fedavg', '--seeds=0,1'):
    builder.build(settings, _FOLDER)
  del counted['processes']
  assert counted == dict(load=1, split_and_hold_out=2, build_model=2)


@pytest.fixture
def warned(monkeypatch):
  """The warnings that absl has logged."""
  texts = []
  monkeypatch.setattr(
      logging, 'warning', lambda text, *args: texts.append(text % args)
  )
  return texts


def _tasks(*arguments, finished=()):
  return [
      jobs.Task(settings, _FOLDER, '', number in finished)
      for number, settings in enumerate(_runs(*arguments))
  ]


def test_check_builds_every_process_once(counted):
  tasks = _tasks(
      '--algorithms=fedavg,fbn',
      '--seeds=0,1,2',
      '--sweep=dataset=digits,generated:8x8x1:10',
      '--sweep=local_steps=1,2',
      finished=[0],
  )
  jobs.check(jobs.Builder(), tasks)
  # The check loads each dataset once, although seeds alternate between them,
  # and then the first one again to build its processes.
  assert counted['load'] == 3
  built = counted['processes']
  # The process of the finished run is built for another seed.
  assert len(built) == 2 * 2 * 2
  assert {(s.algorithm, s.dataset, s.local_steps) for s in built} == {
      (s.algorithm, s.dataset, s.local_steps)
      for s in (task.settings for task in tasks)
  }


def test_check_builds_one_process_for_all_splits(counted):
  tasks = _tasks(
      '--algorithms=fbn',
      '--split=gamma',
      '--sweep=gamma=0,0.1,1',
      '--sweep=num_clients=4,5',
  )
  jobs.check(jobs.Builder(), tasks)
  # The check of the data makes each of the six splits. Building the two
  # processes makes one split for each of them again.
  assert counted['split_and_hold_out'] == 2 * 3 + 2
  assert [s.num_clients for s in counted['processes']] == [4, 5]


@pytest.mark.parametrize(
    'sweep', ['dataset=digits,npz:nope.npz', 'model=mlp3,nomodule:f']
)
def test_check_builds_no_process_if_later_data_or_models_are_wrong(
    counted, sweep
):
  with pytest.raises(ValueError, match='nope.npz|nomodule'):
    jobs.check(
        jobs.Builder(),
        _tasks('--algorithms=fedavg,fbn', f'--sweep={sweep}'),
    )
  assert 'processes' not in counted


def test_check_finds_a_split_that_is_impossible_with_a_later_run():
  tasks = _tasks('--algorithms=single', '--sweep=num_clients=4,4000')
  with pytest.raises(ValueError, match='4000'):
    jobs.check(jobs.Builder(), tasks)


@pytest.mark.parametrize(
    ('varied', 'words'),
    [
        ((), 'digits, 4 clients, --split=classes'),
        (('rounds',), 'digits, 4 clients, --split=classes'),
        (('split',), 'digits'),
        (('num_clients',), 'digits, --split=classes'),
        (('dataset',), '--split=classes'),
    ],
)
def test_describe_data(varied, words):
  (settings,) = _runs('--algorithms=fedavg')
  data = jobs.Builder().data(settings)
  assert jobs.describe_data(settings, data, varied) == words


@pytest.mark.parametrize(
    ('arguments', 'expected'),
    [
        # Clients have 1437 / 4 = 359 or 360 examples.
        (['--batch_size=359'], None),
        (['--batch_size=400', '--local_epochs=1'], None),
        (['--batch_size=400', '--algorithms=centralized'], None),
        (
            ['--batch_size=360'],
            '360 is larger .* of 3 of 4 clients .359 to 359',
        ),
        (
            ['--batch_size=400'],
            '400 is larger .* of 4 of 4 clients .359 to 360',
        ),
        (
            ['--batch_size=1000', '--algorithms=centralized']
            + ['--clients_per_round=2'],
            '1000 is larger .* of 1 of 1 clients .718 to 718',
        ),
        (
            ['--batch_size=400', '--algorithms=centralized']
            + ['--centralized_batch_size=1437'],
            None,
        ),
        (
            ['--algorithms=centralized', '--centralized_batch_size=1438'],
            '1438 is larger .*smaller --centralized_batch_size',
        ),
    ],
)
def test_small_clients_are_warned_of(arguments, expected, warned):
  if '--algorithms=centralized' not in arguments:
    arguments = ['--algorithms=fedavg', *arguments]
  (settings,) = _runs('--split=iid', *arguments)
  job = types.SimpleNamespace(
      settings=settings, data=jobs.Builder().data(settings)
  )
  jobs.warn_of_small_clients(job)
  assert len(warned) == (expected is not None)
  for text in warned:
    assert re.search(f'^--(centralized_)?batch_size={expected}', text)


def test_statistics_without_memory_are_warned_of(warned):
  for arguments in ((), ('--batch_norm_momentum=0.01',)):
    (settings,) = _runs('--algorithms=fbn', *arguments)
    jobs.warn_of_no_memory(settings)
  assert not warned
  (settings,) = _runs('--algorithms=fbn', '--batch_norm_momentum=0')
  jobs.warn_of_no_memory(settings)
  (text,) = warned
  assert text.startswith('--batch_norm_momentum=0 keeps nothing')


class _Job:
  """A run that is built."""

  def __init__(self, settings):
    self.settings = settings
    self.itself = self


class _Builder:
  """Makes objects that refer to themselves, as Keras's models do."""

  def __init__(self):
    self.references = []

  def data(self, settings):
    return types.SimpleNamespace(client_ids=range(settings.num_clients))

  def build(self, settings, folder):
    # The memory of the previous run is free.
    assert not any(reference() for reference in self.references)
    job = _Job(settings)
    self.references.append(weakref.ref(job))
    return job


def test_runs_leave_nothing_behind(monkeypatch, tmp_path):
  tasks = _tasks('--algorithms=fedavg,fbn', '--sweep=local_steps=1,2')
  trained = []
  monkeypatch.setattr(
      jobs, 'train_one', lambda job, hook: trained.append(job.settings)
  )
  builder = _Builder()
  gc.disable()
  try:
    jobs.check(builder, tasks)
    assert jobs.train(builder, tasks) == []
  finally:
    gc.enable()
  assert trained == [task.settings for task in tasks]
  assert len(builder.references) == 8


@pytest.mark.slow
def test_later_collections_leave_out_the_modules(monkeypatch, tmp_path):
  tasks = _tasks('--algorithms=fedavg', '--seeds=0,1')
  monkeypatch.setattr(jobs, 'train_one', lambda job, hook: None)
  builder = _Builder()
  jobs._leave_out_modules.cache_clear()  # As in a new process.
  gc.unfreeze()
  counts = []
  monkeypatch.setattr(
      builder, 'build', lambda *args: counts.append(gc.get_freeze_count())
  )
  jobs.train(builder, tasks)
  before, after = counts
  assert not before
  assert after > 10_000


@pytest.mark.parametrize(
    ('arguments', 'expected'),
    [
        (
            ['--algorithms=fedavg', '--rounds=5', '--local_steps=2']
            + ['--batch_norm_momentum=0.99'],
            '--batch_norm_momentum=0.99 leaves 90 % of the initial .* after 5'
            ' rounds, .* Use a smaller --batch_norm_momentum or more rounds, .*'
            ': tff-bn-evaluate --reestimate_statistics.',
        ),
        # 0.9^7 = 0.48.
        (['--algorithms=fedavg', '--rounds=7', '--local_steps=1'], None),
        (
            ['--algorithms=fedavg', '--rounds=6', '--local_steps=1'],
            '--batch_norm_momentum=0.9 leaves 53 % .*',
        ),
        # Its evaluation computes the statistics again.
        pytest.param(
            ['--algorithms=hbn', '--rounds=1'], None, marks=pytest.mark.slow
        ),
        pytest.param(
            ['--algorithms=fedavg', '--rounds=1', '--normalization=group5'],
            None,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_statistics_that_hardly_move_are_warned_of(
    arguments, expected, monkeypatch, warned, tmp_path
):
  (settings,) = _runs(*arguments)
  job = jobs.Builder().build(settings, tmp_path)

  def train(*args, **kwargs):
    # As `training.train` does, without the names of flags.
    warnings.warn(
        'momentum=0.9 …', training.KeptStatisticsWarning, stacklevel=2
    )
    return types.SimpleNamespace(
        resumed_from=settings.rounds, rows=[dict(round=settings.rounds)]
    )

  monkeypatch.setattr(training, 'train', train)
  # There is no model.
  monkeypatch.setattr(
      jobs.detailed_evaluation, 'evaluate_final_models', lambda *args: ()
  )
  monkeypatch.setattr(jobs.finished, 'add_result', lambda *args: None)
  with warnings.catch_warnings():
    warnings.simplefilter('error', training.KeptStatisticsWarning)
    jobs.train_one(job)
  assert len(warned) == (expected is not None)
  once = repeated_warnings.WarningsOnce()
  for text in warned:
    assert re.fullmatch(expected, text)
    # Many runs of a comparison have the same warning.
    assert once.shows(f'WARNING:absl:{text}')
    assert not once.shows(f'WARNING:absl:{text}')
