"""What local training does against the drift of the clients' models.

Clients with different data pull their models apart between two exchanges. A
`DriftCorrection` changes what a client minimizes, or its gradients, or what it
counts for at the server: see `tff_bn.algorithms.FedProx`, `Scaffold`, `Moon`
and `FedBs`. It has no part in what is done with batch normalization, nor in
which variables are shared, so it goes with every builder of
`tff_bn.algorithms` for which it makes sense.
"""

import abc
import collections
from collections.abc import Mapping, Sequence
import contextlib
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights

# Tensors by name.
State = collections.OrderedDict[str, Any]


class BoundCorrection:
  """A correction for one model, as local training and the server use it.

  This one corrects nothing; subclasses override what they need.

  Attributes:
    variables: TensorFlow variables, besides those of the model, that training
      steps read. A client sets them at the start of a round, see `start`.
    collecting: Those among them whose last values `finish` needs.
  """

  variables: Sequence[tf.Variable] = ()
  collecting: Sequence[tf.Variable] = ()

  # In the computation of a training step.

  def watching(self) -> contextlib.AbstractContextManager[None]:
    """Lasts while the model is called in a training step."""
    return contextlib.nullcontext()

  def penalty(self, x: Any) -> Optional[tf.Tensor]:
    """What is added to the loss of a batch.

    Args:
      x: The model's input.

    Returns:
      A float scalar, or `None`. The loss in the metrics is without it.
    """
    del x
    return None

  def correct(
      self, gradients: tuple[tf.Tensor, ...], learning_rate: Optional[Any]
  ) -> tuple[tf.Tensor, ...]:
    """Corrects the gradients, just before the optimizer gets them.

    Args:
      gradients: Those of the trainable variables, clipped and with weight
        decay.
      learning_rate: The step's; `None` if the optimizer has none.

    Returns:
      The corrected gradients.
    """
    del learning_rate
    return gradients

  # In the computations of a client, before and after its training.

  def initial_client_state(self, values: Sequence[tf.Tensor]) -> State:
    """What a client keeps that is seen for the first time.

    Args:
      values: The values of the model's variables that the client starts with.

    Returns:
      Tensors by name; the names are none of the model's variables.
    """
    del values
    return collections.OrderedDict()

  def start(
      self,
      before: Sequence[tf.Tensor],
      server_state: Mapping[str, Any],
      client_state: Mapping[str, Any],
  ) -> Sequence[tf.Tensor]:
    """The values of `variables` at the start of a round.

    Args:
      before: The values of the model's variables, in their order.
      server_state: The server's state of the correction.
      client_state: The client's state, with its local variables.

    Returns:
      One value for each variable.
    """
    del before, server_state, client_state
    return ()

  def finish(
      self,
      started: Sequence[tf.Tensor],
      before: Sequence[tf.Tensor],
      after: Sequence[tf.Tensor],
      collected: Sequence[tf.Tensor],
      client_state: Mapping[str, Any],
  ) -> tuple[State, State]:
    """What a client keeps and sends after its training.

    What it returns for a client that is dropped, or has no data, is replaced:
    the client keeps what it has, and sends zeros.

    Args:
      started: What `start` returned.
      before: The values of the model's variables before training.
      after: The values after it.
      collected: The last values of `collecting`.
      client_state: The client's state before.

    Returns:
      The client's new state, as `initial_client_state`; and parts of its
      update, besides those of the model, see
      `tff_bn.aggregators.model_update`.
    """
    del started, before, after, collected, client_state
    return collections.OrderedDict(), collections.OrderedDict()

  def client_weight(
      self, server_state: Mapping[str, Any], weight: tf.Tensor, loss: tf.Tensor
  ) -> tf.Tensor:
    """A client's weight in the mean of the clients.

    Args:
      server_state: The server's state of the correction.
      weight: The weight by the number of examples, or 1; float32 scalar.
      loss: The mean loss of the round's examples; NaN without any.

    Returns:
      A float32 scalar.
    """
    del server_state, loss
    return weight

  def sums(self, loss: tf.Tensor) -> State:
    """What the server gets the sum of, over all clients.

    Args:
      loss: The mean loss of the round's examples; NaN if the client is dropped
        or has no data.

    Returns:
      Tensors by name.
    """
    del loss
    return collections.OrderedDict()

  # In the computations of the server.

  def initial_server_state(self) -> State:
    """What the server keeps, and sends to the clients of each round."""
    return collections.OrderedDict()

  def next_server_state(
      self,
      server_state: Mapping[str, Any],
      total: Mapping[str, Any],
      aggregated: Mapping[str, Any],
  ) -> State:
    """What the server keeps after a round.

    Args:
      server_state: What it kept before.
      total: The sums of `sums`, and `num_clients`, `num_participants`: the
        numbers of clients in the round, and of those with weight.
      aggregated: The aggregated parts of the clients' updates that `finish`
        returned.

    Returns:
      The new state.
    """
    del total, aggregated
    return collections.OrderedDict(server_state)

  def metrics(
      self, server_state: Mapping[str, Any], total: Mapping[str, Any]
  ) -> State:
    """The correction's metrics of a round.

    Args:
      server_state: What the server keeps after the round.
      total: See `next_server_state`.

    Returns:
      Scalars by name.
    """
    del server_state, total
    return collections.OrderedDict()


class DriftCorrection(abc.ABC):
  """A way to correct the clients' drift, for any model."""

  @abc.abstractmethod
  def bind(
      self,
      model: BatchNormModel,
      weights: SharedWeights,
      client_optimizer: tff.learning.optimizers.Optimizer,
  ) -> BoundCorrection:
    """Prepares the correction for a model.

    Args:
      model: The model.
      weights: Which of its variables are shared. Only these are corrected:
        clients do not drift apart in what is their own.
      client_optimizer: The optimizer of local training.

    Returns:
      The bound correction.

    Raises:
      ValueError: If it makes no sense for them.
    """


def check_shares(
    model: BatchNormModel, weights: SharedWeights, name: str
) -> None:
  """Checks that clients share what they could drift apart in.

  Args:
    model: The model.
    weights: Which of its variables are shared.
    name: The correction's name.

  Raises:
    ValueError: If no trainable variable is shared.
  """
  if not weights.trainable:
    raise ValueError(
        f'{name} keeps clients from drifting apart in what they share, but no'
        f' trainable variable of the model {model.keras_model.name!r} is'
        ' shared.'
    )
