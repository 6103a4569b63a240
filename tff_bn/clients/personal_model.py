"""Local training in which each client keeps a model of its own."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.local_training import LocalTrainingWork
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.shared_weights import SharedWeights


class PersonalModelWork(LocalTrainingWork):
  """Local training of clients that keep own values of the shared variables.

  They start as the server's, in the first round in which a client takes part.
  """

  has_client_models = True

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      correction: Optional[BoundCorrection],
  ):
    """See the base class."""
    super().__init__(model, config, weights, correction)
    self._names = {
        p: f'personal_{model.variables[p].name}' for p in weights.positions
    }

  def initial_client_state(
      self, values: Sequence[Any]
  ) -> collections.OrderedDict[str, Any]:
    """Returns the server's values as the client's own."""
    return collections.OrderedDict(
        super().initial_client_state(values), **self._personal(values)
    )

  def _personal(
      self, values: Sequence[Any]
  ) -> collections.OrderedDict[str, Any]:
    """Returns a model's values by their names in a client's state."""
    return collections.OrderedDict(
        (name, values[position]) for position, name in self._names.items()
    )

  def client_model(
      self, values: Sequence[Any], client_state: Mapping[str, Any]
  ) -> Sequence[Any]:
    """Returns the client's own model."""
    personal = list(values)
    for position, name in self._names.items():
      personal[position] = client_state[name]
    return personal
