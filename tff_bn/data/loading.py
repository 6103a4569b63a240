"""Loads a dataset by its name."""

from collections.abc import Sequence
import dataclasses
import functools
import os
from typing import Any, Optional

from tff_bn.catalog import datasets
from tff_bn.catalog import table_options
from tff_bn.catalog import tasks
from tff_bn.common import checks
from tff_bn.common import user_functions
from tff_bn.data import arrays
from tff_bn.data import classes
from tff_bn.data import dataset as dataset_lib
from tff_bn.data import images
from tff_bn.data import labels
from tff_bn.data import table_encoding

_TABLE_OPTIONS = {option.name: option for option in table_options.OPTIONS}


def load_dataset(
    name: str,
    data_dir: Optional[str] = None,
    image_size: Optional[tuple[int, int]] = None,
    class_names: Optional[Sequence[str]] = None,
    task: Optional[str] = None,
    encoding: Optional[table_encoding.TableEncoding] = None,
    domain_strength: Optional[float] = None,
    **table: Any,
) -> dataset_lib.Dataset:
  """Loads a dataset into memory and checks it.

  Args:
    name: A key of `tff_bn.catalog.datasets.DATASETS`, a name of one of the
      kinds in `KINDS` there, or `package.module:NAME` for your own: a function
      without arguments that returns a `Dataset`, or a
      `tff_bn.catalog.datasets.Source`.
    data_dir: The folder for downloaded datasets (`tfds:`, `emnist`, `femnist`
      and `fashion_mnist`). Default: the folder that their libraries choose.
    image_size: The height and width to resize images to. Default: no resizing.
      Masks are resized with them, to the nearest pixel.
    class_names: The names of the classes of a trained model in the order of its
      outputs, or their numbers as strings if they have no names. The dataset
      gets the labels of the model, and it may lack classes. Default: the
      dataset keeps its own labels.
    task: What a model learns from the labels, a key of
      `tff_bn.catalog.tasks.TASKS`. Default: found from the labels.
    encoding: For tables, how the columns of the training data of a model became
      features: the `table` of that dataset. Default: this dataset's training
      rows decide.
    domain_strength: How much the domains of `digits_domains` and
      `fashion_mnist_domains` differ, from 0 to 1, see
      `tff_bn.catalog.datasets.DOMAIN_STRENGTH`. Default: 1.
    **table: The options of tables (`csv:` and `parquet:`) by name, see
      `tff_bn.catalog.table_options`.

  Returns:
    The dataset.

  Raises:
    TypeError: If the name is no string, or there is no such option.
    ValueError: If the name is unknown or the data can't be used.
  """
  checks.check_type('dataset', name, str, 'be the name of a dataset')
  if not checks.is_utf8(name):
    raise ValueError(
        f'dataset={name!r} is not UTF-8, so files cannot record it; rename the'
        ' file or folder.'
    )
  datasets.DATASET.check(name)
  for option, value in table.items():
    if option not in _TABLE_OPTIONS:
      raise TypeError(
          f'{option!r} is not an option of a dataset; the options of tables are'
          f' {", ".join(_TABLE_OPTIONS)}.'
      )
    if value is not None:
      _TABLE_OPTIONS[option].check(value)
      if not datasets.has_tables(name):
        raise ValueError(
            f'{option}={value} is for tables, but dataset={name} is none.'
        )
  if domain_strength is not None:
    datasets.DOMAIN_STRENGTH.check(domain_strength)
    if not datasets.has_domain_strength(name):
      raise ValueError(
          f'domain_strength={domain_strength} is for {datasets.MADE_DOMAINS},'
          f' but dataset={name} is another one.'
      )
  labels.check_task(task)
  if image_size is not None and min(image_size) < 1:
    raise ValueError(
        f'image_size={image_size[0]}x{image_size[1]}: height and width must'
        ' be at least 1.'
    )
  if data_dir is not None:
    data_dir = os.path.expanduser(data_dir)
  if class_names is not None:
    if not class_names:
      raise ValueError(
          f'dataset={name}: class_names is empty; give the names of the'
          " model's classes, or their numbers as strings."
      )
    class_names = dataset_lib.check_class_names(
        f'dataset={name}', class_names, len(class_names)
    )
  dataset = load_resized(
      name,
      data_dir,
      image_size,
      task=task,
      is_part=class_names is not None,
      encoding=encoding,
      domain_strength=domain_strength,
      **table,
  )
  return (
      dataset if class_names is None else classes.matched(dataset, class_names)
  )


def load_resized(
    name: str,
    data_dir: Optional[str],
    image_size: Optional[tuple[int, int]],
    *,
    task: Optional[str],
    is_part: bool,
    encoding: Optional[table_encoding.TableEncoding] = None,
    **options: Any,
) -> dataset_lib.Dataset:
  """Loads a dataset and resizes its images, see `load_dataset`.

  With `is_part`, its training samples may lack classes.
  """
  try:
    source = datasets.find(name)
  except ValueError as error:
    raise ValueError(f'dataset={name}: {error}') from error
  values = {'data_dir': data_dir, 'image_size': image_size, **options}
  arguments: dict[str, Any] = {
      option.name: values.get(option.name) for option in source.options
  }
  if source.takes_encoding:
    arguments['encoding'] = encoding
  if source.takes_parts:
    arguments['is_part'] = is_part
  if source.takes_task:
    arguments['task'] = task
  load = source.load()
  if source.form is not None:
    load = functools.partial(load, name)
  if datasets.is_users(name):
    load = functools.partial(_load_users, name, load)
  dataset = load(**arguments)
  if task is not None:
    dataset = dataset.with_task(task, is_part=is_part)
  if image_size is None:
    return dataset
  if dataset.input_shape[:-1] != tuple(image_size):
    dataset = _resized(dataset, name, image_size)
  return dataset.unchecked(image_size=tuple(image_size))


def _resized(
    dataset: dataset_lib.Dataset, name: str, image_size: tuple[int, int]
) -> dataset_lib.Dataset:
  """Resizes the images of a dataset, and its masks."""
  if len(dataset.input_shape) != 3:
    raise ValueError(
        f'image_size={image_size[0]}x{image_size[1]} is for images, but'
        f' dataset={name} has {arrays.samples_text(dataset.input_shape)}.'
    )
  for x in (dataset.x_train, dataset.x_test):
    images.check_memory(
        name, len(x), image_size, x.shape[-1] * x.dtype.itemsize
    )
  resize = functools.partial(images.resize_array, image_size=image_size)
  if dataset.task != tasks.SEGMENTATION:
    return dataset.replace_samples(resize)
  resize_masks = functools.partial(images.resize_masks, image_size=image_size)
  return dataclasses.replace(
      dataset,
      x_train=resize(dataset.x_train),
      y_train=resize_masks(dataset.y_train),
      x_test=resize(dataset.x_test),
      y_test=resize_masks(dataset.y_test),
  )


def _load_users(name: str, load: Any, **arguments: Any) -> dataset_lib.Dataset:
  """Calls a user's function, whose dataset gets the name of the function."""
  dataset = user_functions.call(f'dataset={name}', load, **arguments)
  if not isinstance(dataset, dataset_lib.Dataset):
    raise ValueError(
        f'dataset={name}: its function returned {type(dataset).__name__}, not a'
        ' tff_bn.data.Dataset.'
    )
  return dataset.unchecked(name=name)
