"""Rounds that check what a caller gives to a process's `next`.

TFF reports wrong arguments in terms of its own structures, and accepts a round
without clients. These checks need no values, so they take no time.
"""

from collections.abc import Sequence
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import override

from tff_bn.clients.client_work import MovingStatistics
from tff_bn.common import array_form
from tff_bn.common import element_types


class CheckedRound(tff.framework.ConcreteComputation):
  """The computation of a round, whose arguments are checked first.

  Attributes:
    statistics: How a round moves the running statistics; `None` if that is
      unknown.
    array_forms: The computations in it that take a client's dataset, for a
      runtime that has the clients' batches as arrays.
  """

  statistics: Optional[MovingStatistics] = None
  array_forms: Sequence[array_form.ArrayForm] = ()

  @override
  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs the round.

    Raises:
      TypeError: If the arguments are those of another kind of process, the
        state is the whole output of a round, the data are no list, or a
        dataset has elements of another type.
      ValueError: If there are no clients.
    """
    self._check(args, kwargs)
    return super().__call__(*args, **kwargs)

  def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    elements = tff.structure.to_elements(self.type_signature.parameter)
    names = [name for name, _ in elements]
    is_struct = (
        len(args) == 1
        and not kwargs
        and isinstance(args[0], (tff.Value, tff.structure.Struct))
    )
    if is_struct:
      return  # All arguments as one.
    if len(args) + len(kwargs) != len(names):
      raise TypeError(_wrong_number(names, len(args) + len(kwargs)))
    given = {**dict(zip(names, args)), **kwargs}
    check_state(given.get(names[0]))
    for name in names[1:]:
      value = given.get(name)
      if isinstance(value, tf.data.Dataset):
        raise TypeError(
            f'{name} must be a list with one entry for each client, but is a'
            ' single tf.data.Dataset. For one client, give [dataset].'
        )
      if isinstance(value, (list, tuple)) and not value:
        raise ValueError(
            f'{name} is empty, but a round needs at least one client.'
        )
      _check_datasets(name, value, self.type_signature.parameter[name])


def _check_datasets(name: str, values: Any, type_spec: tff.Type) -> None:
  """Checks the elements of the clients' datasets, if these are datasets."""
  if (
      not isinstance(values, (list, tuple))
      or not isinstance(type_spec, tff.FederatedType)
      or not isinstance(type_spec.member, tff.SequenceType)
  ):
    return
  checked = None
  for number, dataset in enumerate(values):
    spec = getattr(dataset, 'element_spec', checked)
    # Clients usually have datasets of the same type.
    if spec != checked:
      element_types.check_elements(
          f'{name}[{number}]', spec, type_spec.member.element
      )
      checked = spec


def _wrong_number(names: list[str], number: int) -> str:
  call = f"process.next({', '.join(names)})"
  if len(names) == 2:
    reason = 'The clients of this algorithm keep no state between rounds.'
  else:
    reason = (
        'The clients of this algorithm keep a state between rounds: make the'
        ' state of a new client with process.personalize('
        'process.initialize_client(state), number), and take later states from'
        ' output.client_states.'
    )
  return (
      f'next of this process takes {len(names)} arguments, {call}, but got'
      f' {number}. {reason}'
  )


def check_state(state: Any) -> None:
  """Raises a `TypeError` if a state is the whole output of a round."""
  # `tff.learning.templates.LearningProcessOutput` or `StatefulProcessOutput`.
  if isinstance(state, tuple) and hasattr(state, 'metrics'):
    raise TypeError(
        f'state is a {type(state).__name__}, the whole output of a round; give'
        ' output.state.'
    )


def check_arguments(
    next_fn: tff.Computation,
    statistics: Optional[MovingStatistics] = None,
    array_forms: Sequence[array_form.ArrayForm] = (),
) -> tff.Computation:
  """Returns the computation of a round, with checks of its arguments.

  A computation that chooses between several is returned as it is, because these
  check their arguments.
  """
  if isinstance(next_fn, CheckedRound) or not isinstance(
      next_fn, tff.framework.ConcreteComputation
  ):
    return next_fn
  checked = CheckedRound(
      computation_proto=tff.framework.ConcreteComputation.get_proto(next_fn),
      context_stack=tff.framework.get_context_stack(),
      annotated_type=next_fn.type_signature,
  )
  checked.statistics = statistics
  checked.array_forms = array_forms
  return checked
