"""The phases of the clients' personal position encodings."""

from collections.abc import Sequence

import numpy as np

from tff_bn.common import seeding
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import Role


def names(model: BatchNormModel) -> Sequence[str]:
  """Returns the names of the variables that hold personal phases."""
  return [v.name for v in model.variables if v.role is Role.PERSONAL_PHASE]


def draw(
    model: BatchNormModel, seed: int, client_number: int
) -> dict[str, np.float32]:
  """Draws the phases of a client, in [0, 1), for each name of `names`."""
  phase_names = names(model)
  # NumPy takes no negative seeds.
  rng = seeding.generator(
      seeding.Stream.PERSONAL_PHASES, seed % 2**64, client_number
  )
  phases = rng.random(len(phase_names), np.float32)
  return dict(zip(phase_names, phases, strict=True))
