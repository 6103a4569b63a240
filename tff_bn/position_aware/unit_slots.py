"""Slots of a model's weights, and groups of units that may be permuted.

A slot is one index on one axis of a weight, or of a tensor where no weight has
such an axis. Two slots are tied if they belong to the same unit; a unit is a
connected component of tied slots. Two units may trade places if they have the
same signature: the same slots on the same axes, counted from 0 for each unit
and axis, and the same ties between them.
"""

import collections
from collections.abc import Sequence
import dataclasses
import itertools
from typing import NamedTuple, Optional

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph


@dataclasses.dataclass(frozen=True, eq=False)
class UnitOccurrence:
  """The positions of a group's units in one weight.

  Attributes:
    weight: The weight's index in `model.weights`.
    axis: An axis of that weight.
    positions: The positions of the units on that axis,
      `int64[size, positions per unit]`. After a `Flatten`, a unit has one
      position for each pixel.
  """

  weight: int
  axis: int
  positions: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class UnitGroup:
  """Hidden units of a model that can be permuted among each other.

  Attributes:
    name: The name of the first layer that outputs the units. If several groups
      share that layer, the group's number follows, as in `conv[0]`.
    size: The number of units.
    occurrences: The axes of weights on which the units occur.
  """

  name: str
  size: int
  occurrences: tuple[UnitOccurrence, ...]


class WeightAxis(NamedTuple):
  """An axis of the weight with this index in `model.weights`."""

  weight: int
  axis: int


class _Axis(NamedTuple):
  """An axis that starts with slot `start`, see `Slots.new_axis`."""

  start: int
  weights: Sequence[WeightAxis]
  output_layer: Optional[str]


class _Units(NamedTuple):
  """The axis and the unit of each slot, and its rank within both."""

  axes: np.ndarray
  units: np.ndarray
  ranks: list[int]


class _Candidate(NamedTuple):
  """Interchangeable units."""

  # The first axis with outputs of a layer, and the first slot on it.
  output_axis: int
  first_slot: int
  # A row for each unit; and the axis of each column.
  slots: np.ndarray
  columns: np.ndarray


class Slots:
  """The slots of a model, and the ties between them."""

  def __init__(self) -> None:
    self._num_slots = 0
    self._axes: list[_Axis] = []
    # Each pair of vectors is one tie; elements at the same index are one unit.
    self._ties: list[tuple[np.ndarray, np.ndarray]] = []
    self._fixed: list[np.ndarray] = []

  def new_axis(
      self,
      size: int,
      weights: Sequence[WeightAxis] = (),
      output_layer: Optional[str] = None,
  ) -> np.ndarray:
    """Adds an axis and returns its slots, `int64[size]`.

    Args:
      size: The number of its slots.
      weights: The axes of weights that it stands for.
      output_layer: The name of the layer whose outputs lie on it, if any.
    """
    start = self._num_slots
    self._axes.append(_Axis(start, weights, output_layer))
    self._num_slots += size
    return np.arange(start, self._num_slots)

  def tie(self, left: np.ndarray, right: np.ndarray) -> None:
    """Ties slots to slots that belong to the same units, both `int64[n]`."""
    self._ties.append((left, right))

  def fix(self, slots: np.ndarray) -> None:
    """Forbids that the units of these slots are permuted."""
    self._fixed.append(slots)

  def groups(self) -> list[UnitGroup]:
    """Returns the groups of at least two units that can trade places.

    They are in the order of their layers.
    """
    candidates = sorted(self._candidates(), key=lambda x: x.first_slot)
    groups = []
    for axis, same_layer in itertools.groupby(
        candidates, key=lambda x: x.output_axis
    ):
      of_layer = list(same_layer)
      for number, candidate in enumerate(of_layer):
        suffix = f'[{number}]' if len(of_layer) > 1 else ''
        groups.append(
            UnitGroup(
                f'{self._axes[axis].output_layer}{suffix}',
                len(candidate.slots),
                self._occurrences(candidate),
            )
        )
    return groups

  def _candidates(self) -> list[_Candidate]:
    """Finds units with equal signatures that a layer outputs."""
    found = self._find_units()
    same: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for unit, signature in self._signatures(found).items():
      same.setdefault(signature, []).append(unit)
    # The slots of each unit in ascending order; the units are 0, 1, ….
    order = np.argsort(found.units, kind='stable')
    slots_of = np.split(order, np.cumsum(np.bincount(found.units))[:-1])
    candidates = []
    for units in same.values():
      slots = np.stack([slots_of[unit] for unit in units])
      columns = found.axes[slots[0]]
      outputs = [
          column
          for column, axis in enumerate(columns)
          if self._axes[axis].output_layer is not None
      ]
      if len(units) > 1 and outputs:
        slots = slots[np.argsort(slots[:, outputs[0]])]
        candidates.append(
            _Candidate(
                columns[outputs[0]], slots[0, outputs[0]], slots, columns
            )
        )
    return candidates

  def _find_units(self) -> _Units:
    """Finds the connected components of the slots."""
    starts = [axis.start for axis in self._axes]
    sizes = np.diff([*starts, self._num_slots])
    axes: np.ndarray = np.repeat(np.arange(len(starts)), sizes)
    ties = np.concatenate([np.zeros((2, 0), np.int64), *self._ties], axis=1)
    graph = sparse.coo_array(
        (np.ones(ties.shape[1]), (ties[0], ties[1])),
        shape=(self._num_slots, self._num_slots),
    )
    _, units = csgraph.connected_components(graph, directed=False)
    counts: collections.Counter[tuple[int, int]] = collections.Counter()
    ranks = []
    for key in zip(axes.tolist(), units.tolist()):
      ranks.append(counts[key])
      counts[key] += 1
    return _Units(axes, units, ranks)

  def _signatures(
      self, found: _Units
  ) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Computes the signature of each unit that isn't fixed."""
    units = found.units.tolist()
    fixed = {units[slot] for slots in self._fixed for slot in slots.tolist()}
    names = list(zip(found.axes.tolist(), found.ranks))
    signatures: dict[int, list[tuple[int, ...]]] = {}
    for unit, name in zip(units, names):
      signatures.setdefault(unit, []).append(name)
    for number, (left, right) in enumerate(self._ties):
      for a, b in zip(left.tolist(), right.tolist()):
        signatures[units[a]].append((number, *names[a], *names[b]))
    return {
        unit: tuple(sorted(signature))
        for unit, signature in signatures.items()
        if unit not in fixed
    }

  def _occurrences(self, candidate: _Candidate) -> tuple[UnitOccurrence, ...]:
    found = []
    for number in np.unique(candidate.columns):
      axis = self._axes[number]
      positions = candidate.slots[:, candidate.columns == number] - axis.start
      for weight, weight_axis in axis.weights:
        found.append(UnitOccurrence(weight, weight_axis, positions))
    return tuple(sorted(found, key=lambda x: (x.weight, x.axis)))
