"""Tests for `tff_bn.keras_graph`."""

import tensorflow as tf

from tff_bn import keras_graph

_LAYERS = tf.keras.layers


def _names(model):
  return [node.layer.name for node in keras_graph.calls(model)]


def test_a_chain():
  model = tf.keras.Sequential(
      [
          tf.keras.Input((4,)),
          _LAYERS.Dense(3, name='z'),
          _LAYERS.ReLU(name='y'),
          _LAYERS.Dense(2, name='x'),
      ]
  )
  assert _names(model) == ['z', 'y', 'x']


def _branches():
  inputs = [tf.keras.Input((4,)), tf.keras.Input((4,))]
  shared = _LAYERS.Dense(4, name='shared')
  a = shared(inputs[0])
  b = shared(_LAYERS.ReLU(name='relu')(inputs[1]))
  c = _LAYERS.Subtract(name='subtract')([a, b])
  d = _LAYERS.Add(name='add')([c, a, b])
  return tf.keras.Model(inputs, [d, c]), shared


def test_a_call_comes_after_all_that_it_needs():
  model, _ = _branches()
  # The shared layer is called twice; what is used twice is called once.
  assert _names(model) == ['shared', 'relu', 'shared', 'subtract', 'add']
  known = {id(tensor) for tensor in model.inputs}
  for node in keras_graph.calls(model):
    assert {id(tensor) for tensor in node.keras_inputs} <= known
    known.update(id(tensor) for tensor in tf.nest.flatten(node.outputs))
  assert {id(tensor) for tensor in model.outputs} <= known


def test_calls_that_are_not_part_of_the_model_are_left_out():
  model, shared = _branches()
  shared(tf.keras.Input((4,)))
  assert _names(model) == ['shared', 'relu', 'shared', 'subtract', 'add']
  # A part of it, from the middle to the middle.
  a, b = (shared.get_output_at(i) for i in (0, 1))
  part = tf.keras.Model([a, b], model.outputs[1])
  assert _names(part) == ['subtract']


def test_a_nested_model_is_one_call():
  inner, _ = _branches()
  inputs = tf.keras.Input((4,))
  outputs = inner([inputs, inputs])
  model = tf.keras.Model(inputs, outputs)
  (node,) = keras_graph.calls(model)
  assert node.layer is inner
  assert len(tf.nest.flatten(node.outputs)) == 2


def test_an_output_that_is_an_input():
  inputs = tf.keras.Input((4,))
  assert not keras_graph.calls(tf.keras.Model(inputs, inputs))
