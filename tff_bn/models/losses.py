"""The losses of `tff_bn.catalog.tasks.LOSSES`, from logits.

Each function gets the task, a key of `tff_bn.catalog.tasks.TASKS`, and returns
a new `keras.losses.Loss` that averages over the batch.
"""

import keras
from keras import ops

from tff_bn.catalog import tasks

# Added to both sums of the soft Dice, so that it is 1 where both are empty.
_SMOOTHING = 1.0


class SparseFocalCrossentropy(keras.losses.Loss):
  """The focal loss of integer labels and logits.

  It is `(1 - p)^gamma * -log(p)`, where p is the probability of the true class.
  Examples or pixels that are easy, with p close to 1, count less.

  Reference: Lin et al., Focal Loss for Dense Object Detection, ICCV 2017.
  """

  def __init__(self, gamma: float = 2.0, name: str = 'focal'):
    """Initializes the loss with the exponent `gamma`."""
    super().__init__(name=name)
    self._gamma = gamma

  def call(self, y_true, y_pred):
    """Returns the losses for labels `[...]` and logits `[..., classes]`."""
    loss = keras.losses.sparse_categorical_crossentropy(
        y_true, y_pred, from_logits=True
    )
    return ops.power(1 - ops.exp(-loss), self._gamma) * loss


class DiceLoss(keras.losses.Loss):
  """1 - the soft Dice coefficient of integer labels and logits, for images.

  The soft Dice coefficient of a class in an image is
  `(2 * sum(p * y) + 1) / (sum(p) + sum(y) + 1)`, where the sums are over the
  pixels, p are the probabilities of the class and y is 1 in its pixels and 0
  elsewhere. The loss of an image has the mean over the classes other than 0,
  the background.

  Reference: Milletari et al., V-Net: Fully Convolutional Neural Networks for
  Volumetric Medical Image Segmentation, 3DV 2016, who square the probabilities
  in the denominator.
  """

  def __init__(self, name: str = 'dice'):
    """Initializes the loss."""
    super().__init__(name=name)

  def call(self, y_true, y_pred):
    """Returns the losses, `[batch]`.

    The labels are of shape `[batch, height, width]`, the logits of shape
    `[batch, height, width, classes]`.
    """
    labels = ops.one_hot(ops.cast(y_true, 'int32'), y_pred.shape[-1])
    labels = ops.cast(labels, y_pred.dtype)
    probabilities = ops.softmax(y_pred)
    common, predicted, actual = (
        ops.sum(part, axis=(1, 2))[:, 1:]
        for part in (labels * probabilities, probabilities, labels)
    )
    dice = (2 * common + _SMOOTHING) / (predicted + actual + _SMOOTHING)
    return 1 - ops.mean(dice, axis=-1)


def cross_entropy(task: str) -> keras.losses.Loss:
  """Returns the cross-entropy of integer labels, for samples or pixels."""
  del task
  return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def binary_cross_entropy(task: str) -> keras.losses.Loss:
  """Returns the mean cross-entropy of labels 0 or 1."""
  del task
  return keras.losses.BinaryCrossentropy(from_logits=True)


def focal(task: str) -> keras.losses.Loss:
  """Returns the focal loss with the exponent 2."""
  if task in tasks.EXCLUSIVE:
    return SparseFocalCrossentropy()
  return keras.losses.BinaryFocalCrossentropy(from_logits=True)


def dice(task: str) -> keras.losses.Loss:
  """Returns the Dice loss."""
  del task
  return DiceLoss()


def mean_squared_error(task: str) -> keras.losses.Loss:
  """Returns the mean squared error."""
  del task
  return keras.losses.MeanSquaredError()


def mean_absolute_error(task: str) -> keras.losses.Loss:
  """Returns the mean absolute error."""
  del task
  return keras.losses.MeanAbsoluteError()


def huber(task: str) -> keras.losses.Loss:
  """Returns the Huber loss, which is linear from an error of 1."""
  del task
  return keras.losses.Huber()
