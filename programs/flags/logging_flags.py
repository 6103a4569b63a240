"""Where a run's metrics go besides its folder, from the flags.

These flags do not change the results: a run may be continued with other ones.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Optional

from tff_bn.catalog import value_types
from tff_bn.catalog.options import Option
from tff_bn.common import user_functions
from tff_bn.programs.cli import flag_groups

_METRICS_HOOK = Option(
    'metrics_hook',
    value_types.CodeName(),
    'A function of yours as package.module:function, which gives each row of'
    ' metrics.csv to a logger such as MLflow or Weights & Biases'
    ' (docs/logging.md)',
    default_text='none',
)


@dataclasses.dataclass(frozen=True)
class LoggingFlags(flag_groups.base_class(_METRICS_HOOK)):  # type: ignore[misc]
  """Where metrics go besides the run's folder."""

  TITLE = 'Logging'

  def load(self) -> Optional[Callable[..., Any]]:
    """Imports the hook, if there is one; a ValueError says what is wrong."""
    if self.metrics_hook is None:
      return None
    return user_functions.import_function('metrics_hook', self.metrics_hook)
