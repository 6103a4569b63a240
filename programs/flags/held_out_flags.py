"""The flags of clients that take no part in training."""

import dataclasses
from typing import Any, Optional

from tff_bn.catalog import value_types
from tff_bn.catalog.options import Condition
from tff_bn.catalog.options import Option
from tff_bn.data import splits
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli.parsed_flags import ParsedFlags

_NEEDS_CLIENTS = Condition(
    'held_out_clients',
    lambda flags: flags.held_out_clients is not None,
    'has no effect without --held_out_clients',
)
_OPTIONS = (
    Option(
        'held_out_clients',
        value_types.List(value_types.TEXT),
        'Ids of clients, separated by commas, that take no part in training.'
        ' The final model is tested on them with averaged BN statistics, with'
        ' statistics from their own unlabeled training data, and with a mixture'
        ' of both',
        default_text='none',
    ),
    Option(
        'held_out_prior',
        value_types.POSITIVE,
        'Weight N of the averaged BN statistics in the mixture: the statistics'
        ' of a client with n training samples have the share n/(n+N)',
        16.0,
        conditions=(_NEEDS_CLIENTS,),
    ),
    Option(
        'held_out_epochs',
        value_types.POSITIVE_INTEGER,
        "Number of passes over a held-out client's labeled training data in"
        ' which it trains its own scale, shift and statistics, with the'
        ' learning rate and batch size of the run. All other weights stay as'
        ' they are. The client is tested with this model, too',
        default_text='none, it does not train',
        conditions=(_NEEDS_CLIENTS,),
    ),
)


@dataclasses.dataclass(frozen=True)
class HeldOutFlags(flag_groups.base_class(*_OPTIONS)):  # type: ignore[misc]
  """Clients that are tested after the training."""

  TITLE = 'Held-out clients'

  @classmethod
  def check(cls, flags: ParsedFlags) -> None:
    """See `Flags.check`."""
    super().check(flags)
    num_clients = num_training_clients(flags)
    if num_clients is not None and num_clients < 1:
      raise ValueError(
          f'{flags.text("held_out_clients")} leaves none of the'
          f' {splits.chosen_num_clients(flags)} clients for training.'
      )


def num_training_clients(flags: Any) -> Optional[int]:
  """Returns the number of clients that train; None: the data decides it."""
  num_clients = splits.chosen_num_clients(flags)
  if num_clients is None:
    return None
  return num_clients - len(flags.held_out_clients or ())
