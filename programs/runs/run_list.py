"""What `tff-bn-compare --list` prints: the runs, and the remaining time."""

from collections.abc import Sequence
import dataclasses
import pathlib
import statistics

from tff_bn.programs.plan import comparison as comparison_lib
from tff_bn.programs.runs import run_folder
from tff_bn.programs.runs import run_timing

_STATES = tuple(reversed(run_folder.State))


@dataclasses.dataclass(frozen=True)
class ListedRun:
  """A run, the number of its rounds that are saved, and the time of a round."""

  run: comparison_lib.Run
  state: run_folder.State
  rounds: int
  seconds_per_round: float | None

  @property
  def remaining_rounds(self) -> int:
    """The number of rounds that are not yet trained."""
    return self.run.settings.rounds - self.rounds


def look(
    run: comparison_lib.Run, folder: pathlib.Path, state: run_folder.State
) -> ListedRun:
  """Finds out how many rounds of a run are trained, and how long they took.

  Args:
    run: The run.
    folder: Its folder, which need not exist.
    state: How far it is, see `run_folder.check`.
  """
  timing = run_timing.read(folder)
  rounds = {
      run_folder.State.NEW: 0,
      run_folder.State.FINISHED: run.settings.rounds,
  }.get(state, min(run_folder.saved_round(folder), run.settings.rounds))
  seconds = timing.seconds / timing.rounds if timing else None
  return ListedRun(run, state, rounds, seconds)


def remaining_seconds(runs: Sequence[ListedRun], jobs: int) -> float | None:
  """Estimates how long the remaining rounds take, with this many jobs.

  A round takes the mean time of the measured runs with the same algorithm, or
  of all. Returns None if no run has measured its time.
  """
  measured: dict[str, list[float]] = {}
  for listed in runs:
    if listed.seconds_per_round is not None:
      measured.setdefault(listed.run.settings.algorithm, []).append(
          listed.seconds_per_round
      )
  if not measured:
    return None
  all_seconds = [seconds for values in measured.values() for seconds in values]
  unfinished = [listed for listed in runs if listed.remaining_rounds]
  total = sum(
      listed.remaining_rounds
      * statistics.fmean(
          measured.get(listed.run.settings.algorithm, all_seconds)
      )
      for listed in unfinished
  )
  return total / max(1, min(jobs, len(unfinished)))


def text(runs: Sequence[ListedRun], jobs: int) -> str:
  """Returns a line for each run, the number of runs, and the estimate."""
  lines = []
  for listed in runs:
    line = f'{listed.state:8}  {listed.run.title}'
    if listed.state == run_folder.State.BEGUN:
      line += f'  ({listed.rounds} of {listed.run.settings.rounds} rounds)'
    lines.append(line)
  states = [listed.state for listed in runs]
  counts = [f'{states.count(state)} {state}' for state in _STATES]
  lines.append(f'{len(runs)} runs: {", ".join(counts)}.')
  if set(states) - {'finished'}:
    seconds = remaining_seconds(runs, jobs)
    if seconds is None:
      lines.append('The time is unknown until a first run is finished.')
    else:
      lines.append(
          f'About {_duration(seconds)} with --jobs={jobs}, estimated from the'
          ' finished runs.'
      )
  return '\n'.join(lines)


def _duration(seconds: float) -> str:
  """Writes a duration in the largest unit that makes it at least 2."""
  for unit, length in (('days', 86400), ('hours', 3600), ('minutes', 60)):
    if seconds >= 2 * length:
      return f'{seconds / length:.1f} {unit}'
  return f'{seconds:.0f} seconds'
