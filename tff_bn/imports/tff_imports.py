"""The import hook for TensorFlow Federated: finds it, and loads it our way.

See `tff_stand_ins` for what is done then, and why. Importing this module
installs the hook. It runs in two ways:

- `import tff_bn` imports it.
- Python runs it at start-up, so that `import tensorflow_federated` may come
  before `import tff_bn`: setup.py copies the text of this file into
  `tff_bn.pth`. So it imports nothing that takes time, and nothing of `tff_bn`
  before that is needed.
"""

import sys

# What type checkers take for true; importing it from typing takes 5 ms.
TYPE_CHECKING = False
if TYPE_CHECKING:
  import importlib.machinery


class TffFinder:
  """A finder, as `sys.meta_path` has them, for TensorFlow Federated only."""

  def find_spec(
      self, name: str, path: object, target: object = None
  ) -> 'importlib.machinery.ModuleSpec | None':
    """See `importlib.abc.MetaPathFinder`."""
    del path, target
    if name != 'tensorflow_federated':
      return None
    try:
      from tff_bn.imports import tff_stand_ins  # pylint: disable=g-import-not-at-top
    except ImportError:
      # Somebody deleted the package, but not `tff_bn.pth`.
      return None
    return tff_stand_ins.find_spec(name)


def install() -> None:
  """Installs the hook unless it is there."""
  # Compared by name: the hook installed at start-up is of a class that was made
  # from the same text.
  names = [type(finder).__name__ for finder in sys.meta_path]
  if TffFinder.__name__ not in names:
    sys.meta_path.insert(0, TffFinder())


install()
