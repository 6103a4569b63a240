"""The form of a client's computation that takes batches as arrays."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Optional

import tensorflow_federated as tff

from tff_bn.common import client_batches


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayForm:
  """A computation of a client, and how to build its forms with arrays.

  Attributes:
    computation: The computation, a `tff.tensorflow.computation`. A part of its
      argument is a dataset.
    build: Builds the computation that takes, in place of the dataset, what
      `data_type` says, and computes the same. Its argument is `equal_sizes`.
    compiled_flops: The number of floating point operations in a step with a
      number of samples, if XLA can compile the form with equal sizes. Otherwise
      `None`.
  """

  computation: tff.Computation
  build: Callable[[bool], tff.Computation]
  compiled_flops: Optional[Callable[[int], float]]


def data_type(input_spec: Any, equal_sizes: bool) -> tff.StructType:
  """Returns the type of the samples and of a client's place among them.

  Its elements are the arguments of `ClientBatches.of_client`.

  Args:
    input_spec: The structure of a batch, of `tf.TensorSpec`s.
    equal_sizes: Whether all batches have the same size.
  """
  spec = client_batches.ClientBatches.spec(input_spec, equal_sizes)
  return tff.to_type(
      [
          (name, tff.types.tensorflow_to_type(getattr(spec, name)))
          for name in ('samples', 'bounds', 'first', 'size')
      ]
  )


def build(
    function: Callable[[Sequence[Any], client_batches.Data], Any],
    types: Sequence[Any],
    input_spec: Any,
    compiled_flops: Optional[Callable[[int], float]],
) -> ArrayForm:
  """Builds the computation of a client.

  Args:
    function: Takes the values of `types` and the client's data.
    types: The types of the computation's first arguments.
    input_spec: The structure of a batch, of `tf.TensorSpec`s.
    compiled_flops: See `ArrayForm`.
  """
  sequence_type = tff.SequenceType(tff.types.tensorflow_to_type(input_spec))

  @tff.tensorflow.computation([*types, sequence_type])
  def of_dataset(arguments):
    *others, dataset = arguments
    return function(others, dataset)

  def build_of_arrays(equal_sizes):
    @tff.tensorflow.computation([*types, data_type(input_spec, equal_sizes)])
    def of_arrays(arguments):
      *others, data = arguments
      return function(others, client_batches.ClientBatches.of_client(**data))

    return of_arrays

  return ArrayForm(of_dataset, build_of_arrays, compiled_flops)
