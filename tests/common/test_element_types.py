"""Tests that a dataset of another type is explained."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.common import element_types

_X = tf.TensorSpec([None, 4, 1], tf.float32)
_Y = tf.TensorSpec([None], tf.int32)


def _spec(x=_X, y=_Y):
  return x, y


def _type(spec):
  return tff.to_type(tff.types.tensorflow_to_type(spec))


def _change(spec, shape=None, dtype=None):
  return tf.TensorSpec(
      spec.shape if shape is None else shape, dtype or spec.dtype
  )


def test_the_same_or_a_more_exact_type():
  element_types.check_elements('data', _spec(), _type(_spec()))
  exact = _spec(_change(_X, [8, 4, 1]), _change(_Y, [8]))
  element_types.check_elements('data', exact, _type(_spec()))


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        (
            _spec(y=_change(_Y, dtype=tf.int64)),
            'y has the dtype int64, but must have int32. Use dataset.map('
            'lambda x, y: (x, tf.cast(y, tf.int32))).',
        ),
        (
            _spec(x=_change(_X, dtype=tf.float64)),
            'x has the dtype float64, but must have float32. Use dataset.map('
            'lambda x, y: (tf.cast(x, tf.float32), y)).',
        ),
        (
            _spec(_change(_X, dtype=tf.uint8), _change(_Y, dtype=tf.bool)),
            'x has the dtype uint8, but must have float32; y has the dtype'
            ' bool, but must have int32. Use dataset.map(lambda x, y: ('
            'tf.cast(x, tf.float32), tf.cast(y, tf.int32))).',
        ),
        (
            _spec(y=_change(_Y, [None, 1], tf.int64)),
            'y has the dtype int64, but must have int32; y has the shape (None,'
            ' 1), but must have (None,). Use dataset.map(lambda x, y: (x,'
            ' tf.cast(tf.squeeze(y, -1), tf.int32))).',
        ),
        (
            _spec(x=_change(_X, [None, 4, 3])),
            'x has the shape (None, 4, 3), but must have (None, 4, 1).',
        ),
        (
            _spec(x=_change(_X, [None, None, 1])),
            'x has the shape (None, None, 1), but must have (None, 4, 1).',
        ),
        (
            _spec(x=_change(_X, tf.TensorShape(None))),
            'x has the shape <unknown>, but must have (None, 4, 1).',
        ),
        (
            _spec(x=_change(_X, dtype=tf.string)),
            'x has the dtype string, but must have float32.',
        ),
        (
            _spec(_change(_X, [4, 1]), _change(_Y, [])),
            'x has the shape (4, 1), but must have (None, 4, 1); y has the'
            ' shape (), but must have (None,). The dataset is not batched: use'
            ' dataset.batch(batch_size).',
        ),
        (
            _spec(x={'a': _X}),
            'x has the type <a=float32[?,4,1]>, but must have float32[?,4,1].',
        ),
        *(
            (
                spec,
                f'the elements of the dataset have the type {_type(spec)}, but'
                ' must be pairs (x, y) of the type'
                f' <float32[?,4,1],int32[?]>.{advice}',
            )
            for spec, advice in (
                (_X, ''),
                (
                    (_X, _Y, _X),
                    ' To use the weights, build the model with'
                    ' input_spec=dataset.element_spec; to drop them, use'
                    ' dataset.map(lambda x, y, sample_weight: (x, y)).',
                ),
                (
                    collections.OrderedDict(x=_X, y=_Y),
                    ' Use dataset.map to make pairs, such as lambda batch:'
                    ' (batch[X], batch[Y]).',
                ),
            )
        ),
    ],
)
def test_what_is_wrong_and_how_to_convert_it(spec, message):
  with pytest.raises(TypeError) as error:
    element_types.check_elements('data[3]', spec, _type(_spec()))
  assert str(error.value) == f'data[3]: {message}'


def test_parts_of_x_have_names():
  expected = _type(_spec(x=collections.OrderedDict(a=_X, b=(_X, _Y))))
  wrong = collections.OrderedDict(a=_X, b=(_X, _change(_Y, dtype=tf.int64)))
  with pytest.raises(TypeError, match=r"data: x\['b'\]\[1\] has the dtype int"):
    element_types.check_elements('data', _spec(x=wrong), expected)


def test_other_tensors():
  sparse = tf.SparseTensorSpec([None, 4, 1], tf.float32)
  with pytest.raises(TypeError, match='^data: .*SparseTensor.*, but must'):
    element_types.check_elements('data', _spec(x=sparse), _type(_spec()))


def test_the_advice_works():
  """Each piece of advice, applied, gives a dataset of the right type."""
  wrong = tf.data.Dataset.from_tensor_slices(
      (np.ones([6, 4, 1]), np.arange(6)[:, np.newaxis])
  ).batch(2)
  with pytest.raises(TypeError) as error:
    element_types.check_elements('d', wrong.element_spec, _type(_spec()))
  advice = str(error.value).partition('Use ')[2].rstrip('.')
  right = eval(advice, {'dataset': wrong, 'tf': tf})
  element_types.check_elements('d', right.element_spec, _type(_spec()))
  assert [list(y.numpy()) for _, y in right] == [[0, 1], [2, 3], [4, 5]]
