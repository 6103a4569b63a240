"""Models, their normalizations, and the options of both."""

from collections.abc import Sequence
import dataclasses
import functools
import os
import re
from typing import Any, Optional

from tff_bn.catalog import table_options
from tff_bn.catalog import tasks
from tff_bn.catalog import value_types
from tff_bn.catalog.options import OWN_NAME
from tff_bn.catalog.options import Condition
from tff_bn.catalog.options import Option
from tff_bn.catalog.options import declared
from tff_bn.catalog.parts import YOURS
from tff_bn.catalog.parts import Part
from tff_bn.catalog.parts import PartName
from tff_bn.catalog.parts import Parts
from tff_bn.catalog.parts import listing
from tff_bn.catalog.parts import require_function
from tff_bn.common import files

_ROOM = 'tff_bn.models'
# Kinds of samples, with the axes of a sample.
IMAGES = 'images'
SERIES = 'series'
VECTORS = 'vectors'
AXES = {
    IMAGES: ('height', 'width', 'channels'),
    SERIES: ('steps', 'features'),
    VECTORS: ('features',),
}
# Forms of a model's output.
VECTOR = 'vector'
MAP = 'map'
OUTPUTS = {
    VECTOR: 'one vector of outputs for each sample',
    MAP: 'a map: a vector of outputs for each pixel',
}


@dataclasses.dataclass(frozen=True)
class Model(Part):
  """A model.

  Its function gets the shape of a sample, the number of outputs and
  `normalization`. It returns an untrained `keras.Model` whose outputs are
  logits, or plain numbers for a regression.

  Attributes:
    samples: The kind of samples that it takes, a key of `AXES`. Default:
      images if `smallest` is given, otherwise samples of any shape (None).
    smallest: The smallest height and width of its images.
    outputs: The form of its output, a key of `OUTPUTS`. For a user's model, its
      actual output counts.
    has_residual_blocks: Whether the normalization `fixup` is possible.
    takes_categories: Whether its function gets `category_counts`, too: the
      position of each feature of a sample that is the number of a category, and
      how many categories it has.
  """

  samples: Optional[str] = None
  smallest: int = 1
  outputs: str = VECTOR
  has_residual_blocks: bool = False
  takes_categories: bool = False

  def __post_init__(self):
    if self.smallest > 1 and self.samples is None:
      object.__setattr__(self, 'samples', IMAGES)

  def describe_samples(self) -> str:
    """Returns the samples that it takes, in words."""
    if self.samples is None:
      return 'any'
    if self.samples != IMAGES:
      return self.samples
    return f'{IMAGES} of at least {self.smallest}x{self.smallest} pixels'

  def takes(self, input_shape: Sequence[int]) -> bool:
    """Whether it takes samples of this shape."""
    if self.samples is None:
      return True
    if len(input_shape) != len(AXES[self.samples]):
      return False
    return self.samples != IMAGES or min(input_shape[:2]) >= self.smallest

  def fits(self, input_shape: Sequence[int], task: str) -> bool:
    """Whether it takes samples of this shape and has the outputs of a task."""
    return self.takes(input_shape) and self.outputs == needed_outputs(task)


def needed_outputs(task: str) -> str:
  """Returns the form of the outputs that a task needs, a key of `OUTPUTS`."""
  return MAP if task == tasks.SEGMENTATION else VECTOR


def _model_of_object(name: str, function: Any) -> Model:
  """Returns the entry of a user's function."""
  require_function(
      function,
      'a function of the shape of a sample and the number of outputs that'
      ' returns a keras.Model, or an entry tff_bn.catalog.models.Model',
  )
  return Model(name, 'a model of yours', function)


MODELS: Parts[Model] = Parts(
    Model(
        'small_cnn',
        '3 convolutions of 16, 32 and 32 channels; for small images',
        f'{_ROOM}.convolutional:build_small_cnn',
        smallest=4,
    ),
    Model(
        'mlp3',
        'one hidden layer of 30 neurons (FedTAN)',
        f'{_ROOM}.perceptrons:build_mlp3',
    ),
    Model(
        'digits_cnn',
        '3 convolutions of 64, 64 and 128 channels and 3 dense layers (FedBN,'
        ' table 3)',
        f'{_ROOM}.convolutional:build_digits_cnn',
        smallest=4,
    ),
    Model(
        'fbn_cnn',
        '4 convolutions of 64, 64, 128 and 128 channels, BN after ReLU, dropout'
        ' and 2 dense layers (FBN, table 1)',
        f'{_ROOM}.convolutional:build_fbn_cnn',
        smallest=4,
    ),
    Model(
        'resnet20',
        'ResNet-20 with 16, 32 and 64 channels (FedTAN)',
        f'{_ROOM}.resnet20:build_resnet20',
        smallest=4,
        has_residual_blocks=True,
    ),
    Model(
        'mlp4',
        '3 hidden layers of 1024 neurons (FedPAN)',
        f'{_ROOM}.perceptrons:build_mlp4',
    ),
    Model(
        'vgg9',
        '6 convolutions of 32 to 256 channels and 3 dense layers (FedPAN)',
        f'{_ROOM}.convolutional:build_vgg9',
        smallest=4,
    ),
    Model(
        'vgg11',
        '8 convolutions of 64 to 512 channels and 1 dense layer (FedPAN)',
        f'{_ROOM}.convolutional:build_vgg11',
        smallest=4,
    ),
    Model(
        'vgg13',
        '10 convolutions of 64 to 512 channels, 1 dense layer (FedPAN)',
        f'{_ROOM}.convolutional:build_vgg13',
        smallest=4,
    ),
    Model(
        'resnet20_wide',
        'ResNet-20 with 64, 128 and 256 channels (FedPAN)',
        f'{_ROOM}.resnet20:build_resnet20_wide',
        smallest=4,
        has_residual_blocks=True,
    ),
    Model(
        'fedbn_two_layer',
        'one hidden layer of 100 neurons, for fedbn_synthetic (FedBN, appendix'
        ' F)',
        f'{_ROOM}.perceptrons:build_fedbn_two_layer',
    ),
    Model(
        'alexnet_bn',
        'AlexNet: 5 convolutions of 64 to 384 channels and 3 dense layers'
        ' (FedBN, table 9)',
        f'{_ROOM}.convolutional:build_alexnet_bn',
        smallest=95,
    ),
    Model(
        'abide_mlp',
        '2 hidden layers of 16 neurons (FedBN, section 5.2)',
        f'{_ROOM}.perceptrons:build_abide_mlp',
    ),
    Model(
        'tabular',
        '2 hidden layers of 64 and 32 neurons; for tables of features, with'
        ' embedded categories, too',
        f'{_ROOM}.perceptrons:build_tabular',
        samples=VECTORS,
        takes_categories=True,
    ),
    Model(
        'conv1d',
        '3 convolutions over time of 32, 64 and 64 channels; for series',
        f'{_ROOM}.series:build_conv1d',
        samples=SERIES,
    ),
    Model(
        'unet',
        'U-Net with 16, 32 and 64 channels; for segmentation',
        f'{_ROOM}.unet:build_unet',
        smallest=4,
        outputs=MAP,
    ),
    Model(
        'mobilenet_v2',
        'MobileNetV2 of keras.applications with a new last layer',
        f'{_ROOM}.applications:build_mobilenet_v2',
        smallest=32,
    ),
    Model(
        'resnet50',
        'ResNet-50 of keras.applications with a new last layer',
        f'{_ROOM}.applications:build_resnet50',
        smallest=32,
    ),
    of_object=_model_of_object,
)
# The models that can have the normalization `fixup`.
FIXUP_MODELS = tuple(
    name for name, model in MODELS.items() if model.has_residual_blocks
)


def fitting(input_shape: Sequence[int], task: str) -> list[str]:
  """Returns the models for such samples and this task.

  Models for this kind of samples come before models for any samples.
  """
  names = [n for n, model in MODELS.items() if model.fits(input_shape, task)]
  return sorted(names, key=lambda name: MODELS[name].samples is None)


def check_embeds_categories(name: str) -> None:
  """Checks that a model embeds categories."""
  if MODELS[name].takes_categories:
    return
  able = [n for n, model in MODELS.items() if model.takes_categories]
  option = table_options.CATEGORIES.name
  raise ValueError(
      f'{option}={table_options.EMBEDDED} is impossible with model={name},'
      f' which embeds no categories; use model={" or ".join(able)}, or'
      f' {option}={table_options.ONE_HOT}.'
  )


@dataclasses.dataclass(frozen=True)
class Normalization(Part):
  """A normalization of the hidden layers of models.

  Attributes:
    builds: The layer that follows a convolution or a dense layer, or None.
    has_momentum: Whether the layer has running statistics with a momentum.
    needs_bias: Whether the convolution or dense layer before it has a bias,
      because nothing makes it redundant.
    variables: Its variables, which clients send.
  """

  builds: Any = None
  has_momentum: bool = False
  needs_bias: bool = False
  variables: str = '–'


_AFFINE = 'γ, β'
_AFFINE_AND_STATISTICS = f'{_AFFINE}, running mean and variance'
STANDARDIZED_WEIGHTS = 'weight_standardization'
FEATURE = 'feature'
KERNEL = 'kernel'
FIXUP = 'fixup'
NORMALIZATIONS: Parts[Normalization] = Parts(
    Normalization(
        'batch',
        'batch normalization',
        'keras.layers:BatchNormalization',
        has_momentum=True,
        variables=_AFFINE_AND_STATISTICS,
    ),
    Normalization(
        'layer',
        'layer normalization over the channels',
        'keras.layers:LayerNormalization',
        variables=_AFFINE,
    ),
    Normalization(
        'batch_renorm',
        'batch renormalization: corrects the batch to the running statistics',
        'tff_bn.layers.batch_renormalization:BatchRenormalization',
        has_momentum=True,
        variables=_AFFINE_AND_STATISTICS,
    ),
    Normalization(
        'static_batch',
        'batch normalization without running statistics (HeteroFL): evaluation'
        ' uses the batch, too',
        'tff_bn.layers.static_batch_normalization:StaticBatchNormalization',
        variables=_AFFINE,
    ),
    Normalization(
        STANDARDIZED_WEIGHTS,
        'standardized weights instead of normalization layers (FedWon)',
        needs_bias=True,
        variables='gain',
    ),
    Normalization(
        KERNEL,
        'what each convolution reads at a position, over all its channels, and'
        ' what each hidden dense layer reads (KernelNorm)',
        needs_bias=True,
    ),
    Normalization(
        FIXUP,
        'Fixup initialization instead of normalization; only for '
        + ' and '.join(FIXUP_MODELS),
        variables='38 biases and 9 multipliers, one number each',
    ),
    Normalization(
        FEATURE,
        'only the features before the last layer (FN)',
        needs_bias=True,
    ),
    Normalization('none', 'no normalization', needs_bias=True),
)
GROUP_NORMALIZATION = Normalization(
    'group<N>',
    'group normalization with N groups',
    'keras.layers:GroupNormalization',
    variables=_AFFINE,
)
_GROUPS = f'{GROUP_NORMALIZATION.name}: {GROUP_NORMALIZATION.description}'


def num_groups(normalization: str) -> int:
  """Returns the N of `group<N>`; 0 for any other normalization."""
  match = re.fullmatch(r'group([1-9][0-9]*)', normalization)
  return int(match[1]) if match else 0


def find_normalization(name: str) -> Normalization:
  """Returns the entry of a normalization; raises a `KeyError` without one."""
  return GROUP_NORMALIZATION if num_groups(name) else NORMALIZATIONS[name]


# The dtype policies of Keras that are possible.
PRECISIONS = {
    'float32': 'everything in float32',
    'mixed_bfloat16': 'layers compute in bfloat16; variables are float32',
    'mixed_float16': (
        'layers compute in float16, with a scaled loss; variables are float32'
    ),
}


@dataclasses.dataclass(frozen=True)
class PositionEncodings:
  """A mode of the position encodings in hidden layers (FedPAN).

  Attributes:
    description: What they do to a unit.
    amplitude: The amplitude of FedPAN's paper (appendix C); 0: none.
  """

  description: str
  amplitude: float = 0.0


NO_ENCODINGS = 'off'
PANS = {
    NO_ENCODINGS: PositionEncodings('nothing'),
    'add': PositionEncodings(
        'each unit plus the encoding of its position', 0.05
    ),
    'multiply': PositionEncodings(
        'each unit times the encoding of its position', 0.1
    ),
}
# float32 has no exact phases with more periods, and sums with larger amplitudes
# hardly depend on the units.
_PAN_NUMBER = value_types.Number(float, minimum=0, maximum=10**5)
# Options that switch position encodings off where they are 0.
PAN_SWITCHES = ('pan_amplitude', 'pan_period')


def are_encodings_off(options: Any) -> bool:
  """Whether an option with the value 0 switches position encodings off."""
  return any(getattr(options, name) == 0 for name in PAN_SWITCHES)


def has_personal_encodings(options: Any) -> bool:
  """Whether clients have personal position encodings, given all options."""
  return bool(
      options.initial_model is None
      and options.pan != NO_ENCODINGS
      and not are_encodings_off(options)
      and options.pan_personal_share
  )


# A file has the architecture and the weights of a model.
_BUILDS_MODEL = Condition(
    'initial_model',
    lambda options: options.initial_model is None,
    'has no effect with --initial_model={}, whose file has the architecture',
)


def _pan_option(
    name: str, values: value_types.ValueType, description: str, **more: Any
) -> Option:
  """Declares an option that has an effect with position encodings only."""
  return Option(
      name,
      values,
      description,
      **more,
      conditions=(
          _BUILDS_MODEL,
          Condition(
              'pan',
              lambda options: options.pan != NO_ENCODINGS,
              f'has no effect with --pan={NO_ENCODINGS}',
          ),
      ),
      argument=OWN_NAME,
  )


def _absolute(path: str) -> str:
  """Makes a path absolute, so that flags.txt is valid in any working folder."""
  return os.path.abspath(os.path.expanduser(path))


def _checksum_of_file(options: Any) -> str:
  """Returns the checksum of the initial model."""
  path = _absolute(options.initial_model)
  status = os.stat(path)
  return _cached_checksum(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache
def _cached_checksum(path: str, size: int, changed: int) -> str:
  """Returns the checksum of a file with this size and time of change."""
  del size, changed
  return files.checksum(path)


def _require_checksum(text: str) -> None:
  if not re.fullmatch('[0-9a-f]{64}', text):
    raise ValueError('must be 64 hexadecimal digits.')


MODEL = Option(
    'model',
    PartName(MODELS, YOURS),
    f'The model:\n{listing(MODELS)}or {YOURS}; the function is called'
    ' with the shape of a sample and the number of outputs (classes, labels or'
    ' targets) and returns an untrained keras.Model. Its outputs are logits, or'
    ' plain numbers for a regression',
    'small_cnn',
    conditions=(_BUILDS_MODEL,),
)
INITIAL_MODEL = Option(
    'initial_model',
    value_types.KerasFile(),
    'A .keras file from which the training starts, with its architecture and'
    " weights: a pretrained model, or an earlier run's model/model.keras",
    default_text='a new model',
    convert=_absolute,
)
INITIAL_MODEL_SHA256 = Option(
    'initial_model_sha256',
    value_types.CheckedText(_require_checksum),
    'The SHA-256 that the file of --initial_model must have. The flags.txt of a'
    ' run has it, so that nothing continues or evaluates the run with another'
    ' file',
    default_text="the file's",
    compute=_checksum_of_file,
    conditions=(
        Condition(
            'initial_model',
            lambda options: options.initial_model is not None,
            'has no effect without --initial_model',
        ),
    ),
    argument='sha256',
)
FROZEN_LAYERS = Option(
    'frozen_layers',
    value_types.REGULAR_EXPRESSION,
    'Layers whose weights are not trained: a regular expression for whole names'
    ' of layers, or paths such as backbone/conv1 in nested models. Their batch'
    ' normalization uses its running statistics. Clients do not send these'
    ' weights',
    default_text='none',
    argument=OWN_NAME,
)
NORMALIZATION = Option(
    'normalization',
    value_types.Choice(
        NORMALIZATIONS,
        _GROUPS,
        lambda name: num_groups(name) > 0,
    ),
    'The normalization layers of the model:\n'
    f'{listing(NORMALIZATIONS)}or {_GROUPS}',
    'batch',
    conditions=(_BUILDS_MODEL,),
    argument=OWN_NAME,
)
PRECISION = Option(
    'precision',
    value_types.Choice(PRECISIONS),
    "The dtype in which the model's layers compute. Losses and BN statistics"
    ' are always float32. Mixed precision is for GPUs with hardware support; on'
    f' the CPU it is slower:\n{listing(PRECISIONS)}',
    'float32',
    conditions=(_BUILDS_MODEL,),
    argument=OWN_NAME,
)
BATCH_NORM_MOMENTUM = Option(
    'batch_norm_momentum',
    value_types.MOMENTUM,
    'Momentum m of the running BN statistics: new = m * old + (1 - m) *'
    " batch's. Algorithms that normalize with the running statistics in"
    ' training may need 0.99 or more',
    default_text="the model's own, 0.9 for the models above",
    argument=OWN_NAME,
)
PAN = Option(
    'pan',
    value_types.Choice(PANS),
    'Position-aware neurons (FedPAN): how the encoding of its position changes'
    f' each unit of the hidden layers, before the activation:\n{listing(PANS)}',
    NO_ENCODINGS,
    conditions=(_BUILDS_MODEL,),
    argument=OWN_NAME,
)
PAN_AMPLITUDE = _pan_option(
    'pan_amplitude',
    _PAN_NUMBER,
    'Amplitude of the position encodings of --pan',
    compute=lambda options: PANS[options.pan].amplitude,
    default_text=', '.join(
        f'{mode.amplitude:g} for {name}'
        for name, mode in PANS.items()
        if mode.amplitude
    ),
)
PAN_PERIOD = _pan_option(
    'pan_period',
    _PAN_NUMBER,
    'Number of periods of the sine that the position encodings of a layer span',
    default=1.0,
)
PAN_PERSONAL_SHARE = _pan_option(
    'pan_personal_share',
    value_types.SHARE,
    'Share of the units of each hidden layer, counted from its last unit, that'
    ' have personal position encodings: their phase is drawn for each client'
    ' and layer. With 0, all encodings are the same for all clients',
    default=0.0,
    ignored=are_encodings_off,
)
MOON_PROJECTION = Option(
    'moon_projection',
    # A larger head needs gigabytes for each client.
    value_types.Number(int, minimum=1, maximum=10**5),
    "Number of outputs of MOON's projection head, 256 in its paper: a dense"
    ' layer, ReLU and a dense layer before the last layer of the model. For all'
    ' algorithms, so that a comparison trains the same model; moon contrasts'
    ' its outputs',
    default_text='no head',
    conditions=(_BUILDS_MODEL,),
    argument=OWN_NAME,
)
OPTIONS = declared(vars())
