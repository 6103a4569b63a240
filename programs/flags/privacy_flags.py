"""The flags of secure sums and of differential privacy."""

import dataclasses

from tff_bn.catalog import local_training
from tff_bn.catalog import privacy
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli.parsed_flags import ParsedFlags


@dataclasses.dataclass(frozen=True)
class PrivacyFlags(flag_groups.base_class(*privacy.OPTIONS)):  # type: ignore[misc]
  """What the server sees of what clients send."""

  TITLE = 'Privacy'

  @classmethod
  def check(cls, flags: ParsedFlags) -> None:
    """See `Flags.check`."""
    super().check(flags)
    if flags.privacy != privacy.DP:
      return
    needed = (privacy.NOISE_MULTIPLIER.name, privacy.EPSILON.name)
    if all(getattr(flags, name) is None for name in needed):
      raise ValueError(
          f'--privacy={flags.privacy} needs'
          f' {" or ".join(f"--{name}" for name in needed)}, which say how much'
          ' noise there is.'
      )
    local_training.check_weighting(
        flags.client_weighting, f'--privacy={flags.privacy}', False
    )
