"""The import hook that lets TensorFlow Federated be imported.

Importing this module installs the hook; `tff_stand_ins` explains what the hook
does. The code runs in two ways:

- `import tff_bn` imports it.
- Python runs it at start-up, so that `import tensorflow_federated` may come
  before `import tff_bn`: setup.py copies the text of this file into
  `tff_bn.pth`. Therefore this file imports nothing slow, and imports from
  `tff_bn` only when the hook is called.
"""

import sys

# True for type checkers; importing the constant from typing takes 5 ms.
TYPE_CHECKING = False
if TYPE_CHECKING:
  import importlib.machinery


class TffFinder:
  """A finder for `sys.meta_path` that finds TensorFlow Federated only."""

  def find_spec(
      self, name: str, path: object, target: object = None
  ) -> 'importlib.machinery.ModuleSpec | None':
    """See `importlib.abc.MetaPathFinder`."""
    del path, target
    if name != 'tensorflow_federated':
      return None
    try:
      from tff_bn.imports import tff_stand_ins
    except ImportError:
      # The package was deleted, but `tff_bn.pth` was not.
      return None
    return tff_stand_ins.find_spec(name)


def install() -> None:
  """Installs the hook unless it is installed already."""
  # Compare by name: the start-up hook's class comes from a copy of this file.
  names = [type(finder).__name__ for finder in sys.meta_path]
  if TffFinder.__name__ not in names:
    sys.meta_path.insert(0, TffFinder())


install()
