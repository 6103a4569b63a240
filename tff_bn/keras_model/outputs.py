"""The outputs of a model, and what belongs to each of them.

Losses, metrics, labels and weights of a model with several outputs are lists in
the order of the outputs, or dictionaries by the outputs' names, as in Keras's
`compile` and `fit`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf


class Output(NamedTuple):
  """One output of a model.

  Attributes:
    name: Its name; empty if the model has no other output, or if it stands for
      all outputs together.
    path: The keys and positions that lead to it in the model's output.
    key: The name in dictionaries of a model's only output: its own key, or the
      name of its layer if Keras knows it. Empty for other outputs.
    spec: The spec of a batch, or of all outputs.
  """

  name: str
  path: tuple[str | int, ...]
  key: str
  spec: Any

  @property
  def description(self) -> str:
    """The output in words, for errors."""
    return f'the output {self.name!r}' if self.name else "the model's output"

  def of(self, structure: Any) -> Any:
    """Returns the part of a structure that belongs to this output.

    Args:
      structure: The outputs of a batch, or the labels or other values of all
        outputs: a list or dictionary, in the form of the outputs or by their
        names. For a model with one output, the part itself, or a list or
        dictionary of one.

    Raises:
      KeyError: If it has no part for this output.
    """
    if not self.name:
      flat = tf.nest.flatten(structure)
      return flat[0] if len(flat) == 1 else structure
    if isinstance(structure, Mapping) and self.name in structure:
      return structure[self.name]
    for key in self.path:
      is_there = (
          key in structure
          if isinstance(structure, Mapping)
          else isinstance(structure, (list, tuple))
          and isinstance(key, int)
          and key < len(structure)
      )
      if not is_there:
        raise KeyError(self.name)
      structure = structure[key]
    return structure


def find(model: keras.Model, spec: Any, y_spec: Any) -> tuple[Output, ...]:
  """Returns the outputs of a model, given the specs of outputs and labels.

  If the labels are a single tensor, several outputs count as one: the loss gets
  all of them.

  The outputs of a functional model with a list of outputs are named after their
  layers. Other names are the keys of dictionaries, or `output_1`, ….
  """
  leaves = list(_leaves(spec, ()))
  layers = list(getattr(model, 'output_names', None) or [])
  if len(layers) != len(leaves):
    layers = [''] * len(leaves)
  if len(leaves) == 1:
    path, leaf = leaves[0]
    key = path[0] if path and isinstance(path[0], str) else layers[0]
    return (Output('', path, key, leaf),)
  if not tf.nest.is_nested(y_spec):
    return (Output('', (), '', spec),)
  is_list = isinstance(spec, Sequence)
  return tuple(
      Output(
          # Keras sorts the names of a dictionary's outputs otherwise.
          layer if is_list and layer else _name(path),
          path,
          '',
          leaf,
      )
      for (path, leaf), layer in zip(leaves, layers, strict=True)
  )


def describe(specs: Any) -> str:
  """Returns the shapes and dtypes of specs in words, for errors."""
  return ', '.join(
      f'shape {spec.shape} and dtype {spec.dtype.name}'
      for spec in tf.nest.flatten(specs)
  )


def _leaves(
    spec: Any, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], tf.TensorSpec]]:
  """Yields the path and the spec of each tensor, in the order of `tf.nest`."""
  if isinstance(spec, Mapping):
    for key in sorted(spec):
      yield from _leaves(spec[key], (*path, key))
  elif isinstance(spec, (list, tuple)):
    for number, part in enumerate(spec):
      yield from _leaves(part, (*path, number))
  else:
    yield path, spec


def _name(path: tuple[str | int, ...]) -> str:
  return '_'.join(
      f'output_{key + 1}' if isinstance(key, int) else key for key in path
  )


def assign(argument: str, values: Any, outputs: Sequence[Output]) -> list[Any]:
  """Returns the value of each output in an argument for all outputs.

  Args:
    argument: The argument's name, for errors.
    values: A list with a value or `None` for each output, or a dictionary of
      some outputs' values.
    outputs: The outputs, more than one.

  Returns:
    The values in the order of `outputs`; `None` for outputs without one.

  Raises:
    ValueError: If a name or the number of values is wrong.
  """
  names = [output.name for output in outputs]
  is_flat = all(len(output.path) == 1 for output in outputs)
  if isinstance(values, Mapping):
    known = {name for o in outputs for name in (o.name, *o.path[:1])}
    unknown = [key for key in values if key not in known]
    if unknown:
      raise ValueError(
          f'{argument} has the entry {unknown[0]!r}, but the outputs of the'
          f' model are {", ".join(map(repr, names))}.'
      )
  elif is_flat and len(values) == len(outputs):
    return list(values)
  elif is_flat:
    raise ValueError(
        f'{argument} has {len(values)} entries, but the model has the'
        f' {len(outputs)} outputs {", ".join(map(repr, names))}. Give one entry'
        ' for each output, None for an output without one, or a dictionary.'
    )
  found = []
  for output in outputs:
    try:
      found.append(output.of(values))
    except KeyError:
      found.append(None)
  return found
