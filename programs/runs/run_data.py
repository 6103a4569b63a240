"""Makes the data of a run from its settings.

Importing this module imports TensorFlow, so programs do it after they have
checked their flags.
"""

import dataclasses
import re
from typing import NamedTuple, Optional, Self

from tff_bn import data as tff_bn_data
from tff_bn.catalog import rules
from tff_bn.programs.flags import data_flags
from tff_bn.programs.plan import settings as settings_lib


class SplitData(NamedTuple):
  """The data of the clients that train, and of those that are held out."""

  training: tff_bn_data.FederatedData
  held_out: Optional[tff_bn_data.FederatedData]


@dataclasses.dataclass(frozen=True)
class Poisoning:
  """An attack that falsifies data. The attributes are flags."""

  attack: str
  attack_strength: Optional[float]
  num_attackers: int

  @classmethod
  def of(cls, settings: settings_lib.RunSettings) -> Optional[Self]:
    """Returns the attack of a run; None if it falsifies no data."""
    attack = settings.attack
    if attack is None or not rules.ATTACKS[attack].poisons_data:
      return None
    return cls(attack, settings.attack_strength, settings.num_attackers)

  def falsify(
      self, data: tff_bn_data.FederatedData
  ) -> tff_bn_data.FederatedData:
    """Returns the data after the attack."""
    attack = rules.ATTACKS[self.attack]
    strength = {}
    if attack.strength is not None:
      strength[attack.strength.name] = self.attack_strength
    return attack.load()(data, self.num_attackers, **strength)


@dataclasses.dataclass(frozen=True)
class DataRecipe:
  """Makes the data of a run, see `tff_bn.data.FederatedData.recipe`.

  `poisoning` is the attack that falsifies the data of the first clients; None
  if there is no attack of this kind. The other attributes are flags.
  """

  data: data_flags.DataFlags
  seed: int
  clients_per_round: Optional[int]
  poisoning: Optional[Poisoning]
  augment: Optional[str]
  held_out_clients: Optional[tuple[str, ...]]
  validation_share: Optional[float] = None

  @classmethod
  def of(cls, settings: settings_lib.RunSettings) -> 'DataRecipe':
    """Returns the recipe of the data of a run."""
    return cls(
        settings.part(data_flags.DataFlags),
        settings.seed,
        settings.clients_per_round,
        Poisoning.of(settings),
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
        text = re.sub('^share=', '--validation_share=', str(error))
        raise ValueError(text) from error
    if self.data.pixel_scaling is not None:
      data = data.scaled(self.data.pixel_scaling)
      if held_out is not None and data.client_scalings is not None:
        held_out = held_out.with_client_scalings(
            {}, are_drawn=False, default=data.dataset.scaling
        )
      elif held_out is not None:
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
    if self.poisoning is not None:
      data = self.poisoning.falsify(data)
    data = dataclasses.replace(
        data, recipe=self, augmentation=self.augment or 'none'
    )
    return SplitData(data, held_out)
