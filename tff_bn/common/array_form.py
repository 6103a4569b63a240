"""The form of a client's computation that takes batches as arrays."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import client_batches


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayForm:
  """A computation of a client, and how to build its form with arrays.

  Attributes:
    computation: The computation, a `tff.tensorflow.computation`. A part of its
      argument is a dataset.
    build: Builds the computation that takes, in place of the dataset, what
      `data_type` says, and computes the same.
  """

  computation: tff.Computation
  build: Callable[[], tff.Computation]


def data_type(input_spec: Any) -> tff.StructType:
  """Returns the type of the samples and of a client's place among them.

  Its elements are the arguments of `ClientBatches.of_client`.

  Args:
    input_spec: The structure of a batch, of `tf.TensorSpec`s.
  """
  samples = client_batches.samples_spec(input_spec)
  return tff.to_type(
      [
          ('samples', tff.types.tensorflow_to_type(samples)),
          ('bounds', tff.TensorType(tf.int64.as_numpy_dtype, [None])),
          ('first', tf.int64.as_numpy_dtype),
          ('size', tf.int64.as_numpy_dtype),
      ]
  )


def build(
    function: Callable[[Sequence[Any], client_batches.Data], Any],
    types: Sequence[Any],
    input_spec: Any,
) -> ArrayForm:
  """Builds the computation of a client.

  Args:
    function: Takes the values of `types` and the client's data.
    types: The types of the computation's first arguments.
    input_spec: The structure of a batch, of `tf.TensorSpec`s.
  """
  sequence_type = tff.SequenceType(tff.types.tensorflow_to_type(input_spec))

  @tff.tensorflow.computation([*types, sequence_type])
  def of_dataset(arguments):
    *others, dataset = arguments
    return function(others, dataset)

  def build_of_arrays():
    @tff.tensorflow.computation([*types, data_type(input_spec)])
    def of_arrays(arguments):
      *others, data = arguments
      return function(others, client_batches.ClientBatches.of_client(**data))

    return of_arrays

  return ArrayForm(of_dataset, build_of_arrays)
