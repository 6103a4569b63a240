"""The flags of the dataset and of its split over the clients."""

from collections.abc import Iterable, Sequence
import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING, Any, Optional

from absl import logging

from tff_bn.catalog import options
from tff_bn.catalog import parts
from tff_bn.catalog import value_types
from tff_bn.common import progress
from tff_bn.common import spelling
from tff_bn.data import names as data_names
from tff_bn.data import scaling
from tff_bn.data import splits
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import parsers
from tff_bn.programs.cli.flag_groups import flag
from tff_bn.programs.cli.parsed_flags import ParsedFlags

if TYPE_CHECKING:
  from tff_bn import data as tff_bn_data
  from tff_bn.programs.plan import settings as settings_lib

# The positions of all clients' samples take 8 bytes each.
_MAX_SAMPLES = 10**8


def _absolute(path: str) -> str:
  """Makes a path absolute, so that flags.txt is valid in any working folder."""
  return os.path.abspath(os.path.expanduser(path))


def _absolute_dataset(dataset: str) -> str:
  return data_names.map_sources(dataset, _absolute_source)


def _absolute_source(dataset: str) -> str:
  for prefix in data_names.PATH_PREFIXES:
    if dataset.startswith(prefix):
      return prefix + _absolute(dataset.removeprefix(prefix))
  if dataset in data_names.DATASET_NAMES or dataset.startswith(
      (data_names.TFDS_PREFIX, data_names.GENERATED_PREFIX)
  ):
    return dataset
  return _absolute(dataset)


# They need something after them.
_SOURCE_PREFIXES = (
    *data_names.PATH_PREFIXES,
    data_names.TFDS_PREFIX,
)


class DatasetParser(value_types.Choice):
  """Parses the name of a dataset, and of the datasets of its domains."""

  def __init__(self, fewest_domains: int = 2) -> None:
    """Initializes the parser.

    Args:
      fewest_domains: The smallest number of domains in `domains:...`.
    """
    self._fewest_domains = fewest_domains
    super().__init__(
        data_names.DATASET_NAMES,
        data_names.OTHER_DATASETS,
        data_names.is_other_dataset,
    )

  def parse(self, argument: str) -> str:
    """Returns the name; raises a ValueError if it isn't allowed."""
    super().parse(argument)
    if argument in _SOURCE_PREFIXES:
      raise ValueError(f'must have a name or a path after {argument}')
    try:
      self._check(argument)
    except ValueError as error:
      # The flag's error names the dataset already.
      text = str(error).removeprefix(f'dataset={argument}').lstrip(': ')
      raise ValueError(text) from error
    return argument

  def names_code(self, value):
    """See the base class."""
    return data_names.is_community_dataset(value)

  def _check(self, argument: str) -> None:
    """Checks the parts of a name."""
    if argument.startswith(data_names.GENERATED_PREFIX):
      data_names.parse_generated(argument)
    if argument.startswith(data_names.DOMAINS_PREFIX):
      domains = data_names.parse_domains(argument, self._fewest_domains)
      for domain, source in domains.items():
        try:
          self.parse(source)
        except ValueError as error:
          raise ValueError(f'the domain {domain!r}: {error}') from error


def _saying_what_is_loaded(
    dataset: str,
) -> contextlib.AbstractContextManager[None]:
  """Says that a dataset is loaded, unless this takes a moment only."""
  if data_names.is_quick(dataset):
    return contextlib.nullcontext()
  return progress.saying(f'Loading {data_names.short_name(dataset)}')


_SPLIT_OF_DOMAINS = 'domains'
_SPLIT_OF_OTHERS = 'classes'


def split(flags: Any) -> str:
  """Returns the split of the training data.

  Args:
    flags: All flags of the program, or the settings of a run.
  """
  if flags.split is not None:
    return flags.split
  if data_names.has_domains(flags.dataset):
    return _SPLIT_OF_DOMAINS
  return _SPLIT_OF_OTHERS


def announce_split(
    flags: ParsedFlags, runs: Iterable['settings_lib.RunSettings']
) -> None:
  """Says which split is used because a dataset has domains.

  Args:
    flags: All flags of the program.
    runs: The settings of its runs.
  """
  if flags.split is None and any(
      run.split == _SPLIT_OF_DOMAINS for run in runs
  ):
    progress.say(
        'The dataset has domains, so each client has data of one domain'
        f' (--split={_SPLIT_OF_DOMAINS}). Any other --split mixes the domains.'
    )


def num_clients(flags: Any) -> Optional[int]:
  """Returns the number of clients; None: the data decides it.

  Args:
    flags: All flags of the program, or the settings of a run.
  """
  if flags.num_clients is None and not splits.SPLITS[split(flags)].client:
    return splits.DEFAULT_NUM_CLIENTS
  return flags.num_clients


def _say_missing_classes(dataset: 'tff_bn_data.Dataset') -> None:
  """Says which domains lack classes: a name may be misspelled."""
  from tff_bn.data import classes

  missing = classes.missing_by_domain(dataset)
  if missing:
    names = dataset.class_names or classes.numbers(dataset.num_classes)
    lacking = [
        f'{domain} ({spelling.name_some(lacked)})'
        for domain, lacked in missing.items()
    ]
    progress.say(
        f'Classes: {spelling.name_some(names)}. Domains without training'
        f' samples of a class: {", ".join(lacking)}.'
    )


def _explain_splits() -> str:
  parameters = [
      split.parameter for split in splits.SPLITS.values() if split.parameter
  ]
  return (
      'How the training data is split over the clients:\n'
      + parsers.name_flags(parts.listing(splits.SPLITS), parameters)
  )


def _only_for_split(name: str) -> options.Condition:
  """Returns the condition that the training data is split in this way."""
  return options.Condition(
      'split',
      lambda flags: split(flags) == name,
      f'is only for --split={name}',
  )


def _split_flag(
    parser: value_types.ValueType,
    explanation: str,
    default: Optional[float],
    needed: str,
    default_text: Optional[str] = None,
) -> Any:
  """Declares the parameter of a split."""
  return flag(
      parser,
      explanation,
      default,
      default_text=default_text,
      conditions=(_only_for_split(needed),),
      argument=options.OWN_NAME,
  )


@dataclasses.dataclass(frozen=True)
class DataFlags(flag_groups.Flags):
  """The dataset and its split over the clients."""

  TITLE = 'Data'

  dataset: str = flag(
      DatasetParser(),
      'The data:\n'
      + parts.listing(data_names.DATASET_NAMES)
      + f'or {data_names.OTHER_DATASETS}',
      'digits',
      convert=_absolute_dataset,
  )
  data_dir: Optional[str] = flag(
      value_types.TEXT,
      'Folder from which datasets that are not built in are read, and to which'
      ' they are downloaded',
      default_text="the dataset library's own",
      convert=_absolute,
      conditions=(
          options.Condition(
              'dataset',
              lambda flags: data_names.is_downloaded(flags.dataset),
              'has no effect with --dataset={}, which is not downloaded',
          ),
      ),
  )
  image_size: Optional[str] = flag(
      value_types.CheckedText(parsers.parse_image_size),
      'HEIGHTxWIDTH in pixels to which images are resized, for example 32x32',
      default_text="the images' own size",
  )
  pixel_scaling: Optional[str] = flag(
      value_types.Choice(scaling.PIXEL_SCALINGS),
      'What the pixels of images, or the features of vectors, become before'
      ' they enter the model:\n' + parts.listing(scaling.PIXEL_SCALINGS),
      'unit',
      # Not in flags.txt, so that runs from before this flag can be continued.
      convert=lambda name: None if name == 'unit' else name,
  )
  train_share: Optional[float] = flag(
      value_types.Number(float, above=0, maximum=1),
      'Share of the training samples that is used, of each domain if the data'
      ' has domains; drawn at random',
      1.0,
      convert=lambda share: None if share == 1 else share,
      argument=options.OWN_NAME,
  )
  samples_per_domain: Optional[int] = flag(
      value_types.POSITIVE_INTEGER,
      'Largest number of training samples of each domain that is used; drawn at'
      ' random',
      default_text='no limit',
      argument=options.OWN_NAME,
  )
  split: str = flag(
      value_types.Choice(splits.SPLITS),
      _explain_splits,
      compute=split,
      default_text=(
          f'{_SPLIT_OF_DOMAINS} for a dataset with domains, otherwise'
          f' {_SPLIT_OF_OTHERS}'
      ),
  )
  num_clients: Optional[int] = flag(
      flag_groups.NUM_CLIENTS,
      'Number of clients',
      compute=num_clients,
      default_text='; '.join(
          [
              f'{splits.DEFAULT_NUM_CLIENTS}',
              ', '.join(
                  f'one for each {split.client} with --split={name}'
                  for name, split in splits.SPLITS.items()
                  if split.client
              ),
          ]
      ),
  )
  samples_per_client: Optional[int] = _split_flag(
      value_types.POSITIVE_INTEGER,
      'Number of training samples that each client draws with --split=iid,'
      ' independently of the other clients. Clients then share samples, so that'
      ' there may be more clients than samples',
      None,
      'iid',
      'none, the clients divide the training data among themselves',
  )
  classes_per_client: Optional[int] = _split_flag(
      value_types.POSITIVE_INTEGER,
      'Number of classes that each client has with --split=classes',
      1,
      'classes',
  )
  dirichlet_alpha: Optional[float] = _split_flag(
      value_types.POSITIVE,
      'Concentration for --split=dirichlet: the smaller it is, the more the'
      " clients' labels differ",
      0.5,
      'dirichlet',
  )
  dirichlet_by: Optional[str] = flag(
      value_types.Choice(splits.SPLITS['dirichlet'].variants),
      'What --split=dirichlet draws:\n'
      + parts.listing(splits.SPLITS['dirichlet'].variants),
      'class',
      conditions=(_only_for_split('dirichlet'),),
      convert=lambda name: None if name == 'class' else name,
      argument=options.OWN_NAME,
  )
  gamma: Optional[float] = _split_flag(
      value_types.SHARE,
      "Share of each client's data that is drawn at random with --split=gamma:"
      ' 1 gives all clients the same distribution, 0 sorts the data by class',
      0.1,
      'gamma',
  )
  imbalance: Optional[float] = _split_flag(
      value_types.NOT_NEGATIVE,
      "How much the clients' sizes differ with --split=unbalanced: the standard"
      ' deviation of their logarithm',
      1.0,
      'unbalanced',
  )

  @classmethod
  def check(cls, flags: ParsedFlags) -> None:
    """See `Flags.check`."""
    super().check(flags)
    if split(flags) == 'iid' and flags.samples_per_client is not None:
      number = num_clients(flags) * flags.samples_per_client
      if number > _MAX_SAMPLES:
        raise ValueError(
            f'--num_clients={num_clients(flags)} with'
            f' {flags.text("samples_per_client")} makes {number} samples of all'
            f' clients; at most {_MAX_SAMPLES} are possible.'
        )

  @property
  def parsed_image_size(self) -> Optional[tuple[int, int]]:
    """The height and width to which images are resized; `None`: not."""
    if self.image_size is None:
      return None
    return parsers.parse_image_size(self.image_size)

  def load(
      self, class_names: Optional[Sequence[str]] = None
  ) -> 'tff_bn_data.Dataset':
    """Loads the dataset; a ValueError says why it can't be used.

    Args:
      class_names: The classes of a trained model, see `data.load_dataset`.

    Returns:
      The dataset.
    """
    from tff_bn import data

    with _saying_what_is_loaded(self.dataset):
      dataset = data.load_dataset(
          self.dataset,
          data_dir=self.data_dir,
          image_size=self.parsed_image_size,
          class_names=class_names,
      )
    _say_missing_classes(dataset)
    if self.pixel_scaling is None and scaling.has_unscaled_floats(dataset):
      logging.warning(
          '--dataset=%s has images of floats from %g to %g, which are used as'
          ' they are. Models train better with values near [0, 1]: store pixels'
          ' from 0 to 255 as uint8, which are scaled, divide them by 255, or'
          ' use --pixel_scaling=standardized.',
          self.dataset,
          dataset.x_train.min(),
          dataset.x_train.max(),
      )
    if self.pixel_scaling is None and (
        number := scaling.small_features(dataset)
    ):
      logging.warning(
          '--dataset=%s has features of very different sizes: the values of %d'
          ' of %d features are less than 1/%d of the largest feature, so that'
          ' models hardly learn from them. Use --pixel_scaling=standardized.',
          self.dataset,
          number,
          dataset.input_shape[-1],
          scaling.LARGEST_RATIO,
      )
    return dataset

  def split_over_clients(
      self, dataset: 'tff_bn_data.Dataset', seed: int
  ) -> 'tff_bn_data.FederatedData':
    """Splits the dataset; a ValueError says why that is impossible."""
    from tff_bn import data

    arguments = self.arguments(DataFlags)
    used = data.draw_training_samples(
        dataset,
        seed,
        train_share=arguments.pop('train_share', None),
        samples_per_domain=arguments.pop('samples_per_domain', None),
    )
    return data.split_dataset(
        used, self.split, self.num_clients, seed, **arguments
    )
