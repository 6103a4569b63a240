"""Tests that sparse tensors are refused by a clear sentence."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import BatchNormModel
from tff_bn import algorithms

_LAYERS = keras.layers
_SPARSE = tf.SparseTensorSpec((None, 4))
_DENSE = tf.TensorSpec((None, 4))


def _keras_model():
  inputs = {name: keras.Input((4,), name=name) for name in ('a', 'b')}
  x = _LAYERS.Concatenate()(list(inputs.values()))
  return keras.Model(inputs, _LAYERS.Dense(4)(_LAYERS.BatchNormalization()(x)))


def _model(x=None, y=_DENSE):
  return BatchNormModel(
      _keras_model,
      (x or {'a': _DENSE, 'b': _DENSE}, y),
      loss_fn=keras.losses.MeanSquaredError,
  )


def test_one_of_several_inputs_is_sparse():
  with pytest.raises(
      TypeError,
      match='^input_spec .* x has a part of type SparseTensorSpec. Convert .*'
      r' by tf.sparse.to_dense\(part\) in dataset.map\.$',
  ):
    _model({'a': _DENSE, 'b': _SPARSE})


def test_sparse_labels_of_several_inputs():
  with pytest.raises(
      TypeError, match=r'y has .* Sparse.*\(x, tf.sparse.to_dense\(y\)\)'
  ):
    _model(y=_SPARSE)


@pytest.mark.usefixtures('in_process_runtime')
def test_sparse_data_of_a_client():
  process = algorithms.build_fed_avg(
      _model(), tff.learning.optimizers.build_sgdm(0.1)
  )
  values = np.eye(4, dtype=np.float32)
  sparse = tf.sparse.from_dense(values)
  for x, y in (
      ({'a': values, 'b': sparse}, values),
      ({'a': values, 'b': values}, sparse),
  ):
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    with pytest.raises(
        TypeError, match=r'client_data\[0\]: .*SparseTensor.*, but must be'
    ):
      process.next(process.initialize(), [data])
