"""The flags of robust aggregation and of attacks."""

from collections.abc import Mapping
import dataclasses
from typing import TYPE_CHECKING, Any, Optional

from tff_bn.catalog import parts
from tff_bn.catalog import rules
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli.parsed_flags import ParsedFlags

if TYPE_CHECKING:
  from tff_bn import aggregators


def num_attackers(flags: Any) -> Optional[int]:
  """Returns the number of attackers; None if there is no attack."""
  if flags.attack is None:
    return None
  return flags.num_attackers or flags.num_byzantine


def trusts_attackers(flags: ParsedFlags, num_clients: int) -> bool:
  """Whether monna trusts one of the attackers, the first clients."""
  number = num_attackers(flags)
  if number is None or not rules.uses(rules.TRUSTED_CLIENT.name, flags):
    return False
  position = flags.trusted_client
  if position < 0:
    position += num_clients
  return 0 <= position < number


@dataclasses.dataclass(frozen=True)
class RobustnessFlags(flag_groups.base_class(*rules.OPTIONS)):  # type: ignore[misc]
  """The server's rules against Byzantine clients, and their attack."""

  TITLE = 'Robustness'

  @classmethod
  def check(cls, flags: ParsedFlags) -> None:
    """See `Flags.check`."""
    for name in rules.AGGREGATORS:
      for part in rules.chain(getattr(flags, name)):
        if part.needs_num_byzantine and flags.num_byzantine is None:
          raise ValueError(
              f'{flags.text(name)} needs --num_byzantine, the number of clients'
              f' that {part.name} has to withstand.'
          )
    super().check(flags)
    if flags.attack is not None and not num_attackers(flags):
      raise ValueError(
          f'--attack={flags.attack} needs --num_attackers, the number of'
          ' clients of a round that attack.'
      )

  def build_rule(
      self, target: str, seed: int, num_clients: Optional[int]
  ) -> 'Optional[aggregators.Rule]':
    """Builds the rule that aggregates the clients' values, and the attack.

    Args:
      target: 'model', for the clients' changes of the model; 'statistics', for
        their running BN statistics; or 'exchange', for FedTAN's exchanges.
      seed: Decides the random choices of rules and attacks.
      num_clients: The number of clients of a round, if it is known.

    Returns:
      The rule; None for the mean of honest clients.
    """
    option = f'{target}_aggregator'
    name = getattr(self, option)
    attack = None
    if rules.is_attacked(option, self):
      attack = rules.ATTACKS[self.attack]
    if name is None or (name == 'mean' and attack is None):
      return None

    def build(part: parts.Part, *wrapped: Any, **more: Any) -> Any:
      if part.needs_seed:
        more['seed'] = seed
      return part.load()(*wrapped, **self._arguments(part), **more)

    *wrappers, last = rules.chain(name)
    rule = build(last, num_clients=num_clients)
    for wrapper in reversed(wrappers):
      rule = build(wrapper, rule, num_clients=num_clients)
    if attack is None:
      return rule
    strength = {}
    if attack.strength is not None:
      strength[attack.strength.name] = self.attack_strength
    from tff_bn import aggregators

    return aggregators.Attacked(
        rule,
        build(attack, **strength),
        self.num_attackers,
        num_clients=num_clients,
    )

  def _arguments(self, part: parts.Part) -> Mapping[str, Any]:
    """Returns the arguments of a part from its options."""
    arguments = {
        option.argument or option.name: getattr(self, option.name)
        for option in part.options
    }
    if rules.NUM_BYZANTINE.name in arguments:
      arguments[rules.NUM_BYZANTINE.name] = self.num_byzantine or 0
    return arguments
