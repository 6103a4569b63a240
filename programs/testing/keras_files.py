"""How plain Keras uses a model file. Imports neither Keras nor TensorFlow."""

from collections.abc import Collection, Iterator, Mapping, Sequence
import json
import os
import pathlib
from typing import Any, NamedTuple, Optional
import zipfile

from tff_bn.catalog import tasks
from tff_bn.training import manifests
from tff_bn.training import run_entries
from tff_bn.training import saved_inputs

_CONFIG = 'config.json'
_LAMBDA = '__lambda__'
_FUNCTION = 'function'
# The packages whose objects Keras finds itself.
_KERAS = ('keras', 'builtins')
# More values are read from the file that has them.
_MAX_PRINTED_VALUES = 20
_WHITE = 255
# Code for the predictions of each task from the outputs `{}`: integers, truth
# values or numbers; and code that names their classes.
_PREDICTIONS = {
    tasks.CLASSIFICATION: '{}.argmax(axis=-1)',
    tasks.BINARY: '({}[:, 0] > 0).astype(int)',
    tasks.MULTILABEL: '{} > 0',
    tasks.REGRESSION: '{}',
    tasks.SEGMENTATION: '{}.argmax(axis=-1)',
}
_NAMED = {
    tasks.CLASSIFICATION: '[class_names[label] for label in predicted]',
    tasks.BINARY: '[class_names[label] for label in predicted]',
    tasks.MULTILABEL: (
        '[[n for n, yes in zip(class_names, row) if yes] for row in predicted]'
    ),
}
# Code that makes features of a table, see `tff_bn.data.table_encoding`.
_TABLE_CODE = [
    '# table: a pandas.DataFrame with the columns of the training data',
    'features = []',
    "for column in manifest['table']:",
    "  values, fill = table[column['name']], column['fill']",
    "  if column['categories'] is None:",
    '    features.append(values if fill is None else values.fillna(fill))',
    '  else:',
    "    values = values.astype(object).where(values.notna(), '').map(str)",
    "    features += [values == text for text in column['categories']]",
    'x = np.stack(features, axis=-1)',
]
# The lines of this code for embedded categories, instead of the last but one.
_EMBEDDED_CODE = [
    "    numbers = {text: n for n, text in enumerate(column['categories'])}",
    '    features.append(values.map(numbers).fillna(len(numbers)))',
]
_CHANNELS = {1: 'gray', 3: 'RGB'}


class _Custom(NamedTuple):
  """An object in a model that is not Keras's own.

  Attributes:
    module: The module that defines it; empty if the file does not say so.
    name: Its name there.
    is_registered: Whether Keras finds it when the module is imported.
  """

  module: str
  name: str
  is_registered: bool


def loading_code(path: pathlib.Path) -> list[str]:
  """Returns the lines of Python that load a `.keras` file.

  The last one calls `keras.models.load_model`; others import what it needs
  besides Keras.
  """
  with zipfile.ZipFile(path) as archive:
    values = list(_objects(json.loads(archive.read(_CONFIG))))
  custom = sorted({found for value in values if (found := _custom(value))})
  arguments = [repr(os.fspath(path))]
  unregistered = [found for found in custom if not found.is_registered]
  if unregistered:
    entries = (
        f'{c.name!r}: {c.module and f"{c.module}."}{c.name}'
        for c in unregistered
    )
    arguments.append(f'custom_objects={{{", ".join(entries)}}}')
  if any(value.get('class_name') == _LAMBDA for value in values):
    arguments.append('safe_mode=False')
  imports = dict.fromkeys(f'import {c.module}' for c in custom if c.module)
  return [*imports, f'keras.models.load_model({", ".join(arguments)})']


def prediction_code(
    path: pathlib.Path,
    manifest: Mapping[str, Any],
    image_size: Optional[tuple[int, int]],
) -> list[str]:
  """Returns the lines of Python that load a model and predict with it.

  They turn samples `x`, as they were before the run scaled them, into
  `predicted`: the names or numbers of their classes, or the targets.

  Args:
    path: The `.keras` file.
    manifest: The manifest of the run's models.
    image_size: The height and width to which the run resized its images; None:
      not.
  """
  *imports, model = loading_code(path)
  return [
      'import keras',
      *imports,
      f'model = {model}',
      *usage_code(path.parent, manifest, image_size),
  ]


def usage_code(
    folder: pathlib.Path,
    manifest: Mapping[str, Any],
    image_size: Optional[tuple[int, int]],
) -> list[str]:
  """Returns the lines of `prediction_code` that follow after loading."""
  if 'class_names' not in manifest or manifest['input_shape'] is None:
    return []  # The models of an earlier version, or of unknown data.
  names = manifest['class_names']
  is_raw = saved_inputs.takes_raw(manifest)
  scaling = None if is_raw else saved_inputs.scaling(manifest)
  known = dict(scaling or {}, class_names=names)
  long = [n for n, v in known.items() if len(v) > _MAX_PRINTED_VALUES]
  lines = []
  if long or 'table' in manifest:
    lines += [
        'import json',
        'manifest ='
        f' json.load(open({os.fspath(folder / manifests.FILE_NAME)!r}'
        ", encoding='utf-8'))",
    ]
  outputs = 'model.predict(x)'
  if is_raw:
    more, outputs = _raw_samples(manifest, image_size)
    lines += more
  else:
    obstacle = saved_inputs.obstacle(manifest)
    if obstacle is not None and manifest.get('export') == run_entries.RAW:
      lines.append(f'# The file takes scaled samples: {obstacle}.')
    lines += _scaled_samples(manifest, image_size, long)
  task = manifest['task']
  lines.append(f'predicted = {_PREDICTIONS[task].format(outputs)}')
  if names and task in _NAMED:
    value = "manifest['class_names']" if 'class_names' in long else repr(names)
    lines += [
        f'class_names = {value}',
        f'predicted = {_NAMED[task]}',
    ]
  return lines


def _raw_samples(
    manifest: Mapping[str, Any], image_size: Optional[tuple[int, int]]
) -> tuple[list[str], str]:
  """Returns lines about samples `x`, and an expression for their outputs."""
  if 'table' in manifest:
    code = _table_code(manifest['table'])
    lines = ['import numpy as np', *code, 'x = np.float32(x)']
    return lines, 'model.predict(x)'
  described = _describe_samples(
      manifest['input_shape'],
      manifest['divisor'],
      image_size,
      is_array=image_size is None,
  )
  if image_size is None:
    return [f'# x: {described}'], 'model.predict(x)'
  # Pictures of different sizes are no array.
  return [
      'import numpy as np',
      f'# x: {described}',
      'outputs = [model(np.float32(picture)[np.newaxis]) for picture in x]',
      'outputs = [keras.ops.convert_to_numpy(output) for output in outputs]',
      'outputs = np.concatenate(outputs)',
  ], 'outputs'


def _scaled_samples(
    manifest: Mapping[str, Any],
    image_size: Optional[tuple[int, int]],
    long: Collection[str],
) -> list[str]:
  """Returns lines that scale samples `x` as the run did.

  `long` are the numbers that are read from the manifest.
  """
  divisor = manifest['divisor']
  lines = ['import numpy as np']
  if 'table' in manifest:
    lines += _table_code(manifest['table'])
  else:
    described = _describe_samples(manifest['input_shape'], divisor, image_size)
    lines.append(f'# x: {described}')
  if image_size is not None:
    lines += [
        'x = [keras.ops.image.resize(np.float32(picture),'
        f' {tuple(image_size)}, antialias=True) for picture in x]',
        'x = [keras.ops.convert_to_numpy(picture) for picture in x]',
    ]
  by = '' if divisor in (None, 1) else f' / {divisor:g}'
  # Resized images of type uint8 are rounded.
  convert = 'rint' if image_size and divisor == _WHITE else 'float32'
  lines.append(f'x = np.{convert}(x){by}')
  scaling = saved_inputs.scaling(manifest)
  if scaling is not None:
    section = f'manifest[{saved_inputs.SCALING!r}]'
    if saved_inputs.CLIENTS in manifest:
      lines.append(
          f'# For the model of a client: {saved_inputs.CLIENTS} in'
          f' {manifests.FILE_NAME}.'
      )
    for name in ('mean', 'deviation'):
      value = (
          f'{section}[{name!r}]' if name in long else _numbers(scaling[name])
      )
      lines.append(f'{name} = np.float32({value})')
    lines.append('x = (x - mean) / deviation')
  return lines


def _table_code(columns: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the lines that make features of a table."""
  if not any(column.get('embedded') for column in columns):
    return _TABLE_CODE
  *before, _, last = _TABLE_CODE
  return [*before, *_EMBEDDED_CODE, last]


def _describe_samples(
    shape: Sequence[int],
    divisor: Optional[float],
    image_size: Optional[tuple[int, int]],
    *,
    is_array: bool = False,
) -> str:
  """Describes the samples that `prediction_code` takes."""
  values = f'values from 0 to {divisor:g}' if divisor and divisor != 1 else ''
  values = values or 'values as in the training data'
  if divisor is None:
    values += ', uint8 divided by 255'
  if len(shape) != 3:
    sizes = ', '.join(map(str, shape))
    return f'an array [samples, {sizes}], {values}'
  *_, channels = shape
  size = f'{shape[0]}, {shape[1]}' if image_size is None else 'height, width'
  form = f'[{size}, {channels}]'
  if channels in _CHANNELS:
    form += f' ({_CHANNELS[channels]})'
  if is_array:
    return f'an array of pictures, each {form}, {values}'
  return f'a list of pictures {form}, {values}'


def _numbers(values: Sequence[float]) -> str:
  """Writes float32 numbers with as many digits as they have."""
  import numpy as np  # Imported late: programs import this module for --help.

  return f'[{", ".join(str(np.float32(value)) for value in values)}]'


def _objects(value: Any) -> Iterator[dict[str, Any]]:
  """Yields all dictionaries in a JSON value."""
  if isinstance(value, dict):
    yield value
    value = list(value.values())
  if isinstance(value, list):
    for element in value:
      yield from _objects(element)


def _custom(value: dict[str, Any]) -> _Custom | None:
  """Returns the object that a dictionary in a config stands for."""
  module, registered = value.get('module'), value.get('registered_name')
  # Keras's own functions are texts.
  if module == 'builtins' and registered == _FUNCTION:
    return _Custom('', value['config'], False)
  if not module or not registered or module.split('.')[0] in _KERAS:
    return None
  return _Custom(module, value['class_name'], '>' in registered)
