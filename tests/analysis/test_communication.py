"""Tests for the count of what algorithms send."""

import numpy as np
import pytest
import tensorflow as tf

from tff_bn import analysis
from tff_bn import partition
from tff_bn.batch_norm_model import BatchNormModel


# FedTAN, section 5.3: ResNet-20 with 5 clients, floats of 4 bytes. The model
# has 271,098 parameters and statistics with batch normalization, and 269,722
# with group normalization.
@pytest.mark.parametrize(
    ('num_values', 'megabytes'), [(271_098, '6.2049'), (269_722, '6.1734')]
)
def test_numbers_of_the_paper(num_values, megabytes):
  traffic = analysis.Traffic(1, 4 * num_values, 4 * num_values)

  assert f'{traffic.megabytes(5):.4f}' == megabytes


def test_one_multicast_down_and_every_upload():
  traffic = analysis.Traffic(
      exchanges=3, download_bytes=2**20, upload_bytes=2**19
  )

  assert traffic.megabytes(4) == 1.0 + 4 * 0.5


def _model():
  return BatchNormModel(
      lambda: tf.keras.Sequential(
          [
              tf.keras.layers.Input([3]),
              tf.keras.layers.Dense(5),
              tf.keras.layers.BatchNormalization(),
              tf.keras.layers.Dense(2, dtype=tf.float64),
          ]
      ),
      input_spec=(
          tf.TensorSpec([None, 3], tf.float32),
          tf.TensorSpec([None], tf.int32),
      ),
      loss_fn=lambda: tf.keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
  )


_KERNELS = 4 * (3 * 5 + 5) + 8 * (5 * 2 + 2)
_AFFINE = 4 * 2 * 5
_STATISTICS = 4 * 2 * 5


@pytest.mark.parametrize(
    ('shared_variables', 'num_bytes'),
    [
        (partition.FEDAVG, _KERNELS + _AFFINE + _STATISTICS),
        (partition.FEDBN, _KERNELS),
        (partition.SILOBN, _KERNELS + _AFFINE),
        (partition.LOCAL_AFFINE, _KERNELS + _STATISTICS),
    ],
    ids=lambda value: getattr(value, 'name', None),
)
def test_shared_variables_go_both_ways(shared_variables, num_bytes):
  traffic = analysis.model_traffic(_model(), shared_variables)

  assert traffic == analysis.Traffic(1, num_bytes, num_bytes)


def test_nothing_shared_nothing_sent():
  traffic = analysis.model_traffic(_model(), partition.SINGLE)

  assert traffic == analysis.Traffic(0, 0, 0)
  np.testing.assert_equal(traffic.megabytes(5), 0.0)
