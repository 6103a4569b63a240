"""Batch normalization that works in federated learning.

`import tff_bn` imports no part of the package. Each part is imported on first
use, so `tff_bn.layers` needs Keras only, and programs answer `--help` quickly.
"""

import importlib
import sys

# Older versions cannot even parse some of the modules.
if sys.version_info < (3, 11):  # noqa: UP036
  raise ImportError(
      'tff_bn needs Python 3.11, 3.12 or 3.13, and this is Python '
      f'{sys.version_info[0]}.{sys.version_info[1]}.'
  )

# Installs the import hook for TensorFlow Federated.
importlib.import_module(f'{__name__}.imports.tff_imports')

from tff_bn.imports import lazy  # noqa: E402
from tff_bn.imports import onednn  # noqa: E402

onednn.switch_on()

__version__ = '0.1.0'

# The submodule that each public name is in, or that it names.
_MEMBERS = {
    'BatchNormModel': 'keras_model.batch_norm_model',
    'StatefulLearningProcess': 'processes.stateful_process',
    'add_position_encodings': 'position_aware.position_encodings',
    'aggregators': 'aggregators',
    'algorithms': 'algorithms',
    'analysis': 'analysis',
    'catalog': 'catalog',
    'convert_batch_norm': 'keras_model.convert',
    'copy_model': 'keras_model.copying',
    'data': 'data',
    'drift_correction': 'clients.drift_correction',
    'evaluation': 'training.evaluation',
    'freeze_layers': 'keras_model.freezing',
    'layers': 'layers',
    'models': 'models',
    'papers': 'papers',
    'partition': 'keras_model.partition',
    'position_aware': 'position_aware',
    'programs': 'programs',
    'runtime': 'runtime',
    'training': 'training',
}

__all__ = tuple(_MEMBERS)

__getattr__, __dir__ = lazy.attach(
    __name__,
    _MEMBERS,
    needs_tff=('BatchNormModel', 'StatefulLearningProcess'),
)
