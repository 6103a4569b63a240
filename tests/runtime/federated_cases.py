"""Cases for `test_in_process_intrinsics`: intrinsics on federated values."""

import collections

import cases
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

_OD = collections.OrderedDict


def map_all_equal():
  # Only TFF's compiler creates this intrinsic.
  member_type = cases.same_at_clients(cases.FLOAT)
  argument_type = tff.StructType([member_type, cases.clients(cases.INT)])
  reference = tff.framework.Reference('x', argument_type)
  argument = tff.framework.Struct(
      [
          cases.double.to_building_block(),
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


def broadcast_of_a_dataset():
  @tff.tensorflow.computation(cases.INTS, cases.INT)
  def scaled_total(numbers, factor):
    return factor * numbers.reduce(0, lambda a, b: a + b)

  @tff.federated_computation(cases.server(cases.INTS), cases.clients(cases.INT))
  def comp(numbers, factors):
    return tff.federated_map(
        scaled_total, (tff.federated_broadcast(numbers), factors)
    )

  return comp, [[1, 2], [1, 2, 3]], [3, 6, 9]


def sum_of_many_dtypes():
  dtypes = [np.int8, np.int64, np.uint8, np.float16, np.float64, np.complex64]
  member = tff.to_type([tff.TensorType(t, [2]) for t in dtypes])

  @tff.federated_computation(cases.clients(member))
  def comp(x):
    return tff.federated_sum(x)

  values = [[np.array([k, 2 * k], t) for t in dtypes] for k in (1, 2)]
  return comp, [values], [np.array([3, 6], t) for t in dtypes]


def mean():
  @tff.federated_computation(
      cases.clients(cases.ROW['a']), cases.clients(cases.VECTOR)
  )
  def comp(x, y):
    return tff.federated_mean(x), tff.federated_mean(y)

  vectors = [[1.0, 2.0], [3.0, 6.0]]
  return comp, [[1.0, 4.0], vectors], (2.5, [2.0, 4.0])


def weighted_mean():
  member = tff.to_type(_OD(b=np.float32, a=(np.float32,)))

  @tff.federated_computation(
      cases.clients(member),
      cases.clients(cases.FLOAT),
      cases.clients(cases.INT),
  )
  def comp(x, weight, count):
    return tff.federated_mean(x, weight), tff.federated_mean(weight, count)

  values = [_OD(b=1.0, a=(2.0,)), _OD(b=4.0, a=(8.0,))]
  expected = _OD(b=3.25, a=(6.5,)), 2.5
  return comp, [values, [1.0, 3.0], [1, 3]], expected


def min_and_max():
  member = tff.to_type(_OD(b=cases.VECTOR, a=(np.int32,)))

  @tff.federated_computation(cases.clients(member))
  def comp(x):
    return tff.federated_min(x), tff.federated_max(x)

  values = [_OD(b=[1.0, 5.0], a=(-2,)), _OD(b=[4.0, 2.0], a=(8,))]
  expected = _OD(b=[1.0, 2.0], a=(-2,)), _OD(b=[4.0, 5.0], a=(8,))
  return comp, [values], expected


def aggregate_in_the_order_of_the_clients():
  @tff.federated_computation(cases.clients(cases.INT))
  def comp(x):
    return tff.federated_aggregate(
        x, 0, cases.append_digit, cases.append_digit, cases.same_int
    )

  return comp, [[1, 2, 3, 4, 5, 6, 7]], 1234567


def aggregate_into_another_type():
  """The accumulator grows, so its shape is wider than zero's shape."""

  @tff.tensorflow.computation(cases.ANY_VECTOR, cases.ROW)
  def append(x, row):
    return tf.concat([x, [row['z'], tf.cast(row['a'], tf.int32)]], 0)

  @tff.tensorflow.computation(cases.ANY_VECTOR, cases.ANY_VECTOR)
  def concatenate(x, y):
    return tf.concat([x, y], 0)

  @tff.tensorflow.computation
  def zero():
    return tf.zeros([0], tf.int32)

  @tff.tensorflow.computation(cases.ANY_VECTOR)
  def report(x):
    return _OD(values=x, size=tf.size(x))

  @tff.federated_computation(cases.clients(cases.ROW))
  def comp(x):
    return tff.federated_aggregate(x, zero(), append, concatenate, report)

  rows = [cases.row(1, 2.0), cases.row(3, 4.0), cases.row(5, 6.0)]
  return comp, [rows], _OD(values=[1, 2, 3, 4, 5, 6], size=6)


def empty_structs_of_clients():
  @tff.tensorflow.computation(cases.FLOAT)
  def nothing(_):
    return ()

  @tff.tensorflow.computation(cases.INT, cases.EMPTY)
  def count(n, _):
    return n + 1

  @tff.federated_computation(cases.clients(cases.FLOAT))
  def comp(x):
    empty = tff.federated_map(nothing, x)
    number = tff.federated_aggregate(
        empty, 0, count, cases.append_digit, cases.same_int
    )
    return empty, number, tff.federated_map(cases.double, x)

  return comp, [[1.0, 2.0]], ([(), ()], 2, [2.0, 4.0])


def eval():
  @tff.tensorflow.computation
  def constants():
    return 3, tf.constant('x')

  @tff.federated_computation(cases.clients(cases.INT))
  def comp(x):
    return (
        tff.federated_eval(constants, tff.CLIENTS),
        tff.federated_eval(constants, tff.SERVER),
        x,
    )

  constants_ = (3, b'x')
  return comp, [[1, 2]], ([constants_, constants_], constants_, [1, 2])


def value():
  @tff.federated_computation(cases.clients(cases.INT))
  def comp(x):
    ones = tff.federated_value(1, tff.CLIENTS)
    return (
        tff.federated_value([1.5, 2.0], tff.CLIENTS),
        tff.federated_value('a', tff.SERVER),
        tff.federated_sum(ones),
        tff.federated_zip((x, ones)),
    )

  return comp, [[5, 6]], ([1.5, 2.0], b'a', 2, [(5, 1), (6, 1)])


def zip():
  @tff.federated_computation(
      cases.clients(cases.INT),
      cases.same_at_clients(cases.FLOAT),
      cases.clients(cases.ROW),
  )
  def comp(x, y, z):
    return tff.federated_zip(_OD(z=x, a=_OD(y=(y, z), b=x)))

  expected = [
      _OD(z=k, a=_OD(y=(0.5, cases.row(10 * k, k + 0.25)), b=k)) for k in (1, 2)
  ]
  rows = [cases.row(10, 1.25), cases.row(20, 2.25)]
  return comp, [[1, 2], 0.5, rows], expected


def zip_of_all_equal_values():
  @tff.federated_computation(
      cases.same_at_clients(cases.INT),
      cases.same_at_clients(cases.FLOAT),
      cases.clients(cases.INT),
  )
  def comp(x, y, z):
    both = tff.federated_zip((x, y))
    return both, tff.federated_zip((both, z))

  pair = (1, 0.5)
  return comp, [*pair, [7, 8]], ([pair, pair], [(pair, 7), (pair, 8)])


def zip_at_server():
  @tff.federated_computation(cases.server(cases.INT), cases.clients(cases.INT))
  def comp(x, y):
    return tff.federated_zip(_OD(z=x, a=(tff.federated_sum(y), x)))

  return comp, [1, [2, 3]], _OD(z=1, a=(5, 1))


def _select_case(make_element, expected):
  table_type = tff.TensorType(np.float32, [4])

  @tff.tensorflow.computation(table_type, cases.INT)
  def look_up(table, key):
    return make_element(key, tf.gather(table, key))

  @tff.federated_computation(
      cases.clients(tff.TensorType(np.int32, [2])),
      cases.server(cases.INT),
      cases.server(table_type),
  )
  def comp(keys, max_key, table):
    return tff.federated_select(keys, max_key, table, look_up)

  return comp, [[[0, 1], [3, 0]], 4, [0.5, 1.5, 2.5, 3.5]], expected


def select():
  expected = [[(0, 0.5), (1, 1.5)], [(3, 3.5), (0, 0.5)]]
  return _select_case(lambda key, value: (key, value), expected)


@cases.not_native  # Mixes up names that are not in alphabetical order.
def select_of_rows():
  expected = [
      [cases.row(0, 0.5), cases.row(1, 1.5)],
      [cases.row(3, 3.5), cases.row(0, 0.5)],
  ]
  return _select_case(cases.row, expected)


def two_exchanges_in_a_row():
  """Clients need values from before the first exchange after the second."""

  @tff.federated_computation(
      cases.clients(cases.FLOAT), cases.server(cases.FLOAT)
  )
  def comp(x, y):
    shifted = tff.federated_map(cases.add, (x, tff.federated_broadcast(y)))
    mean = tff.federated_mean(shifted)
    again = tff.federated_map(
        cases.add, (shifted, tff.federated_broadcast(mean))
    )
    total = tff.federated_sum(again)
    last = tff.federated_map(cases.add, (x, tff.federated_broadcast(total)))
    return again, total, last, shifted

  expected = (
      [23.0, 24.0, 25.0],
      72.0,
      [73.0, 74.0, 75.0],
      [11.0, 12.0, 13.0],
  )
  return comp, [[1.0, 2.0, 3.0], 10.0], expected


def clients_start_in_the_second_pass():
  """The clients' values must outlive a pass without client work."""

  @tff.federated_computation(
      cases.clients(cases.FLOAT), cases.clients(cases.INTS)
  )
  def comp(x, numbers):
    count = tff.federated_sum(tff.federated_value(1.0, tff.CLIENTS))
    counts = tff.federated_broadcast(count)
    return (
        tff.federated_map(cases.add, (x, counts)),
        tff.federated_map(cases.total, numbers),
        tff.federated_sum(counts),
    )

  arguments = [[1.0, 2.0, 3.0], [[1], [2, 3], [4, 5, 6]]]
  return comp, arguments, ([4.0, 5.0, 6.0], [1, 5, 15], 9.0)


def no_clients():
  @tff.federated_computation(
      cases.clients(cases.FLOAT), cases.clients(cases.INT)
  )
  def comp(x, y):
    return (
        tff.federated_sum(x),
        tff.federated_mean(x),
        tff.federated_min(y),
        tff.federated_max(y),
        tff.federated_aggregate(
            y, 7, cases.append_digit, cases.append_digit, cases.same_int
        ),
    )

  extremes = np.iinfo(np.int32)
  return comp, [[], []], (0.0, np.nan, extremes.max, extremes.min, 7)


@cases.not_native
def no_clients_in_a_result():
  @tff.federated_computation(cases.clients(cases.FLOAT))
  def comp(x):
    return x, tff.federated_map(cases.double, x), tff.federated_sum(x)

  return comp, [[]], ([], [], 0.0)


def unknown_number_of_clients():
  @tff.federated_computation
  def comp():
    return tff.federated_sum(tff.federated_value(1, tff.CLIENTS))

  return comp, [], 0


def one_client():
  @tff.federated_computation(cases.clients(cases.FLOAT))
  def comp(x):
    return tff.federated_map(cases.double, x), tff.federated_mean(x)

  return comp, [[3.0]], ([6.0], 3.0)


def argument_as_result():
  @tff.federated_computation(
      cases.INT, cases.clients(cases.ROW), cases.server(cases.FLOAT)
  )
  def comp(x, y, z):
    return _OD(z=z, y=y, x=(x, x))

  rows = [cases.row(1, 0.5), cases.row(2, 1.5)]
  return comp, [1, rows, 0.5], _OD(z=0.5, y=rows, x=(1, 1))
