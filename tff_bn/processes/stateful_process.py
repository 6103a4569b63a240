"""A learning process whose clients keep a state from round to round.

A `tff.learning.templates.LearningProcess` returns only the server's state and
metrics. A `StatefulLearningProcess` also takes and returns a state for each
client. Its type shows what is private: a local variable occurs in the client's
state `C` and in no value that is placed at the server.

A new client gets the state of `initialize_client`, which is the same for all
clients, and then its personal values by `personalize`.
"""

from collections.abc import Callable
import copy
from typing import Any, NamedTuple, Optional, Union

import tensorflow_federated as tff

from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.processes import checked_round


class StatefulProcessOutput(NamedTuple):
  """The result of a round.

  Attributes:
    state: The server's state.
    client_states: The clients' states, in the order of the clients.
    metrics: The round's metrics.
  """

  state: Any
  client_states: Any
  metrics: Any


class StatefulLearningProcess:
  """A federated algorithm whose clients have a state.

  Attributes:
    initialize: The `tff.Computation` `( -> S@SERVER)`.
    initialize_client: The `tff.Computation` `(S -> C)` that makes the state of
      a new client; `personalize` adds the client's personal values.
    next: The `tff.Computation` `(<S@SERVER, {C}@CLIENTS, {D*}@CLIENTS> ->
      <state=S@SERVER, client_states={C}@CLIENTS, metrics=M@SERVER>)`.
    has_client_models: Whether clients' models predict differently from the
      server's.
    evaluation_state: If evaluation needs other statistics than training, the
      `tff.Computation` `(<S@SERVER, {C}@CLIENTS, {D*}@CLIENTS> -> S@SERVER)`.
      It returns the state whose models are to be evaluated; training goes on
      with the given state. Otherwise `None`: states are evaluated as they are.
  """

  evaluation_state: Optional[tff.Computation] = None

  _personalize_fn: Optional[Callable[[Any, int], Any]] = None

  def __init__(
      self,
      initialize: tff.Computation,
      initialize_client: tff.Computation,
      next_fn: tff.Computation,
      get_model_weights_fn: Callable[[Any], ModelWeights],
      get_client_model_weights_fn: Callable[[Any, Any], ModelWeights],
      *,
      set_model_weights_fn: Optional[Callable[[Any, ModelWeights], Any]] = None,
      has_client_models: bool = True,
      personalize_fn: Optional[Callable[[Any, int], Any]] = None,
      evaluation_state: Optional[tff.Computation] = None,
  ):
    """Checks the types and initializes the process.

    Args:
      initialize: See the class.
      initialize_client: See the class.
      next_fn: See the class, `next`.
      get_model_weights_fn: Returns the server's model, given `S`.
      get_client_model_weights_fn: Returns a client's model, given `S` and `C`.
      set_model_weights_fn: Returns `S` with another server's model, given `S`
        and the weights of the whole model. Default: the process has no
        `set_model_weights`.
      has_client_models: See the class.
      personalize_fn: See `personalize`. Default: all clients start with the
        same state.
      evaluation_state: See the class.

    Raises:
      TypeError: If the types do not match.
    """
    state_type = initialize.type_signature.result
    if (
        not isinstance(state_type, tff.FederatedType)
        or state_type.placement is not tff.SERVER
    ):
      raise TypeError(
          f'initialize must return a state at SERVER, but returns {state_type}.'
      )
    if not initialize_client.type_signature.parameter.is_assignable_from(
        state_type.member
    ):
      raise TypeError(
          'initialize_client must take the state of initialize,'
          f' {state_type.member}, but takes'
          f' {initialize_client.type_signature.parameter}.'
      )
    client_type = tff.FederatedType(
        initialize_client.type_signature.result, tff.CLIENTS
    )
    parameter = next_fn.type_signature.parameter
    if (
        not isinstance(parameter, tff.StructType)
        or len(parameter) != 3
        or not parameter[0].is_assignable_from(state_type)
        or not parameter[1].is_assignable_from(client_type)
        or parameter[2].placement is not tff.CLIENTS
    ):
      raise TypeError(
          f'next must take <{state_type}, {client_type}, client data>, but'
          f' takes {parameter}.'
      )
    result = next_fn.type_signature.result
    if (
        not isinstance(result, tff.StructType)
        or [name for name, _ in tff.structure.iter_elements(result)]
        != list(StatefulProcessOutput._fields)
        or not parameter[0].is_assignable_from(result.state)
        or not parameter[1].is_assignable_from(result.client_states)
        or result.metrics.placement is not tff.SERVER
    ):
      raise TypeError(
          f'next must return <state={state_type}, client_states={client_type},'
          f' metrics at SERVER>, but returns {result}.'
      )
    if evaluation_state is not None and not (
        evaluation_state.type_signature.parameter.is_equivalent_to(parameter)
        and evaluation_state.type_signature.result.is_equivalent_to(state_type)
    ):
      raise TypeError(
          f'evaluation_state must take the arguments of next, {parameter}, and'
          f' return {state_type}, but is of type'
          f' {evaluation_state.type_signature}.'
      )
    self.initialize = initialize
    self.initialize_client = initialize_client
    self.next = checked_round.check_arguments(next_fn)
    self.has_client_models = has_client_models
    self.evaluation_state = evaluation_state
    self._get_model_weights_fn = get_model_weights_fn
    self._get_client_model_weights_fn = get_client_model_weights_fn
    self._set_model_weights_fn = set_model_weights_fn
    self._personalize_fn = personalize_fn

  @property
  def has_personal_state(self) -> bool:
    """Whether clients differ before their first round, see `personalize`."""
    return self._personalize_fn is not None

  def personalize(self, client_state: Any, client_number: int) -> Any:
    """Returns a new client's state with its personal values.

    Personal values are the phases of personal position encodings. Training
    never changes them. They depend only on the client's number and on the
    arguments of the process's builder. A program that runs the rounds itself
    calls this once for each client:
    ```
    client_states = [
        process.personalize(process.initialize_client(state), number)
        for number in range(num_clients)
    ]
    ```
    Without it, all clients start with the server's model.

    Args:
      client_state: The result of `initialize_client`.
      client_number: The client's number, at least 0, the same in each run. It
        is no secret: with the seed it determines the personal values.

    Returns:
      The client's state; unchanged if the process has no personal values.
    """
    if self._personalize_fn is None:
      return client_state
    return self._personalize_fn(client_state, client_number)

  def get_model_weights(self, state: Any) -> ModelWeights:
    """Returns the server's model, with initial values of local variables.

    Args:
      state: The server's state.

    Returns:
      The weights of the whole model, as lists.

    Raises:
      TypeError: If the state is the whole output of a round.
    """
    checked_round.check_state(state)
    return self._get_model_weights_fn(state)

  def set_model_weights(self, state: Any, model_weights: ModelWeights) -> Any:
    """Returns the server's state with another model.

    The state takes the values of the variables that the server has. It has no
    local variables, so their values are not taken: clients keep theirs, and a
    new client starts with those of the process's model. A warning says so if
    they differ. To start with other local values, build the process from a
    `BatchNormModel` whose `keras_model_fn` returns a model with them.

    All else in the state stays as it is, such as the number of the round (and
    so the phase of a process with phases), the state of the server optimizer,
    and SCAFFOLD's control variates. Clients keep their states.

    Args:
      state: The server's state.
      model_weights: The weights of the whole model, as `get_model_weights` or
        `BatchNormModel.from_keras` returns them.

    Returns:
      The new state, of the same type.

    Raises:
      TypeError: If the state is the whole output of a round or the state of
        another process, or `model_weights` are not `ModelWeights`.
      ValueError: If the number, a shape or a dtype of the values is wrong, or a
        variable that training cannot change has another value than the model.
      NotImplementedError: If the process was made without
        `set_model_weights_fn`.
    """
    checked_round.check_state(state)
    if self._set_model_weights_fn is None:
      raise NotImplementedError(
          'This process was made without set_model_weights_fn.'
      )
    return self._set_model_weights_fn(state, model_weights)

  def get_client_model_weights(
      self, state: Any, client_state: Any
  ) -> ModelWeights:
    """Returns a client's model.

    Args:
      state: The server's state.
      client_state: The client's state.

    Returns:
      The weights of the whole model, as lists.

    Raises:
      TypeError: If the server's state is the whole output of a round, or
        `client_state` is a list of several clients' states.
    """
    checked_round.check_state(state)
    if isinstance(client_state, list):
      raise TypeError(
          'client_state must be the state of one client, but is a list of'
          f' {len(client_state)}; give one of its entries.'
      )
    return self._get_client_model_weights_fn(state, client_state)


# A learning process of either kind.
Process = Union[tff.learning.templates.LearningProcess, StatefulLearningProcess]


def with_next(process: Process, next_fn: tff.Computation) -> Process:
  """Returns a process with another computation of a round, of the same type."""
  if isinstance(process, StatefulLearningProcess):
    other = copy.copy(process)
    other.next = next_fn
    return other
  return tff.learning.templates.LearningProcess(
      process.initialize,
      next_fn,
      process.get_model_weights,
      process.set_model_weights,
      get_hparams_fn=process.get_hparams,
      set_hparams_fn=process.set_hparams,
  )


def check_process(process: Any) -> None:
  """Raises a `TypeError` if `process` is not a learning process."""
  if not hasattr(process, 'next'):
    raise TypeError(
        'process must be a learning process, such as the result of a builder of'
        f' tff_bn.algorithms, but is a {type(process).__name__}.'
    )
