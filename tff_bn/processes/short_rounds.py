"""Rounds with fewer messages, where these give the same results.

Some corrections of the clients' drift can do without a part of their messages,
but not in every round, and whether the result of such a short round is right is
known only after it. TFF has no conditionals between federated operations, so
there is a computation for each kind of round, and `ShortRounds` chooses. A
process has short rounds if the state of its drift correction at the server,
`client_work['correction']`, has these entries:

*   `next_is_short`: whether the next round may be a short one.
*   `is_exact`: whether the result of the last round is right. A short round for
    which it is not is repeated as a full one.

Its metrics in a round have:

*   `full_rounds`: the number of full rounds so far.
*   `repeated_rounds`: the number of them that repeated a short one.
"""

from typing import Any, Optional

import tensorflow_federated as tff
from typing_extensions import override

from tff_bn.processes import checked_round
from tff_bn.processes import stateful_process
from tff_bn.processes.stateful_process import Process


class ShortRounds(tff.Computation):
  """Runs a short round if possible, else a full one.

  It needs states with values, so it cannot be part of another computation.

  Attributes:
    short: The computation of a short round.
    full: The computation of a full round.
    num_clients: The number of clients that a short round must have; `None` if
      it may have any number.
  """

  def __init__(
      self,
      short: tff.Computation,
      full: tff.Computation,
      num_clients: Optional[int],
  ):
    """Checks that both computations have the same type."""
    if not short.type_signature.is_equivalent_to(full.type_signature):
      raise TypeError(
          'A short round must have the type of a full round,'
          f' {full.type_signature}, but has {short.type_signature}.'
      )
    self.short = short
    self.full = full
    self.num_clients = num_clients

  @property
  @override
  def type_signature(self) -> tff.FunctionType:
    """The type of both computations."""
    return self.full.type_signature

  def may_be_short(self, num_clients: int) -> bool:
    """Whether a round with this number of clients may be short."""
    return self.num_clients in (None, num_clients)

  @override
  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs a round.

    Raises:
      TypeError: If there are other arguments, or they have no values, such as
        while another computation is traced.
    """
    parameter = self.type_signature.parameter
    names = [name for name, _ in tff.structure.to_elements(parameter)]
    given = {**dict(zip(names, args)), **kwargs}
    state: Any = given.get(names[0])
    client_states: Any = given.get(names[1])
    checked_round.check_state(state)
    try:
      next_is_short = bool(state.client_work['correction']['next_is_short'])
      num_clients = len(client_states)
    except (AttributeError, KeyError, TypeError) as error:
      raise TypeError(
          'The next of a process with short rounds takes the state of the'
          ' server and a list of client states, with values, but got a'
          f' {type(state).__name__} and a {type(client_states).__name__}. It'
          ' cannot be called inside another computation.'
      ) from error
    if next_is_short and self.may_be_short(num_clients):
      output = self.short(*args, **kwargs)
      if output.state.client_work['correction']['is_exact']:
        return output
    return self.full(*args, **kwargs)

  @override
  def __hash__(self) -> int:
    return hash((self.short, self.full))


def build_process(
    short: Process,
    full: Process,
    num_clients: Optional[int],
) -> Process:
  """Builds a process whose `next` is a `ShortRounds`.

  Args:
    short: The process with short rounds.
    full: The process with full rounds, of the same types.
    num_clients: See `ShortRounds`.
  """
  return stateful_process.with_next(
      full, ShortRounds(short.next, full.next, num_clients)
  )
