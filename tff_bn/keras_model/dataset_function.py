"""A function of a client's data that uses a Keras model's variables."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, Optional

import keras
import tensorflow as tf

from tff_bn.common import client_batches
from tff_bn.keras_model import batch_norm_calls
from tff_bn.keras_model.batch_norm_calls import TrainingCall
from tff_bn.keras_model.stateless_function import StatelessFunction
from tff_bn.keras_model.stateless_function import Variable


class DatasetFunction:
  """A `StatelessFunction` whose first argument is a client's data.

  It is traced for a `tf.data.Dataset`, and once more for each kind of
  `ClientBatches` when it is first called with them. XLA compiles it for batches
  of equal sizes.
  """

  def __init__(
      self,
      fn: Callable[..., Any],
      variables: Sequence[Variable],
      input_spec: Any,
      specs: Sequence[Any],
      keras_model: keras.Model,
      batch_norm_call: TrainingCall,
  ):
    """Traces the function.

    Args:
      fn: The function, see `StatelessFunction`. It has no conditions or loops
        of Python that depend on tensors.
      variables: The variables whose values the caller gives at each call.
      input_spec: The structure of a batch, of `tf.TensorSpec`s.
      specs: `tf.TypeSpec`s, or nested structures of them, of the arguments
        after the data.
      keras_model: The model that the function calls.
      batch_norm_call: Computes its batch normalization layers in training.
    """
    # AutoGraph would take a quarter of a second in each process to convert the
    # source of local training.
    fn = tf.autograph.experimental.do_not_convert(fn)

    def trace(data_spec, jit_compile=False):
      with batch_norm_calls.replaced(keras_model, batch_norm_call):
        return StatelessFunction(
            fn, variables, data_spec, *specs, jit_compile=jit_compile
        )

    self._trace = trace
    self._input_spec = input_spec
    self._of_dataset = trace(tf.data.DatasetSpec(input_spec))

  @functools.cached_property
  def _of_batches(self) -> StatelessFunction:
    return self._trace_batches(equal_sizes=False)

  @functools.cached_property
  def _of_equal_batches(self) -> StatelessFunction:
    return self._trace_batches(equal_sizes=True)

  def _trace_batches(self, equal_sizes: bool) -> StatelessFunction:
    spec = client_batches.ClientBatches.spec(self._input_spec, equal_sizes)
    # The caller builds another graph.
    with tf.__internal__.eager_context.eager_mode():
      return self._trace(spec, jit_compile=equal_sizes)

  @property
  def is_random(self) -> bool:
    """Whether the function draws random numbers, and so needs a seed."""
    return self._of_dataset.is_random

  def __call__(
      self,
      values: Sequence[tf.Tensor],
      data: client_batches.Data,
      *args: Any,
      seed: Optional[tf.Tensor] = None,
  ) -> Any:
    """Calls the function inside a graph; see `StatelessFunction`."""
    function = self._of_dataset
    if isinstance(data, client_batches.ClientBatches):
      function = (
          self._of_batches
          if tf.is_tensor(data.bounds)
          else self._of_equal_batches
      )
    return function(values, data, *args, seed=seed)
