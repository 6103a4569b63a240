"""What several tests need: the runtime, and small models and datasets.

Fixtures import Keras and TensorFlow, so that the process that starts pytest's
workers need not.
"""

import functools
import gc
import math
import os
import pathlib
import sys
import time

import contexts
import hypothesis
import pytest

# Before TensorFlow, so that it uses oneDNN.
import tff_bn  # noqa: F401

# All tests, and the programs that they start, compute the same bits, whichever
# comes first. Several test processes keep the cores busy.
os.environ.setdefault('TF_NUM_INTRAOP_THREADS', '1')
# At a fork, gRPC would start its threads again in the child, whose files are
# closed then: their message would be among the errors of a tested program.
os.environ.setdefault('GRPC_ENABLE_FORK_SUPPORT', 'false')


# The same examples in every run. `--hypothesis-profile=long` draws others.
hypothesis.settings.register_profile(
    'reproducible', derandomize=True, database=None, deadline=None
)
hypothesis.settings.register_profile(
    'long', max_examples=5000, database=None, deadline=None, print_blob=True
)
hypothesis.settings.load_profile('reproducible')

_START = time.monotonic()

# The type of functions with a cache, such as processes that tests share.
_Cached = type(functools.cache(len))

# Folders of tests whose files take minutes.
_LONG_FOLDERS = frozenset(
    ['algorithms', 'papers', 'programs', 'runtime', 'training']
)


def pytest_addoption(parser):
  parser.addoption(
      '--slow', action='store_true', help='run the tests marked as slow, too'
  )
  parser.addoption(
      '--slow_minutes',
      type=float,
      default=math.inf,
      metavar='N',
      help='begin no slow test later than this many minutes after the start',
  )


def _position(item):
  """Returns when the file of a test runs, relative to others.

  The files with the smallest numbers run first. The last files are short, so
  that no worker waits long for another one.
  """
  # Their processes need most memory, so they run before the process of the
  # tests itself has grown.
  if 'test_smoke_' in item.path.name:
    return 0
  # Its single tests take minutes.
  if item.path.name == 'test_readme_tables.py':
    return 1
  # Some files beside this one run the code of the documentation.
  is_beside = item.path.parent == pathlib.Path(__file__).parent
  if is_beside or _LONG_FOLDERS.intersection(
      part.name for part in item.path.parents
  ):
    return 2
  return 3


def pytest_collection_modifyitems(config, items):
  items.sort(key=_position)
  if config.getoption('--slow'):
    return
  for item in items:
    if item.get_closest_marker('slow'):
      item.add_marker(pytest.mark.skip(reason='slow; run with --slow'))


@pytest.hookimpl(tryfirst=True)  # Before the fixtures of the test.
def pytest_runtest_setup(item):
  minutes = item.config.getoption('--slow_minutes')
  is_late = time.monotonic() - _START > 60 * minutes
  if is_late and item.get_closest_marker('slow'):
    pytest.skip(f'slow, and {minutes:g} minutes were over')


def pytest_collection_finish():
  # The garbage collector need not search the imported modules, nor often: a
  # trace of TensorFlow makes hundreds of thousands of objects.
  gc.collect()
  gc.freeze()
  gc.set_threshold(50_000, 20, 20)


def pytest_sessionfinish():
  """Ends workers of TFF's default context, as at the exit of a program."""
  # pytest collects garbage twice at its end, which takes seconds.
  gc.freeze()
  # pytest's own workers end without Python's exit handlers.
  native = sys.modules.get('tff_bn.runtime.native')
  if native is not None:
    native.end_worker_processes()


@pytest.fixture(autouse=True, scope='module')
def few_collections(request):
  """Lets Python choose when to collect garbage, except in tests about it.

  Programs and benchmarks collect it after each run, which takes seconds where
  many tests have run before. At the end, the caches of the module are emptied.
  """
  if 'gc' in vars(request.module):
    gc.freeze()
    yield
    gc.unfreeze()
  else:
    with pytest.MonkeyPatch.context() as monkeypatch:
      monkeypatch.setattr(gc, 'collect', lambda generation=2: 0)
      yield
  for value in vars(request.module).values():
    if isinstance(value, _Cached):
      value.cache_clear()


@pytest.fixture(autouse=True)
def keep_log_settings(monkeypatch):
  """Programs change them for their process."""
  from absl import logging

  monkeypatch.setenv('TF_CPP_MIN_LOG_LEVEL', '3')
  verbosity = logging.get_verbosity()
  yield
  logging.set_verbosity(verbosity)


@pytest.fixture(scope='session')
def native_context():
  """TFF's own runtime; its worker process ends with the test run."""
  import tensorflow_federated as tff

  from tff_bn import runtime

  before = tff.framework.get_context_stack().current
  with runtime.native_runtime() as context:
    # Other tests use another context.
    tff.framework.set_default_context(before)
    yield context


@pytest.fixture(scope='module')
def in_process_context():
  """The runtime of this process, with two clients at a time."""
  from tff_bn import runtime

  context = runtime.InProcessContext(max_concurrent_clients=2)
  yield context
  context.close()


@pytest.fixture
def native_runtime(native_context):
  """Lets a test's computations run in TFF's own runtime."""
  with contexts.default(native_context) as context:
    yield context


@pytest.fixture
def in_process_runtime(in_process_context):
  """Lets a test's computations run in this process."""
  with contexts.default(in_process_context) as context:
    yield context


@pytest.fixture
def toy():
  """The problem in float64."""
  import toy_problem

  return toy_problem.Toy()


@pytest.fixture
def toy_images():
  """The problem on float32 images, where fused operations are used."""
  import toy_problem

  return toy_problem.Toy('float32', (5, 5, 2))
