"""One stage of a staged function: a part of its graph."""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools

import tensorflow as tf

from tff_bn.fedtan import data_flow

# Gives each variable of a stage a name that is unique in a computation.
_variable_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Stage:
  """A part of a graph. Tensors are known by their names in the whole graph.

  Attributes:
    graph_def: The operations. Their other inputs are `carried` and `sources`.
    sources: The inputs from outside: arguments, variables, answers.
    carried: The inputs from earlier stages.
    results: The outputs to send or return.
    carried_on: The outputs for each later stage.
    specs: The specs of all outputs.
    shapes: The inputs and outputs that are shapes. Each spec has the shape, as
      far as it is known, and the type of its numbers. Stages pass on a tensor
      without elements that has this shape, because XLA must know the shapes,
      but not the elements, of all inputs.
    jit_compile: Whether XLA compiles the stage.
  """

  graph_def: tf.compat.v1.GraphDef
  sources: tuple[str, ...]
  carried: tuple[str, ...]
  results: tuple[str, ...]
  carried_on: Mapping[int, tuple[str, ...]]
  specs: Mapping[str, tf.TensorSpec]
  shapes: Mapping[str, tf.TensorSpec]
  jit_compile: bool

  def __call__(
      self, given: Mapping[str, tf.Tensor]
  ) -> tuple[list[tf.Tensor], dict[int, list[tf.Tensor]]]:
    """Computes `results`, and the tensors for each later stage.

    `given` has the tensors of `sources` and `carried`, by name.
    """
    tensors = {name: given[name] for name in (*self.carried, *self.sources)}
    for name in self.carried:
      if name in self.shapes:
        tensors[name] = _shape(tensors[name], self.shapes[name])
    wanted = [name for name in self.specs if name not in tensors]
    used = {i for node in self.graph_def.node for i in node.input}

    def compute(*given):
      inputs = {_input_name(n): tensor for n, tensor in enumerate(given)}
      return tf.graph_util.import_graph_def(
          self.graph_def,
          # No operation takes an input that the stage only passes on.
          input_map={name: inputs[name] for name in used & inputs.keys()},
          return_elements=wanted,
          name='stage',
      )

    if self.jit_compile:
      compute = tf.function(compute, jit_compile=True, autograph=False)
    computed = compute(*tensors.values())
    tensors.update(zip(wanted, computed))
    for name, spec in self.specs.items():
      # TensorFlow infers less from a part of the graph than from the whole.
      tensors[name].set_shape(spec.shape)
    passed_on = tensors | {
        name: _without_elements(tensors[name], spec)
        for name, spec in self.shapes.items()
    }
    return [tensors[name] for name in self.results], {
        number: [passed_on[name] for name in names]
        for number, names in self.carried_on.items()
    }


def cut_stage(
    flow: data_flow.DataFlow,
    number: int,
    results: Sequence[str],
    carried_on: Mapping[int, Sequence[str]],
    jit_compile: bool,
) -> Stage:
  """Cuts one stage out of a graph.

  Args:
    flow: The graph.
    number: The number of the stage.
    results: The names of the tensors to send or return.
    carried_on: The names of the tensors that each later stage needs.
    jit_compile: Whether XLA compiles the stage, if possible.

  Raises:
    ValueError: If the stage would have to repeat an operation that may give
      another result.
  """
  nodes: dict[str, data_flow.Node] = {}
  # Dictionaries without values are ordered sets.
  carried: dict[str, None] = {}
  sources: dict[str, None] = {}
  wanted = [*results, *itertools.chain(*carried_on.values())]
  stack = list(wanted)
  while stack:
    name = stack.pop()
    if flow.level(name) < number and flow.can_be_carried(name):
      carried[name] = None
    elif flow.is_source(name):
      sources[name] = None
    elif data_flow.node_of(name) not in nodes:
      node = flow.node(name)
      if node.level < number and not node.is_repeatable:
        raise ValueError(
            f'The operation {node.definition.name!r} ({node.definition.op})'
            ' would have to be repeated in the backward pass, but may give'
            ' another result there, for instance because it draws random'
            ' numbers in a loop.'
        )
      nodes[node.definition.name] = node
      stack += node.dependencies()
  inputs = {name: _input_name(n) for n, name in enumerate([*carried, *sources])}
  return Stage(
      graph_def=_to_graph_def(flow, list(nodes.values()), inputs),
      sources=tuple(sources),
      carried=tuple(carried),
      results=tuple(results),
      carried_on={k: tuple(names) for k, names in carried_on.items()},
      specs={name: flow.spec(name) for name in wanted},
      shapes=_shapes(flow, [*carried, *itertools.chain(*carried_on.values())]),
      # XLA cannot create variables.
      jit_compile=jit_compile
      and all(n.definition.op != 'VarHandleOp' for n in nodes.values()),
  )


def _shapes(
    flow: data_flow.DataFlow, names: Sequence[str]
) -> dict[str, tf.TensorSpec]:
  """Returns `Stage.shapes`, given the tensors that stages pass on."""
  shapes = {name: flow.shape_of(name) for name in names}
  return {
      name: tf.TensorSpec(shape, flow.spec(name).dtype)
      for name, shape in shapes.items()
      if shape is not None
  }


def _without_elements(shape: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
  """Returns a tensor of a shape with a further axis of length 0."""
  zero = tf.constant([0], spec.dtype)
  # A model has hundreds of shapes, and `tf.zeros` takes three times as long.
  empty = tf.fill(tf.concat([shape, zero], 0), False)
  empty.set_shape([*spec.shape, 0])
  return empty


def _shape(empty: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
  """Returns the shape that made a tensor without elements."""
  return tf.slice(tf.shape(empty, spec.dtype), [0], [spec.shape.rank])


def _to_graph_def(
    flow: data_flow.DataFlow,
    nodes: Sequence[data_flow.Node],
    inputs: Mapping[str, str],
) -> tf.compat.v1.GraphDef:
  graph_def = tf.compat.v1.GraphDef(versions=flow.versions)
  for node in nodes:
    definition = graph_def.node.add()
    definition.CopyFrom(node.definition)
    definition.input.extend(inputs.get(i, i) for i in node.inputs)
    definition.input.extend(f'^{name}' for name in node.control_inputs)
    if definition.op == 'VarHandleOp':
      shared_name = f'stage_variable_{next(_variable_numbers)}'
      definition.attr['shared_name'].s = shared_name.encode()
  flow.library.add_called_functions(graph_def)
  return graph_def


def _input_name(number: int) -> str:
  return f'tff_bn.given_{number}:0'
