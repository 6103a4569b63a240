"""Gives the rows of a run's metrics to a function of the user.

A metrics hook is a function that opens a logger, such as a run of MLflow or of
Weights & Biases, and returns a context manager. Its value is called with each
row of `metrics.csv`:

```
@contextlib.contextmanager
def print_rows(run):
  print('start', run.run_id, run.settings)
  yield lambda row: print(row['round'], row['test_accuracy'])
  print('end')
```

`metrics_hook.json` in the run's folder says which rows each hook has got, so
that a run that was stopped or killed continues without giving a row twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import pathlib
from typing import Any, Optional, TypeVar, Union
import uuid

from absl import logging

from tff_bn.common import checks
from tff_bn.common import files
from tff_bn.training import manifests
from tff_bn.training import run_entries

Row = dict[str, Union[int, float, None]]
_LogRow = Callable[[Row], Any]
_Result = TypeVar('_Result')


@dataclasses.dataclass(frozen=True)
class HookedRun:
  """What a metrics hook is told about a run.

  Attributes:
    run_id: A name that no other run has. It stays the same when the run is
      continued, so that the hook can continue its own.
    folder: The run's folder.
    settings: The run's flags or settings, by name.
    last_round: The round of the last row that the hook has got; `None` before
      the first one.
  """

  run_id: str
  folder: pathlib.Path
  settings: Mapping[str, Any]
  last_round: Optional[int]


# A function that returns a context manager, whose value takes rows.
MetricsHook = Callable[[HookedRun], contextlib.AbstractContextManager[_LogRow]]


class MetricsHookError(RuntimeError):
  """A metrics hook raised an exception."""


class HookedRows:
  """Gives each row to a hook, once."""

  def __init__(
      self,
      hook: Optional[MetricsHook],
      run_dir: pathlib.Path,
      settings: Mapping[str, Any],
  ):
    """Initializes the object, and reads and writes nothing.

    A hook that is no function raises a `TypeError`.
    """
    if hook is not None:
      checks.check_function(
          'metrics_hook', hook, 'takes a run and returns a context manager'
      )
    self._hook = hook
    self._path = run_dir / run_entries.METRICS_HOOK
    self._settings = settings
    self._name = _name(hook)
    self._run_id = ''
    # The rounds of the last rows that hooks have got, by their names.
    self._last_rounds: dict[str, int] = {}
    self._log_row: Optional[_LogRow] = None

  @contextlib.contextmanager
  def open(self) -> Iterator[None]:
    """Opens the hook's context manager for a `with` block.

    If the block raises an error, that one is raised, and an error of the hook
    after it is only logged.
    """
    if self._hook is None:
      yield
      return
    self._read()
    manager = self._call('at the start', self._hook, self._run())
    if not isinstance(manager, contextlib.AbstractContextManager):
      raise MetricsHookError(
          f'The metrics hook {self._name} must return a context manager, such'
          ' as a function with the decorator contextlib.contextmanager does,'
          f' but returned a {type(manager).__name__}.'
      )
    log_row = self._call('at the start', manager.__enter__)
    if not callable(log_row):
      raise MetricsHookError(
          f'The context manager of the metrics hook {self._name} must yield a'
          f' function that takes a row, but yielded {log_row!r}.'
      )
    self._log_row = log_row
    try:
      yield
    except BaseException as error:
      try:
        manager.__exit__(type(error), error, error.__traceback__)
      except BaseException as other:
        if other is not error:
          logging.warning(
              'The metrics hook %s failed at the end: %r', self._name, other
          )
      raise
    self._call('at the end', manager.__exit__, None, None, None)

  def update(self, rows: Sequence[Row]) -> None:
    """Gives the hook the rows that it has not got.

    Args:
      rows: All rows of the run up to now, oldest first.
    """
    if self._log_row is None:
      return
    for row in rows:
      round_num = int(row['round'] or 0)
      before = self._last_rounds.get(self._name)
      if before is not None and round_num <= before:
        continue
      # Written first: if the program is killed now, the row is not given again.
      self._last_rounds[self._name] = round_num
      self._write()
      try:
        self._call(f'in round {round_num}', self._log_row, dict(row))
      except MetricsHookError:
        # The hook gets the row when the run is continued.
        if before is None:
          del self._last_rounds[self._name]
        else:
          self._last_rounds[self._name] = before
        self._write()
        raise

  def _run(self) -> HookedRun:
    return HookedRun(
        self._run_id,
        self._path.parent,
        dict(self._settings),
        self._last_rounds.get(self._name),
    )

  def _call(
      self, when: str, function: Callable[..., _Result], *args: Any
  ) -> _Result:
    try:
      return function(*args)
    except Exception as error:
      raise MetricsHookError(
          f'The metrics hook {self._name} failed {when}:'
          f' {type(error).__name__}: {error}'
      ) from error

  def _read(self) -> None:
    try:
      content = manifests.from_text(self._path, self._path.read_bytes())
      self._run_id = str(content['run_id'])
      self._last_rounds = {
          str(name): int(number)
          for name, number in content['last_rounds'].items()
      }
    except FileNotFoundError:
      self._run_id = uuid.uuid4().hex
      self._write()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise ValueError(
          f'{self._path} is damaged, so it is unknown which rows the metrics'
          ' hook has got. Remove the file to give it all rows again.'
      ) from error

  def _write(self) -> None:
    content = dict(run_id=self._run_id, last_rounds=self._last_rounds)
    files.replace(self._path, manifests.to_text(content))


def _name(hook: Optional[MetricsHook]) -> str:
  """Returns the name of a hook, such as `my_module:log_to_mlflow`."""
  module = getattr(hook, '__module__', type(hook).__module__)
  name = getattr(hook, '__qualname__', type(hook).__qualname__)
  return f'{module}:{name}'
