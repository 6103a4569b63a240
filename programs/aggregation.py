"""The server's rules and the clients' attacks, from their flags.

Importing this module imports TensorFlow Federated.
"""

from typing import Optional

from tff_bn import aggregators
from tff_bn.programs import settings as settings_lib


def build_rule(
    settings: settings_lib.RunSettings, target: str
) -> Optional[aggregators.Rule]:
  """Builds what aggregates the clients' values, and the attack on them.

  Args:
    settings: The run's settings.
    target: 'model', for the clients' changes of the model; or 'statistics', for
      their running BN statistics.

  Returns:
    The rule; None for the mean of honest clients.

  Raises:
    ValueError: If a rule can't do what was asked.
  """
  name = getattr(settings, f'{target}_aggregator')
  attacked = settings_lib.attacks_values(
      settings.attack
  ) and settings.attack_target in (target, 'both')
  if name is None or (name == 'mean' and not attacked):
    return None
  *wrappers, last = name.split('+')
  rule = _build_rule(last, settings)
  for wrapper in reversed(wrappers):
    rule = _wrap(wrapper, rule, settings)
  if attacked:
    rule = aggregators.Attacked(
        rule,
        _build_attack(settings),
        settings.num_attackers,
        num_clients=_num_clients(settings),
    )
  return rule


def _num_clients(settings: settings_lib.RunSettings) -> Optional[int]:
  """The number of clients of a round, if it is known."""
  return settings.clients_per_round or settings.num_clients


def _build_rule(
    name: str, settings: settings_lib.RunSettings
) -> aggregators.Rule:
  num_byzantine = settings.num_byzantine or 0
  num_clients = _num_clients(settings)
  match name:
    case 'mean':
      return aggregators.Mean(num_clients=num_clients)
    case 'centered_clipping':
      return aggregators.CenteredClipping(
          settings.clipping_radius,
          num_byzantine=num_byzantine,
          num_clients=num_clients,
      )
  rules = {
      'median': aggregators.CoordinateMedian,
      'trimmed_mean': aggregators.TrimmedMean,
      'geometric_median': aggregators.GeometricMedian,
      'krum': aggregators.Krum,
      'multi_krum': aggregators.MultiKrum,
      'mea_med': aggregators.MeaMed,
  }
  return rules[name](num_byzantine=num_byzantine, num_clients=num_clients)


def _wrap(
    name: str, rule: aggregators.Rule, settings: settings_lib.RunSettings
) -> aggregators.Rule:
  num_clients = _num_clients(settings)
  if name == 'nnm':
    return aggregators.NearestNeighborMixing(
        rule, num_byzantine=settings.num_byzantine, num_clients=num_clients
    )
  return aggregators.Bucketing(
      rule, settings.bucket_size, seed=settings.seed, num_clients=num_clients
  )


def _build_attack(settings: settings_lib.RunSettings) -> aggregators.Attack:
  strength = settings.attack_strength
  match settings.attack:
    case 'sf':
      return aggregators.SignFlipping()
    case 'foe':
      return aggregators.FallOfEmpires(strength)
    case 'alie':
      return aggregators.ALittleIsEnough(strength)
    case 'ipm':
      return aggregators.InnerProductManipulation(strength)
    case 'mimic':
      return aggregators.Mimic()
    case 'gaussian':
      return aggregators.GaussianNoise(strength, seed=settings.seed)
  raise ValueError(f'--attack={settings.attack} is unknown.')
