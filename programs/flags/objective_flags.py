"""The flags of the loss, the metrics and the weights of classes."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import re
from typing import TYPE_CHECKING, Any

from tff_bn.catalog import tasks
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import parsers
from tff_bn.programs.cli.parsed_flags import ParsedFlags

if TYPE_CHECKING:
  import keras

  from tff_bn import data as tff_bn_data

# The arguments of `BatchNormModel` that the flags decide.
_ARGUMENTS = {
    'loss_fn': tasks.LOSS.name,
    'metrics_fn': tasks.METRICS_OPTION.name,
}


@dataclasses.dataclass(frozen=True)
class ObjectiveFlags(flag_groups.base_class(*tasks.OPTIONS)):  # type: ignore[misc]
  """The loss, the metrics and the weights of classes."""

  TITLE = 'Loss and metrics'

  @classmethod
  def check(cls, flags: ParsedFlags) -> None:
    """See `Flags.check`. Without --task, the labels decide what is possible."""
    super().check(flags)
    if flags.task is not None:
      tasks.check(flags.task, flags.loss, flags.metrics, flags.class_weight)

  def check_task(self, task: str, num_outputs: int) -> None:
    """Checks the flags against the task and the outputs of a dataset.

    Raises:
      ValueError: If one of them is for other tasks or more outputs.
    """
    with self.naming_flags():
      tasks.check(task, self.loss, self.metrics, self.class_weight, num_outputs)

  @contextlib.contextmanager
  def naming_flags(self, **more: str) -> Iterator[None]:
    """Names flags in the errors of the library.

    `more` maps further arguments of `BatchNormModel` to their flags.
    """
    try:
      yield
    except ValueError as error:
      text = parsers.name_flags(str(error), ObjectiveFlags.specs())
      flags = {**_ARGUMENTS, **more}
      # Users can have functions with these names: `'my_module:loss_fn'`.
      arguments = rf"(?<![\w.:'])({'|'.join(flags)})(?![\w'])"
      raise ValueError(
          re.sub(arguments, lambda match: f'--{flags[match[0]]}', text)
      ) from error

  def build_loss_fn(self, task: str) -> 'Callable[[], keras.losses.Loss]':
    """Returns a function that builds the loss for a task."""
    from tff_bn.models import objectives

    with self.naming_flags():
      return objectives.loss_fn(task, self.loss)

  def build_metrics_fn(
      self, task: str, num_outputs: int
  ) -> 'Callable[[], list[keras.metrics.Metric]]':
    """Returns a function that builds the metrics for a task."""
    from tff_bn.models import objectives

    with self.naming_flags():
      return objectives.metrics_fn(task, num_outputs, self.metrics)

  def class_weights(self, data: 'tff_bn_data.FederatedData') -> dict[str, Any]:
    """Returns the argument `class_weight` of a model; nothing without weights.

    The weights depend on the labels of all clients that train.
    """
    if self.class_weight in (None, tasks.NO_WEIGHTS):
      return {}
    from tff_bn.models import objectives

    return dict(class_weight=objectives.balanced_weights(data.class_counts()))
