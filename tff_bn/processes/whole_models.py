"""Processes that return whole models although their states lack constants.

The state of a process has only variables that training can change. TFF's
`LearningProcess` gets and sets model weights by TFF computations. These would
contain a model's constants, such as a frozen backbone, and copy them in each
call. The computations here are ordinary functions instead, which pass on the
constants as they are.
"""

from typing import Any

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
    """Initializes the computation.

    Args:
      computation: The computation of the shared weights.
      model: The model.
      weights: Its shared weights.
    """
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


def complete(
    process: tff.learning.templates.LearningProcess,
    model: BatchNormModel,
    weights: SharedWeights,
) -> tff.learning.templates.LearningProcess:
  """Makes a process get and set the weights of whole models.

  Args:
    process: A process for the shared weights.
    model: The model.
    weights: Its shared weights; no variable is local.

  Returns:
    The process; the same if the model has no constants.
  """
  if not model.constants:
    return process
  return tff.learning.templates.LearningProcess(
      process.initialize,
      process.next,
      _GetModelWeights(process.get_model_weights, model, weights),
      _SetModelWeights(process.set_model_weights, model, weights),
      get_hparams_fn=process.get_hparams,
      set_hparams_fn=process.set_hparams,
  )
