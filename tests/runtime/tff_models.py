"""A network in plain TensorFlow for TFF's learning algorithms.

TFF's own adapters, such as `tff.learning.models.from_keras_model`, support only
models of Keras 2.
"""

import collections

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

_INPUT_SPEC = (
    tf.TensorSpec([None, 4], tf.float32),
    tf.TensorSpec([None], tf.int32),
)
_SHAPES = ((4, 5), (5,), (5, 3), (3,))


def build_weights(seed=1):
  """Returns the weights of two dense layers."""
  rng = np.random.default_rng(seed)
  return [rng.uniform(-0.8, 0.8, s).astype(np.float32) for s in _SHAPES]


def compute_logits(weights, x):
  """Computes two dense layers with a ReLU between them."""
  kernel_1, bias_1, kernel_2, bias_2 = weights
  return tf.nn.relu(x @ kernel_1 + bias_1) @ kernel_2 + bias_2


def compute_loss(logits, labels):
  """Computes the mean cross-entropy."""
  return tf.reduce_mean(
      tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
  )


def _num_correct(logits, labels):
  predictions = tf.argmax(logits, 1, tf.int32)
  # Not `==`, which compares identities in the graphs that TFF makes.
  return tf.reduce_sum(tf.cast(tf.equal(predictions, labels), tf.float32))


def _num_examples(labels):
  return tf.cast(tf.size(labels), tf.float32)


def _finalize(total_and_count):
  total, count = total_and_count
  return tf.math.divide_no_nan(total, count)


class VariableModel(tff.learning.models.VariableModel):
  """The network with variables and with metrics as in Keras."""

  input_spec = _INPUT_SPEC
  non_trainable_variables = ()
  trainable_variables = ()  # `__init__` sets it; TFF needs a class attribute.
  local_variables = ()  # Likewise.

  def __init__(self):
    self.trainable_variables = [tf.Variable(w) for w in build_weights()]
    self.local_variables = [
        tf.Variable(tf.zeros([]), trainable=False) for _ in range(3)
    ]

  @tf.function
  def predict_on_batch(self, batch_input, training=True):
    del training  # It makes no difference.
    return compute_logits(self.trainable_variables, batch_input)

  @tf.function
  def forward_pass(self, batch_input, training=True):
    x, labels = batch_input
    logits = self.predict_on_batch(x, training)
    loss, count = compute_loss(logits, labels), _num_examples(labels)
    for variable, value in zip(
        self.local_variables,
        (_num_correct(logits, labels), loss * count, count),
    ):
      variable.assign_add(value)
    return tff.learning.models.BatchOutput(loss, logits, tf.size(labels))

  @tf.function
  def report_local_unfinalized_metrics(self):
    num_correct, loss, count = self.local_variables
    return collections.OrderedDict(
        accuracy=(num_correct, count), loss=(loss, count), num_examples=count
    )

  def metric_finalizers(self):
    return collections.OrderedDict(
        accuracy=tf.function(_finalize),
        loss=tf.function(_finalize),
        num_examples=tf.function(lambda count: count),
    )

  @tf.function
  def reset_metrics(self):
    for variable in self.local_variables:
      variable.assign(0.0)
