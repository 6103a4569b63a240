"""A learning process whose clients keep something from round to round.

`tff.learning.templates.LearningProcess` takes (server state, client data) and
returns server state and metrics: a client's state could ride along on the way
in but not on the way out. A `StatefulLearningProcess` has it in both. Its type
says what is private: a local variable occurs in the client's state `C` and in
nothing that is placed at the server.

A client that is seen for the first time gets the state that `initialize_client`
makes, which is the same for all, and then what is its own by `personalize`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Optional, Union

import tensorflow_federated as tff

from tff_bn.keras_model.batch_norm_model import ModelWeights


class StatefulProcessOutput(NamedTuple):
  """What a round returns.

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
      a client that is seen for the first time; `personalize` makes it its own.
    next: The `tff.Computation` `(<S@SERVER, {C}@CLIENTS, {D*}@CLIENTS> ->
      <state=S@SERVER, client_states={C}@CLIENTS, metrics=M@SERVER>)`.
    has_client_models: Whether clients use models that differ from the server's.
  """

  _personalize_fn: Optional[Callable[[Any, int], Any]] = None

  def __init__(
      self,
      initialize: tff.Computation,
      initialize_client: tff.Computation,
      next_fn: tff.Computation,
      get_model_weights_fn: Callable[[Any], ModelWeights],
      get_client_model_weights_fn: Callable[[Any, Any], ModelWeights],
      *,
      has_client_models: bool = True,
      personalize_fn: Optional[Callable[[Any, int], Any]] = None,
  ):
    """Checks the types and initializes the process.

    Args:
      initialize: See the class.
      initialize_client: See the class.
      next_fn: See the class, `next`.
      get_model_weights_fn: Makes the server's model of `S`.
      get_client_model_weights_fn: Makes a client's model of `S` and its `C`.
      has_client_models: See the class.
      personalize_fn: Makes the state of `initialize_client` and the client's
        number the client's own, see `personalize`. Default: all clients start
        with the same state.

    Raises:
      TypeError: If the types do not fit together.
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
    self.initialize = initialize
    self.initialize_client = initialize_client
    self.next = next_fn
    self.has_client_models = has_client_models
    self._get_model_weights_fn = get_model_weights_fn
    self._get_client_model_weights_fn = get_client_model_weights_fn
    self._personalize_fn = personalize_fn

  @property
  def has_personal_state(self) -> bool:
    """Whether clients differ before their first round, see `personalize`."""
    return self._personalize_fn is not None

  def personalize(self, client_state: Any, client_number: int) -> Any:
    """Gives a client that is seen for the first time what is its own.

    A program that runs the rounds itself calls this once for each client:
    ```
    client_states = [
        process.personalize(process.initialize_client(state), number)
        for number in range(num_clients)
    ]
    ```
    Without it, all clients start alike, with the server's model. What is given
    depends on the number and on what the process was built with alone, not on
    when it is given. Where clients have position encodings of their own, it is
    their phases, which training never changes.

    Args:
      client_state: What `initialize_client` returned.
      client_number: The client's number, at least 0, the same in each run. It
        is no secret: with the seed it says what the client gets.

    Returns:
      The client's state; the given one if nothing is personal.
    """
    if self._personalize_fn is None:
      return client_state
    return self._personalize_fn(client_state, client_number)

  def get_model_weights(self, state: Any) -> ModelWeights:
    """The server's model; local variables have their initial values.

    Args:
      state: The server's state.

    Returns:
      The weights of the whole model, as lists.
    """
    return self._get_model_weights_fn(state)

  def get_client_model_weights(
      self, state: Any, client_state: Any
  ) -> ModelWeights:
    """The model that one client uses.

    Args:
      state: The server's state.
      client_state: The client's state.

    Returns:
      The weights of the whole model, as lists.
    """
    return self._get_client_model_weights_fn(state, client_state)


# An algorithm, of either kind.
Process = Union[tff.learning.templates.LearningProcess, StatefulLearningProcess]
