"""In which settings an experiment differs between two scales, in words."""

from collections.abc import Mapping, Sequence
from typing import Optional

from tff_bn.programs.plan import axes as axes_lib

# They change no model and no number.
_UNIMPORTANT = ('evaluate_every', 'checkpoint_every')
# A longer value of the paper is not repeated.
_MAX_LENGTH = 30
_Flags = Mapping[str, str]
_Settings = tuple[_Flags, Sequence[axes_lib.Axis], Sequence[_Flags]]


def describe(paper: _Settings, other: _Settings) -> tuple[str, ...]:
  """Describes how another scale differs from the paper's.

  Args:
    paper: The common flags, the axes, and the flags of each analysis at the
      paper's scale.
    other: Those at the other scale, with the same names of axes.

  Returns:
    A text for each different flag and axis, such as `rounds=80 instead of
    3000`.
  """
  texts = _flags(paper[0], other[0])
  for theirs, ours in zip(paper[1], other[1]):
    texts += _axis(theirs, ours)
  for their_flags, our_flags in zip(paper[2], other[2]):
    texts += _flags(their_flags, our_flags)
  return tuple(dict.fromkeys(texts))


def _flags(paper: _Flags, other: _Flags) -> list[str]:
  names = [name for name in (*other, *paper) if name not in _UNIMPORTANT]
  return [
      _change(name, paper.get(name), other.get(name))
      for name in dict.fromkeys(names)
      if paper.get(name) != other.get(name)
  ]


def _change(name: str, paper: Optional[str], other: Optional[str]) -> str:
  if other is None:
    return f'no {name}'
  text = f'{name}={other}'
  if paper is None:
    return text
  if len(paper) > _MAX_LENGTH:
    paper = "the paper's"
  return f'{text} instead of {paper}'


def _axis(paper: axes_lib.Axis, other: axes_lib.Axis) -> list[str]:
  theirs = {point.label: point.flags for point in paper.points}
  ours = {point.label: point.flags for point in other.points}
  texts = []
  missing = [label for label in theirs if label not in ours]
  if any(label not in theirs for label in ours):
    texts.append(
        f'{paper.name}: {", ".join(ours)} instead of {", ".join(theirs)}'
    )
  elif missing:
    texts.append(f'{paper.name} without {", ".join(missing)}')
  for label, flags in ours.items():
    changes = _flags(theirs.get(label, flags), flags)
    if changes:
      texts.append(f'{label}: {", ".join(changes)}')
  return texts
