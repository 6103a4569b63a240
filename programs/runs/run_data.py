"""Makes the data of a run from its settings.

Importing this module imports TensorFlow, so programs do it after they have
checked their flags.
"""

import dataclasses
from typing import NamedTuple, Optional

from tff_bn import data as tff_bn_data
from tff_bn.catalog import rules
from tff_bn.programs.flags import data_flags
from tff_bn.programs.plan import settings as settings_lib


class SplitData(NamedTuple):
  """The data of the clients that train, and of those that are held out."""

  training: tff_bn_data.FederatedData
  held_out: Optional[tff_bn_data.FederatedData]


@dataclasses.dataclass(frozen=True)
class DataRecipe:
  """Makes the data of a run, see `tff_bn.data.FederatedData.recipe`.

  `num_flipping` is the number of clients whose labels are falsified. The other
  attributes are flags.
  """

  data: data_flags.DataFlags
  seed: int
  clients_per_round: Optional[int]
  num_flipping: int
  augment: Optional[str]
  held_out_clients: Optional[tuple[str, ...]]
  validation_share: Optional[float] = None

  @classmethod
  def of(cls, settings: settings_lib.RunSettings) -> 'DataRecipe':
    """Returns the recipe of the data of a run."""
    flips_labels = settings.attack is not None and not rules.falsifies_values(
        settings.attack
    )
    return cls(
        settings.part(data_flags.DataFlags),
        settings.seed,
        settings.clients_per_round,
        (settings.num_attackers or 0) if flips_labels else 0,
        settings.augment,
        settings.held_out_clients,
        settings.validation_share,
    )

  def __call__(self) -> tff_bn_data.FederatedData:
    """Makes the data; a ValueError says why that is impossible here."""
    return self.split(self.data.load())

  def split(self, dataset: tff_bn_data.Dataset) -> tff_bn_data.FederatedData:
    """Returns the training data of `split_and_hold_out`."""
    return self.split_and_hold_out(dataset).training

  def split_and_hold_out(self, dataset: tff_bn_data.Dataset) -> SplitData:
    """Splits the dataset; a ValueError says why it is impossible."""
    data = self.data.split_over_clients(dataset, self.seed)
    held_out = None
    if self.held_out_clients is not None:
      data, held_out = data.hold_out(self.held_out_clients)
    if self.validation_share is not None:
      try:
        data = data.with_validation(self.validation_share, self.seed)
      except ValueError as error:
        raise ValueError(f'--validation_{error}') from error
    if self.data.pixel_scaling is not None:
      data = data.scaled(self.data.pixel_scaling)
      if held_out is not None:
        held_out = held_out.with_scaling(data.dataset.scaling)
    num_clients = len(data.client_ids)
    if (
        self.clients_per_round is not None
        and self.clients_per_round > num_clients
    ):
      raise ValueError(
          f'--clients_per_round={self.clients_per_round} asks for more clients'
          f' than the {num_clients} that exist; use at most {num_clients}.'
      )
    if self.num_flipping:
      data = tff_bn_data.with_flipped_labels(data, self.num_flipping)
    data = dataclasses.replace(
        data, recipe=self, augmentation=self.augment or 'none'
    )
    return SplitData(data, held_out)
