"""Tests of the arguments that the in-process runtime accepts and refuses."""

import collections

import attrs
import cases
import comparison
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import runtime

_OD = collections.OrderedDict
_Point = collections.namedtuple('_Point', 'z a')
_Pair = attrs.make_class('_Pair', ['z', 'a'])
_Struct = tff.structure.Struct

_BOOL = tff.TensorType(np.bool_)
_INT = tff.TensorType(np.int32)
_FLOAT = tff.TensorType(np.float32)
_DOUBLE = tff.TensorType(np.float64)
_STRING = tff.TensorType(np.str_)
_WORDS = tff.TensorType(np.str_, [2])
_VECTOR = tff.TensorType(np.float32, [2])
_ANY_VECTOR = tff.TensorType(np.float32, [None])
_ROW = tff.to_type(_OD(z=np.int32, a=np.float32))
_SORTED = tff.to_type(_OD(a=np.int32, z=np.int32))
_TUPLE = tff.to_type((np.int32, np.float32))
_EMPTY = tff.StructType([])


def _slices(value):
  return tf.data.Dataset.from_tensor_slices(value)


def _identity(type_spec):
  if isinstance(type_spec, tff.SequenceType):
    return tff.tensorflow.computation(lambda x: x.take(5), type_spec)
  return tff.federated_computation(lambda x: x, type_spec)


_ROW_VALUE = _OD(z=1, a=2.0)
# Types, and values (or functions that return them) for an argument.
_ACCEPTED_BY_NATIVE = [
    (_BOOL, True),
    (_INT, 1),
    (_INT, -(2**31)),
    (_INT, np.int8(1)),
    (_INT, np.uint16(1)),
    (_INT, np.array(1, np.int32)),
    (_INT, lambda: tf.constant(1)),
    (_INT, lambda: tf.Variable(1)),
    (_FLOAT, 1.5),
    (_FLOAT, float('inf')),
    (_FLOAT, np.float16(1.5)),
    (_FLOAT, lambda: tf.constant(1.5)),
    (_DOUBLE, 0.1),
    (_VECTOR, [1.0, 2.0]),
    (_VECTOR, np.array([1, 2], np.float32)),
    (_VECTOR, [np.float32(1), np.float32(2)]),
    (_VECTOR, lambda: [tf.constant(1.0), tf.constant(2.0)]),
    (_VECTOR, lambda: tf.Variable([1.0, 2.0])),
    (_ANY_VECTOR, []),
    (_ANY_VECTOR, [1.0, 2.0, 3.0]),
    (_STRING, 'a'),
    (_STRING, b'a\xff\x00'),
    (_STRING, np.array('a')),
    (_STRING, np.array('a', object)),
    (_STRING, lambda: tf.constant('a')),
    (_WORDS, [b'a', 'b']),
    (_WORDS, np.array(['a', b'b'], object)),
    (_ROW, _ROW_VALUE),
    (_ROW, (1, 2.0)),
    (_ROW, _Point(1, 2.0)),
    (_ROW, _Pair(1, 2.0)),
    (_ROW, _Struct([('z', 1), ('a', 2.0)])),
    (_ROW, _Struct([(None, 1), (None, 2.0)])),
    (_TUPLE, _Point(1, 2.0)),
    (_TUPLE, _ROW_VALUE),
    (_EMPTY, ()),
    (cases.clients(_INT), [1, 2]),
    (cases.clients(_ROW), [_ROW_VALUE, (3, 4.0)]),
    (tff.FederatedType(_INT, tff.SERVER), 1),
    (tff.to_type(_OD(b=cases.clients(_INT), a=_INT)), _OD(b=[1], a=2)),
    (tff.SequenceType(_INT), lambda: _slices([1]).repeat()),
    (tff.SequenceType(_INT), [1, 2]),
    (tff.SequenceType(tff.TensorType(np.int64)), [1, 2]),
    (tff.SequenceType(_DOUBLE), [0.1, 0.2]),
    (tff.SequenceType(_STRING), ['a', 'b']),
    (tff.SequenceType(_ROW), lambda: _slices(_OD(z=[1], a=[2.0]))),
    (tff.SequenceType(_ROW), [(1, 2.0)]),
    (tff.SequenceType(_ROW), [_Point(1, 2.0)]),
    (tff.SequenceType(_ROW), []),
    # Elements in alphabetical order have the same order everywhere.
    (
        tff.SequenceType(_SORTED),
        lambda: _slices(collections.namedtuple('P', 'a z')([1], [2])),
    ),
    (
        tff.SequenceType(_SORTED),
        lambda: _slices(attrs.make_class('P', ['a', 'z'])([1], [2])),
    ),
    (tff.SequenceType(_TUPLE), lambda: _slices(([1], [2.0]))),
    (tff.SequenceType(_ANY_VECTOR), lambda: _slices([[1.0, 2.0]])),
    (tff.SequenceType(_ANY_VECTOR), lambda: _slices([1.0, 2.0, 3.0]).batch(2)),
    (tff.SequenceType(_ANY_VECTOR), [[1.0, 2.0], [3.0]]),
    (
        cases.clients(tff.SequenceType(_INT)),
        lambda: [_slices([1]), [2, 3], _slices([4, 5, 6]).take(0)],
    ),
]


def _given(value):
  return value() if callable(value) else value


@pytest.mark.parametrize(('type_spec', 'value'), _ACCEPTED_BY_NATIVE)
def test_accepts_what_native_accepts(
    type_spec, value, in_process_context, native_context
):
  comp = _identity(type_spec)
  found, expected = (
      comparison.as_plain(context.invoke(comp, _given(value)))
      for context in (in_process_context, native_context)
  )
  comparison.assert_equal(found, expected, same_leaf_types=True)


@pytest.mark.parametrize(
    ('type_spec', 'value', 'expected'),
    [
        (_FLOAT, 1, 1.0),
        (_VECTOR, [1, 2.5], np.float32([1, 2.5])),
        (_VECTOR, [np.float64(1), np.float64(2)], np.float32([1, 2])),
        (_STRING, 'é', 'é'.encode()),
        (_ROW, dict(a=2.0, z=1), _ROW_VALUE),
        (_ROW, _Struct([('a', 2.0), ('z', 1)]), _ROW_VALUE),
        (cases.clients(_INT), (1, 2), [1, 2]),
        (tff.FederatedType(_INT, tff.CLIENTS, True), 1, 1),
        (tff.SequenceType(_INT), (1, 2), [1, 2]),
        (
            tff.SequenceType(_ROW),
            lambda: _slices(dict(z=[1], a=[2.0])),
            [_ROW_VALUE],
        ),
        (
            tff.SequenceType(_ANY_VECTOR),
            [[1.0], [2.0, 3.0], [4.0, 5.0], [], [6.0]],
            [np.float32(x) for x in ([1], [2, 3], [4, 5], [], [6])],
        ),
    ],
)
def test_more_is_accepted(type_spec, value, expected, in_process_context):
  found = in_process_context.invoke(_identity(type_spec), _given(value))
  comparison.assert_equal(comparison.as_plain(found), expected)


def _arrays(z, a):
  return _OD(z=np.array(z, np.int32), a=np.array(a, np.float32))


@pytest.mark.parametrize(
    'second',
    [
        _arrays(3, 4.0),
        dict(reversed(_arrays(3, 4.0).items())),
        _Point(**_arrays(3, 4.0)),
        tuple(_arrays(3, 4.0).values()),
        _OD(z=3, a=4.0),
        _arrays(3, 4.0) | {'a': np.float16(4.0)},
    ],
)
def test_clients_may_have_other_containers(second, in_process_context):
  comp = _identity(cases.clients(_ROW))
  found = in_process_context.invoke(comp, [_arrays(1, 2.0), second])
  assert [type(value) for value in found] == [_OD, _OD]
  comparison.assert_equal(found, [_ROW_VALUE, _OD(z=3, a=4.0)])


@pytest.mark.parametrize(
    'member',
    [
        _Point(np.int32, np.float32),
        _Pair(np.int32, np.float32),
        [np.int32, np.float32],
        (np.int32, _OD(z=np.float32, a=(np.int32, _Point(np.int32, np.int32)))),
        dict(z=np.int32, a=np.float32),
        _Struct([('z', np.int32), ('a', np.float32)]),
        tff.StructWithPythonType([('z', np.int32), ('a', np.int32)], _Struct),
        [],
    ],
)
def test_containers_of_results(member, in_process_context, native_context):
  type_spec = tff.to_type(member)
  numbers = iter(range(20))

  def value(part):
    if isinstance(part, tff.StructType):
      return _Struct(
          [(name, value(p)) for name, p in tff.structure.iter_elements(part)]
      )
    return np.array(next(numbers), part.dtype)

  values = [
      tff.types.type_to_py_container(value(type_spec), type_spec)
      for _ in range(3)
  ]
  comp = _identity(cases.clients(type_spec))
  found, expected = (
      context.invoke(comp, values)
      for context in (in_process_context, native_context)
  )
  comparison.assert_equal(found, expected)


_REFUSED = [
    # Another dtype.
    (_INT, 1.0, r'The argument must be of type int32, but is 1\.0'),
    (_INT, None, 'The argument must be of type int32'),
    (_INT, 2**31, 'The argument must be of type int32'),
    (_INT, 2**70, 'The argument must be of type int32'),
    (tff.TensorType(np.uint8), -1, 'The argument must be of type uint8'),
    (_INT, np.int64(1), 'of type int32, but is int64'),
    (_INT, np.bool_(True), 'of type int32, but is bool'),
    (_INT, lambda: tf.constant(1.0), 'of type int32, but is float32'),
    (_FLOAT, 1e300, 'The argument must be of type float32'),
    (_FLOAT, np.float64(1), 'of type float32, but is float64'),
    (_FLOAT, np.int32(1), 'of type float32, but is int32'),
    (_VECTOR, np.array([1, 2.0]), r'float32\[2\], but is float64'),
    (_BOOL, 1, 'The argument must be of type bool, but is 1'),
    (_STRING, 1, 'The argument must be of type str, but is 1'),
    # Another shape.
    (_INT, [1], r'of type int32, but has the shape \[1\]'),
    (_VECTOR, [1.0], r'float32\[2\], but has the shape \[1\]'),
    (_ANY_VECTOR, 1.0, r'float32\[\?\], but has the shape \[\]'),
    (_VECTOR, [[1.0], 2.0], 'The argument must be of type float32'),
    (_VECTOR, np.zeros([2, 1], np.float32), r'the shape \[2, 1\]'),
    # Other elements.
    (_ROW, _OD(z=1), r"elements \['z', 'a'\], but has \['z'\]"),
    (_ROW, _OD(z=1, a=2.0, b=3), r"has \['z', 'a', 'b'\]"),
    (_ROW, _OD(x=1, y=2.0), r"elements \['z', 'a'\], but has \['x', 'y'\]"),
    (_TUPLE, (1, 2.0, 3), r'elements \[None, None\], but has'),
    (_ROW, 1, 'of type <z=int32,a=float32>, but is a int'),
    (_EMPTY, None, 'must be of type <>, but is a NoneType'),
    (_ROW, _OD(z=1, a='x'), r"argument\.a must be of type float32, but is 'x'"),
    (_TUPLE, (1.5, 2.0), r'argument\[0\] must be of type int32, but is 1\.5'),
    # Other clients.
    (cases.clients(_INT), 1, 'must be a list with one value for each client'),
    (cases.clients(_INT), np.int32([1, 2]), 'must be a list .* is a ndarray'),
    (cases.clients(_INT), {'a': 1}, 'must be a list .* is a dict'),
    (
        cases.clients(_ROW),
        [_ROW_VALUE, _OD(z=1.5, a=2.0)],
        r'argument\[1\]\.z must be of type int32, but is 1\.5',
    ),
    (
        cases.clients(_ROW),
        [_arrays(1, 2.0), _arrays(1, 2.0) | {'z': np.array([1], np.int32)}],
        r'argument\[1\]\.z must be of type int32, but has the shape \[1\]',
    ),
    (
        cases.clients(_ROW),
        [_arrays(1, 2.0), _OD(a=np.array(1.0, np.float32))],
        r"argument\[1\] must have .* \['z', 'a'\], but has \['a'\]",
    ),
    (
        tff.to_type(_OD(y=cases.clients(_INT), x=_OD(b=cases.clients(_FLOAT)))),
        _OD(y=[1, 2], x=_OD(b=[1.0])),
        r'x\.b has values of 1 clients, but other parts have values of 2',
    ),
    (tff.FederatedType(_INT, tff.SERVER), [1], r'has the shape \[1\]'),
    (
        tff.FederatedType(_INT, tff.CLIENTS, True),
        [1],
        r'of type int32, but has the shape \[1\]',
    ),
    # Other datasets.
    (tff.SequenceType(_INT), 1, r'must be a tf\.data\.Dataset or a list'),
    (tff.SequenceType(_INT), [1, 1.5], r'argument\[1\] must be of type int32'),
    (
        tff.SequenceType(_INT),
        lambda: _slices([1.0]),
        'elements of type int32, but its elements are of type float32',
    ),
    (
        tff.SequenceType(_VECTOR),
        lambda: _slices([1.0, 2.0]).batch(2),
        r'elements of type float32\[2\], but .* float32\[\?\]',
    ),
    (
        tff.SequenceType(_ROW),
        lambda: _slices(_OD(a=[2.0], z=[1])),
        'of type <z=int32,a=float32>, but .* <a=float32,z=int32>',
    ),
    (
        tff.SequenceType(_ROW),
        lambda: _slices(_OD(z=[1])),
        'of type <z=int32,a=float32>, but .* <z=int32>',
    ),
    # `tf.data` keeps z before a in these elements, but sorts an OrderedDict.
    (
        tff.SequenceType(_ROW),
        lambda: _slices(_Point([1], [2.0])),
        r'use a collections\.OrderedDict',
    ),
    (
        tff.SequenceType(_ROW),
        lambda: _slices(_Pair([1], [2.0])),
        r'use a collections\.OrderedDict',
    ),
    (
        tff.SequenceType(_ROW),
        lambda: _slices(([1], [2.0])),
        r'use a collections\.OrderedDict',
    ),
    (
        cases.clients(tff.SequenceType(_INT)),
        lambda: [_slices([1]), _slices([1.0])],
        r'argument\[1\] must be a dataset with elements of type int32',
    ),
]


@pytest.mark.parametrize(('type_spec', 'value', 'message'), _REFUSED)
def test_refusal_names_the_part(type_spec, value, message, in_process_context):
  with pytest.raises((TypeError, ValueError), match=message):
    in_process_context.invoke(_identity(type_spec), _given(value))


class _Unbuilt(runtime.ClientDataset):
  """A dataset that must not be built."""

  element_spec = None  # `__init__` sets it.

  def __init__(self, dtype):
    self.element_spec = tf.TensorSpec([], dtype)

  def build(self):
    raise AssertionError


def test_checks_all_arguments_before_building_datasets(in_process_context):
  comp = _identity(
      tff.to_type([cases.clients(tff.SequenceType(_INT)), cases.clients(_INT)])
  )
  with pytest.raises(TypeError, match=r'argument\[1\]\[1\] must be of type'):
    in_process_context.invoke(comp, [[_Unbuilt(tf.int32)] * 2, [1, 'x']])


def test_the_spec_of_a_client_dataset_is_checked(in_process_context):
  comp = _identity(cases.clients(tff.SequenceType(_INT)))
  with pytest.raises(TypeError, match='its elements are of type float32'):
    in_process_context.invoke(comp, [_Unbuilt(tf.float32)])


def test_the_caller_may_change_an_array_after_the_call(in_process_context):
  """Changing the argument must not change the result."""
  array = np.zeros([3], np.float32)
  comp = _identity(tff.TensorType(np.float32, [3]))
  found = in_process_context.invoke(comp, array)
  array[0] = 1
  np.testing.assert_array_equal(found, [0, 0, 0])
