"""Splits of samples over clients: pure functions of labels and a seed.

Every function returns one array of indices for each client, in increasing
order. The clients' indices are disjoint and cover all samples, except with
`split_by_classes` (which equalizes the sizes), `split_by_client` (which may
leave out clients) and `draw_iid` (where clients share samples).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from tff_bn.catalog import datasets
from tff_bn.catalog import tasks
from tff_bn.catalog import value_types
from tff_bn.catalog.options import OWN_NAME
from tff_bn.catalog.options import Condition
from tff_bn.catalog.options import Option
from tff_bn.catalog.options import only_for
from tff_bn.catalog.parts import YOURS
from tff_bn.catalog.parts import Part
from tff_bn.catalog.parts import PartName
from tff_bn.catalog.parts import Parts
from tff_bn.catalog.parts import listing
from tff_bn.catalog.parts import require_function
from tff_bn.imports import lazy

if TYPE_CHECKING:
  import numpy as np

  from tff_bn.common import seeding
  from tff_bn.data import dirichlet
  from tff_bn.data import label_shares
else:
  # Programs read the entries below to parse their flags, without NumPy.
  np = lazy.Module('numpy')
  seeding = lazy.Module('tff_bn.common.seeding')
  dirichlet = lazy.Module('tff_bn.data.dirichlet')
  label_shares = lazy.Module('tff_bn.data.label_shares')

# The number of clients, unless the dataset determines it.
DEFAULT_NUM_CLIENTS = 10


def split_iid(
    num_samples: int, num_clients: int, seed: int
) -> list[np.ndarray]:
  """Deals the shuffled samples to the clients.

  Args:
    num_samples: The number of samples.
    num_clients: The number of clients.
    seed: Determines each client's samples.

  Returns:
    Each client's indices; sizes differ by at most 1.

  Raises:
    ValueError: If there are no clients, or more clients than samples.
  """
  label_shares.check_num_clients(num_clients, num_samples, 'training samples')
  rng = seeding.generator(seeding.Stream.SPLIT, seed)
  return _sorted(np.array_split(rng.permutation(num_samples), num_clients))


def draw_iid(
    num_samples: int,
    num_clients: int,
    samples_per_client: int,
    rng: np.random.Generator,
) -> list[np.ndarray]:
  """Draws samples for each client, independently of the other clients.

  Clients share samples, so there may be more clients than samples. More clients
  do not change the samples of the first ones.

  Args:
    num_samples: The number of samples.
    num_clients: The number of clients.
    samples_per_client: The number of different samples of each client.
    rng: Determines each client's samples.

  Returns:
    Each client's indices, of shape `[samples_per_client]`.
  """
  return _sorted(
      [
          rng.choice(
              num_samples, samples_per_client, replace=False, shuffle=False
          )
          for _ in range(num_clients)
      ]
  )


def split_by_classes(
    labels: np.ndarray,
    num_classes: int,
    num_clients: int,
    classes_per_client: int,
    seed: int,
) -> list[np.ndarray]:
  """Gives each client some consecutive classes (FedTAN, Appendix D).

  Client k = 0, 1, ... has `classes_per_client` classes starting with class k·s,
  modulo the number of classes. The stride s is a fifth of the classes, so that
  five clients cover all of them. It is at least 2, and at most
  `classes_per_client`, so that no class is left out.

  Args:
    labels: The samples' classes, integers of shape `[n]`.
    num_classes: The number of classes.
    num_clients: The number of clients.
    classes_per_client: The number of classes of each client.
    seed: Determines which samples of its classes a client gets.

  Returns:
    Each client's indices. All clients have the same number of samples of each
    of their classes, which the smallest class limits. The other samples are not
    used.

  Raises:
    ValueError: If `classes_per_client` is not in 1..`num_classes`, or if a
      class has fewer samples than clients.
  """
  label_shares.check_num_clients(num_clients, len(labels), 'training samples')
  if not 1 <= classes_per_client <= num_classes:
    raise ValueError(
        f'classes_per_client={classes_per_client} must be between 1 and the'
        f' number of classes, {num_classes}.'
    )
  stride = min(classes_per_client, max(2, num_classes // 5))
  starts: np.ndarray = stride * np.arange(num_clients)[:, np.newaxis]
  # held[client] are the client's classes.
  held = (starts + np.arange(classes_per_client)) % num_classes
  num_holders = np.bincount(held.ravel(), minlength=num_classes)
  num_samples = np.bincount(labels, minlength=num_classes)
  used = np.flatnonzero(num_holders)
  shares = num_samples[used] // num_holders[used]
  scarcest = used[np.argmin(shares)]
  share = shares.min()
  if share == 0:
    raise ValueError(
        f'num_clients={num_clients} with'
        f' classes_per_client={classes_per_client} gives class {scarcest} to'
        f' {num_holders[scarcest]} clients, but it has'
        f' {num_samples[scarcest]} training samples; use fewer clients or'
        ' another split.'
    )
  rng = seeding.generator(seeding.Stream.SPLIT, seed)
  parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
  for label in used:
    pool = rng.permutation(np.flatnonzero(labels == label))
    holders = np.flatnonzero((held == label).any(axis=1))
    for number, client in enumerate(holders):
      parts[client].append(pool[number * share : (number + 1) * share])
  return _sorted([np.concatenate(part) for part in parts])


def split_by_gamma_similarity(
    labels: np.ndarray, num_clients: int, gamma: float, seed: int
) -> list[np.ndarray]:
  """Splits with γ-similarity (FBN paper, section 4).

  A share γ of all samples is drawn at random and dealt to the clients evenly.
  The others are sorted by class and cut into one chunk for each client. γ = 1
  is IID; with γ = 0 each client has few classes.

  Args:
    labels: The samples' classes, integers of shape `[n]`.
    num_clients: The number of clients.
    gamma: The share γ in [0, 1].
    seed: Determines each client's samples.

  Returns:
    Each client's indices; sizes differ by at most 1.

  Raises:
    ValueError: If γ is outside [0, 1], if there are no clients, or more clients
      than samples.
  """
  label_shares.check_num_clients(num_clients, len(labels), 'training samples')
  GAMMA.check(gamma)
  rng = seeding.generator(seeding.Stream.SPLIT, seed)
  order = rng.permutation(len(labels))
  homogeneous, rest = np.split(order, [round(gamma * len(labels))])
  rest = rest[np.argsort(labels[rest], kind='stable')]
  # `array_split` makes the first parts larger. Reversing one of the lists keeps
  # the sizes of the clients within 1.
  return _sorted(
      [
          np.concatenate(parts)
          for parts in zip(
              np.array_split(rest, num_clients),
              reversed(np.array_split(homogeneous, num_clients)),
          )
      ]
  )


def split_by_domain(
    labels: np.ndarray,
    domains: np.ndarray,
    num_domains: int,
    num_clients: int,
    seed: int,
) -> list[np.ndarray]:
  """Gives each client data of one domain (FedBN, section 5.1).

  Client i has data of domain i mod `num_domains`.

  Args:
    labels: The samples' classes, integers of shape `[n]`.
    domains: The samples' domains, integers of shape `[n]`.
    num_domains: The number of domains.
    num_clients: The number of clients, a multiple of `num_domains`.
    seed: Determines each client's samples.

  Returns:
    Each client's indices. The clients of a domain have the same size and label
    distribution, up to one sample.

  Raises:
    ValueError: If the number of clients is not a multiple of the number of
      domains, or if a domain has more clients than samples.
  """
  label_shares.check_num_clients(num_clients, len(labels), 'training samples')
  if num_clients % num_domains:
    raise ValueError(
        f'num_clients={num_clients} is not a multiple of the {num_domains}'
        ' domains; split=domains gives each domain to the same number of'
        f' clients. Use a multiple of {num_domains}, or another split.'
    )
  per_domain = num_clients // num_domains
  smallest = np.bincount(domains, minlength=num_domains).min()
  if smallest < per_domain:
    raise ValueError(
        f'num_clients={num_clients} gives each domain to {per_domain}'
        f' clients, but the smallest domain has {smallest} training samples;'
        f' use at most {smallest * num_domains}.'
    )
  rng = seeding.generator(seeding.Stream.SPLIT, seed)
  by_domain = []
  for domain in range(num_domains):
    members = np.flatnonzero(domains == domain)
    dealt = label_shares.deal_by_label(labels[members], per_domain, rng)
    by_domain.append([members[indices] for indices in dealt])
  return _sorted(interleave(by_domain))


def interleave(by_domain: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
  """Returns each client's indices, with client i in domain i mod `num_domains`.

  Args:
    by_domain: The indices of the clients of each domain.
  """
  return [part for parts in zip(*by_domain) for part in parts]


def split_unbalanced(
    num_samples: int, num_clients: int, imbalance: float, seed: int
) -> list[np.ndarray]:
  """Deals the shuffled samples to clients of different sizes.

  Args:
    num_samples: The number of samples.
    num_clients: The number of clients.
    imbalance: The standard deviation of the sizes' logarithms. Each client has
      one sample, and the others are dealt in proportion to draws from a
      log-normal distribution. 0 gives equal sizes.
    seed: Determines the sizes and each client's samples.

  Returns:
    Each client's indices, at least one.

  Raises:
    ValueError: If the imbalance is negative or not finite, if there are no
      clients, or more clients than samples.
  """
  label_shares.check_num_clients(num_clients, num_samples, 'training samples')
  IMBALANCE.check(imbalance)
  rng = seeding.generator(seeding.Stream.SPLIT, seed)
  normal = rng.standard_normal(num_clients)
  # Relative to the largest, so that the exponential does not overflow.
  weights = np.exp(imbalance * (normal - normal.max()))
  sizes: np.ndarray = 1 + label_shares.apportion(
      num_samples - num_clients, weights, rng
  )
  order = rng.permutation(num_samples)
  return _sorted(np.split(order, np.cumsum(sizes)[:-1]))


def split_by_client(
    clients: np.ndarray, num_clients: int, seed: int
) -> list[np.ndarray]:
  """Takes the clients that the dataset has.

  Args:
    clients: The samples' clients, integers of shape `[n]`.
    num_clients: How many of them to take.
    seed: Determines which ones, if there are more.

  Returns:
    Each client's indices. The clients are in increasing order.

  Raises:
    ValueError: If there are no clients, or fewer than `num_clients`.
  """
  present = np.unique(clients)
  label_shares.check_num_clients(num_clients, len(present), 'natural clients')
  rng = seeding.generator(seeding.Stream.SPLIT, seed)
  chosen = np.sort(rng.choice(present, num_clients, replace=False))
  return positions(clients, chosen)


def positions(clients: np.ndarray, chosen: np.ndarray) -> list[np.ndarray]:
  """Returns the positions of the samples of each of some clients."""
  # One sort for all clients is faster than a pass over the data for each.
  order = np.argsort(clients, kind='stable')
  bounds = np.asarray(
      np.searchsorted(clients[order], np.stack([chosen, chosen + 1], axis=1))
  )
  return [order[start:end] for start, end in bounds]


def _sorted(parts: list[np.ndarray]) -> list[np.ndarray]:
  return [np.sort(part) for part in parts]


class SplitTask(NamedTuple):
  """What a split divides.

  Attributes:
    labels: The samples' classes, integers of shape `[n]`; for other tasks, the
      labels as a `tff_bn.data.Dataset` stores them.
    num_classes: The number of classes; None for a regression.
    num_clients: The number of clients.
    seed: The seed of all random choices.
    task: The dataset's task, a key of `tff_bn.catalog.tasks.TASKS`.
  """

  labels: np.ndarray
  num_classes: Optional[int]
  num_clients: int
  seed: int
  task: str = tasks.CLASSIFICATION


# Draws the indices of each client, given the number of samples, the number of
# clients, the number of samples of a client, and a generator.
Draw = Callable[[int, int, int, 'np.random.Generator'], 'list[np.ndarray]']


@dataclasses.dataclass(frozen=True)
class Split(Part):
  """A way to split the training data over the clients.

  Its function gets a `SplitTask`, and its options by name. It returns each
  client's indices.

  Attributes:
    draw: Draws the indices of clients that share samples, if its only option
      is given: the number of samples of a client.
    client: The noun for a client if the dataset determines the clients, such as
      'domain'. Then the function gets the dataset, the number of clients or
      None, and the seed, and returns a `FederatedData`.
    needs_classes: Whether each sample must have exactly one class.
  """

  draw: Optional[Draw] = None
  client: Optional[str] = None
  needs_classes: bool = False


def _split_of_object(name: str, function: Any) -> Split:
  """Returns the entry of a user's function."""
  require_function(
      function,
      'a function of a tff_bn.data.SplitTask that returns the positions of each'
      " client's training samples, or an entry tff_bn.data.Split",
  )
  return Split(name, 'a split of yours', function)


def chosen_split(options: Any) -> str:
  """Returns the split of the training data, given all options."""
  if options.split is not None:
    return options.split
  if datasets.has_domains(options.dataset):
    return DOMAINS
  if datasets.has_clients(options):
    return NATURAL
  task = getattr(options, 'task', None) or datasets.find(options.dataset).task
  has_classes = task is None or tasks.has_sample_classes(task)
  return _SPLIT_OF_CLASSES if has_classes else _SPLIT_OF_OTHERS


def chosen_num_clients(options: Any) -> Optional[int]:
  """Returns the number of clients, given all options; None: the data's."""
  if options.num_clients is None and not SPLITS[chosen_split(options)].client:
    return DEFAULT_NUM_CLIENTS
  return options.num_clients


def draws_samples(options: Any) -> bool:
  """Whether clients draw samples that they share, given all options."""
  split = SPLITS[chosen_split(options)]
  return split.draw is not None and any(
      getattr(options, option.name) is not None for option in split.options
  )


def _option(
    name: str,
    values: value_types.ValueType,
    description: str,
    default: Any = None,
    conditions: tuple[Condition, ...] = (),
    **more: Any,
) -> Option:
  """Declares an option that only some splits have."""
  return Option(
      name,
      values,
      description,
      default,
      conditions=(
          Condition(
              'split',
              lambda options: SPLITS[chosen_split(options)].has(name),
              lambda: 'is only for --split='
              + ' or '.join(
                  n for n, split in SPLITS.items() if split.has(name)
              ),
          ),
          *conditions,
      ),
      argument=OWN_NAME,
      **more,
  )


DOMAINS = 'domains'
NATURAL = 'natural'
# The default split of other datasets: if samples have classes, and otherwise.
_SPLIT_OF_CLASSES = 'classes'
_SPLIT_OF_OTHERS = 'iid'

SAMPLES_PER_CLIENT = _option(
    'samples_per_client',
    value_types.POSITIVE_INTEGER,
    'Number of training samples that each client draws with --split=iid,'
    ' independently of the other clients. Clients then share samples, so that'
    ' there may be more clients than samples',
    default_text='none, the clients divide the training data among themselves',
)
CLASSES_PER_CLIENT = _option(
    'classes_per_client',
    value_types.POSITIVE_INTEGER,
    'Number of classes that each client has with --split=classes',
    1,
)
GAMMA = _option(
    'gamma',
    value_types.SHARE,
    "Share of each client's data that is drawn at random with --split=gamma: 1"
    ' gives all clients the same distribution, 0 sorts the data by class',
    0.1,
)
IMBALANCE = _option(
    'imbalance',
    value_types.NOT_NEGATIVE,
    "How much the clients' sizes differ with --split=unbalanced: the standard"
    ' deviation of their logarithm',
    1.0,
)
_DIRICHLET_VARIANTS = {
    'class': 'how each class spreads over the clients; sizes differ',
    'client': 'the label distribution of each client; equal sizes',
}
DIRICHLET_BY = _option(
    'dirichlet_by',
    value_types.Choice(_DIRICHLET_VARIANTS),
    f'What --split=dirichlet draws:\n{listing(_DIRICHLET_VARIANTS)}',
    'class',
    convert=lambda name: None if name == 'class' else name,
)
DIRICHLET_ALPHA = _option(
    'dirichlet_alpha',
    value_types.POSITIVE,
    'Concentration for --split=dirichlet: the smaller it is, the more the'
    " clients' labels differ",
    0.5,
)
_PROPORTIONAL = 'proportional'
_DIRICHLET_PRIORS = {
    'uniform': 'Dir(α, …, α): each class has α',
    _PROPORTIONAL: (
        'Dir(α p), where p are the shares of the classes in the data (Hsu et'
        ' al. 2019). With C classes of the same size each has α / C, so that'
        " the same α makes the clients' labels differ more"
    ),
}
DIRICHLET_PRIOR = _option(
    'dirichlet_prior',
    value_types.Choice(_DIRICHLET_PRIORS),
    'The distribution from which --dirichlet_by=client draws, with α ='
    f' --dirichlet_alpha:\n{listing(_DIRICHLET_PRIORS)}',
    'uniform',
    (only_for('dirichlet_by', 'client'),),
    convert=lambda name: None if name == 'uniform' else name,
)


def _split_by_dirichlet(
    task: SplitTask,
    dirichlet_alpha: float,
    dirichlet_by: str,
    dirichlet_prior: str,
) -> list[np.ndarray]:
  if dirichlet_by == 'client':
    assert task.num_classes is not None  # The split needs classes.
    return dirichlet.split_by_client_dirichlet(
        task.labels,
        task.num_classes,
        task.num_clients,
        dirichlet_alpha,
        task.seed,
        proportional=dirichlet_prior == _PROPORTIONAL,
    )
  return dirichlet.split_by_dirichlet(
      task.labels, task.num_clients, dirichlet_alpha, task.seed
  )


SPLITS: Parts[Split] = Parts(
    Split(
        'iid',
        'evenly at random; with --samples_per_client, each client draws its'
        ' samples from all of them, so that clients share samples',
        lambda task, samples_per_client: split_iid(
            len(task.labels), task.num_clients, task.seed
        ),
        (SAMPLES_PER_CLIENT,),
        draw=draw_iid,
    ),
    Split(
        'classes',
        '--classes_per_client consecutive classes for each client, the same'
        ' number of samples for all (FedTAN, Appendix D)',
        lambda task, classes_per_client: split_by_classes(
            task.labels,
            task.num_classes,
            task.num_clients,
            classes_per_client,
            task.seed,
        ),
        (CLASSES_PER_CLIENT,),
        needs_classes=True,
    ),
    Split(
        'dirichlet',
        'shares drawn from a Dirichlet distribution with concentration'
        ' --dirichlet_alpha, see --dirichlet_by',
        _split_by_dirichlet,
        (DIRICHLET_ALPHA, DIRICHLET_BY, DIRICHLET_PRIOR),
        needs_classes=True,
    ),
    Split(
        'gamma',
        "a share --gamma of each client's data at random, the rest sorted by"
        ' class (gamma-similarity)',
        lambda task, gamma: split_by_gamma_similarity(
            task.labels, task.num_clients, gamma, task.seed
        ),
        (GAMMA,),
        needs_classes=True,
    ),
    Split(
        DOMAINS,
        'each client has data of one domain (feature shift)',
        'tff_bn.data.splitting:split_domains',
        client='domain',
    ),
    Split(
        'unbalanced',
        'at random, sizes log-normal with standard deviation --imbalance of'
        ' their logarithm',
        lambda task, imbalance: split_unbalanced(
            len(task.labels), task.num_clients, imbalance, task.seed
        ),
        (IMBALANCE,),
    ),
    Split(
        NATURAL,
        'the clients that the dataset has, such as the writers of emnist',
        'tff_bn.data.splitting:split_natural',
        client='natural client',
    ),
    of_object=_split_of_object,
)
SPLIT = Option(
    'split',
    PartName(SPLITS, YOURS),
    lambda: (
        'How the training data is split over the clients:\n'
        f'{listing(SPLITS)}or {YOURS}; the function gets a'
        ' tff_bn.data.SplitTask and returns the positions of the training'
        ' samples of each client'
    ),
    compute=chosen_split,
    default_text=(
        f'{DOMAINS} for a dataset with domains, {NATURAL} for files with'
        f' clients, {_SPLIT_OF_CLASSES} for others whose samples have one class'
        f' each, otherwise {_SPLIT_OF_OTHERS}'
    ),
    argument=OWN_NAME,
)
NUM_CLIENTS = Option(
    'num_clients',
    # Each client has an entry in several tables in memory.
    value_types.Number(int, minimum=1, maximum=10**6),
    'Number of clients',
    compute=chosen_num_clients,
    default_text='; '.join(
        [
            f'{DEFAULT_NUM_CLIENTS}',
            ', '.join(
                f'one for each {split.client} with --split={name}'
                for name, split in SPLITS.items()
                if split.client
            ),
        ]
    ),
)
# The options of all splits.
PARAMETERS = {
    option.name: option for split in SPLITS.values() for option in split.options
}
