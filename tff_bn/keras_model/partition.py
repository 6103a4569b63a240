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

Whole layers can be local, too: with `local_layers`, all variables of some
layers, and with `shared_layers`, all variables of the others. They are added to
the local roles: `dataclasses.replace(FEDBN, local_layers='head.*')` keeps batch
normalization and the head local.
"""

from collections.abc import Iterator
import dataclasses
import enum
import re
from typing import Optional

from tff_bn.catalog import value_types


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


def matches(pattern: str, path: str) -> bool:
  """Returns whether a regular expression names a layer, or a layer around it.

  Args:
    pattern: A regular expression for a layer's whole name, or its whole path.
    path: The layer's path, such as `backbone/conv1` in a nested model.
  """
  return any(re.fullmatch(pattern, name) for name in _names(path))


def _names(path: str) -> Iterator[str]:
  """Yields the names and the paths of a layer and of the layers around it."""
  parts = path.split('/')
  for number, name in enumerate(parts, start=1):
    yield name
    yield '/'.join(parts[:number])


@dataclasses.dataclass(frozen=True)
class Partition:
  """Splits a model's variables into shared, local and fixed ones.

  Layers are given by regular expressions for the whole name of a layer, such as
  `'head.*'`. In nested models, an expression may also match the whole path,
  such as `'backbone/conv1'`. It includes the layers inside of a layer, and all
  variables of a layer: kernels, batch normalization and its statistics.

  Attributes:
    name: The name of the method that the partition comes from.
    local: The local roles. `PERSONAL_PHASE` is always local. The moving mean
      and variance describe one distribution, so both are local or both are
      shared.
    local_layers: The layers whose variables are all local. Default: none.
    shared_layers: If given, the variables of all other layers are local.
    fixed_layers: The layers whose variables keep their initial values, as if
      training could not change them: they are neither shared nor local.
      Default: none.
  """

  name: str
  local: frozenset[Role]
  local_layers: Optional[str] = None
  shared_layers: Optional[str] = None
  fixed_layers: Optional[str] = None

  def __post_init__(self):
    for argument, pattern in self.layers.items():
      value_types.REGULAR_EXPRESSION.check(argument, pattern)
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

  @property
  def layers(self) -> dict[str, str]:
    """The regular expressions for layers, by the name of the attribute."""
    names = ('local_layers', 'shared_layers', 'fixed_layers')
    patterns = {name: getattr(self, name) for name in names}
    return {name: p for name, p in patterns.items() if p is not None}

  def is_local(self, role: Role, path: Optional[str] = None) -> bool:
    """Returns whether a variable stays with the client.

    Args:
      role: The variable's role.
      path: The path of its layer. Default: any layer that is not local.
    """
    if role in self.local or role is Role.PERSONAL_PHASE:
      return True
    if path is None:
      return False
    if self.local_layers is not None and matches(self.local_layers, path):
      return True
    return self.shared_layers is not None and not matches(
        self.shared_layers, path
    )

  def is_fixed(self, role: Role, path: str) -> bool:
    """Returns whether a variable keeps its initial value."""
    return (
        self.fixed_layers is not None
        and role is not Role.PERSONAL_PHASE
        and matches(self.fixed_layers, path)
    )


FEDAVG = Partition('fedavg', frozenset())
FEDBN = Partition('fedbn', _TRAINED | _STATISTICS)
SILOBN = Partition('silobn', _STATISTICS)
LOCAL_AFFINE = Partition('local_affine', _TRAINED)
HBN = Partition('hbn', frozenset({Role.MIXING}))
SINGLE = Partition('single', frozenset(Role))
