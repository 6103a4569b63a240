"""A function that waits for answers from outside, cut into stages.

Synchronized batch normalization stops at every layer: a client sends statistics
of its batch and continues with the answer, in the forward and again in the
backward pass. TFF has no way to wait inside a client's TensorFlow code. So the
whole function is traced, forward and backward pass in one graph, and the graph
is cut: a stage is everything that can be computed with the answers so far.
Later stages get the values that they need from earlier stages, so that nothing
expensive is computed twice.

Questions that do not depend on each other's answers, as in parallel branches of
a model, are asked at the same time. So the number of stages is the depth of the
graph in questions, not their number. Questions whose answers are not needed are
not asked.

The stages are free of side effects: variables become inputs and outputs.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Optional

import tensorflow as tf

from tff_bn.fedtan import data_flow
from tff_bn.fedtan import stage as stage_lib
from tff_bn.fedtan.questions import Asked
from tff_bn.fedtan.questions import Kind
from tff_bn.fedtan.questions import Question
from tff_bn.fedtan.questions import Request
from tff_bn.keras_model import stateless_function

# Asks a question: takes its kind, a nested structure of tensors, and a bool
# scalar that says whether the values may be used (default: yes); returns the
# answer.
Ask = Callable[..., Any]


class StageOutput(NamedTuple):
  """The output of one stage.

  Attributes:
    result: The values to send, a list of `Asked` in the order of the stage's
      `questions`; in the last stage, the result of the function.
    carried: The tensors for each later stage.
  """

  result: Any
  carried: Mapping[int, list[tf.Tensor]]


class StagedFunction(Generic[Kind]):
  """A traced function in stages, to be called inside TFF computations.

  Attributes:
    questions: The questions at the end of each stage but the last.
    is_random: Whether the function draws random numbers, and so needs a seed.
  """

  def __init__(
      self,
      fn: Callable[..., Any],
      variables: Sequence[stateless_function.Variable],
      *specs: Any,
      jit_compile: bool = False,
  ):
    """Traces and cuts the function.

    Args:
      fn: The function of an `Ask` and the arguments. It may read and assign any
        variable, and should return the values that the caller wants back.
      variables: The variables whose values the caller gives. Others start with
        the value that they have now.
      *specs: `tf.TensorSpec`s, or nested structures of them, of the arguments.
      jit_compile: Whether XLA compiles the stages.

    Raises:
      ValueError: If a question is asked inside a loop, a condition or a
        function, or the function uses a resource other than a variable.
    """
    requests: list[Request[Kind]] = []

    def ask(kind, value, sound=True):
      # Before the placeholders, because the graph is analyzed in this order.
      value = tf.nest.map_structure(tf.identity, value)
      sound = tf.identity(sound)
      answer = tf.nest.map_structure(
          lambda v: tf.compat.v1.placeholder(v.dtype, v.shape), value
      )
      requests.append(Request(kind, value, sound, answer))
      return answer

    # The traced function never runs, but operations can depend on the compiler.
    @tf.function(autograph=False, jit_compile=jit_compile)
    def traced(*args):
      # TensorFlow traces a function that makes a variable a second time.
      requests.clear()
      return fn(ask, *args)

    function = traced.get_concrete_function(*specs)
    graph = function.graph
    if any(
        tensor.graph is not graph
        for request in requests
        for tensor in request.tensors
    ):
      raise ValueError(
          'A question is asked inside a loop, a condition or a function.'
      )
    self._flow = data_flow.DataFlow(function, variables, requests)
    self._structure = function.structured_outputs
    outputs = [self._flow.resolve(tensor.name) for tensor in graph.outputs]
    needed = self._flow.needed_requests(outputs)
    self._requests: list[list[Request[Kind]]] = [
        [] for _ in range(max(needed.values(), default=0))
    ]
    for request, level in needed.items():
      self._requests[level - 1].append(request)
    self.questions: tuple[tuple[Question[Kind], ...], ...] = tuple(
        tuple(request.question() for request in at_end)
        for at_end in self._requests
    )
    self._stages = self._cut(outputs, jit_compile)
    self.is_random = any(
        name.startswith((data_flow.SEED, data_flow.GENERATOR))
        for name in self._stages[0].sources
    )

  @property
  def num_stages(self) -> int:
    """The number of stages."""
    return len(self._stages)

  def sources_of(self, number: int) -> list[int]:
    """Returns the earlier stages whose tensors a stage needs."""
    return sorted(
        {self._flow.level(name) for name in self._stages[number].carried}
    )

  def targets_of(self, number: int) -> list[int]:
    """Returns the later stages that need tensors of a stage."""
    return sorted(self._stages[number].carried_on)

  def _cut(
      self, outputs: Sequence[str], jit_compile: bool
  ) -> list[stage_lib.Stage]:
    stages = []
    # From the last stage back, because later stages say what they need.
    wanted: dict[int, dict[int, list[str]]] = collections.defaultdict(dict)
    results = list(outputs)
    for number in reversed(range(len(self._requests) + 1)):
      stage = stage_lib.cut_stage(
          self._flow, number, results, wanted[number], jit_compile
      )
      for name in stage.carried:
        by_target = wanted[self._flow.level(name)]
        by_target.setdefault(number, []).append(name)
      stages.append(stage)
      if number:
        results = [
            name
            for request in self._requests[number - 1]
            for name in self._flow.sent(request)
        ]
    return stages[::-1]

  def start(
      self,
      values: Sequence[tf.Tensor],
      *args: Any,
      seed: Optional[tf.Tensor] = None,
  ) -> StageOutput:
    """Calls the first stage inside a graph.

    Args:
      values: The values that `variables` have at the start.
      *args: The arguments, of the traced types.
      seed: An int64 vector of 2 elements that determines all random draws.
        Needed if `is_random`.
    """
    flat_args = tf.nest.flatten(args)
    given = {}
    for name in self._stages[0].sources:
      kind, _, digits = name.partition('/')
      number = int(digits)
      if kind == data_flow.ARGUMENT:
        given[name] = flat_args[number]
      elif kind == data_flow.VALUE:
        given[name] = values[number]
      elif kind == data_flow.SEED:
        given[name] = stateless_function.seed_state(seed, number)
      else:
        given[name] = stateless_function.generator_state(seed, number)
    return self._call(0, given)

  def proceed(
      self,
      number: int,
      answers: Sequence[Any],
      carried: Mapping[int, Sequence[tf.Tensor]],
  ) -> StageOutput:
    """Calls a stage after the first inside a graph.

    Args:
      number: The number of the stage.
      answers: The answers to `questions[number - 1]`.
      carried: The tensors that each of `sources_of(number)` returned for this
        stage.
    """
    stage = self._stages[number]
    given = {}
    for request, answer in zip(
        self._requests[number - 1], answers, strict=True
    ):
      for placeholder, tensor in zip(
          tf.nest.flatten(request.answer), tf.nest.flatten(answer), strict=True
      ):
        given[placeholder.name] = tensor
    for source in self.sources_of(number):
      names = [n for n in stage.carried if self._flow.level(n) == source]
      given.update(zip(names, carried[source], strict=True))
    return self._call(number, given)

  def _call(self, number: int, given: Mapping[str, tf.Tensor]) -> StageOutput:
    tensors, carried = self._stages[number](given)
    if number == len(self._requests):
      result = tf.nest.pack_sequence_as(self._structure, tensors)
      return StageOutput(result, carried)
    remaining = iter(tensors)
    return StageOutput(
        [
            Asked(
                tf.nest.map_structure(lambda _: next(remaining), request.value),
                next(remaining),
            )
            for request in self._requests[number]
        ],
        carried,
    )
