"""The builders of all algorithms, with values for arguments without default."""

from tff_bn import algorithms

NAMES = [name for name in algorithms.__all__ if name.startswith('build_')]
# Rounds of the others are computed like these: they differ from FedBN in which
# variables stay at the clients, or (GReg) from FedProx in the loss.
WITH_DIFFERENT_ROUNDS = [
    name
    for name in NAMES
    if name.removeprefix('build_')
    not in ('fed_per', 'fed_babu', 'lg_fed_avg', 'local_affine', 'silo_bn')
    + ('single', 'greg')
]
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
