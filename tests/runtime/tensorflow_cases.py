"""Cases for `test_in_process_intrinsics`: TensorFlow, functions, datasets."""

import collections

import attrs
import cases
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import order_statistics

_OD = collections.OrderedDict

_Point = collections.namedtuple('_Point', 'y x')


@attrs.define
class _Pair:
  second: object
  first: object


@cases.not_native  # Mixes up names that are not in alphabetical order.
def reduce_of_a_sequence():
  state = tff.to_type(_OD(q=np.float32, c=np.int32))

  @tff.tensorflow.computation(state, cases.ROW)
  def reduce(s, row):
    return _OD(q=2 * s['q'] + row['a'], c=10 * s['c'] + row['z'])

  @tff.tensorflow.computation
  def zero():
    return _OD(q=1.0, c=5)

  @tff.federated_computation(tff.SequenceType(cases.ROW))
  def reduce_rows(rows):
    return tff.sequence_reduce(rows, zero(), reduce)

  @tff.federated_computation(cases.clients(tff.SequenceType(cases.ROW)))
  def comp(x):
    return tff.federated_map(reduce_rows, x)

  return (
      comp,
      [[cases.rows(2), cases.rows(0)]],
      [_OD(q=6.5, c=501), _OD(q=1.0, c=5)],
  )


@cases.not_native
def map_and_sum_of_a_sequence():
  @tff.tensorflow.computation(cases.ROW)
  def swap(row):
    return _OD(y=row['a'], b=row['z'])

  @tff.federated_computation(cases.clients(tff.SequenceType(cases.ROW)))
  def comp(x):
    swapped = tff.sequence_map(swap, x)
    return swapped, tff.sequence_sum(swapped), tff.sequence_sum(x)

  expected = (
      [[_OD(y=0.5, b=0), _OD(y=1.5, b=1)], []],
      [_OD(y=2.0, b=1), _OD(y=0.0, b=0)],
      [cases.row(1, 2.0), cases.row(0, 0.0)],
  )
  return comp, [[cases.rows(2), cases.rows(0)]], expected


@cases.not_native
def sequences_of_tuples_and_single_tensors():
  pair = tff.to_type((cases.INT, (cases.FLOAT, cases.INT)))

  @tff.tensorflow.computation(pair)
  def first(a, _):
    return a

  @tff.tensorflow.computation(cases.INT)
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


@cases.not_native
def functions_of_intrinsics_capture_outer_values():
  @tff.tensorflow.computation(tff.TensorType(np.int32, [3]), cases.INT)
  def look_up(table, key):
    return tf.gather(table, key)

  @tff.federated_computation(
      cases.INT,
      cases.clients(cases.INT),
      cases.clients(tff.TensorType(np.int32, [1])),
  )
  def comp(k, x, keys):
    @tff.federated_computation(cases.INT, cases.INT)
    def accumulate(a, v):
      return cases.append_digit(cases.append_digit(a, v), k)

    @tff.federated_computation(cases.INT)
    def map_(v):
      return cases.append_digit(v, k)

    @tff.federated_computation(tff.TensorType(np.int32, [3]), cases.INT)
    def select(table, key):
      return cases.append_digit(k, look_up(table, key))

    total = tff.federated_aggregate(x, 0, accumulate, cases.append_digit, map_)
    table = tff.federated_value(np.array([7, 8, 9], np.int32), tff.SERVER)
    max_key = tff.federated_value(3, tff.SERVER)
    selected = tff.federated_select(keys, max_key, table, select)
    return total, tff.federated_map(map_, x), selected

  return comp, [5, [1, 2], [[2], [0]]], (15255, [15, 25], [[59], [57]])


@cases.not_native
def functions_of_sequences_capture_outer_values():
  @tff.federated_computation(cases.INT, cases.INTS)
  def comp(k, numbers):
    @tff.federated_computation(cases.INT)
    def append(x):
      return cases.append_digit(x, k)

    @tff.federated_computation(cases.INT, cases.INT)
    def reduce(s, x):
      return cases.append_digit(cases.append_digit(s, x), k)

    return tff.sequence_map(append, numbers), tff.sequence_reduce(
        numbers, k, reduce
    )

  return comp, [5, [1, 2]], ([15, 25], 51525)


@cases.not_native
def functions_of_intrinsics_return_outer_values():
  @tff.federated_computation(cases.INT, cases.clients(cases.INT), cases.INTS)
  def comp(k, x, numbers):
    @tff.federated_computation(cases.INT, cases.INT)
    def last(_, v):
      return cases.append_digit(v, k)

    @tff.federated_computation(cases.INT, cases.INT)
    def constant(a, v):
      del a, v
      return k

    @tff.federated_computation(cases.INT)
    def outer(_):
      return k

    return (
        tff.federated_aggregate(x, 0, last, constant, outer),
        tff.federated_aggregate(x, 0, constant, constant, cases.same_int),
        tff.sequence_map(outer, numbers),
        tff.sequence_reduce(numbers, 0, constant),
        tff.federated_map(outer, x),
    )

  return comp, [5, [1, 2], [3, 4, 6]], (5, 5, [5, 5, 5], 5, [5, 5])


def reduce_captures_client_values():
  @tff.federated_computation(
      cases.clients(cases.INT), cases.clients(cases.INTS)
  )
  def comp(x, numbers):
    @tff.federated_computation(cases.INT, cases.INTS)
    def count(zero, inner):
      return tff.sequence_reduce(inner, zero, cases.append_digit)

    return tff.federated_map(count, (x, numbers))

  return comp, [[4, 5], [[1, 2], [3]]], [412, 53]


def functions_of_functions():
  @tff.federated_computation(cases.FLOAT)
  def comp(x):
    @tff.federated_computation(cases.FLOAT)
    def add_x(y):
      return cases.add(x, y)

    return add_x(add_x(cases.double(x)))

  return comp, [2.0], 8.0


def tensorflow_alone():
  @tff.tensorflow.computation(cases.INT, cases.VECTOR)
  def comp(x, y):
    return _OD(z=x + 1, a=[2 * y, tf.reduce_sum(y)], unchanged=y)

  expected = _OD(z=2, a=[[2.0, 3.0], 2.5], unchanged=[1.0, 1.5])
  return comp, [1, [1.0, 1.5]], expected


def tensorflow_that_ignores_its_argument():
  @tff.tensorflow.computation(cases.INT, cases.INTS)
  def comp(_, numbers):
    del numbers
    return 5

  return comp, [1, [1, 2]], 5


def unknown_shapes():
  @tff.tensorflow.computation(
      cases.ANY_VECTOR, tff.TensorType(np.float32, None)
  )
  def shapes(x, y):
    return x, tf.size(x), tf.shape(y)

  @tff.federated_computation(
      cases.clients(cases.ANY_VECTOR),
      cases.clients(tff.TensorType(np.float32, None)),
  )
  def comp(x, y):
    return tff.federated_map(shapes, (x, y))

  arguments = [
      [[1], [1, 2], []],
      [np.ones(shape, np.float32) for shape in [(2, 3), (4,), (1, 2, 1)]],
  ]
  expected = [([1], 1, [2, 3]), ([1, 2], 2, [4]), ([], 0, [1, 2, 1])]
  return comp, arguments, expected


def strings_and_bools():
  @tff.tensorflow.computation(
      tff.TensorType(np.str_, [None]), tff.TensorType(np.bool_)
  )
  def comp(words, flag):
    return tf.strings.join([words, '!']), words[0], tf.logical_not(flag), flag

  expected = np.array([b'a!', b'b!'], object), b'a', False, True
  return comp, [['a', 'b'], True], expected


def containers():
  @tff.tensorflow.computation(cases.INT)
  def wrap(x):
    return _Point(x, _Pair(x, [x, (x,)]))

  @tff.federated_computation(cases.clients(cases.INT))
  def comp(x):
    wrapped = tff.federated_map(wrap, x)
    return _OD(
        b=wrapped, a=tff.federated_sum(wrapped), c=[tff.federated_sum(x)]
    )

  def wrapped(x):
    return _Point(x, _Pair(x, [x, (x,)]))

  return comp, [[1, 2]], _OD(b=[wrapped(1), wrapped(2)], a=wrapped(3), c=[3])


def datasets_as_results():
  @tff.federated_computation(cases.clients(cases.INT), cases.INT)
  def comp(x, y):
    return tff.federated_map(cases.count_up, x), cases.count_up(y)

  first, second = cases.row(0, 0.5), cases.row(1, 1.5)
  return comp, [[0, 1, 2], 1], ([[], [first], [first, second]], [first])


def datasets_between_computations():
  @tff.tensorflow.computation(cases.count_up.type_signature.result)
  def total(rows):
    return rows.reduce(0.0, lambda s, row: s + row['a'])

  @tff.federated_computation(cases.clients(cases.INT))
  def comp(x):
    datasets = tff.federated_map(cases.count_up, x)
    count = tff.federated_sum(x)  # The datasets must outlive this pass.
    totals = tff.federated_map(total, datasets)
    del count
    return totals, tff.federated_sum(totals)

  return comp, [[1, 2, 3]], ([0.5, 2.0, 4.5], 7.0)


def nested_datasets_as_arguments():
  element = tff.to_type(
      _OD(
          z=(cases.INT, cases.FLOAT),
          b=_OD(y=cases.INT, c=tff.TensorType(np.int32, [None])),
      )
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


def variables_in_datasets():
  @tff.tensorflow.computation(cases.INTS)
  def shift(numbers):
    variable = tf.Variable(10)
    return numbers.map(lambda x: x + variable)

  @tff.federated_computation(cases.clients(cases.INTS))
  def comp(x):
    return tff.federated_map(cases.total, tff.federated_map(shift, x))

  return comp, [[[1, 2], [3]]], [23, 13]


def constant_tables():
  @tff.tensorflow.computation(tff.SequenceType(cases.STRING))
  def look_up(words):
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(['a', 'b'], [1, 2]), -1
    )
    return words.map(table.lookup), table.lookup(tf.constant(['b', 'c']))

  @tff.federated_computation(cases.clients(tff.SequenceType(cases.STRING)))
  def comp(x):
    return tff.federated_map(look_up, x)

  return comp, [[['a', 'b'], ['c']]], [([1, 2], [2, -1]), ([-1], [2, -1])]


def rows_that_numpy_sorts():
  values = np.random.default_rng(0).integers(0, 99, (260, 40))

  @tff.tensorflow.computation(tff.TensorType(np.float32, [None, 40]))
  def median(rows):
    return order_statistics.map_ordered(
        rows,
        tf.stack(order_statistics.median_ranks(tf.shape(rows)[0])),
        order_statistics.median_of,
        most_rows=300,
    )

  return median, [values.astype(np.float32)], np.median(values, axis=0)
