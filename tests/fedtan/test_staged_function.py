"""Tests of functions in stages."""

import numpy as np
import pytest
import random_layers
import tensorflow as tf

from tff_bn.fedtan import staged_function

_VECTOR = tf.TensorSpec([None], tf.float64)


def _run(staged, values, *args, answer, seed=(1, 2)):
  """Calls all stages; `answer` maps (stage, kind, value) to an answer."""

  @tf.function(autograph=False)
  def start(values, args):
    return staged.start(values, *args, seed=tf.constant(seed, tf.int64))

  sent, carried = start(values, args)
  kept = {0: carried}
  for number in range(1, staged.num_stages):
    answers = [
        tf.nest.map_structure(
            lambda v, n=number, q=question: answer(n - 1, q.kind, v),
            asked.value,
        )
        for question, asked in zip(staged.questions[number - 1], sent)
    ]
    inputs = {s: kept[s][number] for s in staged.sources_of(number)}
    proceed = tf.function(
        lambda a, c, n=number: staged.proceed(n, a, c), autograph=False
    )
    sent, kept[number] = proceed(answers, inputs)
  return tf.nest.map_structure(lambda t: t.numpy(), sent)


def _echo(stage, kind, value):
  del stage, kind
  return value


def _double(stage, kind, value):
  del stage, kind
  return 2 * value


def _pass_on(ask):
  """Returns an identity function that asks a question in each direction."""

  @tf.custom_gradient
  def pass_on(h):
    return ask('forward', h), lambda dy: ask('backward', dy)

  return pass_on


def _operations(staged, op_type):
  """Returns the stages in which an operation occurs."""
  return [
      number
      for number, stage in enumerate(staged._stages)
      for node in stage.graph_def.node
      if node.op == op_type
  ]


def test_no_question_is_one_stage():
  staged = staged_function.StagedFunction(lambda ask, x: x + 1, [], _VECTOR)
  assert staged.num_stages == 1
  assert staged.questions == ()
  np.testing.assert_equal(
      _run(staged, [], np.array([1.0, 2.0]), answer=_echo), [2.0, 3.0]
  )


def test_questions_one_after_the_other():
  def fn(ask, x):
    first = ask('first', tf.reduce_sum(x))
    second = ask('second', dict(a=tf.reduce_sum(x * first), b=first))
    return x * second['a'] + second['b']

  staged = staged_function.StagedFunction(fn, [], _VECTOR)
  assert [[q.kind for q in qs] for qs in staged.questions] == [
      ['first'],
      ['second'],
  ]
  assert set(staged.questions[1][0].value) == {'a', 'b'}
  x = np.array([1.0, 2.0])
  first = 2 * 3.0
  a, b = 2 * (3.0 * first), 2 * first
  np.testing.assert_allclose(_run(staged, [], x, answer=_double), x * a + b)


def test_independent_questions_are_asked_together():
  def fn(ask, x):
    left = ask('left', tf.reduce_sum(x))
    right = ask('right', tf.reduce_max(x))
    left = ask('left again', left + 1)
    return left + right + ask('sum', left + right)

  staged = staged_function.StagedFunction(fn, [], _VECTOR)
  assert [[q.kind for q in qs] for qs in staged.questions] == [
      ['left', 'right'],
      ['left again'],
      ['sum'],
  ]
  result = _run(staged, [], np.array([1.0, 5.0]), answer=_double)
  left, right = 2 * (2 * 6.0 + 1), 2 * 5.0
  assert result == left + right + 2 * (left + right)


def test_answers_match_their_questions():
  def fn(ask, x):
    answers = [ask(number, x[number]) for number in range(3)]
    return tf.stack(answers)

  staged = staged_function.StagedFunction(fn, [], _VECTOR)
  result = _run(
      staged,
      [],
      np.array([1.0, 2.0, 3.0]),
      answer=lambda stage, kind, value: value + 10 * kind,
  )
  np.testing.assert_equal(result, [1.0, 12.0, 23.0])


def test_questions_without_use_are_not_asked():
  def fn(ask, x):
    ask('unused', ask('only for the unused', tf.reduce_sum(x)))
    return ask('used', x[0])

  staged = staged_function.StagedFunction(fn, [], _VECTOR)
  assert [[q.kind for q in qs] for qs in staged.questions] == [['used']]


def test_gradient_across_questions_computes_nothing_twice():
  """As in a synchronized layer, with a question in each direction."""
  weight = tf.Variable(np.array([[1.0, -2.0], [0.5, 3.0]]))

  def fn(ask, x):
    @tf.custom_gradient
    def shift(h):
      mean = ask('forward', tf.reduce_sum(h))

      def gradient(dy):
        return dy + ask('backward', tf.reduce_sum(dy))

      return h - mean, gradient

    with tf.GradientTape() as tape:
      h = tf.matmul(x, weight)
      loss = tf.reduce_sum(tf.math.square(tf.nn.softplus(shift(h))))
    return tape.gradient(loss, weight)

  spec = tf.TensorSpec([None, 2], tf.float64)
  staged = staged_function.StagedFunction(fn, [weight], spec)
  assert staged.num_stages == 3
  assert _operations(staged, 'Softplus') == [1]
  assert _operations(staged, 'MatMul') == [0, 2]
  x = np.array([[1.0, 2.0], [-1.0, 0.3], [0.2, 0.7]])
  value = weight.numpy()
  h = x @ value
  z = h - 2 * h.sum()
  dz = 2 * np.log1p(np.exp(z)) / (1 + np.exp(-z))
  expected = x.T @ (dz + 2 * dz.sum())
  np.testing.assert_allclose(
      _run(staged, [value], x, answer=_double), expected, rtol=1e-12
  )


def test_variables_are_read_and_written_in_the_order_of_the_code():
  variable = tf.Variable(np.float64(3.0))
  counter = tf.Variable(np.float64(10.0))

  def fn(ask, x):
    before = tf.identity(variable)
    variable.assign(ask('q', x[0] * before))
    between = variable.read_value()
    variable.assign_add(between)
    counter.assign_sub(variable)
    ask_again = ask('r', tf.identity(variable))
    variable.assign(ask_again + before)
    return before, between, variable.read_value(), counter.read_value()

  staged = staged_function.StagedFunction(fn, [variable], _VECTOR)
  result = _run(staged, [np.float64(5.0)], np.array([7.0]), answer=_double)
  before, between = 5.0, 2 * 35.0
  assert result == (before, between, 2 * (2 * between) + before, 10 - 140.0)
  # The variables did not change.
  assert variable.numpy() == 3.0
  assert counter.numpy() == 10.0


def test_operations_that_take_a_variable():
  table = tf.Variable(np.arange(6.0).reshape(3, 2))

  def fn(ask, x):
    row = tf.gather(table, 1)
    answer = ask('q', row * x[0])
    table.scatter_nd_update([[0]], [answer])
    return table.read_value(), tf.gather(table, 0)

  staged = staged_function.StagedFunction(fn, [table], _VECTOR)
  value = 10 + np.arange(6.0).reshape(3, 2)
  found, row = _run(staged, [value], np.array([3.0]), answer=_double)
  np.testing.assert_equal(row, 2 * 3 * value[1])
  np.testing.assert_equal(found, [row, value[1], value[2]])


def test_a_loop_between_questions():
  """Tensors that a loop keeps for its gradient are computed again."""
  weight = tf.Variable(np.float64(0.9))

  def fn(ask, x):
    pass_on = _pass_on(ask)
    with tf.GradientTape() as tape:
      h = tf.while_loop(
          lambda i, h: i < 4,
          lambda i, h: (i + 1, tf.sin(h * weight)),
          (0, pass_on(x)),
      )[1]
      loss = tf.reduce_sum(pass_on(h) ** 2)
    return loss, tape.gradient(loss, weight)

  spec = tf.TensorSpec([3], tf.float64)
  staged = staged_function.StagedFunction(fn, [weight], spec)
  x = np.array([0.3, -1.2, 2.0])
  loss, gradient = _run(staged, [np.float64(0.7)], x, answer=_echo)
  w = tf.Variable(np.float64(0.7))
  with tf.GradientTape() as tape:
    h = tf.constant(x)
    for _ in range(4):
      h = tf.sin(h * w)
    expected = tf.reduce_sum(h**2)
  np.testing.assert_allclose(loss, expected, rtol=1e-12)
  np.testing.assert_allclose(gradient, tape.gradient(expected, w), rtol=1e-12)


def test_a_variable_that_a_loop_writes():
  """The later stage gets the variable's value after the loop."""
  variable = tf.Variable(np.float64(1.0))

  def fn(ask, x):
    def step(i):
      variable.assign_add(x[0])
      return [i + 1]

    tf.while_loop(lambda i: i < 3, step, [0])
    return ask('q', x[1]) + variable.read_value()

  staged = staged_function.StagedFunction(fn, [variable], _VECTOR)
  result = _run(
      staged, [np.float64(10.0)], np.array([5.0, 7.0]), answer=_double
  )
  assert result == 2 * 7 + 10 + 3 * 5


@pytest.mark.parametrize('new_layer', random_layers.KINDS)
def test_random_numbers_depend_on_the_seed_alone_and_are_drawn_once(new_layer):
  layer = new_layer()
  layer(tf.ones([1, 3]))
  weight = tf.Variable(np.float32(1.0))

  def fn(ask, x):
    with tf.GradientTape() as tape:
      first = layer(x * weight, training=True)
      second = layer(x * weight, training=True)
      asked = ask('q', tf.identity(first))
      loss = tf.reduce_sum(first * tf.stop_gradient(asked) + second * 0)
    return first, second, tape.gradient(loss, weight)

  spec = tf.TensorSpec([None, 50], tf.float32)
  staged = staged_function.StagedFunction(fn, [weight], spec)
  assert staged.is_random
  x = np.ones([4, 50], np.float32)
  value = [np.float32(1.0)]
  first, second, gradient = _run(staged, value, x, answer=_echo)
  assert 50 < np.count_nonzero(first) < 150
  assert np.any(first != second)
  # With another mask in the backward pass it would be smaller.
  assert gradient == pytest.approx(np.sum(first * first))
  again = _run(staged, value, x, answer=_echo)
  np.testing.assert_equal(again[0], first)
  other = _run(staged, value, x, answer=_echo, seed=(1, 3))
  assert np.any(other[0] != first)


@pytest.mark.parametrize('new_layer', random_layers.KINDS)
def test_random_numbers_for_an_answer(new_layer):
  """The number of draws is known only after the question."""
  layer = new_layer()
  layer(tf.ones([1, 3]))

  def fn(ask, x):
    return layer(ask('q', x), training=True)

  spec = tf.TensorSpec([None, 50], tf.float32)
  staged = staged_function.StagedFunction(fn, [], spec)
  assert staged.is_random
  x = np.ones([4, 50], np.float32)
  found = _run(staged, [], x, answer=_double)
  assert set(np.unique(found)) == {0.0, 4.0}
  np.testing.assert_equal(_run(staged, [], x, answer=_double), found)
  other = _run(staged, [], x, answer=_double, seed=(1, 3))
  assert np.any(other != found)


def test_random_numbers_in_a_loop_are_an_error():
  weight = tf.Variable(np.float64(0.9))

  def fn(ask, x):
    pass_on = _pass_on(ask)
    with tf.GradientTape() as tape:
      h = tf.while_loop(
          lambda i, h: i < 4,
          lambda i, h: (
              i + 1,
              tf.sin(h * weight * tf.random.uniform([3], dtype=tf.float64)),
          ),
          (0, x),
      )[1]
      loss = tf.reduce_sum(pass_on(h) ** 2)
    return tape.gradient(loss, weight)

  with pytest.raises(ValueError, match='While.*random'):
    staged_function.StagedFunction(fn, [weight], tf.TensorSpec([3], tf.float64))


def test_a_question_in_a_condition_is_an_error():
  def fn(ask, x):
    return tf.cond(x[0] > 0, lambda: ask('q', x[0]), lambda: x[0])

  with pytest.raises(ValueError, match='inside a loop, a condition'):
    staged_function.StagedFunction(fn, [], _VECTOR)


def test_carried_tensors_do_not_grow_with_the_questions():
  def carried(length):
    def fn(ask, x):
      for number in range(length):
        x = tf.sin(x) + ask(number, tf.reduce_sum(x))
      return x

    staged = staged_function.StagedFunction(fn, [], _VECTOR)
    return max(len(stage.carried) for stage in staged._stages)

  assert carried(40) == carried(5)


@pytest.mark.parametrize('dtype', [tf.int32, tf.int64])
def test_shapes_are_passed_on_without_elements(dtype):
  """XLA compiles a stage that makes tensors of such shapes."""

  def fn(ask, x):
    rows, columns = tf.unstack(tf.shape(x, dtype))
    total = ask('total', tf.reduce_sum(x))
    return tf.fill(tf.stack([columns, 2 * rows]), total)

  spec = tf.TensorSpec([None, 3], tf.float64)
  staged = staged_function.StagedFunction(fn, [], spec)
  x = np.ones([4, 3])
  start = tf.function(lambda x: staged.start([], x).carried, autograph=False)
  carried = start(tf.constant(x))
  ((kept,),) = carried.values()
  assert kept.shape == [4, 3, 0]

  @tf.function(jit_compile=True, autograph=False)
  def proceed(answers, kept):
    return staged.proceed(1, answers, {0: [kept]}).result

  answers = [tf.constant(5.0, tf.float64)]
  np.testing.assert_array_equal(proceed(answers, kept), np.full([3, 8], 5.0))


def test_a_shape_of_unknown_length_is_passed_on_as_it_is():
  def fn(ask, x):
    shape = tf.shape(x)
    return tf.fill(shape, ask('total', tf.reduce_sum(x)))

  staged = staged_function.StagedFunction(
      fn, [], tf.TensorSpec(None, tf.float64)
  )
  np.testing.assert_array_equal(
      _run(staged, [], np.ones([2, 3]), answer=_double), np.full([2, 3], 12.0)
  )
