"""Corrections of the drift of the clients' models during local training.

Clients with different data train their models apart between two exchanges. A
`DriftCorrection` changes a client's loss, its gradients, its update, its weight
at the server, or the server's step; examples are `FedProx`, `Scaffold`, `Moon`,
`FedBs`, `FedNova` and `FedDyn` in `tff_bn.algorithms`. It depends neither on
the treatment of batch normalization nor on the choice of shared variables, so
most builders of `tff_bn.algorithms` accept any correction.
"""

import abc
import collections
from collections.abc import Callable, Mapping, Sequence
import contextlib
from typing import Any, NamedTuple, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights

Tensors = Sequence[tf.Tensor]
# Tensors by name; to be returned as an `OrderedDict`, as TFF needs it.
State = Mapping[str, Any]


class BoundCorrection:
  """A correction for one model, used by local training and the server.

  Subclasses override the methods that they need. The methods of this class
  correct nothing. Arguments with the same name mean the same in all of them:

  *   `before`, `after`: The values of the model's variables before and after
      the client's training, in their order.
  *   `server_state`: The server's state of the correction; for a client, the
      part that `state_for_clients` returns.
  *   `client_state`: The client's state before the round, with its local
      variables.
  *   `loss`: The mean loss of the client's examples in the round; NaN if it is
      dropped or has no data.
  *   `total`: The sums over all clients of `sums`, `counts`, `num_clients` (the
      clients in the round) and `num_participants` (the clients with weight).

  Attributes:
    variables: TensorFlow variables outside the model that training steps read.
      A client sets them at the start of a round, see `start`.
    collecting: The subset of `variables` whose last values `finish` needs.
  """

  variables: Sequence[tf.Variable] = ()
  collecting: Sequence[tf.Variable] = ()

  # In the computation of a training step.

  def watching(self) -> contextlib.AbstractContextManager[None]:
    """Returns a context that wraps the model's call in a training step."""
    return contextlib.nullcontext()

  def penalty(self, x: Any) -> Optional[tf.Tensor]:
    """Computes a term that is added to the loss of a batch.

    Args:
      x: The model's input.

    Returns:
      A float scalar, or `None`. The loss in the metrics does not include it.
    """
    del x
    return None

  def correct(
      self, gradients: tuple[tf.Tensor, ...], learning_rate: Optional[Any]
  ) -> tuple[tf.Tensor, ...]:
    """Corrects the gradients just before the optimizer's step.

    Args:
      gradients: The gradients of the trainable variables, after clipping and
        weight decay.
      learning_rate: The step's learning rate; `None` if the optimizer has none.

    Returns:
      The corrected gradients.
    """
    del learning_rate
    return gradients

  # In the computations of a client, before and after its training.

  def initial_client_state(self, values: Tensors) -> State:
    """Returns the initial state of a new client.

    Args:
      values: The values of the model's variables that the client starts with.

    Returns:
      Tensors by name. The names must differ from those of model variables.
    """
    del values
    return collections.OrderedDict()

  def start(
      self, before: Tensors, server_state: State, client_state: State
  ) -> Tensors:
    """Returns the value of each of `variables` at the start of a round."""
    del before, server_state, client_state
    return ()

  def finish(
      self,
      started: Tensors,
      before: Tensors,
      after: Tensors,
      collected: Tensors,
      client_state: State,
  ) -> tuple[State, State]:
    """Returns a client's new state and additional update after its training.

    The result is ignored for a client that is dropped or has no data: it keeps
    its old state and sends zeros.

    Args:
      started: What `start` returned.
      before: See above.
      after: See above.
      collected: The last values of `collecting`.
      client_state: See above.

    Returns:
      The client's new state, as in `initial_client_state`, and additional parts
      of its update, see `tff_bn.aggregators.model_update`. A part `trainable`
      replaces the differences of the shared trainable variables.
    """
    del started, before, after, collected, client_state
    return collections.OrderedDict(), collections.OrderedDict()

  def client_weight(
      self, server_state: State, weight: tf.Tensor, loss: tf.Tensor
  ) -> tf.Tensor:
    """Returns a client's weight in the mean over the clients, a float32 scalar.

    `weight` is the weight without correction.
    """
    del server_state, loss
    return weight

  def sums(self, loss: tf.Tensor) -> State:
    """Returns the client's terms, by name, of sums that the server receives."""
    del loss
    return collections.OrderedDict()

  def counts(
      self, server_state: State, client_state: State, num_steps: tf.Tensor
  ) -> State:
    """Returns further terms of sums, by name, that the server receives.

    `num_steps` is the number of steps that the client made, an int64 scalar; 0
    if it is dropped or has no data.
    """
    del server_state, client_state, num_steps
    return collections.OrderedDict()

  # In the computations of the server.

  def initial_server_state(self) -> State:
    """Returns the initial server state."""
    return collections.OrderedDict()

  def state_for_clients(self, server_state: State) -> State:
    """Returns the part of the server's state that is sent to clients."""
    return server_state

  def server_update(self, server_state: State, aggregated: State) -> State:
    """Returns changed parts of the aggregated update, by name.

    The server's step uses them in place of the aggregated ones. A changed
    `trainable` is the gradient that the server optimizer gets.

    Args:
      server_state: The state before the round.
      aggregated: The aggregated updates, with the parts that `finish` returned,
        `num_participants` (the clients with weight) and `num_dropped`.
    """
    del server_state, aggregated
    return collections.OrderedDict()

  def next_server_state(
      self,
      server_state: State,
      total: State,
      aggregated: State,
      learning_rate: Optional[tf.Tensor],
  ) -> State:
    """Returns the server's state after a round.

    Args:
      server_state: The state before the round.
      total: See above.
      aggregated: The aggregated updates, with the parts that `finish` returned,
        and the shared weights before and after the round, `weights_before` and
        `weights_after`.
      learning_rate: The learning rate of the clients' first step in the round;
        `None` if the optimizer has none.
    """
    del total, aggregated, learning_rate
    return collections.OrderedDict(server_state)

  def metrics(self, server_state: State, total: State) -> State:
    """Returns scalars by name, the correction's metrics of a round.

    `server_state` is the state after the round.
    """
    del server_state, total
    return collections.OrderedDict()


class RoundVariants(NamedTuple):
  """Two variants of a correction, see `tff_bn.processes.short_rounds`.

  Attributes:
    short: The correction with fewer messages.
    full: The correction with all messages.
    combine: Builds the process that chooses between the rounds of two
      processes, with the short and with the full correction.
  """

  short: 'DriftCorrection'
  full: 'DriftCorrection'
  combine: Callable[[Any, Any], Any]


class DriftCorrection(abc.ABC):
  """A correction of the clients' drift, for any model."""

  def round_variants(self) -> Optional[RoundVariants]:
    """Returns variants for a server that takes the mean of the clients' models.

    Returns:
      Two corrections with the same results and the same types of states, or
      `None` if there is only one.
    """
    return None

  @abc.abstractmethod
  def bind(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      client_optimizer: tff.learning.optimizers.Optimizer,
  ) -> BoundCorrection:
    """Binds the correction to a model.

    Args:
      model: The model.
      weights: The shared variables. Only these are corrected, because local
        variables cannot drift apart.
      client_optimizer: The optimizer of local training.

    Returns:
      The bound correction.

    Raises:
      ValueError: If the correction cannot be applied to them.
    """


def num_all_clients(
    name: str, num_clients: Optional[int], in_round: tf.Tensor
) -> tf.Tensor:
  """Returns the number of all clients, at least as many as are in a round.

  Args:
    name: The name of the correction, for the error in a round with more.
    num_clients: The number of all clients. `None`: those of the round.
    in_round: The number of clients in the round.
  """
  if num_clients is None:
    return in_round
  check = tf.debugging.assert_less_equal(
      in_round,
      num_clients,
      message=(
          f'{name} got num_clients={num_clients}, but there are more clients in'
          ' a round.'
      ),
  )
  with tf.control_dependencies([check]):
    return tf.constant(num_clients)


def check_shares(
    model: BatchNormModel, weights: SharedWeights, name: str
) -> None:
  """Raises a `ValueError` that names the correction if nothing is shared.

  Without a shared trainable variable, there is nothing to correct.
  """
  if not weights.trainable:
    raise ValueError(
        f'{name} keeps shared variables from drifting apart, but no'
        f' trainable variable of the model {model.keras_model.name!r} is'
        ' shared.'
    )
