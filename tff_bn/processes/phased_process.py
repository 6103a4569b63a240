"""A learning process that changes its algorithm at given rounds.

TFF has no conditionals between federated operations: a computation with the
exchanges of two algorithms always makes both. So each phase has its own
computation, and `PhasedComputation` chooses one by the number of the round,
which is a part of the state.
"""

from collections.abc import Sequence
import operator
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow_federated as tff
from typing_extensions import override

from tff_bn.processes import checked_round
from tff_bn.processes import stateful_process
from tff_bn.processes.stateful_process import Process


class Phase(NamedTuple):
  """A phase of the training.

  Attributes:
    num_rounds: The number of rounds; `None` for a last phase that does not end.
    computation: The computation of a round.
  """

  num_rounds: Optional[int]
  computation: tff.Computation


class PhasedComputation(tff.Computation):
  """Runs the `next` of several algorithms, each for a number of rounds.

  If the last phase ends, the first one follows it, and so on.

  It chooses by the number of finished rounds in the state,
  `state.client_work['round_num']`, so it needs a state with values and cannot
  be part of another computation.

  Attributes:
    phases: The phases.
  """

  def __init__(self, phases: Sequence[Phase]):
    """Initializes the computation; see `build_phased_process` for checks."""
    self.phases = tuple(phases)

  @property
  @override
  def type_signature(self) -> tff.FunctionType:
    """The type of all phases' computations."""
    return self.phases[0].computation.type_signature

  def phase_after(self, round_num: int) -> Phase:
    """Returns the phase of the round after `round_num` finished rounds."""
    counts = self.rounds_of_phases(round_num)
    next_counts = self.rounds_of_phases(round_num + 1)
    changed = [after > before for before, after in zip(counts, next_counts)]
    return self.phases[changed.index(True)]

  def rounds_of_phases(self, num_rounds: int) -> list[int]:
    """Returns how many of the first `num_rounds` rounds each phase has."""
    lengths = [phase.num_rounds for phase in self.phases]
    repetitions, rest = 0, num_rounds
    if None not in lengths:
      repetitions, rest = divmod(num_rounds, sum(filter(None, lengths)))
    counts = []
    for length in lengths:
      count = rest if length is None else min(rest, length)
      rest -= count
      counts.append(count + repetitions * (length or 0))
    return counts

  @override
  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs a round of the state's phase.

    Raises:
      TypeError: If the state has no number of finished rounds, such as while
        another computation is traced.
    """
    state_name, _ = tff.structure.to_elements(self.type_signature.parameter)[0]
    state: Any = args[0] if args else kwargs.get(state_name)
    checked_round.check_state(state)
    try:
      round_num = operator.index(state.client_work['round_num'])
    except (AttributeError, KeyError, TypeError) as error:
      raise TypeError(
          "The next of a phased process chooses its phase by the state's"
          " client_work['round_num'], but got a"
          f' {type(state).__name__} without this number. It cannot be called'
          ' inside another computation or with a state that has no values yet.'
      ) from error
    return self.phase_after(round_num).computation(*args, **kwargs)

  @override
  def __hash__(self) -> int:
    return hash(self.phases)


def phases_of(process: Process) -> PhasedComputation:
  """Returns the phases of a process; one without an end if it has none."""
  if isinstance(process.next, PhasedComputation):
    return process.next
  return PhasedComputation([Phase(None, process.next)])


def build_phased_process(
    phases: Sequence[tuple[Optional[int], Process]],
) -> Process:
  """Builds a process that runs several algorithms one after the other.

  If the last phase ends, the first one follows it, and so on.

  Each algorithm continues with the states of the one before. The first
  algorithm initializes states, personalizes clients, and gets and sets model
  weights and hyperparameters.

  Args:
    phases: For each algorithm the number of its rounds, and its process. The
      number of the last one may be `None`: it does not end. The processes must
      have the same types, and a state with the number of finished rounds,
      `client_work['round_num']`, as all processes of `tff_bn.algorithms` have.

  Returns:
    The process; its `next` is a `PhasedComputation`.

  Raises:
    TypeError: If the processes' types differ, or the state has no such number.
    ValueError: If there are no phases, a number of rounds is less than 1, or
      one before the last is `None`.
  """
  if not phases:
    raise ValueError('phases is empty; give at least one process.')
  num_rounds = [n for n, _ in phases]
  *first_ones, last_one = num_rounds
  if None in first_ones or any(
      n is not None and n < 1 for n in (*first_ones, last_one)
  ):
    raise ValueError(
        f'phases have the numbers of rounds {num_rounds}; each must be at least'
        ' 1, and only the last one may be None (no end).'
    )
  processes = [process for _, process in phases]
  first = processes[0]
  _check_state_type(_types(first)['state'].member)
  for number, process in enumerate(processes[1:], start=2):
    types, expected_types = _types(process), _types(first)
    for name in {**expected_types, **types}:
      type_spec, expected = types.get(name), expected_types.get(name)
      if (
          type_spec is None
          or expected is None
          or not type_spec.is_equivalent_to(expected)
      ):
        raise TypeError(
            f'The {name} of phase {number} must have the same type as in phase'
            f' 1, {expected}, but has {type_spec}.'
        )
  return stateful_process.with_next(
      first, PhasedComputation([Phase(n, p.next) for n, p in phases])
  )


def _check_state_type(state_type: tff.Type) -> None:
  try:
    round_num_type = state_type['client_work']['round_num']
  except (AttributeError, TypeError):
    round_num_type = None
  if (
      not isinstance(round_num_type, tff.TensorType)
      or round_num_type.shape != ()
      or not np.issubdtype(round_num_type.dtype, np.integer)
  ):
    raise TypeError(
        'The state of a process with phases must have the number of finished'
        " rounds, an integer client_work['round_num'], but is of type"
        f' {state_type}.'
    )


def _types(process: Process) -> dict[str, tff.Type]:
  """Returns the types of states, client data and metrics."""
  signature = process.next.type_signature
  state_type, *client_state_types, data_type = signature.parameter
  types = {'state': state_type}
  for type_spec in client_state_types:
    types['client state'] = type_spec
  return {
      **types,
      'client data': data_type,
      'metrics': signature.result.metrics,
  }
