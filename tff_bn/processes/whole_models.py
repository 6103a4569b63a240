"""Processes that return whole models although their states lack constants.

The state of a process has only variables that training can change. TFF's
`LearningProcess` gets and sets model weights by TFF computations. These would
contain a model's constants, such as a frozen backbone, and copy them in each
call. The computations here are ordinary functions instead, which pass on the
constants as they are.
"""

from typing import Any
import warnings

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import override

from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.batch_norm_model import ModelWeights
from tff_bn.keras_model.shared_weights import SharedWeights


class _Completed(tff.Computation):
  """A computation of shared weights, as one of the weights of whole models.

  It needs a state with values, so it cannot be part of another computation.
  """

  def __init__(
      self,
      computation: tff.Computation,
      model: BatchNormModel,
      weights: SharedWeights,
  ):
    self._computation = computation
    self._model = model
    self._weights = weights

  def _check(self, state: Any) -> None:
    if isinstance(state, tff.Value):
      raise TypeError(
          f'The model {self._model.keras_model.name!r} has variables that'
          ' training cannot change. get_model_weights and set_model_weights of'
          ' its processes cannot be called inside a computation of TFF.'
      )

  @override
  def __hash__(self) -> int:
    return hash(self._computation)


class _GetModelWeights(_Completed):
  """Returns the weights of the whole model."""

  @property
  @override
  def type_signature(self) -> tff.FunctionType:
    return tff.FunctionType(
        self._computation.type_signature.parameter, self._weights.whole_type()
    )

  @override
  def __call__(self, state: Any) -> ModelWeights:
    self._check(state)
    shared = self._computation(state)
    return self._model.to_model_weights(self._weights.merge(shared, {}))


class _SetModelWeights(_Completed):
  """Sets the weights of the whole model, whose constants must be the same."""

  @property
  @override
  def type_signature(self) -> tff.FunctionType:
    signature = self._computation.type_signature
    names = [name for name, _ in tff.structure.to_elements(signature.parameter)]
    types = signature.result, self._weights.whole_type()
    return tff.FunctionType(
        tff.StructType(list(zip(names, types, strict=True))), signature.result
    )

  @override
  def __call__(self, state: Any, weights: ModelWeights) -> Any:
    self._check(state)
    values = self._model.from_model_weights(weights)
    self._weights.check_constants(values)
    return self._computation(state, self._weights.shared(values))


def build_process(
    model: BatchNormModel,
    weights: SharedWeights,
    initialize: tff.Computation,
    next_fn: tff.Computation,
    **hparams_fns: tff.Computation,
) -> tff.learning.templates.LearningProcess:
  """Builds a process that gets and sets the weights of whole models.

  Args:
    model: The model.
    weights: Its shared weights; no variable is local.
    initialize: Makes a `tff.learning.templates.LearningAlgorithmState`.
    next_fn: The computation of a round.
    **hparams_fns: `get_hparams_fn` and `set_hparams_fn`, see
      `tff.learning.templates.LearningProcess`.
  """
  state_type = initialize.type_signature.result.member

  @tff.tensorflow.computation(state_type)
  def get_shared(state):
    return state.global_model_weights

  @tff.tensorflow.computation(state_type, state_type.global_model_weights)
  def set_shared(state, model_weights):
    return state._replace(global_model_weights=model_weights)

  get_model_weights, set_model_weights = get_shared, set_shared
  if weights.constants:
    get_model_weights = _GetModelWeights(get_shared, model, weights)
    set_model_weights = _SetModelWeights(set_shared, model, weights)
  return tff.learning.templates.LearningProcess(
      initialize, next_fn, get_model_weights, set_model_weights, **hparams_fns
  )


def set_shared_weights(
    model: BatchNormModel,
    weights: SharedWeights,
    state: Any,
    model_weights: ModelWeights,
) -> Any:
  """See `StatefulLearningProcess.set_model_weights`."""
  values = model.from_model_weights(model_weights)
  model.check_types(values)
  weights.check_constants(values)
  shared = weights.shared(values)
  try:
    tf.nest.assert_same_structure(state.global_model_weights, shared)
  except (AttributeError, TypeError, ValueError) as error:
    raise TypeError(
        'state must be a state of this process, such as process.initialize(),'
        f' but is a {type(state).__name__} of another structure.'
    ) from error
  given = weights.local(values)
  initial = weights.local(model.from_model_weights(model.initial_weights))
  others = [
      name
      for name, value in initial.items()
      if not np.array_equal(given[name], value, equal_nan=True)
  ]
  if others:
    warnings.warn(
        f'model_weights has other values than the model for {len(others)} local'
        f' variables, such as {others[0]}. The server has no local variables,'
        " so new clients start with the model's values. To start with others,"
        ' build the process from a BatchNormModel whose keras_model_fn returns'
        ' a model with them.',
        stacklevel=3,
    )
  return state._replace(global_model_weights=shared)
