"""The server's rules and the clients' attacks, from their flags.

Importing this module imports TensorFlow Federated.
"""

from typing import Optional

from tff_bn import aggregators
from tff_bn.aggregators import attacks
from tff_bn.programs import defaults
from tff_bn.programs import settings as settings_lib


def build_model_aggregator(
    settings: settings_lib.RunSettings,
) -> Optional[aggregators.Rule]:
  """Builds what aggregates the clients' changes of the model.

  Args:
    settings: The run's settings.

  Returns:
    The rule; None for the mean of honest clients.

  Raises:
    ValueError: If a rule can't do what was asked.
  """
  return _build(settings, settings.model_aggregator, 'model')


def build_statistics_rule(
    settings: settings_lib.RunSettings,
) -> Optional[aggregators.Rule]:
  """Builds what aggregates the clients' running BN statistics.

  Args:
    settings: The run's settings.

  Returns:
    The rule; None for the mean of honest clients.

  Raises:
    ValueError: If a rule can't do what was asked.
  """
  return _build(settings, settings.statistics_aggregator, 'statistics')


def _build(
    settings: settings_lib.RunSettings, name: Optional[str], target: str
) -> Optional[aggregators.Rule]:
  """Builds an aggregator and the attack on it."""
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
    rule = attacks.Attacked(
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


def _build_attack(settings: settings_lib.RunSettings) -> attacks.Attack:
  strength = settings.attack_strength
  match settings.attack:
    case 'sf':
      return attacks.SignFlipping()
    case 'foe':
      return attacks.FallOfEmpires(strength or defaults.FOE_STRENGTH)
    case 'alie':
      return attacks.ALittleIsEnough(strength)
    case 'ipm':
      return attacks.InnerProductManipulation(strength or defaults.IPM_STRENGTH)
    case 'mimic':
      return attacks.Mimic()
    case 'gaussian':
      return attacks.GaussianNoise(
          strength or defaults.GAUSSIAN_STRENGTH, seed=settings.seed
      )
  raise ValueError(f'--attack={settings.attack} is unknown.')
