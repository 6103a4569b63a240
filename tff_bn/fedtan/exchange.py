"""The messages of clients and server in one exchange of FedTAN."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import operator
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import moments_factories
from tff_bn.common import numerics
from tff_bn.fedtan.questions import Asked
from tff_bn.fedtan.questions import Question
from tff_bn.fedtan.synchronized_batch_norm import Answer

# A client can keep tensors for many later stages. They are a tree, because all
# elements of a list would occur in the type of each selection from it.
_BRANCHES = 8


def _branches(targets: Sequence[int]) -> list[Sequence[int]]:
  size = -(-len(targets) // _BRANCHES)
  return [targets[i : i + size] for i in range(0, len(targets), size)]


def _pack(
    targets: Sequence[int], carried: Mapping[int, Any]
) -> collections.OrderedDict[str, Any]:
  """Makes a tree of the tensors for each later stage."""
  return collections.OrderedDict(
      (
          f'until_{branch[-1]}',
          carried[branch[0]] if len(branch) == 1 else _pack(branch, carried),
      )
      for branch in _branches(targets)
  )


def unpack(
    targets: Sequence[int],
    tree: Any,
    select: Callable[[Any, str], Any] = operator.getitem,
) -> dict[int, Any]:
  """Returns the tensors for each later stage from a tree, or their types.

  Args:
    targets: The later stages.
    tree: The tree that `_pack` made, or its type.
    select: Selects a branch of the tree.
  """
  carried: dict[int, Any] = {}
  for branch in _branches(targets):
    key = f'until_{branch[-1]}'
    if len(branch) == 1:
      carried[branch[0]] = tree[key]
    else:
      carried.update(unpack(branch, select(tree, key), select))
  return carried


def select(tree: tff.Value, key: str) -> tff.Value:
  """Selects `tree[key]` once, however often the result is used."""

  @tff.federated_computation(tree.type_signature.member)
  def select(member):
    return member[key]

  return tff.federated_map(select, tree)


def message(
    questions: Sequence[Question[Answer]],
    asked: Sequence[Asked],
    carried: Mapping[int, Sequence[tf.Tensor]],
    took_part: tf.Tensor,
) -> collections.OrderedDict[str, Any]:
  """Builds the result of a client's stage.

  Args:
    questions: The questions at the end of the stage.
    asked: The values to send for each question.
    carried: The tensors that the client keeps for each later stage.
    took_part: A bool scalar, whether the client took part in the exchange
      before, or may take part in the first one.

  Returns:
    The values to send, zeros if the client does not take part; whether it takes
    part; and the tensors that it keeps.
  """
  takes_part = functools.reduce(
      tf.logical_and, (one.sound for one in asked), took_part
  )
  values = numerics.where_or_zero(takes_part, [one.value for one in asked])
  sent: collections.OrderedDict[str, list[Any]] = collections.OrderedDict()
  for question, value in zip(questions, values, strict=True):
    sent.setdefault(question.kind.name, []).append(value)
  return collections.OrderedDict(
      sent=sent, takes_part=takes_part, **_pack(sorted(carried), carried)
  )


def in_order(
    questions: Iterable[Question[Answer]], answers: Mapping[str, Sequence[Any]]
) -> list[Any]:
  """Returns answers, which are given by kind, in the order of the questions."""
  iterators = {kind: iter(answers[kind]) for kind in answers}
  return [next(iterators[question.kind.name]) for question in questions]


@functools.lru_cache(maxsize=64)
def _pool(moments_type: tff.Type) -> tff.templates.AggregationProcess:
  """Builds an aggregator once for all layers with equally many channels."""
  return moments_factories.PooledMomentsFactory().create(moments_type)


def combine(sent: tff.Value) -> tff.Value:
  """Combines clients' values into answers at the server, for use in TFF code.

  The type of the answers is the type of a message's `sent`.
  """
  answers = collections.OrderedDict()
  for kind, part_type in tff.structure.iter_elements(
      sent.type_signature.member
  ):
    if kind == Answer.POOLED_MOMENTS.name:
      pool = _pool(part_type)
      answers[kind] = pool.next(pool.initialize(), sent[kind]).result
    else:
      answers[kind] = tff.federated_sum(sent[kind])
  return tff.federated_zip(answers)
