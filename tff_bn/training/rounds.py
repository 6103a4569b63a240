"""Both kinds of process, round by round, for TFF's training loop."""

from collections.abc import Sequence
import dataclasses
from typing import Any, Optional, Union

from absl import logging
import tensorflow as tf

from tff_bn import runtime
from tff_bn.processes.stateful_process import Process
from tff_bn.training import client_state_store
from tff_bn.training import termination
from tff_bn.training.training_config import TooManyFailedRoundsError

# A client whose update is this many times as large as the median is reported.
_LARGE_NORM_RATIO = 10


@dataclasses.dataclass(frozen=True)
class RoundData:
  """What the clients of a round train on.

  Attributes:
    round_num: The number of the round.
    client_ids: The sampled clients.
    client_numbers: Which clients of all they are.
    datasets: What the process gets for each of them, or for all together.
  """

  round_num: int
  client_ids: Sequence[str]
  client_numbers: Sequence[int]
  datasets: Sequence[Union[tf.data.Dataset, runtime.ClientDataset]]


def failed_rounds(state: Any) -> int:
  """Counts the rounds in a row, up to a state, that changed nothing.

  Args:
    state: The state of a process; of another package's, it counts none.

  Returns:
    The number.
  """
  try:
    return int(state.finalizer['failed_rounds'])
  except (AttributeError, KeyError, TypeError):
    return 0  # The process of another package.


class IterativeProcess:
  """Either kind of process in the form that TFF's training loop runs."""

  def __init__(
      self,
      process: Process,
      store: Optional[client_state_store.ClientStateStore],
      max_failed_rounds: int,
  ):
    """Initializes the process.

    Args:
      process: The process.
      store: What its clients keep; `None` if they keep nothing.
      max_failed_rounds: After this number of failed rounds in a row `next` and
        `check` raise an error.
    """
    self._process = process
    self._store = store
    self._max_failed_rounds = max_failed_rounds
    self._reported_clients: set[str] = set()

  def initialize(self) -> Any:
    """Returns the server's initial state."""
    return self._process.initialize()

  def next(self, state: Any, data: RoundData) -> tuple[Any, Any]:
    """Runs a round, and stores the new states of its clients.

    Args:
      state: The server's state.
      data: What the clients train on.

    Returns:
      The server's new state, and the metrics.

    Raises:
      TooManyFailedRoundsError: See `check`.
    """
    # Of a state that was loaded, too: such a run stays stopped.
    self.check(state)
    if self._store is None:
      with termination.allowed():
        output = self._process.next(state, list(data.datasets))
      self._report_large_update(output.metrics, data)
      return output.state, output.metrics
    client_states = [self._store.get(c) for c in data.client_ids]
    if any(client_state is None for client_state in client_states):
      initial = self._process.initialize_client(state)
      client_states = [
          self._process.personalize(initial, number) if c is None else c
          for number, c in zip(data.client_numbers, client_states, strict=True)
      ]
    with termination.allowed():
      output = self._process.next(state, client_states, list(data.datasets))
    self._report_large_update(output.metrics, data)
    self._store.put_many(
        data.round_num, dict(zip(data.client_ids, output.client_states))
    )
    return output.state, output.metrics

  def _report_large_update(self, metrics: Any, data: RoundData) -> None:
    """Says which client's update is far larger than the others', once each."""
    try:
      ratio = metrics['client_work']['max_update_norm_ratio']
      position = metrics['client_work']['max_update_norm_client']
    except (KeyError, TypeError):
      return  # The process of another package.
    if not ratio > _LARGE_NORM_RATIO:
      return
    client_id = data.client_ids[position]
    if client_id in self._reported_clients:
      return
    self._reported_clients.add(client_id)
    logging.warning(
        'Round %d: the update of client %s (number %d) is %.3g times as large'
        ' as the median update. It may decide the mean by itself; is its data'
        ' scaled as that of the others? Robust aggregators of the'
        ' model and of the statistics bound its influence.',
        data.round_num,
        client_id,
        data.client_numbers[position],
        ratio,
    )

  def check(self, state: Any) -> None:
    """Checks that not too many rounds in a row have failed.

    Args:
      state: The server's state.

    Raises:
      TooManyFailedRoundsError: If too many have failed.
    """
    num_failed = failed_rounds(state)
    if num_failed >= self._max_failed_rounds:
      raise TooManyFailedRoundsError(
          f'stopped after round {state.client_work["round_num"]}: in the last'
          f' {num_failed} rounds no client was left, because the loss or the'
          " update of every client was not finite, or the server's new model"
          ' was not finite. The model is as it was before. A smaller'
          ' learning rate of the clients, or clipping gradients, may help;'
          f' max_failed_rounds={self._max_failed_rounds} is the number of such'
          ' rounds that is allowed.'
      )
