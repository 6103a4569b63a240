"""The flags of the model."""

from collections.abc import Callable
import dataclasses
from typing import TYPE_CHECKING, Any, Optional

from tff_bn.catalog import options
from tff_bn.catalog import parts
from tff_bn.catalog import value_types
from tff_bn.models import names as model_names
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli.flag_groups import flag
from tff_bn.programs.cli.parsed_flags import ParsedFlags

if TYPE_CHECKING:
  import keras

# The amplitudes of FedPAN's paper.
PAN_AMPLITUDES = {'add': 0.05, 'multiply': 0.1}
# float32 has no exact phases with more periods, and sums with larger amplitudes
# hardly depend on the units.
PERIOD = value_types.Number(float, minimum=0, maximum=10**5)
_AMPLITUDE = value_types.Number(float, minimum=0, maximum=10**5)
# Flags that switch position encodings off where they are 0.
_SWITCHES = ('pan_amplitude', 'pan_period')


def _pan_flag(*arguments: Any, **more: Any) -> Any:
  """Declares a flag that has an effect with position encodings only."""
  return flag(
      *arguments,
      **more,
      conditions=(
          options.Condition(
              'pan',
              lambda flags: flags.pan != 'off',
              'has no effect with --pan=off',
          ),
      ),
      argument=options.OWN_NAME,
  )


def _are_switched_off(flags: Any) -> bool:
  return any(getattr(flags, name) == 0 for name in _SWITCHES)


def has_personal_encodings(flags: Any) -> bool:
  """Whether clients have personal position encodings.

  Args:
    flags: All flags of the program, or the settings of a run.
  """
  return bool(
      flags.pan != 'off'
      and not _are_switched_off(flags)
      and flags.pan_personal_share
  )


class _ModelName(value_types.Choice):
  """The name of a model, or `module:function`."""

  def names_code(self, value):
    """See the base class."""
    return model_names.is_other_model(value)


@dataclasses.dataclass(frozen=True)
class ModelFlags(flag_groups.Flags):
  """The model and its layers."""

  TITLE = 'Model'

  model: str = flag(
      _ModelName(
          model_names.MODEL_NAMES,
          model_names.OTHER_MODELS,
          model_names.is_other_model,
      ),
      'The model:\n'
      + parts.listing(model_names.MODEL_NAMES)
      + f'or {model_names.OTHER_MODELS}, which is called with the shape of a'
      ' sample and the number of classes and returns an untrained'
      ' keras.Model with logits as output',
      'small_cnn',
  )
  normalization: str = flag(
      value_types.Choice(
          model_names.NORMALIZATION_NAMES,
          model_names.OTHER_NORMALIZATIONS,
          model_names.is_other_normalization,
      ),
      'The normalization layers of the model:\n'
      + parts.listing(model_names.NORMALIZATION_NAMES)
      + f'or {model_names.OTHER_NORMALIZATIONS}',
      'batch',
      argument=options.OWN_NAME,
  )
  precision: str = flag(
      value_types.Choice(model_names.PRECISION_NAMES),
      "The dtype in which the model's layers compute. Losses and BN statistics"
      ' are always float32. Mixed precision is for GPUs with hardware support;'
      ' on the CPU it is slower:\n'
      + parts.listing(model_names.PRECISION_NAMES),
      'float32',
      argument=options.OWN_NAME,
  )
  batch_norm_momentum: Optional[float] = flag(
      value_types.MOMENTUM,
      'Momentum m of the running BN statistics: new = m * old + (1 - m) *'
      " batch's. Algorithms that normalize with the running statistics in"
      ' training may need 0.99 or more',
      default_text="the model's own, 0.9 for the models above",
      argument=options.OWN_NAME,
  )
  pan: str = flag(
      value_types.Choice(model_names.PAN_NAMES),
      'Position-aware neurons (FedPAN): how the encoding of its position'
      ' changes each unit of the hidden layers, before the activation:\n'
      + parts.listing(model_names.PAN_NAMES),
      'off',
      argument=options.OWN_NAME,
  )
  pan_amplitude: Optional[float] = _pan_flag(
      _AMPLITUDE,
      'Amplitude of the position encodings of --pan',
      compute=lambda flags: PAN_AMPLITUDES[flags.pan],
      default_text=', '.join(
          f'{amplitude:g} for {name}'
          for name, amplitude in PAN_AMPLITUDES.items()
      ),
  )
  pan_period: Optional[float] = _pan_flag(
      PERIOD,
      'Number of periods of the sine that the position encodings of a layer'
      ' span',
      1.0,
  )
  pan_personal_share: Optional[float] = _pan_flag(
      value_types.SHARE,
      'Share of the units of each hidden layer, counted from its last unit,'
      ' that have personal position encodings: their phase is drawn for each'
      ' client and layer. With 0, all encodings are the same for all clients',
      0.0,
      ignored=_are_switched_off,
  )

  moon_projection: Optional[int] = flag(
      # A larger head needs gigabytes for each client.
      value_types.Number(int, minimum=1, maximum=10**5),
      "Number of outputs of MOON's projection head, 256 in its paper: a dense"
      ' layer, ReLU and a dense layer before the last layer of the model. For'
      ' all algorithms, so that a comparison trains the same model; moon'
      ' contrasts its outputs',
      default_text='no head',
      argument=options.OWN_NAME,
  )

  @classmethod
  def check(cls, flags: ParsedFlags) -> None:
    """See `Flags.check`."""
    super().check(flags)
    if flags.pan == 'off' or not flags.pan_personal_share:
      return
    for name in _SWITCHES:
      if getattr(flags, name) == 0:
        flags.refuse_unless_overruled(
            'pan_personal_share',
            name,
            f'has no effect with --{name}=0, which switches position encodings'
            ' off',
        )

  def build_model_fn(
      self, input_shape: tuple[int, ...], num_classes: int
  ) -> 'Callable[[], keras.Model]':
    """Returns a function that builds untrained models for such samples."""
    from tff_bn import models

    return models.build_model_fn(
        self.model, input_shape, num_classes, **self.arguments(ModelFlags)
    )
