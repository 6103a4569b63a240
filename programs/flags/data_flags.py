"""The flags of the dataset and of its split over the clients."""

from collections.abc import Iterable, Sequence
import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING, Any, Optional

from absl import logging

from tff_bn.catalog import datasets
from tff_bn.catalog import table_options
from tff_bn.catalog import tasks
from tff_bn.common import progress
from tff_bn.common import spelling
from tff_bn.data import scaling
from tff_bn.data import splits
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli.parsed_flags import ParsedFlags

if TYPE_CHECKING:
  from tff_bn import data as tff_bn_data
  from tff_bn.data import table_encoding
  from tff_bn.programs.plan import settings as settings_lib

# The positions of all clients' samples take 8 bytes each.
_MAX_SAMPLES = 10**8


def _absolute(path: str) -> str:
  """Makes a path absolute, so that flags.txt is valid in any working folder."""
  return os.path.abspath(os.path.expanduser(path))


def _absolute_source(dataset: str) -> str:
  if not datasets.is_path(dataset):
    return dataset
  path = datasets.path(dataset)
  return dataset.removesuffix(path) + _absolute(path)


def _saying_what_is_loaded(
    dataset: str,
) -> contextlib.AbstractContextManager[None]:
  """Says that a dataset is loaded, unless this takes a moment only."""
  if datasets.is_quick(dataset):
    return contextlib.nullcontext()
  return progress.saying(f'Loading {datasets.short_name(dataset)}')


def announce_split(
    flags: ParsedFlags, runs: Iterable['settings_lib.RunSettings']
) -> None:
  """Says which split is used because a dataset has domains or clients."""
  if flags.split is not None:
    return
  found = {run.split for run in runs}
  if splits.NATURAL in found:
    progress.say(
        'The dataset has clients, so each of them is a client'
        f' (--split={splits.NATURAL}). Any other --split mixes their data.'
    )
  if splits.DOMAINS in found:
    progress.say(
        'The dataset has domains, so each client has data of one domain'
        f' (--split={splits.DOMAINS}). Any other --split mixes the domains.'
    )


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


# What decides which dataset is loaded.
_LOADED = (
    dataclasses.replace(
        datasets.DATASET,
        convert=lambda name: datasets.map_sources(name, _absolute_source),
    ),
    dataclasses.replace(datasets.DATA_DIR, convert=_absolute),
    datasets.IMAGE_SIZE,
    datasets.DOMAIN_STRENGTH,
    tasks.TASK,
    *table_options.OPTIONS,
)
_OPTIONS = flag_groups.base_class(
    *_LOADED,
    scaling.PIXEL_SCALING,
    datasets.TRAIN_SHARE,
    datasets.SAMPLES_PER_DOMAIN,
    splits.SPLIT,
    splits.NUM_CLIENTS,
    *splits.PARAMETERS.values(),
)


@dataclasses.dataclass(frozen=True)
class DataFlags(_OPTIONS):  # type: ignore[misc, valid-type]
  """The dataset and its split over the clients."""

  TITLE = 'Data'

  @classmethod
  def check(cls, flags: ParsedFlags) -> None:
    """See `Flags.check`."""
    super().check(flags)
    if flags.samples_per_client is not None and splits.draws_samples(flags):
      num_clients = splits.chosen_num_clients(flags)
      number = num_clients * flags.samples_per_client
      if number > _MAX_SAMPLES:
        raise ValueError(
            f'--num_clients={num_clients} with'
            f' {flags.text("samples_per_client")} makes {number} samples of all'
            f' clients; at most {_MAX_SAMPLES} are possible.'
        )

  @property
  def dataset_key(self) -> tuple[Any, ...]:
    """The values of the flags that decide which dataset is loaded."""
    return tuple(getattr(self, option.name) for option in _LOADED)

  @property
  def parsed_image_size(self) -> Optional[tuple[int, int]]:
    """The height and width to which images are resized; `None`: not."""
    if self.image_size is None:
      return None
    return datasets.parse_image_size(self.image_size)

  def load(
      self,
      class_names: Optional[Sequence[str]] = None,
      encoding: Optional['table_encoding.TableEncoding'] = None,
  ) -> 'tff_bn_data.Dataset':
    """Loads the dataset; a ValueError says why it can't be used.

    Args:
      class_names: The classes of a trained model, see `data.load_dataset`.
      encoding: How it got its features from a table, see there.
    """
    from tff_bn import data

    # Without it, the labels decide.
    chosen = {} if self.task is None else dict(task=self.task)
    with _saying_what_is_loaded(self.dataset):
      dataset = data.load_dataset(
          self.dataset,
          data_dir=self.data_dir,
          image_size=self.parsed_image_size,
          class_names=class_names,
          encoding=encoding,
          domain_strength=self.domain_strength,
          **chosen,
          **{o.name: getattr(self, o.name) for o in table_options.OPTIONS},
      )
    if self.task is None and dataset.task != tasks.CLASSIFICATION:
      progress.say(
          f'The labels are {tasks.TASKS[dataset.task].labels}:'
          f' --task={dataset.task}.'
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

    used = data.draw_training_samples(
        dataset,
        seed,
        train_share=self.train_share,
        samples_per_domain=self.samples_per_domain,
    )
    return data.split_dataset(
        used,
        self.split,
        self.num_clients,
        seed,
        **{name: getattr(self, name) for name in splits.PARAMETERS},
    )
