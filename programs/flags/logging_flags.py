"""Where a run's metrics go besides its folder, from the flags.

These flags do not change the results: a run may be continued with other ones.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Optional

from tff_bn.catalog import value_types
from tff_bn.common import user_functions
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli.flag_groups import flag


@dataclasses.dataclass(frozen=True)
class LoggingFlags(flag_groups.Flags):
  """Where metrics go besides the run's folder."""

  TITLE = 'Logging'

  metrics_hook: Optional[str] = flag(
      value_types.CodeName(),
      'A function of yours as package.module:function, which gives each row of'
      ' metrics.csv to a logger such as MLflow or Weights & Biases'
      ' (docs/logging.md)',
      default_text='none',
  )

  def load(self) -> Optional[Callable[..., Any]]:
    """Imports the hook.

    Returns:
      The function; `None` if there is none.

    Raises:
      ValueError: If it can't be imported.
    """
    if self.metrics_hook is None:
      return None
    return user_functions.import_function('metrics_hook', self.metrics_hook)
