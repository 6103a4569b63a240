"""Tasks: what a model learns from the labels.

A task decides the form of the labels and of the model's output. It says which
loss and metrics a run has by default.
"""

from collections.abc import Sequence

from tff_bn.catalog.parts import Part
from tff_bn.catalog.parts import Parts

CLASSIFICATION = 'classification'
BINARY = 'binary'
MULTILABEL = 'multilabel'
REGRESSION = 'regression'
SEGMENTATION = 'segmentation'


class Task(Part):
  """A task. Its function builds the loss."""


TASKS: Parts[Task] = Parts(
    Task(
        CLASSIFICATION,
        'one class for each sample: integers [n], or [n, 1]; a logit for each'
        ' class',
        'keras.losses:SparseCategoricalCrossentropy',
    ),
    Task(
        BINARY,
        'yes or no for each sample: 0 or 1, or bools, [n] or [n, 1]; one logit',
        'keras.losses:BinaryCrossentropy',
    ),
    Task(
        MULTILABEL,
        'any number of labels for each sample: 0 or 1, or bools, [n, labels]; a'
        ' logit for each label',
        'keras.losses:BinaryCrossentropy',
    ),
    Task(
        REGRESSION,
        'numbers for each sample: floats [n] or [n, targets]; as many outputs',
        'keras.losses:MeanSquaredError',
    ),
    Task(
        SEGMENTATION,
        'one class for each pixel: integers [n, height, width], or [n, height,'
        ' width, 1]; a logit for each pixel and class',
        'keras.losses:SparseCategoricalCrossentropy',
    ),
)


def task_of_labels(kind: str, shape: Sequence[int]) -> str:
  """Finds the task from the labels' dtype and shape.

  Args:
    kind: The kind of the dtype, as `numpy.dtype.kind`: 'b', 'i', 'u' or 'f'.
    shape: The shape of one sample's label.

  Returns:
    A key of `TASKS`.

  Raises:
    ValueError: If no task has such labels. The message continues a sentence
      whose subject is the labels.
  """
  is_float = kind == 'f'
  match len(shape):
    case 0:
      is_single = True
    case 1:
      is_single = tuple(shape) == (1,)
    case 2 | 3 if not is_float and tuple(shape[2:]) in ((), (1,)):
      return SEGMENTATION
    case _:
      raise ValueError(
          f'have the dtype kind {kind!r} and the shape {tuple(shape)} for each'
          ' sample, which no task has.'
      )
  if is_float:
    return REGRESSION
  if not is_single:
    return MULTILABEL
  return BINARY if kind == 'b' else CLASSIFICATION


def has_sample_classes(task: str) -> bool:
  """Whether each sample has exactly one class."""
  return task in (CLASSIFICATION, BINARY)


def output_shape(
    task: str, input_shape: Sequence[int], num_outputs: int
) -> tuple[int, ...]:
  """Returns the shape of a model's output for one sample.

  Args:
    task: A key of `TASKS`.
    input_shape: The shape of a sample.
    num_outputs: The number of outputs, for each pixel of a segmentation.
  """
  pixels = tuple(input_shape[:2]) if task == SEGMENTATION else ()
  return (*pixels, num_outputs)
