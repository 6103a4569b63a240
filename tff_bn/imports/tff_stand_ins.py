"""Lets TensorFlow Federated be imported with today's TensorFlow and Python.

TensorFlow Federated 0.87 imports the following modules, although it needs them
for a few functions at most. With today's TensorFlow they can't be imported:

- Estimators, for `tensorflow_privacy`. TensorFlow dropped them after 2.15.
- `tensorflow_model_optimization`, which imports Keras 2. TensorFlow Federated
  uses only its tensor encodings, which don't need Keras.
- `tensorflow_probability`, for the noise of the distributed discrete Gaussian
  mechanism. It needs Keras 2, too.
- `vizier`, a client of a hyperparameter tuning service.
- `jax.lib.xla_client`, for `tff.jax`. JAX dropped it.

While TensorFlow Federated is being imported, stand-ins replace the modules that
can't be imported. Calling anything from a stand-in raises an `ImportError` that
says what to install.
"""

import atexit
from collections.abc import Iterator, Sequence
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, NoReturn, Optional
import weakref

from tff_bn.common import garbage

_TFF = 'tensorflow_federated'
# The process name of the workers of TFF's own runtime.
WORKER_NAME = 'worker_binary'
_ALWAYS_MISSING = (
    'tensorflow_estimator',
    'tensorflow_privacy.privacy.estimators',
    # The stand-in's finder is asked only if JAX lacks this module.
    'jax.lib.xla_client',
)
_ENCODINGS = 'tensorflow_model_optimization'
# Importing the whole of `tensorflow_model_optimization` needs these.
_NEEDED_BY_ENCODINGS = ('tf_keras', 'distutils')
# These are imported for real if all modules named here are installed.
_OPTIONAL = {
    'tensorflow_probability': ('tensorflow_probability', 'tf_keras'),
    'vizier': ('vizier',),
}

_REASONS = {
    'tensorflow_estimator': 'TensorFlow has no estimators since 2.16.',
    'jax': 'Only older versions of JAX have it.',
    'tensorflow_privacy': (
        'It needs estimators, which TensorFlow does not have since 2.16.'
    ),
    _ENCODINGS: (
        'It needs Keras 2; only its tensor encodings, which TensorFlow'
        ' Federated uses, were imported. To use the rest, install tf_keras and'
        ' setuptools.'
    ),
    'tensorflow_probability': (
        'It or tf_keras is not installed: pip install tensorflow-probability'
        ' tf_keras.'
    ),
    'vizier': 'It is not installed: pip install google-vizier.',
}


def find_spec(name: str) -> Optional[importlib.machinery.ModuleSpec]:
  """Returns the spec of TensorFlow Federated, to be loaded with stand-ins.

  It is `None` if there is no module of this name.
  """
  spec = importlib.machinery.PathFinder.find_spec(name)
  if spec is not None and spec.loader is not None:
    spec.loader = _Loader(spec.loader)
  return spec


class _Loader(importlib.abc.Loader):
  """Runs TensorFlow Federated's own loader while stand-ins are installed."""

  def __init__(self, loader: importlib.abc.Loader):
    self._loader = loader

  def create_module(
      self, spec: importlib.machinery.ModuleSpec
  ) -> Optional[types.ModuleType]:
    """See the base class."""
    return self._loader.create_module(spec)

  def exec_module(self, module: types.ModuleType) -> None:
    """See the base class."""
    # Other code must see an ordinary module with its ordinary loader.
    module.__loader__ = self._loader
    if module.__spec__ is not None:
      module.__spec__.loader = self._loader
    # The import makes half a million objects, and nearly all of them stay.
    with garbage.collected_rarely(), _answering():
      self._loader.exec_module(module)


@contextlib.contextmanager
def _answering() -> Iterator[None]:
  """Installs the stand-ins for a `with` block."""
  if not _is_installed('distutils'):
    # `tensorflow_privacy` imports it. Python 3.12 dropped it; setuptools
    # provides it, at Python's start-up or when it is imported.
    with contextlib.suppress(ImportError):
      importlib.import_module('setuptools')
  finder = _StandInFinder()
  sys.meta_path.insert(0, finder)
  try:
    yield
  finally:
    sys.meta_path.remove(finder)
    # Other code must not take the stand-ins for installed modules.
    for name in finder.names:
      stand_in = sys.modules.pop(name, None)
      parent, _, child = name.rpartition('.')
      if vars(sys.modules.get(parent, finder)).get(child) is stand_in:
        delattr(sys.modules[parent], child)
  _remember_stubs()
  atexit.register(_end_default_context)


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finds stand-ins for modules that can't be imported."""

  def __init__(self):
    self.names: list[str] = []  # Of the stand-ins imported so far.
    self._missing = list(_ALWAYS_MISSING) + [
        name
        for name, needed in _OPTIONAL.items()
        if not all(map(_is_installed, needed))
    ]
    self._without_keras = not all(map(_is_installed, _NEEDED_BY_ENCODINGS))

  def find_spec(
      self,
      name: str,
      path: Optional[Sequence[str]],
      target: Optional[types.ModuleType] = None,
  ) -> Optional[importlib.machinery.ModuleSpec]:
    """See the base class."""
    if name == _ENCODINGS and self._without_keras:
      real = importlib.machinery.PathFinder.find_spec(name, path, target)
      if real is None:
        return None
      spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
      spec.submodule_search_locations = real.submodule_search_locations
      return spec
    if not any(name == m or name.startswith(f'{m}.') for m in self._missing):
      return None
    self.names.append(name)
    return importlib.machinery.ModuleSpec(name, self, is_package=True)

  def create_module(
      self, spec: importlib.machinery.ModuleSpec
  ) -> types.ModuleType:
    """See the base class."""
    return _StandIn(spec.name)

  def exec_module(self, module: types.ModuleType) -> None:
    """See the base class."""


class _StandIn(types.ModuleType):
  """A module whose names can appear in annotations, but can't be called."""

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):
      raise AttributeError(name)
    return _Missing(name, (), {'__module__': self.__name__})


class _Missing(type):
  """The metaclass of a stand-in's names: classes that can't be called."""

  def __getattr__(cls, name: str) -> Any:
    if name.startswith('__'):
      raise AttributeError(name)
    return _Missing(
        f'{cls.__name__}.{name}', (), {'__module__': cls.__module__}
    )

  def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
    del args, kwargs
    package = cls.__module__.partition('.')[0]
    raise ImportError(
        f'{cls.__module__}.{cls.__name__} is missing. {_REASONS[package]}'
    )


def _is_installed(name: str) -> bool:
  return name in sys.modules or importlib.util.find_spec(name) is not None


# TensorFlow Federated's connections to workers.
_stubs: weakref.WeakSet[Any] = weakref.WeakSet()


def _remember_stubs() -> None:
  """Makes new connections to workers add themselves to `_stubs`."""
  stub_class = importlib.import_module(
      f'{_TFF}.python.core.impl.executors.remote_executor_grpc_stub'
  ).RemoteExecutorGrpcStub
  initialize = stub_class.__init__

  # Finding the stubs with `gc` when Python exits causes a segmentation fault
  # after tracing some large models.
  @functools.wraps(initialize)
  def initialize_and_remember(self: Any, *args: Any, **kwargs: Any) -> None:
    initialize(self, *args, **kwargs)
    _stubs.add(self)

  stub_class.__init__ = initialize_and_remember


def stop_watching_workers() -> None:
  """Stops watching the connections to workers.

  Call this when Python exits: when a worker ends, gRPC would start a thread,
  which prints an error from Python 3.12 on.
  """
  for stub in _stubs:
    # If TFF renames these private members, the error is printed, no more.
    with contextlib.suppress(AttributeError):
      stub._channel._unsubscribe_all()


def kill_workers() -> list[Any]:
  """Kills this process's workers and returns their `psutil.Process`es.

  TensorFlow Federated sends them a SIGINT and waits. If a script started the
  program in the background, the workers ignore SIGINT and never end.
  """
  psutil = importlib.import_module('psutil')
  killed = []
  for process in psutil.Process().children():
    with contextlib.suppress(psutil.Error):
      if process.name() == WORKER_NAME:
        process.kill()
        killed.append(process)
  return killed


def _end_default_context() -> None:
  """Ends TensorFlow Federated's default context and its worker process.

  Otherwise the context would end after the modules that it uses, print an error
  and leave the worker running.
  """
  stop_watching_workers()
  kill_workers()
  context_stack = f'{_TFF}.python.core.impl.context_stack'
  stack = importlib.import_module(f'{context_stack}.context_stack_impl')
  no_context = importlib.import_module(f'{context_stack}.runtime_error_context')
  stack.context_stack.set_default_context(
      no_context.create_runtime_error_context()
  )
