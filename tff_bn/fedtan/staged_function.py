"""A function that waits for answers from outside, cut into stages.

Synchronized batch normalization stops at every layer: a client sends what it
knows of its batch and goes on with the answer, in the forward and again in the
backward pass. TFF has no way to wait inside of a client's TensorFlow code. So
the function is traced as a whole, forward and backward pass in one graph, and
the graph is cut: a stage is all that can be computed with the answers that are
there. What a later stage needs of an earlier one is carried over, and nothing
is computed twice.

Questions that do not depend on each other's answers, as in parallel branches of
a model, are asked at the same time. So the number of stages is the depth of the
graph in questions, not their number. Questions whose answers nothing needs are
not asked at all.

The stages are free of side effects: variables become inputs and outputs.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Union

import tensorflow as tf

from tff_bn.fedtan import data_flow
from tff_bn.keras_model import stateless_function

# Asks a question: takes its kind, a nested structure of tensors, and a bool
# scalar that says whether the values may be used (default: yes); returns the
# answer.
Ask = Callable[..., Any]


class StagedFunction:
  """A traced function in stages, to be called inside TFF computations.

  Attributes:
    questions: For each stage but the last, the questions at its end.
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
      fn: The function of an `Ask` and the arguments. May read and assign any
        variable; should return the values of those that the caller wants back.
      variables: The variables whose values the caller gives. Others start with
        the value that they have now.
      *specs: `tf.TensorSpec`s, or nested structures of them, of the arguments.
      jit_compile: Whether XLA compiles the stages.

    Raises:
      ValueError: If a question is asked inside of a loop, a condition or a
        function, or the function uses a resource other than a variable.
    """
    requests = []

    def ask(kind, value, sound=True):
      value = tf.nest.map_structure(tf.identity, value)
      sound = tf.identity(sound)
      answer = tf.nest.map_structure(
          lambda v: tf.compat.v1.placeholder(v.dtype, v.shape), value
      )
      requests.append(data_flow.Request(kind, value, sound, answer))
      return answer

    @tf.function
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
          'A question is asked inside of a loop, a condition or a function.'
      )
    flow = data_flow.DataFlow(function, variables, requests)
    self._structure = function.structured_outputs
    outputs = [flow.resolve(tensor.name) for tensor in graph.outputs]
    needed = flow.needed_requests(outputs)
    last = max((level for level, _ in needed), default=0)
    self._requests = [
        [request for level, request in needed if level == number + 1]
        for number in range(last)
    ]
    self.questions = tuple(
        tuple(request.asked() for request in at_end)
        for at_end in self._requests
    )
    self._flow = flow
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
    """The numbers of the stages from which a stage carries something over."""
    return sorted(
        {self._flow.level(name) for name in self._stages[number].carried}
    )

  def targets_of(self, number: int) -> list[int]:
    """The numbers of the stages for which a stage returns something."""
    return sorted(self._stages[number].carried_on)

  def _cut(
      self, outputs: Sequence[str], jit_compile: bool
  ) -> list['data_flow.Stage']:
    flow = self._flow
    stages = []
    # From the last one back: what a stage returns is what later ones need.
    wanted = collections.defaultdict(dict)
    for number in reversed(range(len(self._requests) + 1)):
      if number == len(self._requests):
        results = list(outputs)
      else:
        results = [
            name
            for request in self._requests[number]
            for name in flow.sent(request)
        ]
      stage = flow.stage(number, results, wanted[number], jit_compile)
      for name in stage.carried:
        wanted[flow.level(name)].setdefault(number, []).append(name)
      stages.append(stage)
    return stages[::-1]

  def start(
      self,
      values: Sequence[tf.Tensor],
      *args: Any,
      seed: Optional[tf.Tensor] = None,
  ) -> tuple[Union[list[data_flow.Asked], Any], Mapping[int, list[tf.Tensor]]]:
    """Calls the first stage inside a graph.

    Args:
      values: The values that `variables` have at the start.
      *args: The arguments, of the traced types.
      seed: An int64 vector of 2 elements: the numbers that determine all random
        draws. Needed if `is_random`.

    Returns:
      See `proceed`.
    """
    given = {}
    for name in self._stages[0].sources:
      kind, number = name.split('/')
      number = int(number)
      if kind == data_flow.ARGUMENT:
        given[name] = tf.nest.flatten(args)[number]
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
  ) -> tuple[Union[list[data_flow.Asked], Any], Mapping[int, list[tf.Tensor]]]:
    """Calls a stage after the first inside a graph.

    Args:
      number: The stage.
      answers: The answers to `questions[number - 1]`.
      carried: For each of `sources_of(number)`, what that stage returned for
        this one.

    Returns:
      What is asked in `questions[number]`, or what the function returns if it
      is the last stage; and what it carries over to each later stage.
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

  def _call(
      self, number: int, given: Mapping[str, tf.Tensor]
  ) -> tuple[Any, Mapping[int, list[tf.Tensor]]]:
    results, carried = self._stages[number](given)
    if number == len(self._requests):
      return tf.nest.pack_sequence_as(self._structure, results), carried
    results = iter(results)
    return [
        data_flow.Asked(
            tf.nest.map_structure(lambda _: next(results), request.value),
            next(results),
        )
        for request in self._requests[number]
    ], carried
