"""Tests of training in 16 bits."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tff_bn.common import numerics
from tff_bn.keras_model import mixed_precision


def test_loss_scale_changes_as_in_keras():
  bad, good = np.float32('nan'), np.float32(1.0)
  optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0))
  optimizer.build([keras.Variable(0.0)])
  apply = tf.function(lambda g: optimizer.apply([g]))
  after_step = tf.function(
      lambda scale, gradient: scale.after_step(
          numerics.all_finite([tf.constant([2.0]), gradient])
      )
  )

  scale = mixed_precision.LossScale.initial()
  ours, expected = [float(scale.scale)], [float(optimizer.dynamic_scale)]
  # The numbers of finite steps before each part.
  for good_steps, steps in (
      (0, [bad, good, bad, good, good]),
      (1997, [*[good] * 5, bad]),
      (1998, [bad, *[good] * 3]),
      (1999, [good, *[bad] * 20]),
  ):
    scale = scale._replace(good_steps=tf.constant(good_steps))
    optimizer.step_counter.assign(good_steps)
    for gradient in steps:
      apply(tf.constant(gradient))
      scale = after_step(scale, tf.constant([gradient]))
      ours.append(float(scale.scale))
      # Keras's scale approaches 0, by which gradients can't be divided.
      expected.append(max(float(optimizer.dynamic_scale), 1.0))

  assert ours == expected
  assert ours[0] == 2**15 and ours[-1] == 1 and 2**14 in ours


def test_loss_scale_stays_finite():
  scale = mixed_precision.LossScale(tf.constant(2.0**127), tf.constant(1999))
  assert float(scale.after_step(tf.constant(True)).scale) == 2.0**127


def test_only_16_bit_outputs_are_cast():
  outputs = {
      name: tf.constant([1, 2], name)
      for name in ('float16', 'bfloat16', 'float32', 'float64', 'int32')
  }
  result = mixed_precision.to_float32(outputs)
  assert {name: value.dtype.name for name, value in result.items()} == {
      'float16': 'float32',
      'bfloat16': 'float32',
      'float32': 'float32',
      'float64': 'float64',
      'int32': 'int32',
  }
  np.testing.assert_array_equal(result['bfloat16'], [1, 2])


def test_mask_survives_the_cast():
  layers = keras.layers
  model = keras.Sequential(
      [
          layers.Input([3, 1]),
          layers.Masking(),
          layers.Activation('linear', dtype='mixed_bfloat16'),
      ]
  )
  # Steps of zeros are masked: two in the first sequence, one in the second.
  x = tf.constant([[[1.0], [0.0], [0.0]], [[2.0], [3.0], [0.0]]])
  output = mixed_precision.to_float32(model(x))

  loss = keras.losses.MeanSquaredError()(tf.ones([2, 3, 1]), output)

  assert float(loss) == pytest.approx((0 + 1 + 4) / 3)


@pytest.mark.parametrize(
    ('policy', 'expected'),
    [
        ('float32', False),
        ('mixed_bfloat16', False),
        ('mixed_float16', True),
        ('float16', True),
    ],
)
def test_float16_is_found_in_nested_layers(policy, expected):
  layers = keras.layers
  inner_input = keras.Input([3, 2])
  inner = keras.Model(
      inner_input,
      layers.TimeDistributed(layers.Dense(4, dtype=policy), dtype='float32')(
          inner_input
      ),
  )
  inputs = keras.Input([3, 2])
  model = keras.Model(inputs, layers.Dense(2)(inner(inputs)))
  assert mixed_precision.computes_in_float16(model) == expected
