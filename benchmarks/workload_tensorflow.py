"""The public workloads with this project and with plain Keras."""

from typing import Any

import workload_data
from workload_data import ROUND
from workload_data import TEST
from workload_data import TEST_BATCH_SIZE


def build_model(workload: workload_data.Workload) -> Any:
  """Builds the Keras model of a workload, with logits as outputs."""
  import keras

  layers = keras.layers
  inputs = keras.Input(workload.image_shape)

  def convolve(x, filters):
    x = layers.Conv2D(filters, 3)(x)
    if workload.kind == 'cnn_bn':
      x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)
    return layers.ReLU()(x)

  def drop(x, rate):
    return layers.Dropout(rate)(x) if workload.has_dropout else x

  x = inputs
  if workload.kind == 'linear':
    x = layers.Flatten()(x)
  else:
    x = layers.MaxPooling2D()(convolve(convolve(x, 32), 64))
    x = layers.Flatten()(drop(x, 0.25))
    x = drop(layers.Dense(128, activation='relu')(x), 0.5)
  return keras.Model(inputs, layers.Dense(workload.num_classes)(x))


def run_tff_bn(
    workload: workload_data.Workload, turns: workload_data.Turns
) -> None:
  """Trains with FedAvg of this project, as its programs do."""
  import keras
  import numpy as np
  import tensorflow_federated as tff

  from tff_bn import BatchNormModel
  from tff_bn import algorithms
  from tff_bn import data as tff_bn_data
  from tff_bn import runtime
  from tff_bn.training import evaluation
  from tff_bn.training import round_data

  runtime.divide_cores(workload.clients_per_round)
  source = workload_data.Data(workload)
  numbers = range(workload.num_clients)
  tests = np.array_split(np.arange(workload.test_samples), len(numbers))
  data = tff_bn_data.from_clients(
      {str(number): source.client(number) for number in numbers},
      {
          str(number): (source.x_test[part], source.y_test[part])
          for number, part in zip(numbers, tests)
      },
      num_classes=workload.num_classes,
  )
  model = BatchNormModel(
      lambda: build_model(workload),
      input_spec=data.element_spec,
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
      metrics_fn=lambda: [keras.metrics.SparseCategoricalAccuracy('accuracy')],
  )
  process = algorithms.build_fed_avg(
      model, tff.learning.optimizers.build_sgdm(workload.learning_rate)
  )
  evaluator = evaluation.Evaluator(model)
  test_dataset = data.test_dataset(TEST_BATCH_SIZE)

  def test(state):
    turns.begin()
    metrics = evaluator.evaluate(process.get_model_weights(state), test_dataset)
    turns.end(TEST, loss=metrics['loss'], accuracy=metrics['accuracy'])

  with runtime.in_process_runtime():
    weights = model.to_model_weights(workload_data.initial_weights(workload))
    state = process.set_model_weights(process.initialize(), weights)
    turns.ready()
    test(state)
    for round_num in range(1, workload.rounds + 1):
      turns.begin()
      datasets = [
          round_data.RoundDataset(
              data,
              [str(number)],
              seed=workload.seed,
              round_num=round_num,
              batch_size=workload.batch_size,
              local_epochs=1,
          )
          for number in workload.clients_of_round(round_num)
      ]
      output = process.next(state, datasets)
      state = output.state
      loss = output.metrics['client_work']['train']['loss']
      turns.end(ROUND, loss=loss)
      if workload.is_tested(round_num):
        test(state)


def run_keras(
    workload: workload_data.Workload, turns: workload_data.Turns
) -> None:
  """Trains with a Python loop that calls a `tf.function` for each step."""
  import keras
  import numpy as np
  import tensorflow as tf

  source = workload_data.Data(workload)
  model = build_model(workload)
  model.set_weights(workload_data.initial_weights(workload))
  loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  x_test, y_test = workload_data.scale(source.x_test), source.y_test
  trainable = model.trainable_weights

  @tf.function(reduce_retracing=True)
  def step(x, y):
    with tf.GradientTape() as tape:
      loss = loss_fn(y, model(x, training=True))
    gradients = tape.gradient(loss, trainable)
    for variable, gradient in zip(trainable, gradients):
      variable.assign_sub(workload.learning_rate * gradient)
    return loss

  @tf.function(reduce_retracing=True)
  def evaluate(x, y):
    outputs = model(x, training=False)
    right = tf.argmax(outputs, 1, tf.int32) == y
    return loss_fn(y, outputs), tf.reduce_mean(tf.cast(right, tf.float32))

  def test():
    turns.begin()
    sums = np.zeros(2)
    for start in range(0, len(y_test), TEST_BATCH_SIZE):
      part = slice(start, start + TEST_BATCH_SIZE)
      values = evaluate(x_test[part], y_test[part])
      sums += [float(value) * len(y_test[part]) for value in values]
    loss, accuracy = sums / len(y_test)
    turns.end(TEST, loss=loss, accuracy=accuracy)

  turns.ready()
  test()
  for round_num in range(1, workload.rounds + 1):
    turns.begin()
    clients = workload.clients_of_round(round_num)
    initial = model.get_weights()
    totals = [np.zeros_like(value) for value in initial]
    losses = []
    for number in clients:
      x, y = source.scaled_client(number)
      order = np.random.default_rng([round_num, number]).permutation(len(y))
      for variable, value in zip(model.weights, initial):
        variable.assign(value)
      for start in range(0, len(y), workload.batch_size):
        part = order[start : start + workload.batch_size]
        losses.append(step(x[part], y[part]))
      for total, value in zip(totals, model.get_weights()):
        total += value
    for variable, total in zip(model.weights, totals):
      variable.assign(total / len(clients))
    turns.end(ROUND, loss=np.mean([float(loss) for loss in losses]))
    if workload.is_tested(round_num):
      test()
