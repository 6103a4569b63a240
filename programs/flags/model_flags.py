"""The flags of the model."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import TYPE_CHECKING, Any, Optional

from tff_bn.catalog import models
from tff_bn.catalog import table_options
from tff_bn.catalog import tasks
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import parsers
from tff_bn.programs.cli.parsed_flags import ParsedFlags

if TYPE_CHECKING:
  import keras


@dataclasses.dataclass(frozen=True)
class ModelFlags(flag_groups.base_class(*models.OPTIONS)):  # type: ignore[misc]
  """The model and its layers."""

  TITLE = 'Model'

  @classmethod
  def check(cls, flags: ParsedFlags) -> None:
    """See `Flags.check`."""
    super().check(flags)
    if (
        flags.categories == table_options.EMBEDDED
        and flags.initial_model is None
    ):
      models.check_embeds_categories(flags.model)
    if flags.pan == models.NO_ENCODINGS or not flags.pan_personal_share:
      return
    for name in models.PAN_SWITCHES:
      if getattr(flags, name) == 0:
        flags.refuse_unless_overruled(
            'pan_personal_share',
            name,
            f'has no effect with --{name}=0, which switches position encodings'
            ' off',
        )

  def describe_model(self) -> str:
    """Returns the flags that say which model it is, for messages."""
    if self.initial_model is not None:
      return f'--initial_model={self.initial_model}'
    return f'--model={self.model} and --normalization={self.normalization}'

  def build_model_fn(
      self,
      input_shape: tuple[int, ...],
      num_outputs: int,
      task: str = tasks.CLASSIFICATION,
      category_counts: Optional[Mapping[int, int]] = None,
  ) -> 'Callable[[], keras.Model]':
    """Returns a function that builds the initial models for such samples.

    The table of the dataset has the `category_counts`.
    """
    from tff_bn.models import building
    from tff_bn.models import initial_model

    build: Callable[..., Any] = building.build_model_fn
    name = self.model
    if self.initial_model is not None:
      build, name = initial_model.initial_model_fn, self.initial_model
    arguments = self.arguments(ModelFlags)
    # The architecture of a file says itself what it does with the features.
    if category_counts and self.initial_model is None:
      arguments['category_counts'] = category_counts
    try:
      return build(name, input_shape, num_outputs, task=task, **arguments)
    except ValueError as error:
      # Not every program that builds models defines their flags.
      raise ValueError(parsers.name_flags(str(error), self.specs())) from error
