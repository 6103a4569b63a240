"""The in-process runtime's results, against plain values and TFF's runtime."""

import collections

import attrs
import comparison
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

_OD = collections.OrderedDict
_INT = tff.TensorType(np.int32)
_FLOAT = tff.TensorType(np.float32)
_STRING = tff.TensorType(np.str_)
_VECTOR = tff.TensorType(np.float32, [2])
_ANY_VECTOR = tff.TensorType(np.int32, [None])
_INTS = tff.SequenceType(_INT)
# Not in alphabetical order: `tf.data` sorts names, TFF doesn't.
_ROW = tff.to_type(_OD(z=np.int32, a=np.float32))
_EMPTY = tff.StructType([])

_Point = collections.namedtuple('_Point', 'y x')


@attrs.define
class _Pair:
  second: object
  first: object


def _clients(member):
  return tff.FederatedType(member, tff.CLIENTS)


def _same_at_clients(member):
  return tff.FederatedType(member, tff.CLIENTS, all_equal=True)


def _server(member):
  return tff.FederatedType(member, tff.SERVER)


def _row(z, a):
  return _OD(z=z, a=a)


def _rows(n):
  """Rows (0, 0.5), (1, 1.5), ..."""
  numbers = np.arange(n, dtype=np.int32)
  return tf.data.Dataset.from_tensor_slices(
      _OD(z=numbers, a=numbers.astype(np.float32) + 0.5)
  )


@tff.tensorflow.computation(_FLOAT)
def _double(x):
  return 2 * x


@tff.tensorflow.computation(_FLOAT, _FLOAT)
def _add(x, y):
  return x + y


@tff.tensorflow.computation(_INT, _INT)
def _append_digit(x, digit):
  return 10 * x + digit


@tff.tensorflow.computation(_INT)
def _same_int(x):
  return tf.identity(x)


@tff.tensorflow.computation(_INTS)
def _total(numbers):
  return numbers.reduce(0, lambda a, b: a + b)


@tff.tensorflow.computation(_INT)
def _count_up(n):
  return tf.data.Dataset.range(tf.cast(n, tf.int64)).map(
      lambda i: _row(tf.cast(i, tf.int32), 0.5 + tf.cast(i, tf.float32))
  )


# A case is a function without arguments that returns a computation, its
# arguments and its result.
_CASES = {}
# What TFF's runtime refuses, or does wrong.
_NOT_NATIVE = set()


def _case(function):
  _CASES[function.__name__.strip('_')] = function
  return function


def _not_native(function):
  _NOT_NATIVE.add(function.__name__.strip('_'))
  return function


@_case
def _map():
  @tff.federated_computation(_clients(_FLOAT))
  def comp(x):
    return tff.federated_map(_double, x)

  return comp, [[1.0, 2.5]], [2.0, 5.0]


@_case
def _map_at_server():
  @tff.federated_computation(_server(_FLOAT))
  def comp(x):
    return tff.federated_map(_double, x), x

  return comp, [2.5], (5.0, 2.5)


@_case
def _map_all_equal():
  # No function of TFF's makes it; its compiler does.
  member_type = _same_at_clients(_FLOAT)
  argument_type = tff.StructType([member_type, _clients(_INT)])
  reference = tff.framework.Reference('x', argument_type)
  argument = tff.framework.Struct(
      [
          _double.to_building_block(),
          tff.framework.Selection(reference, index=0),
      ]
  )
  intrinsic = tff.framework.Intrinsic(
      'federated_map_all_equal',
      tff.FunctionType(argument.type_signature, member_type),
  )
  result = tff.framework.Struct(
      [
          tff.framework.Call(intrinsic, argument),
          tff.framework.Selection(reference, index=1),
      ]
  )
  comp = tff.framework.ConcreteComputation.from_building_block(
      tff.framework.Lambda('x', argument_type, result)
  )
  return comp, [2.5, [1, 2]], (5.0, [1, 2])


@_case
def _broadcast():
  @tff.federated_computation(_server(_FLOAT), _clients(_FLOAT))
  def comp(x, y):
    at_clients = tff.federated_broadcast(x)
    return at_clients, tff.federated_map(_add, (at_clients, y))

  return comp, [10.0, [1.0, 2.0]], (10.0, [11.0, 12.0])


@_case
def _broadcast_of_a_dataset():
  @tff.tensorflow.computation(_INTS, _INT)
  def scaled_total(numbers, factor):
    return factor * numbers.reduce(0, lambda a, b: a + b)

  @tff.federated_computation(_server(_INTS), _clients(_INT))
  def comp(numbers, factors):
    return tff.federated_map(
        scaled_total, (tff.federated_broadcast(numbers), factors)
    )

  return comp, [[1, 2], [1, 2, 3]], [3, 6, 9]


@_case
def _sum():
  @tff.federated_computation(_clients(_INT), _clients(_VECTOR))
  def comp(x, y):
    return tff.federated_sum(x), tff.federated_sum(y)

  vectors = [[1.0, 2.0], [0.5, 0.25], [4.0, 8.0]]
  return comp, [[1, 2, 4], vectors], (7, [5.5, 10.25])


@_case
def _sum_of_structs():
  @tff.federated_computation(_clients(tff.to_type(_OD(z=_ROW, a=(_INT, _INT)))))
  def comp(x):
    return tff.federated_sum(x)

  values = [_OD(z=_row(k, 0.5 * k), a=(10 * k, 100 * k)) for k in (1, 2)]
  return comp, [values], _OD(z=_row(3, 1.5), a=(30, 300))


@_case
def _sum_of_many_dtypes():
  dtypes = [np.int8, np.int64, np.uint8, np.float16, np.float64, np.complex64]
  member = tff.to_type([tff.TensorType(t, [2]) for t in dtypes])

  @tff.federated_computation(_clients(member))
  def comp(x):
    return tff.federated_sum(x)

  values = [[np.array([k, 2 * k], t) for t in dtypes] for k in (1, 2)]
  return comp, [values], [np.array([3, 6], t) for t in dtypes]


@_case
def _mean():
  @tff.federated_computation(_clients(_ROW['a']), _clients(_VECTOR))
  def comp(x, y):
    return tff.federated_mean(x), tff.federated_mean(y)

  vectors = [[1.0, 2.0], [3.0, 6.0]]
  return comp, [[1.0, 4.0], vectors], (2.5, [2.0, 4.0])


@_case
def _weighted_mean():
  member = tff.to_type(_OD(b=np.float32, a=(np.float32,)))

  @tff.federated_computation(_clients(member), _clients(_FLOAT), _clients(_INT))
  def comp(x, weight, count):
    return tff.federated_mean(x, weight), tff.federated_mean(weight, count)

  values = [_OD(b=1.0, a=(2.0,)), _OD(b=4.0, a=(8.0,))]
  expected = _OD(b=3.25, a=(6.5,)), 2.5
  return comp, [values, [1.0, 3.0], [1, 3]], expected


@_case
def _min_and_max():
  member = tff.to_type(_OD(b=_VECTOR, a=(np.int32,)))

  @tff.federated_computation(_clients(member))
  def comp(x):
    return tff.federated_min(x), tff.federated_max(x)

  values = [_OD(b=[1.0, 5.0], a=(-2,)), _OD(b=[4.0, 2.0], a=(8,))]
  expected = _OD(b=[1.0, 2.0], a=(-2,)), _OD(b=[4.0, 5.0], a=(8,))
  return comp, [values], expected


@_case
def _aggregate_in_the_order_of_the_clients():
  @tff.federated_computation(_clients(_INT))
  def comp(x):
    return tff.federated_aggregate(
        x, 0, _append_digit, _append_digit, _same_int
    )

  return comp, [[1, 2, 3, 4, 5, 6, 7]], 1234567


@_case
def _aggregate_with_another_type_than_the_values():
  """The accumulator grows, and zero's shape is narrower than its type."""

  @tff.tensorflow.computation(_ANY_VECTOR, _ROW)
  def append(x, row):
    return tf.concat([x, [row['z'], tf.cast(row['a'], tf.int32)]], 0)

  @tff.tensorflow.computation(_ANY_VECTOR, _ANY_VECTOR)
  def concatenate(x, y):
    return tf.concat([x, y], 0)

  @tff.tensorflow.computation
  def zero():
    return tf.zeros([0], tf.int32)

  @tff.tensorflow.computation(_ANY_VECTOR)
  def report(x):
    return _OD(values=x, size=tf.size(x))

  @tff.federated_computation(_clients(_ROW))
  def comp(x):
    return tff.federated_aggregate(x, zero(), append, concatenate, report)

  rows = [_row(1, 2.0), _row(3, 4.0), _row(5, 6.0)]
  return comp, [rows], _OD(values=[1, 2, 3, 4, 5, 6], size=6)


@_case
def _aggregate_of_a_struct_with_a_struct():
  state = tff.to_type(_OD(z=_INT, a=_FLOAT, n=_INT))

  @tff.tensorflow.computation(state, _ROW)
  def accumulate(s, row):
    return _OD(z=10 * s['z'] + row['z'], a=s['a'] + row['a'], n=s['n'] + 1)

  @tff.tensorflow.computation(state, state)
  def merge(s, _):
    return s

  @tff.tensorflow.computation
  def zero():
    return _OD(z=7, a=0.5, n=0)

  @tff.tensorflow.computation(state)
  def report(s):
    return s['n'], s['a'], s['z']

  @tff.federated_computation(_clients(_ROW))
  def comp(x):
    return tff.federated_aggregate(x, zero(), accumulate, merge, report)

  return comp, [[_row(1, 1.0), _row(2, 2.0)]], (2, 3.5, 712)


@_case
def _aggregate_of_nothing_counts_clients():
  @tff.tensorflow.computation(_FLOAT)
  def nothing(_):
    return ()

  @tff.tensorflow.computation(_INT, _EMPTY)
  def count(n, _):
    return n + 1

  @tff.federated_computation(_clients(_FLOAT))
  def comp(x):
    return tff.federated_aggregate(
        tff.federated_map(nothing, x), 0, count, _append_digit, _same_int
    )

  return comp, [[1.0, 2.0, 3.0]], 3


@_case
def _empty_structs_at_clients():
  @tff.tensorflow.computation(_FLOAT)
  def nothing(_):
    return ()

  @tff.federated_computation(_clients(_FLOAT))
  def comp(x):
    return tff.federated_map(nothing, x), tff.federated_map(_double, x)

  return comp, [[1.0, 2.0]], ([(), ()], [2.0, 4.0])


@_case
def _eval():
  @tff.tensorflow.computation
  def constants():
    return 3, tf.constant('x')

  @tff.federated_computation(_clients(_INT))
  def comp(x):
    return (
        tff.federated_eval(constants, tff.CLIENTS),
        tff.federated_eval(constants, tff.SERVER),
        x,
    )

  constants_ = (3, b'x')
  return comp, [[1, 2]], ([constants_, constants_], constants_, [1, 2])


@_case
def _value():
  @tff.federated_computation(_clients(_INT))
  def comp(x):
    ones = tff.federated_value(1, tff.CLIENTS)
    return (
        tff.federated_value([1.5, 2.0], tff.CLIENTS),
        tff.federated_value('a', tff.SERVER),
        tff.federated_sum(ones),
        tff.federated_zip((x, ones)),
    )

  return comp, [[5, 6]], ([1.5, 2.0], b'a', 2, [(5, 1), (6, 1)])


@_case
def _zip():
  @tff.federated_computation(
      _clients(_INT), _same_at_clients(_FLOAT), _clients(_ROW)
  )
  def comp(x, y, z):
    return tff.federated_zip(_OD(z=x, a=_OD(y=(y, z), b=x)))

  expected = [
      _OD(z=k, a=_OD(y=(0.5, _row(10 * k, k + 0.25)), b=k)) for k in (1, 2)
  ]
  rows = [_row(10, 1.25), _row(20, 2.25)]
  return comp, [[1, 2], 0.5, rows], expected


@_case
def _zip_of_what_is_the_same_at_all_clients():
  @tff.federated_computation(
      _same_at_clients(_INT), _same_at_clients(_FLOAT), _clients(_INT)
  )
  def comp(x, y, z):
    both = tff.federated_zip((x, y))
    return both, tff.federated_zip((both, z))

  pair = (1, 0.5)
  return comp, [*pair, [7, 8]], ([pair, pair], [(pair, 7), (pair, 8)])


@_case
def _zip_at_server():
  @tff.federated_computation(_server(_INT), _clients(_INT))
  def comp(x, y):
    return tff.federated_zip(_OD(z=x, a=(tff.federated_sum(y), x)))

  return comp, [1, [2, 3]], _OD(z=1, a=(5, 1))


def _select_case(make_element, expected):
  table_type = tff.TensorType(np.float32, [4])

  @tff.tensorflow.computation(table_type, _INT)
  def look_up(table, key):
    return make_element(key, tf.gather(table, key))

  @tff.federated_computation(
      _clients(tff.TensorType(np.int32, [2])),
      _server(_INT),
      _server(table_type),
  )
  def comp(keys, max_key, table):
    return tff.federated_select(keys, max_key, table, look_up)

  return comp, [[[0, 1], [3, 0]], 4, [0.5, 1.5, 2.5, 3.5]], expected


@_case
def _select():
  expected = [[(0, 0.5), (1, 1.5)], [(3, 3.5), (0, 0.5)]]
  return _select_case(lambda key, value: (key, value), expected)


@_not_native  # Mixes up names that are not in alphabetical order.
@_case
def _select_of_rows():
  expected = [[_row(0, 0.5), _row(1, 1.5)], [_row(3, 3.5), _row(0, 0.5)]]
  return _select_case(_row, expected)


@_not_native  # Mixes up names that are not in alphabetical order.
@_case
def _reduce_of_a_sequence():
  state = tff.to_type(_OD(q=np.float32, c=np.int32))

  @tff.tensorflow.computation(state, _ROW)
  def reduce(s, row):
    return _OD(q=2 * s['q'] + row['a'], c=10 * s['c'] + row['z'])

  @tff.tensorflow.computation
  def zero():
    return _OD(q=1.0, c=5)

  @tff.federated_computation(tff.SequenceType(_ROW))
  def reduce_rows(rows):
    return tff.sequence_reduce(rows, zero(), reduce)

  @tff.federated_computation(_clients(tff.SequenceType(_ROW)))
  def comp(x):
    return tff.federated_map(reduce_rows, x)

  return comp, [[_rows(2), _rows(0)]], [_OD(q=6.5, c=501), _OD(q=1.0, c=5)]


@_not_native
@_case
def _map_and_sum_of_a_sequence():
  @tff.tensorflow.computation(_ROW)
  def swap(row):
    return _OD(y=row['a'], b=row['z'])

  @tff.federated_computation(_clients(tff.SequenceType(_ROW)))
  def comp(x):
    swapped = tff.sequence_map(swap, x)
    return swapped, tff.sequence_sum(swapped), tff.sequence_sum(x)

  expected = (
      [[_OD(y=0.5, b=0), _OD(y=1.5, b=1)], []],
      [_OD(y=2.0, b=1), _OD(y=0.0, b=0)],
      [_row(1, 2.0), _row(0, 0.0)],
  )
  return comp, [[_rows(2), _rows(0)]], expected


@_not_native
@_case
def _sequences_of_tuples_and_single_tensors():
  pair = tff.to_type((_INT, (_FLOAT, _INT)))

  @tff.tensorflow.computation(pair)
  def first(a, _):
    return a

  @tff.tensorflow.computation(_INT)
  def both(x):
    return x, _OD(z=x + 1, a=x + 2)

  @tff.federated_computation(tff.SequenceType(pair))
  def comp(x):
    numbers = tff.sequence_map(first, x)
    return tff.sequence_sum(x), numbers, tff.sequence_map(both, numbers)

  dataset = tf.data.Dataset.from_tensor_slices(([1, 2], ([0.5, 1.5], [10, 20])))
  expected = (
      (3, (2.0, 30)),
      [1, 2],
      [(1, _OD(z=2, a=3)), (2, _OD(z=3, a=4))],
  )
  return comp, [dataset], expected


@_not_native
@_case
def _functions_of_intrinsics_capture_outer_values():
  @tff.tensorflow.computation(tff.TensorType(np.int32, [3]), _INT)
  def look_up(table, key):
    return tf.gather(table, key)

  @tff.federated_computation(
      _INT, _clients(_INT), _clients(tff.TensorType(np.int32, [1]))
  )
  def comp(k, x, keys):
    @tff.federated_computation(_INT, _INT)
    def accumulate(a, v):
      return _append_digit(_append_digit(a, v), k)

    @tff.federated_computation(_INT)
    def map_(v):
      return _append_digit(v, k)

    @tff.federated_computation(tff.TensorType(np.int32, [3]), _INT)
    def select(table, key):
      return _append_digit(k, look_up(table, key))

    total = tff.federated_aggregate(x, 0, accumulate, _append_digit, map_)
    table = tff.federated_value(np.array([7, 8, 9], np.int32), tff.SERVER)
    max_key = tff.federated_value(3, tff.SERVER)
    selected = tff.federated_select(keys, max_key, table, select)
    return total, tff.federated_map(map_, x), selected

  return comp, [5, [1, 2], [[2], [0]]], (15255, [15, 25], [[59], [57]])


@_not_native
@_case
def _functions_of_sequences_capture_outer_values():
  @tff.federated_computation(_INT, _INTS)
  def comp(k, numbers):
    @tff.federated_computation(_INT)
    def append(x):
      return _append_digit(x, k)

    @tff.federated_computation(_INT, _INT)
    def reduce(s, x):
      return _append_digit(_append_digit(s, x), k)

    return tff.sequence_map(append, numbers), tff.sequence_reduce(
        numbers, k, reduce
    )

  return comp, [5, [1, 2]], ([15, 25], 51525)


@_not_native
@_case
def _functions_of_intrinsics_return_outer_values():
  @tff.federated_computation(_INT, _clients(_INT), _INTS)
  def comp(k, x, numbers):
    @tff.federated_computation(_INT, _INT)
    def last(_, v):
      return _append_digit(v, k)

    @tff.federated_computation(_INT, _INT)
    def constant(a, v):
      del a, v
      return k

    @tff.federated_computation(_INT)
    def outer(_):
      return k

    return (
        tff.federated_aggregate(x, 0, last, constant, outer),
        tff.federated_aggregate(x, 0, constant, constant, _same_int),
        tff.sequence_map(outer, numbers),
        tff.sequence_reduce(numbers, 0, constant),
        tff.federated_map(outer, x),
    )

  return comp, [5, [1, 2], [3, 4, 6]], (5, 5, [5, 5, 5], 5, [5, 5])


@_case
def _reduce_captures_what_the_client_has():
  @tff.federated_computation(_clients(_INT), _clients(_INTS))
  def comp(x, numbers):
    @tff.federated_computation(_INT, _INTS)
    def count(zero, inner):
      return tff.sequence_reduce(inner, zero, _append_digit)

    return tff.federated_map(count, (x, numbers))

  return comp, [[4, 5], [[1, 2], [3]]], [412, 53]


@_case
def _functions_of_functions():
  @tff.federated_computation(_FLOAT)
  def comp(x):
    @tff.federated_computation(_FLOAT)
    def add_x(y):
      return _add(x, y)

    return add_x(add_x(_double(x)))

  return comp, [2.0], 8.0


@_case
def _a_computation_used_twice():
  @tff.federated_computation(_server(_FLOAT), _clients(_FLOAT))
  def comp(x, y):
    doubled = tff.federated_map(_double, x)
    again = tff.federated_map(_double, doubled)
    return doubled, again, tff.federated_map(_double, y)

  return comp, [1.5, [1.0, 2.0]], (3.0, 6.0, [2.0, 4.0])


@_case
def _two_exchanges_in_a_row():
  """A client's value outlives the first exchange, and is its own."""

  @tff.federated_computation(_clients(_FLOAT), _server(_FLOAT))
  def comp(x, y):
    shifted = tff.federated_map(_add, (x, tff.federated_broadcast(y)))
    mean = tff.federated_mean(shifted)
    again = tff.federated_map(_add, (shifted, tff.federated_broadcast(mean)))
    total = tff.federated_sum(again)
    last = tff.federated_map(_add, (x, tff.federated_broadcast(total)))
    return again, total, last, shifted

  expected = (
      [23.0, 24.0, 25.0],
      72.0,
      [73.0, 74.0, 75.0],
      [11.0, 12.0, 13.0],
  )
  return comp, [[1.0, 2.0, 3.0], 10.0], expected


@_case
def _clients_have_nothing_to_do_at_first():
  """Their values still have to be there later."""

  @tff.federated_computation(_clients(_FLOAT), _clients(_INTS))
  def comp(x, numbers):
    count = tff.federated_sum(tff.federated_value(1.0, tff.CLIENTS))
    counts = tff.federated_broadcast(count)
    return (
        tff.federated_map(_add, (x, counts)),
        tff.federated_map(_total, numbers),
        tff.federated_sum(counts),
    )

  arguments = [[1.0, 2.0, 3.0], [[1], [2, 3], [4, 5, 6]]]
  return comp, arguments, ([4.0, 5.0, 6.0], [1, 5, 15], 9.0)


@_case
def _no_clients():
  @tff.federated_computation(_clients(_FLOAT), _clients(_INT))
  def comp(x, y):
    return (
        tff.federated_sum(x),
        tff.federated_mean(x),
        tff.federated_min(y),
        tff.federated_max(y),
        tff.federated_aggregate(y, 7, _append_digit, _append_digit, _same_int),
    )

  extremes = np.iinfo(np.int32)
  return comp, [[], []], (0.0, np.nan, extremes.max, extremes.min, 7)


@_not_native
@_case
def _no_clients_in_a_result():
  @tff.federated_computation(_clients(_FLOAT))
  def comp(x):
    return x, tff.federated_map(_double, x), tff.federated_sum(x)

  return comp, [[]], ([], [], 0.0)


@_case
def _nobody_says_how_many_clients_there_are():
  @tff.federated_computation
  def comp():
    return tff.federated_sum(tff.federated_value(1, tff.CLIENTS))

  return comp, [], 0


@_case
def _one_client():
  @tff.federated_computation(_clients(_FLOAT))
  def comp(x):
    return tff.federated_map(_double, x), tff.federated_mean(x)

  return comp, [[3.0]], ([6.0], 3.0)


@_case
def _the_argument_itself():
  @tff.federated_computation(_INT, _clients(_ROW), _server(_FLOAT))
  def comp(x, y, z):
    return _OD(z=z, y=y, x=(x, x))

  rows = [_row(1, 0.5), _row(2, 1.5)]
  return comp, [1, rows, 0.5], _OD(z=0.5, y=rows, x=(1, 1))


@_case
def _tensorflow_alone():
  @tff.tensorflow.computation(_INT, _VECTOR)
  def comp(x, y):
    return _OD(z=x + 1, a=[2 * y, tf.reduce_sum(y)], unchanged=y)

  expected = _OD(z=2, a=[[2.0, 3.0], 2.5], unchanged=[1.0, 1.5])
  return comp, [1, [1.0, 1.5]], expected


@_case
def _tensorflow_without_argument():
  @tff.tensorflow.computation
  def comp():
    return _OD(z=1, a=tf.zeros([2]))

  return comp, [], _OD(z=1, a=[0.0, 0.0])


@_case
def _tensorflow_that_ignores_its_argument():
  @tff.tensorflow.computation(_INT, _INTS)
  def comp(_, numbers):
    del numbers
    return 5

  return comp, [1, [1, 2]], 5


@_case
def _unknown_shapes():
  @tff.tensorflow.computation(_ANY_VECTOR, tff.TensorType(np.float32, None))
  def shapes(x, y):
    return x, tf.size(x), tf.shape(y)

  @tff.federated_computation(
      _clients(_ANY_VECTOR), _clients(tff.TensorType(np.float32, None))
  )
  def comp(x, y):
    return tff.federated_map(shapes, (x, y))

  arguments = [
      [[1], [1, 2], []],
      [np.ones(shape, np.float32) for shape in [(2, 3), (4,), (1, 2, 1)]],
  ]
  expected = [([1], 1, [2, 3]), ([1, 2], 2, [4]), ([], 0, [1, 2, 1])]
  return comp, arguments, expected


@_case
def _strings_and_bools():
  @tff.tensorflow.computation(
      tff.TensorType(np.str_, [None]), tff.TensorType(np.bool_)
  )
  def comp(words, flag):
    return tf.strings.join([words, '!']), words[0], tf.logical_not(flag), flag

  expected = np.array([b'a!', b'b!'], object), b'a', False, True
  return comp, [['a', 'b'], True], expected


@_case
def _containers():
  @tff.tensorflow.computation(_INT)
  def wrap(x):
    return _Point(x, _Pair(x, [x, (x,)]))

  @tff.federated_computation(_clients(_INT))
  def comp(x):
    wrapped = tff.federated_map(wrap, x)
    return _OD(
        b=wrapped, a=tff.federated_sum(wrapped), c=[tff.federated_sum(x)]
    )

  def wrapped(x):
    return _Point(x, _Pair(x, [x, (x,)]))

  return comp, [[1, 2]], _OD(b=[wrapped(1), wrapped(2)], a=wrapped(3), c=[3])


@_case
def _datasets_as_results():
  @tff.federated_computation(_clients(_INT), _INT)
  def comp(x, y):
    return tff.federated_map(_count_up, x), _count_up(y)

  first, second = _row(0, 0.5), _row(1, 1.5)
  return comp, [[0, 1, 2], 1], ([[], [first], [first, second]], [first])


@_case
def _datasets_between_computations():
  @tff.tensorflow.computation(_count_up.type_signature.result)
  def total(rows):
    return rows.reduce(0.0, lambda s, row: s + row['a'])

  @tff.federated_computation(_clients(_INT))
  def comp(x):
    datasets = tff.federated_map(_count_up, x)
    count = tff.federated_sum(x)  # They must live on until after this.
    totals = tff.federated_map(total, datasets)
    del count
    return totals, tff.federated_sum(totals)

  return comp, [[1, 2, 3]], ([0.5, 2.0, 4.5], 7.0)


@_case
def _nested_datasets_as_arguments():
  element = tff.to_type(
      _OD(z=(_INT, _FLOAT), b=_OD(y=_INT, c=tff.TensorType(np.int32, [None])))
  )

  @tff.tensorflow.computation(tff.SequenceType(element))
  def comp(rows):
    def digits(s, row):
      c = tf.reduce_sum(row['b']['c'])
      return 1000 * s + 100 * row['z'][0] + 10 * row['b']['y'] + c

    return rows.reduce(0, digits), rows.take(1)

  dataset = tf.data.Dataset.from_tensor_slices(
      _OD(z=([1, 4], [0.5, 1.5]), b=_OD(y=[2, 5], c=[[1, 2], [2, 4]]))
  )
  first = _OD(z=(1, 0.5), b=_OD(y=2, c=[1, 2]))
  return comp, [dataset], (123456, [first])


@_case
def _lists_as_datasets():
  @tff.tensorflow.computation(tff.SequenceType(_ROW))
  def total(rows):
    return rows.reduce(
        (0, 0.0), lambda s, row: (s[0] + row['z'], s[1] + row['a'])
    )

  @tff.federated_computation(_clients(tff.SequenceType(_ROW)))
  def comp(x):
    return tff.federated_map(total, x)

  rows = [[_row(1, 0.5), _row(2, 1.5)], [], [_row(3, 4.0)]]
  return comp, [rows], [(3, 2.0), (0, 0.0), (3, 4.0)]


@_case
def _lists_as_datasets_of_unequal_batches():
  @tff.tensorflow.computation(tff.SequenceType(_ANY_VECTOR))
  def comp(batches):
    return batches

  batches = [[1, 2], [3, 4], [5]]
  return comp, [batches], batches


@_case
def _variables():
  @tff.tensorflow.computation(_INTS)
  def running_sums(numbers):
    total = tf.Variable(10)
    sums = tf.Variable(0)

    @tf.function
    def loop(numbers):
      for number in numbers:
        total.assign_add(number)
        sums.assign_add(total)
      return total.read_value(), sums.read_value()

    return loop(numbers)

  @tff.federated_computation(_clients(_INTS))
  def comp(x):
    return tff.federated_map(running_sums, x)

  # Each client starts at 10.
  return comp, [[[1, 2], [3], []]], [(13, 24), (13, 13), (10, 0)]


@_case
def _variables_in_datasets():
  @tff.tensorflow.computation(_INTS)
  def shift(numbers):
    variable = tf.Variable(10)
    return numbers.map(lambda x: x + variable)

  @tff.federated_computation(_clients(_INTS))
  def comp(x):
    return tff.federated_map(_total, tff.federated_map(shift, x))

  return comp, [[[1, 2], [3]]], [23, 13]


@_case
def _constant_tables():
  @tff.tensorflow.computation(tff.SequenceType(_STRING))
  def look_up(words):
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(['a', 'b'], [1, 2]), -1
    )
    return words.map(table.lookup), table.lookup(tf.constant(['b', 'c']))

  @tff.federated_computation(_clients(tff.SequenceType(_STRING)))
  def comp(x):
    return tff.federated_map(look_up, x)

  return comp, [[['a', 'b'], ['c']]], [([1, 2], [2, -1]), ([-1], [2, -1])]


def _table_case(build):
  @tff.tensorflow.computation(_INT)
  def remember(x):
    table = build()
    with tf.control_dependencies([table.insert([x], [10 * x])]):
      return table.lookup(tf.constant([1, 2, 3])), table.size()

  @tff.federated_computation(_clients(_INT))
  def comp(x):
    return tff.federated_map(remember, x)

  expected = [([10, -1, -1], 1), ([-1, 20, -1], 1), ([-1, -1, 30], 1)]
  return comp, [[1, 2, 3]], expected


@_case
def _mutable_tables():
  return _table_case(
      lambda: tf.lookup.experimental.MutableHashTable(tf.int32, tf.int32, -1)
  )


@_case
def _dense_tables():
  return _table_case(
      lambda: tf.lookup.experimental.DenseHashTable(
          tf.int32, tf.int32, default_value=-1, empty_key=-1, deleted_key=-2
      )
  )


@_case
def _random_numbers():
  @tff.tensorflow.computation(_INT)
  def draw(seed):
    return tf.random.stateless_uniform(
        [2], [seed, 1], maxval=100, dtype='int32'
    )

  @tff.federated_computation(_clients(_INT))
  def comp(x):
    return tff.federated_map(draw, x)

  expected = [
      tf.random.stateless_uniform([2], [s, 1], maxval=100, dtype='int32')
      for s in (1, 2)
  ]
  return comp, [[1, 2]], expected


def _as_result(value, type_spec):
  """Makes lists of numbers arrays where the type has a tensor."""
  if isinstance(type_spec, tff.FederatedType):
    if type_spec.all_equal or type_spec.placement is tff.SERVER:
      return _as_result(value, type_spec.member)
    return [_as_result(v, type_spec.member) for v in value]
  if isinstance(type_spec, tff.SequenceType):
    return [_as_result(v, type_spec.element) for v in value]
  if isinstance(type_spec, tff.TensorType):
    is_string = type_spec.dtype.type is np.str_
    return np.asarray(value, object if is_string else type_spec.dtype)
  types = [t for _, t in tff.structure.iter_elements(type_spec)]
  if isinstance(value, dict):
    return type(value)(
        (k, _as_result(v, t)) for (k, v), t in zip(value.items(), types)
    )
  if isinstance(value, (list, tuple)) and not hasattr(value, '_fields'):
    return type(value)(map(_as_result, value, types))
  parts = [
      v
      for _, v in tff.structure.iter_elements(
          tff.structure.from_container(value)
      )
  ]
  return type(value)(*map(_as_result, parts, types))


@pytest.mark.parametrize('name', _CASES)
def test_result(name, in_process_context, native_context):
  comp, arguments, expected = _CASES[name]()
  first = comparison.as_plain(
      comparison.invoke(in_process_context, comp, *arguments)
  )
  comparison.assert_equal(
      first, _as_result(expected, comp.type_signature.result)
  )
  second = comparison.as_plain(
      comparison.invoke(in_process_context, comp, *arguments)
  )
  comparison.assert_equal(second, first, same_leaf_types=True)
  if name not in _NOT_NATIVE:
    native = comparison.as_plain(
        comparison.invoke(native_context, comp, *arguments)
    )
    comparison.assert_equal(first, native, same_leaf_types=True)
