"""What clients and server send each other in one exchange of FedTAN."""

import collections
from collections.abc import Callable, Mapping, Sequence
import operator
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import moments_factories
from tff_bn.common import numerics
from tff_bn.fedtan import data_flow
from tff_bn.fedtan.synchronized_batch_norm import Answer

# A client may keep something for each of many later stages. If it was one list,
# all of it would occur in the type of each selection from it; so it is a tree.
_BRANCHES = 8


def _branches(targets: Sequence[int]) -> list[Sequence[int]]:
  size = -(-len(targets) // _BRANCHES)
  return [targets[i : i + size] for i in range(0, len(targets), size)]


def _pack(
    targets: Sequence[int], carried: Mapping[int, Any]
) -> collections.OrderedDict[str, Any]:
  """Makes a tree of what is carried over to each stage."""
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
  """The inverse of `_pack`.

  Args:
    targets: The stages.
    tree: The tree, or its type.
    select: Selects a branch of the tree.

  Returns:
    What is carried over to each stage, or its type.
  """
  carried = {}
  for branch in _branches(targets):
    key = f'until_{branch[-1]}'
    if len(branch) == 1:
      carried[branch[0]] = tree[key]
    else:
      carried.update(unpack(branch, select(tree, key), select))
  return carried


def select(tree: tff.Value, key: str) -> tff.Value:
  """Selects as `tree[key]`, but only once, however often it is used."""

  @tff.federated_computation(tree.type_signature.member)
  def select(member):
    return member[key]

  return tff.federated_map(select, tree)


def message(
    questions: Sequence[data_flow.Question],
    asked: Sequence[data_flow.Asked],
    carried: Mapping[int, Sequence[tf.Tensor]],
    took_part: tf.Tensor,
) -> collections.OrderedDict[str, Any]:
  """What a client's stage returns.

  Args:
    questions: The questions at the end of the stage.
    asked: What the client asks.
    carried: What stays with it for each later stage.
    took_part: Whether it took part in the exchange before, or may take part in
      the first one; a bool scalar.

  Returns:
    What it sends, zeros if it does not take part; whether it takes part; and
    what stays with it.
  """
  takes_part = tf.reduce_all([took_part, *(one.sound for one in asked)])
  values = numerics.where_or_zero(takes_part, [one.value for one in asked])
  return collections.OrderedDict(
      sent=_by_kind(questions, values),
      takes_part=takes_part,
      **_pack(sorted(carried), carried),
  )


def _by_kind(
    questions: Sequence[data_flow.Question], values: Sequence[Any]
) -> collections.OrderedDict[str, list[Any]]:
  sent = collections.OrderedDict()
  for question, value in zip(questions, values, strict=True):
    sent.setdefault(question.kind.name, []).append(value)
  return sent


def in_order(
    questions: Sequence[data_flow.Question],
    answers: Mapping[str, Sequence[Any]],
) -> list[Any]:
  """Returns answers, which are given by kind, in the order of the questions."""
  iterators = {kind: iter(answers[kind]) for kind in answers}
  return [next(iterators[question.kind.name]) for question in questions]


class Exchange:
  """From what the clients send to what all of them get."""

  def __init__(self, sent_type: tff.Type):
    self._pool = None
    self.answers_type = sent_type
    for kind, part_type in tff.structure.iter_elements(sent_type):
      if kind == Answer.POOLED_MOMENTS.name:
        self._pool = moments_factories.PooledMomentsFactory().create(part_type)

  def __call__(self, sent: tff.Value) -> tff.Value:
    """In a `tff.federated_computation`: from CLIENTS to CLIENTS."""
    answers = collections.OrderedDict()
    for kind, _ in tff.structure.iter_elements(self.answers_type):
      if kind == Answer.POOLED_MOMENTS.name:
        pooled = self._pool.next(self._pool.initialize(), sent[kind])
        answers[kind] = pooled.result
      else:
        answers[kind] = tff.federated_sum(sent[kind])
    return tff.federated_broadcast(tff.federated_zip(answers))
