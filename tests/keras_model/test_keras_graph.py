"""Tests of the graph of calls in a functional model."""

import keras

from tff_bn.keras_model import keras_graph

_LAYERS = keras.layers


def _names(model):
  return [call.layer.name for call in keras_graph.calls(model)]


def _branches():
  inputs = [keras.Input((4,)), keras.Input((4,))]
  shared = _LAYERS.Dense(4, name='shared')
  a = shared(inputs[0])
  b = shared(_LAYERS.ReLU(name='relu')(inputs[1]))
  c = _LAYERS.Subtract(name='subtract')([a, b])
  d = _LAYERS.Add(name='add')([c, a, b])
  return keras.Model(inputs, [d, c]), shared


def test_a_call_comes_after_the_calls_that_it_needs():
  model, _ = _branches()
  # The shared layer is called twice. A result used twice is computed once.
  assert _names(model) == ['shared', 'relu', 'shared', 'subtract', 'add']
  known = {id(tensor) for tensor in model.inputs}
  for call in keras_graph.calls(model):
    assert {id(tensor) for tensor in call.inputs} <= known
    known.update(id(tensor) for tensor in call.outputs)
  assert {id(tensor) for tensor in model.outputs} <= known


def test_calls_outside_the_model_are_left_out():
  model, shared = _branches()
  shared(keras.Input((4,)))
  assert _names(model) == ['shared', 'relu', 'shared', 'subtract', 'add']
  # A part of the model, from the middle to the end.
  a, b = keras_graph.calls(model)[-1].inputs[1:]
  part = keras.Model([a, b], model.outputs[1])
  assert _names(part) == ['subtract']


def test_a_nested_model_is_one_call():
  inner, _ = _branches()
  inputs = keras.Input((4,))
  outputs = inner([inputs, inputs])
  model = keras.Model(inputs, outputs)
  (call,) = keras_graph.calls(model)
  assert call.layer is inner
  assert len(call.outputs) == 2


def test_an_output_that_is_an_input():
  inputs = keras.Input((4,))
  assert not keras_graph.calls(keras.Model(inputs, inputs))


def test_functions_and_operators_are_calls_of_operations():
  x = keras.Input((4,))
  y = keras.ops.reshape(x, (-1, 2, 2))
  z = y[:, 0] * 2.0
  calls = keras_graph.calls(keras.Model(x, z))
  assert len(calls) == 3
  for call in calls:
    assert isinstance(call.layer, keras.Operation)
    assert not isinstance(call.layer, keras.Layer)
  assert [call.inputs[0] for call in calls] == [x, y, calls[1].outputs[0]]
  assert calls[2].outputs == [z]


def test_arguments_of_a_call():
  query, value = keras.Input((3, 4)), keras.Input((5, 4))
  attention = _LAYERS.MultiHeadAttention(2, 2)
  outputs = attention(query, value=value, training=False)
  (call,) = keras_graph.calls(keras.Model([query, value], outputs))
  assert call.args == (query,)
  assert call.kwargs == {'value': value, 'training': False}
  assert call.inputs == [query, value]


def test_a_call_is_repeated_with_other_tensors():
  model, _ = _branches()
  calls = keras_graph.calls(model)
  others = [keras.Input((4,)), keras.Input((4,)), keras.Input((4,))]
  tensors = {id(x): y for x, y in zip(calls[-1].inputs, others, strict=True)}
  (output,) = calls[-1].repeat(_LAYERS.Add(name='sum'), tensors)
  (call,) = keras_graph.calls(keras.Model(others, output))
  assert call.layer.name == 'sum'
  assert call.inputs == others


def test_the_producer_of_a_tensor():
  model, shared = _branches()
  assert keras_graph.producer(model.outputs[0]).layer.name == 'add'
  producer = keras_graph.producer(model.inputs[0])
  assert isinstance(producer.layer, _LAYERS.InputLayer)
  assert producer.outputs == [model.inputs[0]]
  a = keras_graph.calls(model)[-1].inputs[1]
  assert keras_graph.producer(a).layer is shared
  assert keras_graph.producer(a).inputs == [model.inputs[0]]
