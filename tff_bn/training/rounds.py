"""Runs the rounds of both kinds of process, for TFF's training loop."""

from collections.abc import Sequence
import dataclasses
from typing import Any, Optional, Union

from absl import logging
import tensorflow as tf

from tff_bn import runtime
from tff_bn.processes.stateful_process import Process
from tff_bn.processes.stateful_process import StatefulLearningProcess
from tff_bn.training import client_seconds
from tff_bn.training import client_state_store
from tff_bn.training import termination
from tff_bn.training.training_config import TooManyFailedRoundsError

# A client whose update is this many times as large as the median is reported.
_LARGE_NORM_RATIO = 10


@dataclasses.dataclass(frozen=True)
class RoundData:
  """The data of the clients of a round.

  Attributes:
    round_num: The number of the round.
    client_ids: The sampled clients.
    client_numbers: Their positions among all clients.
    datasets: The process's dataset for each client, or one for all together.
  """

  round_num: int
  client_ids: Sequence[str]
  client_numbers: Sequence[int]
  datasets: Sequence[Union[tf.data.Dataset, runtime.ClientDataset]]


def failed_rounds(state: Any) -> int:
  """Counts the last rounds in a row, up to a state, that changed nothing."""
  try:
    return int(state.finalizer['failed_rounds'])
  except (AttributeError, KeyError, TypeError):
    return 0  # The process of another package.


def client_states(
    process: StatefulLearningProcess,
    store: client_state_store.ClientStateStore,
    state: Any,
    client_ids: Sequence[str],
    client_numbers: Sequence[int],
    round_num: Optional[int] = None,
) -> list[Any]:
  """Returns the state of each client, which is initialized if it is new.

  `client_numbers` has the clients' positions among all clients. If `round_num`
  is given, states after later rounds are ignored.
  """
  stored = [store.get(client_id, round_num) for client_id in client_ids]
  if all(client_state is not None for client_state in stored):
    return stored
  initial = process.initialize_client(state)
  return [
      process.personalize(initial, number) if old is None else old
      for number, old in zip(client_numbers, stored, strict=True)
  ]


class IterativeProcess:
  """Either kind of process in the form that TFF's training loop runs.

  After `max_failed_rounds` failed rounds in a row, `next` and `check` raise an
  error.

  Attributes:
    client_seconds: How long the clients took.
  """

  def __init__(
      self,
      process: Process,
      store: Optional[client_state_store.ClientStateStore],
      max_failed_rounds: int,
  ):
    self._process = process
    self._store = store
    self._max_failed_rounds = max_failed_rounds
    self._reported_clients: set[str] = set()
    self.client_seconds = client_seconds.ClientSeconds()

  def initialize(self) -> Any:
    """Returns the server's initial state."""
    return self._process.initialize()

  def next(self, state: Any, data: RoundData) -> tuple[Any, Any]:
    """Runs a round and stores the new states of its clients.

    Returns:
      The server's new state and the metrics.
    """
    # The state may come from a checkpoint of a run that was stopped.
    self.check(state)
    arguments = [list(data.datasets)]
    if self._store is not None:
      arguments.insert(
          0,
          client_states(
              self._process,
              self._store,
              state,
              data.client_ids,
              data.client_numbers,
          ),
      )
    with termination.allowed():
      output = self._process.next(state, *arguments)
    self.client_seconds.add_round(data.client_ids)
    self._report_large_update(output.metrics, data)
    if self._store is not None:
      self._store.put_many(
          data.round_num, dict(zip(data.client_ids, output.client_states))
      )
    return output.state, output.metrics

  def _report_large_update(self, metrics: Any, data: RoundData) -> None:
    """Warns once of each client whose update is far larger than the others'."""
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
        ' as the median update, so it may dominate the mean. Is its data scaled'
        " like the other clients' data? Robust aggregators of the model and of"
        ' the statistics bound its influence.',
        data.round_num,
        client_id,
        data.client_numbers[position],
        ratio,
    )

  def check(self, state: Any) -> None:
    """Raises an error if too many rounds in a row, up to a state, failed."""
    num_failed = failed_rounds(state)
    if num_failed >= self._max_failed_rounds:
      raise TooManyFailedRoundsError(
          f'stopped after round {state.client_work["round_num"]}: in the last'
          f' {num_failed} rounds the loss or the update of every client, or'
          " the server's new model, was not finite. The model is the same as"
          ' before these rounds. A smaller learning rate of the clients or'
          ' clipping gradients may help; max_failed_rounds='
          f'{self._max_failed_rounds} sets the number of such rounds.'
      )
