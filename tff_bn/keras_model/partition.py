"""Partitions of a model's variables into shared and local ones.

A variable's *role* says what it does in its layer. A `Partition` lists the
roles that are local, which stay with the client. The server aggregates all
others.

| partition | scale, shift | moving mean, variance | mixing | source |
| --- | --- | --- | --- | --- |
| `FEDAVG` | shared | shared | shared | McMahan et al. 2017 |
| `FEDBN` | local | local | local | Li et al., FedBN, ICLR 2021 |
| `SILOBN` | shared | local | shared | Andreux et al., SiloBN, DART 2020 |
| `LOCAL_AFFINE` | local | shared | local | Mills et al., IEEE TPDS 2022 |
| `HBN` | shared | shared | local | Chen et al., HBN, ICML 2025 |
| `SINGLE` | local | local | local | FedBN, section 5.1 |

Only `tff_bn.layers.HybridBatchNormalization` has the variable "mixing". It is
trained, so a partition treats it as it treats scale and shift, except for
`HBN`, for which it was made. With every partition, the phases of personal
position encodings are local. With `SINGLE`, all variables are local. Variables
that training cannot change, such as the weights of frozen layers, are neither
shared nor local, see `tff_bn.BatchNormModel.constants`.
"""

import dataclasses
import enum


class Role(enum.Enum):
  """The role of a variable in its layer."""

  KERNEL = 'kernel'
  """A trainable variable outside of batch normalization."""

  SCALE = 'scale'
  """γ of a batch normalization layer."""

  SHIFT = 'shift'
  """β of a batch normalization layer (ζ where β is the momentum)."""

  MIXING = 'mixing'
  """θ of a hybrid batch normalization layer: the share of the batch."""

  MOVING_MEAN = 'moving_mean'
  """The running mean of a batch normalization layer."""

  MOVING_VARIANCE = 'moving_variance'
  """The running variance of a batch normalization layer."""

  PERSONAL_PHASE = 'personal_phase'
  """The phase of a personal position encoding; always local."""

  OTHER_STATE = 'other_state'
  """Any other non-trainable variable."""


_STATISTICS = frozenset({Role.MOVING_MEAN, Role.MOVING_VARIANCE})
# The trained variables of batch normalization.
_TRAINED = frozenset({Role.SCALE, Role.SHIFT, Role.MIXING})


@dataclasses.dataclass(frozen=True)
class Partition:
  """Splits a model's variables by role into shared and local ones.

  Attributes:
    name: The name of the method that the partition comes from.
    local: The local roles. `PERSONAL_PHASE` is always local. The moving mean
      and variance describe one distribution, so both are local or both are
      shared.
  """

  name: str
  local: frozenset[Role]

  def __post_init__(self):
    if not isinstance(self.local, frozenset) or not all(
        isinstance(role, Role) for role in self.local
    ):
      raise TypeError(
          f'local of the partition {self.name!r} must be a frozenset of'
          f' tff_bn.partition.Role, but is {self.local!r}.'
      )
    if len(self.local & _STATISTICS) == 1:
      raise ValueError(
          f'Partition {self.name!r} keeps'
          f' {next(iter(self.local & _STATISTICS)).value} local and shares the'
          ' other running statistic; put both moving_mean and moving_variance'
          ' into `local`, or neither.'
      )

  def is_local(self, role: Role) -> bool:
    """Returns whether variables of a role stay with the client."""
    return role in self.local or role is Role.PERSONAL_PHASE


FEDAVG = Partition('fedavg', frozenset())
FEDBN = Partition('fedbn', _TRAINED | _STATISTICS)
SILOBN = Partition('silobn', _STATISTICS)
LOCAL_AFFINE = Partition('local_affine', _TRAINED)
HBN = Partition('hbn', frozenset({Role.MIXING}))
SINGLE = Partition('single', frozenset(Role))
