"""Perceptrons: those of the papers, and one for tables of features."""

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import keras

from tff_bn.models import normalization as normalization_lib

_MAX_EMBEDDING = 50


def build_mlp3(
    input_shape: tuple[int, ...],
    num_outputs: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds the 3-layer network of the FedTAN paper (section 6.1).

  It has a hidden layer of 30 units, which normalization and ReLU follow.

  Returns:
    An untrained functional model with logits as output. With batch
    normalization, 784 inputs and ten classes it has 23,950 values, 60 of them
    moving means and variances. Table 5 of the paper counts 23,920: a bias of
    the hidden layer, which is redundant, and no statistics.
  """
  return _build('mlp3', input_shape, num_outputs, normalization, [30], '')


def build_mlp4(
    input_shape: tuple[int, ...],
    num_outputs: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds the perceptron of the FedPAN paper (appendix B).

  Li et al., Federated Learning with Position-Aware Neurons, CVPR 2022. It has
  three hidden layers of 1024 units. Normalization and ReLU follow each of them;
  the paper's network has no normalization.
  """
  return _build(
      'mlp4',
      input_shape,
      num_outputs,
      normalization,
      [1024, 1024, 1024],
      kernel_initializer='he_normal',
  )


def build_abide_mlp(
    input_shape: tuple[int, ...],
    num_outputs: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds the perceptron of the FedBN paper for ABIDE (section 5.2).

  It has two hidden layers of 16 units. Normalization and ReLU follow each of
  them. The paper's inputs are vectors of 5,995 connections between regions of
  the brain, with two classes.
  """
  return _build('abide_mlp', input_shape, num_outputs, normalization, [16, 16])


def build_fedbn_two_layer(
    input_shape: tuple[int, ...],
    num_outputs: int,
    normalization: str = 'batch',
) -> keras.Model:
  """Builds the network of the FedBN paper's synthetic experiment.

  Li et al., ICLR 2021, section 4 and appendix F. It has a hidden layer of 100
  neurons, which normalization and ReLU follow. As in the paper, its weights
  and, without BN, its biases are drawn from a normal distribution. The
  deviation is not legible in the paper's text; it is 1 here.
  """
  normal = keras.initializers.RandomNormal
  return _build(
      'fedbn_two_layer',
      input_shape,
      num_outputs,
      normalization,
      [100],
      '',
      kernel_initializer=normal(stddev=1.0),
      bias_initializer=normal(stddev=1.0),
  )


def build_tabular(
    input_shape: tuple[int],
    num_outputs: int,
    normalization: str = 'batch',
    category_counts: Optional[Mapping[int, int]] = None,
) -> keras.Model:
  """Builds a perceptron for vectors of features, such as rows of a table.

  It has hidden layers of 64 and 32 units. Normalization and ReLU follow each of
  them. Each feature in `category_counts` is the number of a category and is
  replaced by a trained vector; the layer is `embedding_N` for feature N.
  Numbers that are no category have the vector 0.

  Args:
    input_shape: The number of features.
    num_outputs: The number of outputs.
    normalization: See `build_model_fn`.
    category_counts: The position of a feature -> its number of categories.

  Returns:
    An untrained functional model. With batch normalization, `d` features and
    `k` outputs it has `64 d + 33 k + 2432` values, 192 of them moving means and
    variances. A category counts as `embedding_size(n)` features, and its layer
    has `n` times as many values.
  """
  inputs = keras.Input(input_shape, name='input')
  features = inputs
  if category_counts:
    features = _embed(inputs, category_counts)
  return _build_from(
      inputs,
      features,
      'tabular',
      num_outputs,
      normalization,
      [64, 32],
  )


def embedding_size(num_categories: int) -> int:
  """Returns the length of the vectors of categories.

  It is half of the number of categories, at most 50: the rule of fast.ai's
  course "Practical Deep Learning for Coders" of 2018. Guo and Berkhahn, Entity
  Embeddings of Categorical Variables, 2016, chose the lengths by hand.
  """
  return min(_MAX_EMBEDDING, (num_categories + 1) // 2)


def _embed(inputs: Any, category_counts: Mapping[int, int]) -> Any:
  """Replaces numbers of categories by vectors, after the other features."""
  ops = keras.ops
  others = [n for n in range(inputs.shape[-1]) if n not in category_counts]
  parts = [ops.take(inputs, others, axis=-1)] if others else []
  for position, count in category_counts.items():
    # Before any layer: in mixed precision, layers round large numbers.
    number = ops.cast(ops.take(inputs, position, axis=-1), 'int32')
    known = ops.clip(number, 0, count - 1)
    vector = keras.layers.Embedding(
        count, embedding_size(count), name=f'embedding_{position}'
    )(known)
    is_known = ops.cast(ops.equal(number, known), vector.dtype)
    parts.append(vector * ops.expand_dims(is_known, -1))
  return ops.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]


def _build(
    name: str,
    input_shape: tuple[int, ...],
    num_outputs: int,
    normalization: str,
    hidden: Sequence[int],
    suffix: str = '_{}',
    **arguments: Any,
) -> keras.Model:
  """Builds a perceptron with hidden layers of these sizes.

  `suffix` ends the names of layers, given the number of the hidden layer, and
  `arguments` are those of the hidden layers.
  """
  inputs = keras.Input(input_shape, name='input')
  return _build_from(
      inputs,
      inputs,
      name,
      num_outputs,
      normalization,
      hidden,
      suffix,
      **arguments,
  )


def _build_from(
    inputs: Any,
    features: Any,
    name: str,
    num_outputs: int,
    normalization: str,
    hidden: Sequence[int],
    suffix: str = '_{}',
    **arguments: Any,
) -> keras.Model:
  """Builds a perceptron on features of the inputs, see `_build`."""
  layers = keras.layers
  x = layers.Flatten(name='flatten')(features)
  for number, units in enumerate(hidden, start=1):
    end = suffix.format(number)
    x = normalization_lib.dense(
        x, units, normalization, **arguments, name=f'hidden{end}'
    )
    x = normalization_lib.normalize(x, normalization, f'norm{end}')
    x = layers.ReLU(name=f'relu{end}')(x)
  outputs = normalization_lib.logits(x, num_outputs, normalization)
  return keras.Model(inputs, outputs, name=name)
