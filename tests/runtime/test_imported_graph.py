"""Tests of the import of TFF's graphs."""

import collections

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.runtime import element_structure
from tff_bn.runtime import imported_graph

_INT = tff.TensorType(np.int32)
_FLOAT = tff.TensorType(np.float32)
_EMPTY = tff.StructType([])


def _proto(comp):
  return comp.to_building_block().proto.tensorflow


def _import(comp):
  graph = imported_graph.ImportedGraph(_proto(comp))
  parameter = comp.type_signature.parameter
  return tf.compat.v1.wrap_function(
      lambda *args: graph.call(args),
      list(
          map(
              element_structure.tensor_spec,
              element_structure.leaf_types(parameter),
          )
      ),
  )


def test_tensors_are_depth_first():
  part = tff.to_type(
      collections.OrderedDict(z=np.int32, a=[np.float32, _EMPTY])
  )

  @tff.tensorflow.computation(part, tff.SequenceType(np.int32), _FLOAT)
  def comp(x, numbers, y):
    return collections.OrderedDict(
        d=y, c=[x['a'][0], numbers, collections.OrderedDict(f=x['z'], e=2 * y)]
    )

  proto = _proto(comp)
  names = imported_graph.tensor_names(proto.parameter)
  assert len(names) == 4
  assert len(imported_graph.tensor_names(proto.result)) == 5
  dataset = tf.data.experimental.to_variant(tf.data.Dataset.range(3))
  outputs = _import(comp)(
      tf.constant(1), tf.constant(2.0), dataset, tf.constant(3.0)
  )
  assert [o.dtype for o in outputs] == [
      tf.float32,
      tf.float32,
      tf.variant,
      tf.int32,
      tf.float32,
  ]
  assert [float(o) for o in (*outputs[:2], *outputs[3:])] == [3, 2, 1, 6]


def test_each_call_has_its_own_variables():
  @tff.tensorflow.computation(_INT)
  def comp(x):
    first = tf.Variable(10, name='same')
    second = tf.Variable(20, name='same')
    with tf.control_dependencies([first.assign_add(x), second.assign_sub(x)]):
      return first.read_value(), second.read_value()

  function = _import(comp)
  for x in (1, 2):
    assert [int(v) for v in function(tf.constant(x))] == [10 + x, 20 - x]

  @tf.function
  def twice(x):
    return function(x), function(x + 1)

  found = tf.nest.map_structure(int, twice(tf.constant(1)))
  assert found == ([11, 19], [12, 18])


def test_variables_are_initialized_before_they_are_used():
  """Functions, loops and datasets can use the variables."""

  @tff.tensorflow.computation(_INT)
  def comp(n):
    initial = tf.random.stateless_uniform([1000, 1000], [1, 2])
    large = tf.Variable(tf.linalg.matmul(initial, initial))
    counter = tf.Variable(tf.cast(large.shape[0], tf.int32))

    @tf.function
    def loop():
      for _ in tf.range(n):
        counter.assign_add(1)
      return counter.read_value()

    in_dataset = tf.data.Dataset.range(2).map(lambda _: large[0, 0])
    return loop(), in_dataset.reduce(0.0, tf.add), large[0, 0]

  count, twice, once = _import(comp)(tf.constant(3))
  assert count == 1003
  assert once > 0
  assert twice == 2 * once


@pytest.mark.parametrize('kind', ['static', 'mutable', 'dense', 'of_vectors'])
def test_each_call_has_its_own_tables(kind):
  lookup = tf.lookup

  @tff.tensorflow.computation(_INT)
  def comp(x):
    if kind == 'static':
      table = lookup.StaticHashTable(
          lookup.KeyValueTensorInitializer([1, 2], [10, 20]), -1
      )
      return table.lookup(tf.stack([x]))
    if kind == 'dense':
      table = lookup.experimental.DenseHashTable(
          tf.int32, tf.int32, default_value=-1, empty_key=-1, deleted_key=-2
      )
    else:
      default = -1 if kind == 'mutable' else [-1, -1]
      table = lookup.experimental.MutableHashTable(tf.int32, tf.int32, default)
    value = 10 * x if kind != 'of_vectors' else tf.stack([10 * x, x])
    with tf.control_dependencies([table.insert([x], [value])]):
      return table.lookup([1, 2])

  function = _import(comp)
  expected = {
      'static': [[10], [20]],
      'mutable': [[10, -1], [-1, 20]],
      'dense': [[10, -1], [-1, 20]],
      'of_vectors': [[[10, 1], [-1, -1]], [[-1, -1], [20, 2]]],
  }[kind]
  for x, truth in zip((1, 2), expected):
    np.testing.assert_array_equal(function(tf.constant(x))[0], truth)


def test_result_dataset_can_use_a_table():
  """The table lives as long as the dataset."""

  @tff.tensorflow.computation(tff.SequenceType(np.str_))
  def comp(words):
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(['a', 'b'], [1, 2]), -1
    )
    return words.map(table.lookup)

  words = tf.data.Dataset.from_tensor_slices(['b', 'a', 'c'])
  (variant,) = _import(comp)(tf.data.experimental.to_variant(words))
  dataset = tf.data.experimental.from_variant(
      variant, tf.TensorSpec([], tf.int32)
  )
  assert [int(x) for x in dataset] == [2, 1, -1]


def test_functions_of_two_graphs_do_not_collide():
  """Both graphs have functions with the same names, some of them nested."""

  def build(factor):
    @tff.tensorflow.computation(tff.SequenceType(_FLOAT))
    def comp(numbers):
      @tf.function
      def scale(x):
        return factor * x

      @tf.function
      def body(total, x):
        return total + tf.map_fn(scale, tf.stack([x]))[0] + scale(x)

      return numbers.reduce(0.0, body)

    return _import(comp)

  dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0])
  variant = tf.data.experimental.to_variant(dataset)
  first, second = build(1), build(10)

  @tf.function
  def both(x):
    return first(x) + second(x)

  assert [float(x) for x in both(variant)] == [6, 60]


def test_graph_with_branches_can_be_imported_twice():
  """A branch operation has a list of functions."""

  def build():
    @tff.tensorflow.computation(_INT)
    def comp(x):
      return tf.switch_case(
          x, [lambda: x + 10, lambda: tf.cond(x > 5, lambda: x, lambda: -x)]
      )

    return comp

  comp = build()
  here, again = _import(comp), _import(comp)

  @tf.function
  def both(x):
    return here(x)[0], again(x)[0]

  assert [int(x) for x in both(tf.constant(0))] == [10, 10]
  assert [int(x) for x in both(tf.constant(1))] == [-1, -1]
  names = [
      {f.signature.name for f in fn.graph.as_graph_def().library.function}
      for fn in (here, again)
  ]
  assert len(names[0]) >= 4
  assert not names[0] & names[1]


def test_gradients_inside_of_functions():
  """A function and its custom gradient refer to each other by name."""

  def build(factor):
    @tff.tensorflow.computation(_FLOAT)
    def comp(x):
      @tf.custom_gradient
      def square(x):
        return x * x, lambda g: factor * g

      @tf.function
      def outer(x):
        with tf.GradientTape() as tape:
          tape.watch(x)
          y = square(x) * x
        return tape.gradient(y, x)

      return outer(x)

    return _import(comp)

  # d(s(x) x) = s(x) + x f, where f replaces s'(x).
  first, second = build(1.0), build(100.0)
  assert float(first(tf.constant(3.0))[0]) == 12
  assert float(second(tf.constant(3.0))[0]) == 309


def test_unused_placeholders_are_removed():
  """Keras leaves such placeholders behind."""

  @tff.tensorflow.computation(_FLOAT)
  def comp(x):
    tf.compat.v1.placeholder(tf.float32, [3])
    return x + 1

  assert float(_import(comp)(tf.constant(1.0))[0]) == 2


def test_unused_operations_do_not_run():
  @tff.tensorflow.computation(_FLOAT)
  def comp(x):
    tf.debugging.assert_positive(x)
    return x + 1

  assert float(_import(comp)(tf.constant(-1.0))[0]) == 0


def test_number_of_edges_is_linear_in_the_number_of_variables():
  """A deep model has hundreds of variables, and results as well."""
  num_variables = 60

  @tff.tensorflow.computation(_FLOAT)
  def comp(x):
    variables = [tf.Variable(x) for _ in range(num_variables)]
    return [variable.read_value() for variable in variables]

  function = _import(comp)
  assert function(tf.constant(2.0))[0] == 2
  nodes = function.graph.as_graph_def().node
  assert sum(node.op == 'DestroyResourceOp' for node in nodes) == num_variables
  assert sum(len(node.input) for node in nodes) < 15 * num_variables


@pytest.mark.parametrize('gives_variables', [False, True])
def test_nodes_on_the_device_of_a_parameter(gives_variables):
  """TensorFlow's norms are computed on the device of their tensors."""

  @tff.tensorflow.computation(tff.TensorType(np.float32, [2]))
  def comp(x):
    return tf.linalg.global_norm([x])

  graph = imported_graph.ImportedGraph(_proto(comp))
  function = tf.compat.v1.wrap_function(
      lambda x: graph.call([x], [] if gives_variables else None),
      [tf.TensorSpec([2])],
  )
  assert function(tf.constant([3.0, 4.0]))[0] == 5


@pytest.mark.parametrize('has_gpu', [False, True])
def test_large_constants_are_not_copied_into_functions(has_gpu, monkeypatch):
  monkeypatch.setattr(
      tf.config, 'get_visible_devices', lambda kind: [f'{kind}:0'] * has_gpu
  )
  rng = np.random.default_rng(0)
  small = rng.normal(size=3).astype(np.float32)
  large = rng.normal(size=(3, 10_000)).astype(np.float32)
  numbers = rng.integers(99, size=20_000)

  @tff.tensorflow.computation(_FLOAT)
  def comp(x):
    matrix = tf.constant(large)
    _, total = tf.while_loop(
        lambda i, _: i < 2, lambda i, y: (i + 1, y + matrix), (0, matrix)
    )
    product = tf.linalg.matvec(matrix, x * small, transpose_a=True)
    return product, tf.constant(numbers), total

  function = _import(comp)
  num_bytes = function.graph.as_graph_def().ByteSize()
  assert (num_bytes > large.nbytes) == has_gpu
  product, constant, total = function(tf.constant(2.0))
  np.testing.assert_allclose(product, 2 * small @ large, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(constant, numbers)
  np.testing.assert_array_equal(total, large + large + large)


def test_operations_that_wait_for_a_parameter_or_a_large_constant():
  large = np.arange(20_000, dtype=np.float32)

  @tff.tensorflow.computation(_FLOAT, tff.SequenceType(np.int64), _FLOAT)
  def comp(x, numbers, unused):
    constant = tf.constant(large)
    with tf.control_dependencies([constant, x, unused]):
      y = tf.constant(1.0)
    with tf.control_dependencies([tf.data.experimental.to_variant(numbers)]):
      total = numbers.reduce(np.int64(0), tf.add)
    return y, constant, total, x

  dataset = tf.data.experimental.to_variant(tf.data.Dataset.range(4))
  y, constant, total, x = _import(comp)(
      tf.constant(2.0), dataset, tf.constant(3.0)
  )
  assert (y, total, x) == (1, 6, 2)
  np.testing.assert_array_equal(constant, large)
