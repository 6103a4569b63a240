"""Versions of the software that affects the bits of a result."""

import functools
import hashlib
import importlib
import importlib.metadata
import pathlib
import platform

import tff_bn
from tff_bn.imports import onednn

_PACKAGES = ('tensorflow', 'keras', 'tensorflow-federated', 'numpy')


@functools.cache
def versions() -> dict[str, str]:
  """Returns versions by package name, and what else changes bits.

  These are a checksum of this package, and TensorFlow's setting of oneDNN.
  """
  found = {'tff_bn': tff_bn.__version__, 'python': platform.python_version()}
  for name in _PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = 'unknown'
  found['tff_bn source'] = _source_checksum()
  found[onednn.VARIABLE] = onednn.setting()
  return found


def _source_checksum() -> str:
  # `layers` and `programs` may lie outside the folder of `tff_bn`.
  digest = hashlib.sha256()
  for package in ('tff_bn', 'tff_bn.layers', 'tff_bn.programs'):
    folder = pathlib.Path(importlib.import_module(package).__path__[0])
    for path in sorted(folder.rglob('*.py')):
      digest.update(f'{package}/{path.relative_to(folder)}'.encode())
      digest.update(path.read_bytes())
  return digest.hexdigest()
