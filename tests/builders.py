"""The builders of all algorithms, with values for arguments without default."""

from tff_bn import algorithms

NAMES = [name for name in algorithms.__all__ if name.startswith('build_')]
REQUIRED = {
    'build_fed_bs': dict(epsilon=1.0),
    'build_fedtan_ii': dict(sync_rounds=1),
    'build_fixbn': dict(fixbn_rounds=1),
}


def build(name, model, client_optimizer, **options):
  """Calls the builder with a name."""
  return getattr(algorithms, name)(
      model, client_optimizer, **{**REQUIRED.get(name, {}), **options}
  )
