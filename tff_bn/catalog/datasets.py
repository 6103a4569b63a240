"""Datasets: their names, and the options that decide which data is used.

The ways to split a dataset over clients are in `tff_bn.data.splits`, and the
scalings of its pixels in `tff_bn.data.scaling`.
"""

from collections.abc import Callable
import dataclasses
import json
import os
import re
from typing import Any, NamedTuple, Optional
import zipfile

from tff_bn.catalog import table_options
from tff_bn.catalog import tasks
from tff_bn.catalog import value_types
from tff_bn.catalog.options import OWN_NAME
from tff_bn.catalog.options import Condition
from tff_bn.catalog.options import Option
from tff_bn.catalog.parts import YOURS
from tff_bn.catalog.parts import Part
from tff_bn.catalog.parts import PartName
from tff_bn.catalog.parts import Parts
from tff_bn.catalog.parts import listing
from tff_bn.catalog.parts import require_function
from tff_bn.common import spelling

_ROOM = 'tff_bn.data'
# Larger images, if they fit into memory at all, fill it in the first layer.
_LARGEST_SIDE = 10**4
_GENERATED_NUMBERS = (200, 100)
_PATH = 'PATH'


@dataclasses.dataclass(frozen=True)
class Source(Part):
  """A dataset, or a kind of datasets such as `npz:PATH`.

  Its function returns a `tff_bn.data.Dataset`. The function of a kind gets the
  whole name of the dataset first.

  Attributes:
    form: What the names of a kind have after the colon. None: it is one
      dataset.
    other_form: Another form of the names of a kind.
    check: Raises a `ValueError` for a wrong name. The message continues a
      sentence whose subject is the name.
    has_domains: Whether the data has several domains.
    takes_parts: Whether the function gets `is_part`, too: whether training
      samples may lack classes.
    takes_task: Whether the function gets `task`, too: the task that the user
      chose, or None.
    task: The task of a dataset that is not a classification, a key of
      `tff_bn.catalog.tasks.TASKS`. None: the labels decide.
    takes_encoding: Whether the function gets `encoding`, too: how the columns
      of the training data of a model became features, or None.
    finds_clients: Whether the file or folder at a path divides the samples over
      clients, as far as a short look tells. None: it never does.
  """

  form: Optional[str] = None
  other_form: Optional[str] = None
  check: Optional[Callable[[str], Any]] = None
  has_domains: bool = False
  takes_parts: bool = False
  takes_task: bool = False
  task: Optional[str] = None
  takes_encoding: bool = False
  finds_clients: Optional[Callable[[str], bool]] = None

  @property
  def prefix(self) -> str:
    """The beginning of the names of a kind."""
    return f'{self.name}:'


class Generated(NamedTuple):
  """What a name `generated:...` asks for.

  Attributes:
    shape: The shape of an example: height, width and channels, or features.
    num_classes: The number of classes.
    num_train: The number of training examples.
    num_test: The number of test examples.
  """

  shape: tuple[int, ...]
  num_classes: int
  num_train: int
  num_test: int


def parse_generated(name: str) -> Generated:
  """Parses `generated:SHAPE:CLASSES`, optionally with `:TRAIN:TEST`.

  Default: 200 training and 100 test examples, or one for each class if there
  are more classes. Raises a `ValueError` if the name has another form.
  """
  match = re.fullmatch(
      r'generated:(\d+|\d+x\d+x\d+):(\d+)(?::(\d+))?(?::(\d+))?', name
  )
  if match is None:
    raise ValueError(
        'must be generated:SHAPE:CLASSES or generated:SHAPE:CLASSES:TRAIN:TEST,'
        ' where SHAPE is HEIGHTxWIDTHxCHANNELS or a number of features, for'
        ' example generated:32x32x3:10:500:100.'
    )
  shape, classes, *examples = match.groups()
  num_classes = int(classes)
  num_train, num_test = (
      max(default, num_classes) if number is None else int(number)
      for default, number in zip(_GENERATED_NUMBERS, examples)
  )
  generated = Generated(
      tuple(map(int, shape.split('x'))), num_classes, num_train, num_test
  )
  if min(*generated.shape, num_test) < 1 or num_classes < 2:
    raise ValueError('needs sizes of at least 1, and at least 2 classes.')
  if num_train < num_classes:
    raise ValueError(
        f'asks for {num_train} training examples of {num_classes} classes; it'
        ' needs at least one of each class.'
    )
  return generated


def parse_domains(name: str, fewest: int = 2) -> dict[str, str]:
  """Parses `domains:NAME=DATASET,DATASET,...`.

  Returns the name of each domain's dataset by the domain's name. A domain
  without a name has the last part of its dataset's name, without the suffix of
  a file.

  Raises:
    ValueError: If there are fewer than `fewest` domains, if two have the same
      name, or if a dataset is not allowed as a domain.
  """
  sources: dict[str, str] = {}
  advice = 'write domains:NAME=DATASET,NAME=DATASET.'
  for text in name.removeprefix(DOMAINS.prefix).split(','):
    match = re.fullmatch(r'([\w.-]+)=(.*)', text)
    domain, source = match.groups() if match else (_domain_name(text), text)
    if not source:
      raise ValueError(
          f'has no dataset for the domain {domain or text!r}; {advice}'
      )
    if source.startswith(DOMAINS.prefix):
      raise ValueError(
          f'has a list of domains as the domain {domain!r}; a domain must be a'
          ' single dataset.'
      )
    if domain in sources:
      raise ValueError(f'has two domains {domain!r}; name them: {advice}')
    sources[domain] = source
  if len(sources) < fewest:
    raise ValueError(
        'has a single domain; use at least two, or'
        f' {next(iter(sources.values()))} without `domains:`.'
    )
  return sources


def single_domain(name: str) -> Optional[tuple[str, str]]:
  """Returns NAME and DATASET of `domains:NAME=DATASET`, for one domain only."""
  if not name.startswith(DOMAINS.prefix):
    return None
  domains = parse_domains(name, fewest=1)
  return next(iter(domains.items())) if len(domains) == 1 else None


def sources(name: str) -> list[str]:
  """Returns the name of a dataset, or the names of its domains' datasets."""
  if not name.startswith(DOMAINS.prefix):
    return [name]
  return list(parse_domains(name, fewest=1).values())


def map_sources(name: str, change: Callable[[str], str]) -> str:
  """Changes a dataset's name, or the name of each domain's dataset.

  In the new name, all domains have names.
  """
  if not name.startswith(DOMAINS.prefix):
    return change(name)
  return DOMAINS.prefix + ','.join(
      f'{domain}={change(source)}'
      for domain, source in parse_domains(name).items()
  )


def short_name(name: str) -> str:
  """Returns a name for titles: without paths, or the names of domains."""
  if name.startswith(DOMAINS.prefix):
    domains = list(parse_domains(name, fewest=1))
    return f'domains {spelling.name_some(domains)}'
  return _domain_name(name) or name


def _domain_name(source: str) -> str:
  """Returns a readable name for a dataset without a name."""
  if is_path(source):
    return os.path.basename(path(source).rstrip('/')).removesuffix(NPZ_SUFFIX)
  return source.removeprefix(TFDS.prefix)


def _source_of_object(name: str, function: Any) -> Source:
  """Returns the entry of a user's function."""
  require_function(
      function,
      'a function that returns a tff_bn.data.Dataset, or an entry'
      ' tff_bn.catalog.datasets.Source',
  )
  return Source(name, 'a dataset of yours', function)


DATA_DIR = Option(
    'data_dir',
    value_types.TEXT,
    'Folder from which datasets that are not built in are read, and to which'
    ' they are downloaded',
    default_text="the dataset library's own",
    conditions=(
        Condition(
            'dataset',
            lambda options: is_downloaded(options.dataset),
            'has no effect with --dataset={}, which is not downloaded',
        ),
    ),
)


def parse_image_size(text: str) -> tuple[int, int]:
  """Parses `HEIGHTxWIDTH`, e.g. '32x32'."""
  match = re.fullmatch('([0-9]+)x([0-9]+)', text.lower())
  height, width = map(int, match.groups()) if match else (0, 0)
  if height < 1 or width < 1:
    raise ValueError('must be HEIGHTxWIDTH in pixels, for example 32x32.')
  if max(height, width) > _LARGEST_SIDE:
    raise ValueError(
        f'must have a height and a width of at most {_LARGEST_SIDE} pixels.'
    )
  return height, width


IMAGE_SIZE = Option(
    'image_size',
    value_types.CheckedText(parse_image_size),
    'HEIGHTxWIDTH in pixels to which images are resized, for example 32x32',
    default_text="the images' own size",
)

# The datasets whose domains are made from images that look alike.
MADE_DOMAINS = 'digits_domains and fashion_mnist_domains'

DOMAIN_STRENGTH = Option(
    'domain_strength',
    value_types.SHARE,
    f'How much the domains of {MADE_DOMAINS} differ: s·c + (1 - s)·x for this'
    ' number s, the plain image x and the image c of the domain. 0: all images'
    ' are plain; 0.5: inverted images are uniformly grey',
    1.0,
    argument=OWN_NAME,
    conditions=(
        Condition(
            'dataset',
            lambda options: has_domain_strength(options.dataset),
            f'has no effect with --dataset={{}}; it is for {MADE_DOMAINS}',
        ),
    ),
)

DATASETS: Parts[Source] = Parts(
    Source(
        'digits',
        "scikit-learn's 1,797 handwritten digits of 8x8 pixels (offline)",
        f'{_ROOM}.digits:load_digits',
    ),
    Source(
        'digits_domains',
        'the same digits in five domains: plain, inverted, low contrast, noisy'
        ' background, blurred and shifted (offline)',
        f'{_ROOM}.digits:load_digits_domains',
        (DOMAIN_STRENGTH,),
        has_domains=True,
    ),
    Source(
        'emnist',
        "TensorFlow Federated's EMNIST: digits of 3,383 writers, 28x28 pixels"
        ' (downloaded on first use)',
        f'{_ROOM}.emnist:load_emnist',
        (DATA_DIR,),
    ),
    Source(
        'femnist',
        "TensorFlow Federated's EMNIST with all 62 digits and letters of 3,400"
        ' writers, 28x28 pixels (downloaded on first use)',
        f'{_ROOM}.emnist:load_femnist',
        (DATA_DIR,),
    ),
    Source(
        'emnist_synthetic',
        'ten images in the format of emnist for each of two writers (offline)',
        f'{_ROOM}.emnist:load_emnist_synthetic',
    ),
    Source(
        'fashion_mnist',
        "70,000 pictures of clothes, 28x28 pixels: from --data_dir, Debian's"
        ' dataset-fashion-mnist or TensorFlow Datasets',
        f'{_ROOM}.fashion_mnist:load_fashion_mnist',
        (DATA_DIR,),
    ),
    Source(
        'fashion_mnist_domains',
        'the same pictures in the five domains of digits_domains; the domains'
        ' have 1.3 to 66 % of them',
        f'{_ROOM}.fashion_mnist:load_fashion_mnist_domains',
        (DATA_DIR, DOMAIN_STRENGTH),
        has_domains=True,
    ),
    Source(
        'fedbn_synthetic',
        'two classes of Gaussian points in two domains with different'
        ' covariances, as in appendix F of the FedBN paper (offline)',
        f'{_ROOM}.generated:load_fedbn_synthetic',
        has_domains=True,
    ),
    Source(
        'breast_cancer',
        "scikit-learn's 569 breast tumours, malignant or benign: 30 features"
        ' (offline)',
        f'{_ROOM}.tables:load_breast_cancer',
        task=tasks.BINARY,
    ),
    Source(
        'diabetes',
        "scikit-learn's 442 patients with diabetes: 10 features, the progress"
        ' of the disease after a year in standard deviations (offline)',
        f'{_ROOM}.tables:load_diabetes',
        task=tasks.REGRESSION,
    ),
    Source(
        'discs',
        'generated 32x32 pictures of discs, whose pixels are found, in four'
        ' domains of different brightness and contrast (offline)',
        f'{_ROOM}.shifted:load_discs',
        has_domains=True,
        task=tasks.SEGMENTATION,
    ),
    Source(
        'sensor_windows',
        'generated windows of 32 steps of three sensors in four kinds of'
        ' motion, in four domains with other offsets and gains (offline)',
        f'{_ROOM}.shifted:load_sensor_windows',
        has_domains=True,
    ),
    Source(
        'findings',
        'generated 16x16 pictures with any of four findings, in four domains of'
        ' different brightness and contrast (offline)',
        f'{_ROOM}.shifted:load_findings',
        has_domains=True,
        task=tasks.MULTILABEL,
    ),
    of_object=_source_of_object,
)
NPZ_SUFFIX = '.npz'
NPY_SUFFIX = '.npy'
TRAIN_SPLIT = 'train'
# The first of these splits that a dataset has is the test data.
TEST_SPLITS = ('test', 'validation')
# The arrays of an archive that give the ids of clients.
CLIENT_ARRAYS = ('client_train', 'client_test')


def clients_in_folder(path: str) -> list[str]:
  """Returns the folders in an image folder that are clients, sorted.

  They have folders of training images, while the folder itself has none.
  """
  train = 'train'
  if not os.path.isdir(path) or os.path.isdir(os.path.join(path, train)):
    return []
  return sorted(
      entry.name
      for entry in os.scandir(path)
      if os.path.isdir(os.path.join(entry.path, train))
  )


def _npz_has_clients(path: str) -> bool:
  """Whether an archive has the ids of clients; False if it can't be read."""
  # Reading from a pipe may last forever.
  if not os.path.isfile(path):
    return False
  try:
    with zipfile.ZipFile(path) as archive:
      return CLIENT_ARRAYS[0] + NPY_SUFFIX in archive.namelist()
  # A damaged file may raise anything; the error comes when it is loaded.
  except Exception:
    return False


TFDS = Source(
    'tfds',
    'TensorFlow Datasets',
    f'{_ROOM}.tfds_source:load_tfds',
    (DATA_DIR, IMAGE_SIZE),
    form='NAME',
)
NPZ = Source(
    'npz',
    'a NumPy archive with x_train, y_train, x_test and y_test, and'
    ' client_train and client_test for the ids of clients if they are known',
    f'{_ROOM}.npz_file:load_npz',
    form=_PATH,
    other_form=f'a path that ends in {NPZ_SUFFIX}',
    takes_parts=True,
    takes_task=True,
    finds_clients=_npz_has_clients,
)
SERIES = Source(
    'series',
    'such an archive of series [samples, steps, features]',
    f'{_ROOM}.npz_file:load_npz',
    form=_PATH,
    takes_parts=True,
    takes_task=True,
    finds_clients=_npz_has_clients,
)
FOLDER = Source(
    'folder',
    'images in PATH/train/LABEL/ and PATH/test/LABEL/, or in'
    ' PATH/CLIENT/train/LABEL/ and PATH/CLIENT/test/LABEL/',
    f'{_ROOM}.image_folder:load_image_folder',
    (IMAGE_SIZE,),
    form=_PATH,
    takes_parts=True,
    finds_clients=lambda path: bool(clients_in_folder(path)),
)
CSV = Source(
    'csv',
    'a table with --label_column: a CSV file, or a folder with one for each'
    ' client',
    f'{_ROOM}.table_files:load_csv',
    table_options.OPTIONS,
    form=_PATH,
    takes_parts=True,
    takes_task=True,
    takes_encoding=True,
    finds_clients=os.path.isdir,
)
PARQUET = Source(
    'parquet',
    'a table with --label_column: a Parquet file, or a folder with the parts of'
    ' one; needs pyarrow',
    f'{_ROOM}.table_files:load_parquet',
    table_options.OPTIONS,
    form=_PATH,
    takes_parts=True,
    takes_task=True,
    takes_encoding=True,
)
HF = Source(
    'hf',
    'a folder written by save_to_disk of Hugging Face datasets, with'
    ' --label_column: pictures, arrays or a table; needs the package datasets',
    f'{_ROOM}.hugging_face:load_hugging_face',
    (IMAGE_SIZE, *table_options.OPTIONS),
    form=_PATH,
    takes_parts=True,
    takes_task=True,
    takes_encoding=True,
)
IDX = Source(
    'idx',
    'the files in which MNIST, Fashion-MNIST, KMNIST and EMNIST are published,'
    ' also compressed (.gz)',
    f'{_ROOM}.idx_files:load_idx',
    form=_PATH,
    takes_parts=True,
)
GENERATED = Source(
    'generated',
    'random examples, for trying things out; SHAPE is HxWxC or a number of'
    ' features, and the numbers of training and test examples may be left out',
    f'{_ROOM}.generated:load_generated',
    form='SHAPE:CLASSES:TRAIN:TEST',
    check=parse_generated,
)
DOMAINS = Source(
    'domains',
    'several datasets as the domains of one; NAME= may be left out',
    f'{_ROOM}.domains:load_domains',
    (DATA_DIR, IMAGE_SIZE),
    form='NAME=DATASET,NAME=DATASET',
    has_domains=True,
    takes_parts=True,
    takes_task=True,
)
KINDS = {
    kind.name: kind
    for kind in (
        TFDS,
        NPZ,
        SERIES,
        FOLDER,
        CSV,
        PARQUET,
        HF,
        IDX,
        GENERATED,
        DOMAINS,
    )
}


def _explain_others() -> str:
  """Returns the forms of the names that are not in `DATASETS`."""
  forms = [
      f'{kind.prefix}{kind.form}'
      + (f' or {kind.other_form}' if kind.other_form else '')
      + f' ({kind.description})'
      for kind in KINDS.values()
  ]
  return f'{", ".join(forms)}, or {YOURS}'


OTHER_DATASETS = _explain_others()


def find_kind(name: str) -> Optional[Source]:
  """Returns the kind to which a dataset belongs; None if it has none."""
  prefix, colon, _ = name.partition(':')
  if colon and prefix in KINDS:
    return KINDS[prefix]
  return NPZ if name.endswith(NPZ_SUFFIX) else None


def find(name: str) -> Source:
  """Returns the entry of a dataset, or of its kind; see `Parts` for errors."""
  return find_kind(name) or DATASETS[name]


def is_path(name: str) -> bool:
  """Whether a dataset is a file or a folder."""
  kind = find_kind(name)
  return kind is not None and kind.form == _PATH


def path(name: str) -> str:
  """Returns what the name of a dataset of a kind has after the prefix."""
  kind = find_kind(name)
  return name if kind is None else name.removeprefix(kind.prefix)


def is_users(name: str) -> bool:
  """Whether a dataset is a user's part."""
  return find_kind(name) is None and DATASETS.is_users(name)


def has_domains(name: str) -> bool:
  """Whether a dataset has several domains."""
  return find(name).has_domains


def has_domain_strength(name: str) -> bool:
  """Whether one can choose how much the domains of a dataset differ."""
  return find(name).has(DOMAIN_STRENGTH.name)


def has_clients(options: Any) -> bool:
  """Whether the dataset is a file or folder with clients, given all options."""
  if getattr(options, table_options.CLIENT_COLUMN.name, None) is not None:
    return True
  found = find(options.dataset).finds_clients
  return found is not None and found(os.path.expanduser(path(options.dataset)))


def has_tables(name: str) -> bool:
  """Whether a dataset has columns, such as a table."""
  kind = find_kind(name)
  return kind is not None and kind.takes_encoding


def saved_splits(path: str) -> list[str]:
  """Returns the splits of a `DatasetDict` of Hugging Face in a folder.

  Empty if it has a single `Dataset`, or can't be read.
  """
  file = os.path.join(path, 'dataset_dict.json')
  # Reading from a pipe may last forever.
  if not os.path.isfile(file):
    return []
  try:
    with open(file, encoding='utf-8') as opened:
      splits = json.load(opened)['splits']
  # A damaged file may have anything; the error comes when it is loaded.
  except (OSError, ValueError, LookupError, TypeError):
    return []
  return list(map(str, splits)) if isinstance(splits, list) else []


def has_test_split(name: str) -> bool:
  """Whether a dataset with columns has test data of its own."""
  if find_kind(name) is not HF:
    return False
  return not set(TEST_SPLITS).isdisjoint(
      saved_splits(os.path.expanduser(path(name)))
  )


def is_downloaded(name: str) -> bool:
  """Whether a dataset, or the dataset of a domain, may be downloaded."""
  return any(find(source).has('data_dir') for source in sources(name))


def is_quick(name: str) -> bool:
  """Whether loading a dataset takes a moment only: it is small and built in."""
  return all(
      not is_users(source)
      and not find(source).has('data_dir')
      and not is_path(source)
      for source in sources(name)
  )


def _is_community(name: str) -> bool:
  """Whether TensorFlow Datasets runs downloaded code: `tfds:SPACE:NAME`."""
  # A version comes after a colon, too, but begins with a digit or a star.
  return bool(re.match(rf'{TFDS.prefix}[^:]*:[^\d*]', name))


class DatasetName(PartName):
  """The name of a dataset."""

  def __init__(self, fewest_domains: int = 2):
    """Initializes the names; `domains:...` needs `fewest_domains`."""
    super().__init__(DATASETS, OTHER_DATASETS)
    self._fewest_domains = fewest_domains

  def allows(self, text):
    """See the base class."""
    return find_kind(text) is not None or super().allows(text)

  def parse(self, text):
    """See the base class."""
    super().parse(text)
    kind = find_kind(text)
    if kind is None:
      return text
    if text == kind.prefix:
      raise ValueError(f'must have the form {text}{kind.form}.')
    if kind.check is not None:
      kind.check(text)
    if kind is DOMAINS:
      domains = parse_domains(text, self._fewest_domains)
      for domain, source in domains.items():
        try:
          self.parse(source)
          if has_tables(source):
            raise ValueError(
                'is read by its columns; use one folder of tables or'
                f' --{table_options.CLIENT_COLUMN.name}.'
            )
        except ValueError as error:
          raise ValueError(
              f'has the domain {domain!r}, whose dataset {source} {error}'
          ) from error
    return text

  def names_code(self, value):
    """See the base class."""
    return any(
        is_users(source) or _is_community(source) for source in sources(value)
    )

  def load(self, value):
    """See the base class."""
    for source in filter(is_users, sources(value)):
      DATASETS[source].load()


DATASET = Option(
    'dataset',
    DatasetName(),
    f'The data:\n{listing(DATASETS)}or {OTHER_DATASETS}; the function returns a'
    ' tff_bn.data.Dataset',
    'digits',
    argument=OWN_NAME,
)
TRAIN_SHARE = Option(
    'train_share',
    value_types.POSITIVE_SHARE,
    'Share of the training samples that is used, of each domain if the data has'
    ' domains; drawn at random',
    1.0,
    convert=lambda share: None if share == 1 else share,
    argument=OWN_NAME,
)
SAMPLES_PER_DOMAIN = Option(
    'samples_per_domain',
    value_types.POSITIVE_INTEGER,
    'Largest number of training samples of each domain that is used; drawn at'
    ' random',
    default_text='no limit',
    argument=OWN_NAME,
)
