"""Tests when tf.data's optimizer is turned off."""

import numpy as np
import pytest
import tensorflow as tf

from tff_bn.common import dataset_options
from tff_bn.runtime import client_dataset


def _batches():
  return (
      tf.data.Dataset.from_tensor_slices((np.arange(5.0), np.arange(5)))
      .repeat(2)
      .batch(3)
  )


def _is_optimized(dataset):
  options = dataset.options()
  return (
      options.experimental_optimization.apply_default_optimizations,
      options.autotune.enabled,
  )


def _elements(dataset):
  return [(x.tolist(), y.tolist()) for x, y in dataset.as_numpy_iterator()]


@pytest.mark.parametrize(
    'function',
    [
        dataset_options.without_optimizer,
        dataset_options.without_useless_optimizer,
    ],
)
def test_elements_stay_the_same(function):
  dataset = function(_batches())
  assert _is_optimized(dataset) == (False, False)
  assert dataset.element_spec == _batches().element_spec
  assert _elements(dataset) == _elements(_batches())


def test_in_process_runtime_does_not_optimize():
  dataset = _batches()
  variant = client_dataset.to_variant(dataset)
  used = tf.data.experimental.from_variant(variant, dataset.element_spec)
  assert _is_optimized(used) == (False, False)
  assert _elements(used) == _elements(dataset)


def _half(a, b):
  return a / 2, b


@pytest.mark.parametrize(
    'transform',
    [
        lambda x: x.repeat(6).map(_half),
        lambda x: x.map(_half).repeat(),
        lambda x: x.repeat(6).map(_half).cache().prefetch(1),
        lambda x: x.filter(lambda a, b: True),
        lambda x: tf.data.Dataset.zip(
            x.repeat(6), x.repeat(6).map(lambda a, b: a)
        ),
        lambda x: tf.data.Dataset.range(2).interleave(lambda _: x),
    ],
)
def test_functions_of_long_datasets_may_run_in_parallel(transform):
  dataset = transform(_batches())
  assert dataset_options.without_useless_optimizer(dataset) is dataset


@pytest.mark.parametrize('num_batches, is_optimized', [(16, False), (17, None)])
def test_functions_of_few_batches_are_not_tuned(num_batches, is_optimized):
  dataset = _batches().repeat().take(num_batches).map(_half)
  result = dataset_options.without_useless_optimizer(dataset)
  assert _is_optimized(result) == (is_optimized, is_optimized)
  assert _elements(result) == _elements(dataset)


@pytest.mark.parametrize('value', [True, False])
@pytest.mark.parametrize(
    'name',
    [
        'experimental_optimization.apply_default_optimizations',
        'autotune.enabled',
    ],
)
def test_a_datasets_own_choice_is_kept(name, value):
  options = tf.data.Options()
  group, _, option = name.partition('.')
  setattr(getattr(options, group), option, value)
  dataset = _batches().with_options(options).take(2)
  assert dataset_options.without_useless_optimizer(dataset) is dataset


def test_other_options_are_kept():
  options = tf.data.Options()
  options.deterministic = False
  dataset = dataset_options.without_useless_optimizer(
      _batches().with_options(options)
  )
  assert _is_optimized(dataset) == (False, False)
  assert dataset.options().deterministic is False
