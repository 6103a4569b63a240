"""Keras code with variables as a pure function for TFF computations.

TFF serializes TensorFlow graphs, and a graph may not refer to a variable of the
Python process. TFF's learning library therefore builds the Keras model again
inside each computation, in a TensorFlow 1 graph, where Keras 3 has no
variables.

Here, a function is traced once, as any `tf.function`. Each call inside a
computation calls the traced function with new variables in place of the
captured ones. The model is traced once for all computations and never changes.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
from typing import Any, Optional, Union

import keras
import numpy as np
import tensorflow as tf

from tff_bn.common import garbage

Variable = Union[keras.Variable, tf.Variable]

# Gives the variables of each call names that are unique in a computation.
_variable_numbers = itertools.count()
# Parts of the names of generators' states, with their shapes. Layers draw from
# a `keras.random.SeedGenerator` (a seed and a counter) or a
# `tf.random.Generator` (two counters and a key of Philox). The name identifies
# the state, because a generator need not belong to a layer.
_SEED, _GENERATOR = 'seed_generator_state', 'StateVar'
_RANDOM_STATES = {_SEED: [2], _GENERATOR: [3]}


def _is_random_state(variable: tf.Variable) -> bool:
  return variable.dtype == tf.int64 and any(
      part in variable.name and variable.shape == shape
      for part, shape in _RANDOM_STATES.items()
  )


def fingerprint(tensors: Any) -> tf.Tensor:
  """Returns a number that depends on every bit of the given tensors.

  Args:
    tensors: A nested structure of numeric tensors.

  Returns:
    An int64 scalar.
  """
  total = tf.zeros([], tf.int64)
  for tensor in tf.nest.flatten(tensors):
    digest = tf.fingerprint(tf.reshape(tensor, [1, -1]))
    total = 31 * total + tf.bitcast(digest[0], tf.int64)
  return total


@dataclasses.dataclass(frozen=True)
class Constant:
  """A captured tensor; `value` is its value."""

  value: np.ndarray


@dataclasses.dataclass(frozen=True)
class GivenVariable:
  """A captured variable whose value a caller gives, at position `index`."""

  variable: tf.Variable
  index: int


@dataclasses.dataclass(frozen=True)
class OtherVariable:
  """A captured variable that has the value `initial` before every call."""

  variable: tf.Variable
  initial: np.ndarray


@dataclasses.dataclass(frozen=True)
class RandomState:
  """The captured state of the random number generator with this number."""

  variable: tf.Variable
  number: int

  @property
  def is_seed(self) -> bool:
    """Whether the state is a Keras seed, which draws only read and assign."""
    return _SEED in self.variable.name


Capture = Union[Constant, GivenVariable, OtherVariable, RandomState]


def captures(
    function: tf.types.experimental.ConcreteFunction,
    variables: Sequence[Variable],
) -> list[Capture]:
  """Classifies the captured inputs of a function.

  Args:
    function: A traced function.
    variables: The variables whose values callers give.

  Returns:
    One entry for each of `function.captured_inputs`.

  Raises:
    ValueError: If the function uses a resource other than a variable.
  """
  # By handle, which Keras's variables share with TensorFlow's.
  index_of = {id(v.handle): i for i, v in enumerate(variables)}
  variable_of = {id(v.handle): v for v in function.graph.variables}
  num_random_states = 0
  found: list[Capture] = []
  for captured in function.captured_inputs:
    variable = variable_of.get(id(captured))
    if variable is None:
      if captured.dtype in (tf.resource, tf.variant):
        raise ValueError(
            'The model uses a TensorFlow resource that is not a variable,'
            ' such as the lookup table of a StringLookup layer. Such a layer'
            ' cannot be sent to clients: apply it in the dataset instead.'
        )
      found.append(Constant(captured.numpy()))
    elif id(captured) in index_of:
      found.append(GivenVariable(variable, index_of[id(captured)]))
    elif _is_random_state(variable):
      found.append(RandomState(variable, num_random_states))
      num_random_states += 1
    else:
      found.append(OtherVariable(variable, variable.numpy()))
  return found


def seed_state(seed: tf.Tensor, number: int) -> tf.Tensor:
  """Returns the state of `keras.random.SeedGenerator` number `number`.

  Args:
    seed: An int64 vector of 2 elements.
    number: The number of the generator in the function.

  Returns:
    The state, an int64 vector of 2 elements.
  """
  return tf.stack([_key(seed, number), np.int64(0)])


def generator_state(seed: tf.Tensor, number: int) -> tf.Tensor:
  """Returns the state of a `tf.random.Generator`, see `seed_state`."""
  return tf.stack([np.int64(0), np.int64(0), _key(seed, number)])


def _key(seed: tf.Tensor, number: int) -> tf.Tensor:
  return tf.random.stateless_uniform(
      [],
      tf.stack([seed[0], seed[1] + number]),
      minval=None,
      maxval=None,
      dtype=tf.int64,
  )


class StatelessFunction:
  """Turns a function that uses variables into a pure function.

  Captured variables that are not among `variables`, such as the accumulators of
  Keras metrics, start every call with the value that they had when the function
  was traced. The states of random number generators start from the `seed` of
  the call.
  """

  @garbage.collected_rarely()
  def __init__(
      self,
      fn: Callable[..., Any],
      variables: Sequence[Variable],
      *specs: Any,
      jit_compile: bool = False,
  ):
    """Traces the function.

    Args:
      fn: The function. It may read and assign any variable, and should return
        the values that the caller wants back.
      variables: The variables whose values the caller gives at each call.
      *specs: `tf.TypeSpec`s, or nested structures of them, of the arguments.
      jit_compile: Whether XLA compiles the function.

    Raises:
      ValueError: If the function uses a resource other than a variable, such
        as a lookup table.
    """
    self._function = tf.function(
        fn, jit_compile=jit_compile or None
    ).get_concrete_function(*specs)
    self._captures = captures(self._function, variables)
    self._is_random = any(isinstance(c, RandomState) for c in self._captures)

  @property
  def is_random(self) -> bool:
    """Whether the function draws random numbers, and so needs a seed."""
    return self._is_random

  def __call__(
      self,
      values: Sequence[tf.Tensor],
      *args: Any,
      seed: Optional[tf.Tensor] = None,
  ) -> Any:
    """Calls the function inside a graph.

    Args:
      values: The values that `variables` have when the function starts.
      *args: The arguments, of the traced types.
      seed: An int64 vector of 2 elements that determines all random draws.
        Needed if `is_random`.

    Returns:
      The result of the function.
    """
    inputs, assignments = [], []
    for captured in self._captures:
      match captured:
        case Constant(value):
          inputs.append(tf.constant(value))
          continue
        case GivenVariable(variable, index):
          value = values[index]
        case OtherVariable(variable, initial):
          value = tf.constant(initial)
        case RandomState(variable, number):
          make_state = seed_state if captured.is_seed else generator_state
          value = make_state(seed, number)
      # A `tf.Variable` would need an initializer, which costs a runtime another
      # pass over the graph.
      handle = tf.raw_ops.VarHandleOp(
          dtype=variable.dtype,
          shape=variable.shape,
          shared_name=f'stateless_function_{next(_variable_numbers)}',
      )
      assignments.append(
          tf.raw_ops.AssignVariableOp(
              resource=handle, value=tf.cast(value, variable.dtype)
          )
      )
      inputs.append(handle)
    flat_args = []
    for arg in tf.nest.flatten(args):
      if isinstance(arg, tf.data.Dataset):
        arg = tf.data.experimental.to_variant(arg)
      flat_args.append(tf.convert_to_tensor(arg))
    outputs = self._function.structured_outputs
    with tf.control_dependencies(assignments):
      results = tf.raw_ops.StatefulPartitionedCall(
          args=flat_args + inputs,
          Tout=[output.dtype for output in tf.nest.flatten(outputs)],
          f=self._function,
      )
    for result, output in zip(results, tf.nest.flatten(outputs)):
      result.set_shape(output.shape)
    return tf.nest.pack_sequence_as(outputs, results)
