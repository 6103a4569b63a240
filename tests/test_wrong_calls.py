"""Tests that wrong calls of the public API have errors that explain them.

The tests of each room have more; here are mistakes that led to errors of other
packages, or to none.
"""

import re

import numpy as np
import pytest

import tff_bn
from tff_bn import BatchNormModel
from tff_bn import algorithms
from tff_bn import data
from tff_bn import models
from tff_bn import training
from tff_bn.papers import units


@pytest.fixture(scope='module', name='digits')
def _digits():
  return data.load_dataset('digits')


@pytest.fixture(scope='module', name='federated')
def _federated(digits):
  return data.split_dataset(digits, 'iid', num_clients=3, seed=0)


# Calls without mistakes; a wrong call changes some of the arguments.
def _split(digits, **changes):
  right = dict(dataset=digits, split='iid', num_clients=2, seed=0)
  return data.split_dataset(**{**right, **changes})


def _batches(federated, **changes):
  right = dict(seed=0, round_num=1, batch_size=4, local_steps=1)
  return federated.client_dataset(
      **{'client_ids': ['client_0'], **right, **changes}
  )


def _config(**changes):
  return training.TrainingConfig(
      **{**dict(rounds=1, batch_size=4, local_steps=1), **changes}
  )


def test_right_calls(digits, federated):
  _split(digits)
  _batches(federated)
  _config()


# Calls, and the pattern of the error.
_WRONG = r"""
data.load_dataset(None)
    TypeError: dataset must be the name of a dataset
data.load_dataset(('x', 'y'))
    TypeError: dataset must be the name of a dataset
_split('digits')
    TypeError: .*a tff_bn.data.Dataset.*load_dataset\(name\)
_split(digits, split=None)
    TypeError: split must be one of iid, .*, but is None
_split(digits, split='dirichlet', dirichlet_by=1)
    TypeError: dirichlet_by must be one of class, client, but is 1
_split(digits, num_clients=2.5)
    TypeError: num_clients must be an integer .* is 2.5
_split(digits, seed='0')
    TypeError: seed must be an integer .* is '0'
_split(digits, alpha=1)
    TypeError: 'alpha' is not .*; the parameters are .*dirichlet_alph
_split(digits, split='dirichlet', dirichlet_alpha='1')
    TypeError: dirichlet_alpha must be a number, .* but is '1'
_batches(federated, client_ids='client_0')
    TypeError: .*list of ids.* use \['client_0'\]
_batches(federated, batch_size='4')
    TypeError: batch_size must be a whole number, .* is '4'
_batches(federated, batch_size=4.5)
    ValueError: batch_size=4.5 must be a whole number
_batches(federated, seed=float('nan'))
    TypeError: seed must be an integer .* is nan
_batches(federated, local_steps='1')
    TypeError: local_steps must be a whole number, .* is '1'
_batches(federated, round_num=-1)
    ValueError: round_num=-1 must be a whole number
federated.test_dataset('4')
    TypeError: batch_size must be a whole number
data.flip_labels([0, -1], 3)
    ValueError: labels contain -1, but must be from 0 to 2
data.flip_labels([0, 3], 3)
    ValueError: labels contain 3, but must be from 0 to 2
data.flip_labels([0.5], 3)
    TypeError: labels must be integers, .* dtype float64
data.flip_labels(None, 3)
    TypeError: labels must be integers, .* dtype object
data.flip_labels([0], '3')
    TypeError: num_classes must be a whole number
data.draw_training_samples(digits, seed='0')
    TypeError: seed must be an integer .* is '0'
data.draw_training_samples(digits, seed=0, train_share='a')
    TypeError: train_share must be a number, .* is 'a'
data.draw_training_samples(digits, seed=0, samples_per_domain='a')
    TypeError: samples_per_domain must be a whole number
data.draw_training_samples(federated, 0)
    TypeError: dataset must be a tff_bn.data.Dataset
data.with_flipped_labels(digits, 1)
    TypeError: data must be tff_bn.data.Federated
data.with_flipped_labels(federated, 1.5)
    TypeError: num_attackers must be .*is 1.5
models.build_model_fn('small_cnn', 8, 10)
    TypeError: .*such as \(28, 28, 1\), but is a int
models.build_model_fn('small_cnn', (8, 8, 1), 'ten')
    TypeError: num_outputs must be a whole number
models.build_model_fn('small_cnn', (8, 8, 1), 0)
    ValueError: num_outputs=0 must be a whole number, at least 1
models.build_model_fn(None, (8, 8, 1), 10)
    TypeError: name must be the name of a model
models.build_model_fn('mlp3', (None,), 3)
    TypeError: a size in input_shape must be a whole number, at least 1
runtime.InProcessContext(client_devices='CPU:0')
    TypeError: .*use \['CPU:0'\]
runtime.InProcessContext(client_devices=3)
    TypeError: client_devices must be a list
runtime.InProcessContext(client_devices=['abc'])
    ValueError: .*no device 'abc'; the dev
runtime.InProcessContext(max_concurrent_clients='2')
    TypeError: max_concurrent_clients must be a whole number
runtime.InProcessContext(max_concurrent_clients=1.5)
    ValueError: max_concurrent_clients=1.5 must be a whole number
analysis.ProcessTraffic(algorithms.build_fed_avg)
    TypeError: .*a learning process.*but is a function
partition.Partition('own', ['scale'])
    TypeError: .*frozenset of tff_bn.partition.Role
partition.Partition('own', frozenset(['scale']))
    TypeError: .*frozenset of tff_bn.partition.Role
layers.PositionEncoding('add', amplitude='a')
    TypeError: amplitude must be a number, but is 'a'
layers.PositionEncoding('add', period='a')
    TypeError: period must be a number, but is 'a'
layers.PositionEncoding('add', personal_share='a')
    TypeError: personal_share must be a number, but is 'a'
layers.BatchRenormalization(r_max='a')
    TypeError: r_max must be a number, but is 'a'
layers.BatchRenormalization(d_max='a')
    TypeError: d_max must be a number, but is 'a'
_config(rounds='3')
    TypeError: rounds must be a whole number
_config(rounds=1.5)
    ValueError: .*rounds.* must be
_config(batch_size=0)
    ValueError: .*batch_size.* must be
_config(seed=None)
    TypeError: .*seed.* must be
"""


@pytest.mark.parametrize(
    ('call', 'expected'), re.findall('^(\\S.*)\n {4}(.*)$', _WRONG, re.M)
)
def test_wrong_calls(call, expected, digits, federated):
  names = {name: getattr(tff_bn, name) for name in tff_bn.__all__}
  names.update(digits=digits, federated=federated)
  with pytest.raises((TypeError, ValueError)) as error:
    eval(call, globals(), names)
  assert re.match(expected, f'{type(error.value).__name__}: {error.value}')


def test_weight_divergence_of_one_model(toy):
  with pytest.raises(TypeError, match='models must be a list of models'):
    units.weight_divergence_by_layer(toy.keras_model())


@pytest.mark.parametrize(
    ('change', 'error', 'message'),
    [
        (dict(model=3), TypeError, 'model must be a tff_bn.BatchNormModel'),
        (
            dict(data=[1]),
            TypeError,
            'must be a tff_bn.data.FederatedData.* list',
        ),
        (
            dict(config={}),
            TypeError,
            'tff_bn.training.TrainingConfig, but is a',
        ),
        (
            dict(process=algorithms.build_fed_avg),
            TypeError,
            'process must be a learning process',
        ),
        (
            dict(fits=False),
            ValueError,
            'input_spec of the model,.*does not fit',
        ),
    ],
)
def test_train(toy, federated, tmp_path, change, error, message):
  toy.dtype = 'float32'
  model = toy.model()
  if change.pop('fits', True):
    build = models.build_model_fn('mlp3', (8, 8, 1), 10)
    model = BatchNormModel(build, federated.element_spec, toy.loss)
  arguments = dict(
      process=None,
      model=model,
      data=federated,
      config=_config(),
      run_dir=tmp_path / 'run',
  )
  with pytest.raises(error, match=message):
    training.train(**{**arguments, **change})
  assert not (tmp_path / 'run' / 'metrics.csv').exists()


def test_build_model_fn_with_integers_of_numpy():
  shape, classes = (np.int64(6),), np.int64(3)
  assert models.build_model_fn('mlp3', shape, classes)().output_shape[1:] == (
      3,
  )


def test_flip_labels_of_a_list():
  np.testing.assert_array_equal(data.flip_labels([0, 2], 3), [2, 0])
