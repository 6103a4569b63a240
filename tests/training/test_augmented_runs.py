"""Augmented batches in TFF's runtime, and runs that are continued."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import training_example

from tff_bn import algorithms
from tff_bn import training
from tff_bn.training import saved_models


@pytest.fixture(
    params=[
        pytest.param(('standardized', 'flip_rotate'), id='standardized'),
        pytest.param(
            ('random_client', 'none'),
            id='random_client',
            marks=pytest.mark.slow,
        ),
    ],
)
def data(request):
  scaling, augmentation = request.param
  return dataclasses.replace(
      training_example.build_data().scaled(scaling), augmentation=augmentation
  )


def test_batches_in_the_native_runtime(data, native_runtime):
  draw = dict(seed=1, round_num=2, batch_size=16, local_steps=2)
  clients = [data.client_dataset([c], **draw) for c in data.client_ids]
  image_type = tff.TensorType(np.float32, [None, 8, 8, 1])
  batch_type = tff.SequenceType((image_type, tff.TensorType(np.int32, [None])))

  @tff.tensorflow.computation(batch_type)
  def images(batches):
    return batches.reduce(
        tf.zeros([0, 8, 8, 1]), lambda a, batch: tf.concat([a, batch[0]], 0)
    )

  @tff.federated_computation(tff.FederatedType(batch_type, tff.CLIENTS))
  def all_images(batches):
    return tff.federated_map(images, batches)

  for found, client in zip(all_images(clients), clients, strict=True):
    expected = [x for x, _ in client.as_numpy_iterator()]
    np.testing.assert_array_equal(found, np.concatenate(expected))


@pytest.mark.usefixtures('in_process_runtime')
def test_continued_run_is_the_same(data, tmp_path):
  model = training_example.build_model(data)
  # One client with the data of all: its batches are drawn from the union.
  process = algorithms.build_centralized(
      model, tff.learning.optimizers.build_sgdm(0.1)
  )

  def train(folder, rounds, of=data):
    config = dataclasses.replace(
        training_example.CONFIG, rounds=rounds, local_steps=8
    )
    result = training.train(
        process, model, of, config, tmp_path / folder, train_on_union=True
    )
    return [np.asarray(v) for v in tf.nest.flatten(result.model_weights)]

  at_once = train('once', 2)
  train('twice', 1)
  for a, b in zip(train('twice', 2), at_once, strict=True):
    np.testing.assert_array_equal(a, b)
  assert (tmp_path / 'once/metrics.csv').read_text() == (
      tmp_path / 'twice/metrics.csv'
  ).read_text()
  # The scaling is saved with the model.
  saved = saved_models.SavedModels(tmp_path / 'once' / 'model')
  assert saved.manifest['pixel_scaling'] == data.dataset.scaling.to_json()
  # Without augmentation, or random scaling, it is another run.
  plain = dataclasses.replace(data, augmentation='none', client_scalings=None)
  other = train('plain', 2, plain)
  assert any((a != b).any() for a, b in zip(other, at_once))
  with pytest.raises(ValueError, match='data'):
    train('plain', 3, data)
