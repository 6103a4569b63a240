"""Tests for the losses of tasks, against NumPy."""

import keras
import numpy as np
import pytest

from tff_bn.catalog import tasks
from tff_bn.models import losses


@pytest.fixture(name='rng')
def _rng():
  return np.random.default_rng(0)


def _loss(name, task):
  loss = tasks.LOSSES[name].load()(task)
  assert isinstance(loss, keras.losses.Loss)
  return loss


def _softmax(logits):
  powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return powers / powers.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize(
    'task,shape',
    [(tasks.CLASSIFICATION, (5,)), (tasks.SEGMENTATION, (2, 4, 3))],
)
@pytest.mark.parametrize('name,gamma', [('cross_entropy', 0), ('focal', 2)])
def test_losses_of_classes(rng, task, shape, name, gamma):
  y = rng.integers(3, size=shape)
  logits = rng.normal(size=(*shape, 3)).astype(np.float32)
  p = np.take_along_axis(_softmax(logits), y[..., np.newaxis], -1)
  expected = np.mean(-((1 - p) ** gamma) * np.log(p))
  found = _loss(name, task)(y, logits)
  np.testing.assert_allclose(float(found), expected, rtol=1e-5)


@pytest.mark.parametrize(
    'task,shape', [(tasks.BINARY, (5,)), (tasks.MULTILABEL, (5, 3))]
)
@pytest.mark.parametrize(
    'name,gamma', [('binary_cross_entropy', 0), ('focal', 2)]
)
def test_losses_of_yes_or_no(rng, task, shape, name, gamma):
  y = rng.integers(2, size=shape)
  logits = rng.normal(size=(*shape, 3)[:2]).astype(np.float32)
  if task == tasks.BINARY:
    logits = logits[:, :1]
  p = 1 / (1 + np.exp(-logits))
  right = np.where(y.reshape(logits.shape) == 1, p, 1 - p)
  values = -((1 - right) ** gamma) * np.log(right)
  loss = _loss(name, task)
  np.testing.assert_allclose(float(loss(y, logits)), np.mean(values), rtol=1e-5)
  weight = np.array([1.0, 0, 2, 0, 1])
  np.testing.assert_allclose(
      float(loss(y, logits, sample_weight=weight)),
      np.mean(weight * values.mean(axis=-1)),
      rtol=1e-5,
  )


def test_dice_loss(rng):
  y = rng.integers(3, size=(2, 4, 3))
  logits = rng.normal(size=(2, 4, 3, 3)).astype(np.float32)
  probabilities = _softmax(logits)
  expected = []
  for image, labels in zip(probabilities, y):
    for label in (1, 2):
      p, t = image[..., label], labels == label
      expected.append(1 - (2 * np.sum(p * t) + 1) / (p.sum() + t.sum() + 1))
  found = losses.DiceLoss()(y, logits)
  np.testing.assert_allclose(float(found), np.mean(expected), rtol=1e-5)


def test_dice_loss_of_empty_masks():
  """The background alone, found exactly, has no loss."""
  logits = np.zeros((1, 2, 2, 2), np.float32)
  logits[..., 0] = 100
  loss = losses.DiceLoss()
  assert float(loss(np.zeros((1, 2, 2), int), logits)) == pytest.approx(0)
  assert float(loss(np.ones((1, 2, 2), int), logits)) == pytest.approx(0.8)


@pytest.mark.parametrize(
    'name,function',
    [
        ('mean_squared_error', np.square),
        ('mean_absolute_error', np.abs),
        (
            'huber',
            lambda e: np.where(np.abs(e) < 1, e**2 / 2, np.abs(e) - 0.5),
        ),
    ],
    ids=['mean_squared_error', 'mean_absolute_error', 'huber'],
)
def test_losses_of_numbers(rng, name, function):
  y, outputs = 3 * rng.normal(size=(2, 5, 2)).astype(np.float32)
  found = _loss(name, tasks.REGRESSION)(y, outputs)
  np.testing.assert_allclose(
      float(found), np.mean(function(y - outputs)), rtol=1e-5
  )
