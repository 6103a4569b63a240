"""Tests that wrong calls of the public API have errors that explain them.

The tests of each room have more; here are mistakes that led to errors of other
packages, or to none.
"""

import numpy as np
import pytest

from tff_bn import BatchNormModel
from tff_bn import algorithms
from tff_bn import analysis
from tff_bn import data
from tff_bn import layers
from tff_bn import models
from tff_bn import partition
from tff_bn import runtime
from tff_bn import training
from tff_bn.papers import position_aware


@pytest.fixture(scope='module', name='digits')
def _digits():
  return data.load_dataset('digits')


@pytest.fixture(scope='module', name='federated')
def _federated(digits):
  return data.split_dataset(digits, 'iid', num_clients=3, seed=0)


@pytest.mark.parametrize('name', [None, ('x', 'y')])
def test_load_dataset(name):
  with pytest.raises(TypeError, match='dataset must be the name of a dataset'):
    data.load_dataset(name)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            dict(dataset='digits'),
            r'a tff_bn.data.Dataset.*load_dataset\(name\)',
        ),
        (dict(split=None), 'split must be the name .* is a NoneType'),
        (dict(num_clients=2.5), 'num_clients must be an integer .* is 2.5'),
        (dict(seed='0'), "seed must be an integer .* is '0'"),
        (
            dict(alpha=1),
            "'alpha' is not .*; the parameters are .*dirichlet_alph",
        ),
        (
            dict(split='dirichlet', dirichlet_alpha='1'),
            "dirichlet_alpha must be a number, but is '1'",
        ),
    ],
)
def test_split_dataset(digits, arguments, message):
  right = dict(dataset=digits, split='iid', num_clients=2, seed=0)
  data.split_dataset(**right)
  with pytest.raises(TypeError, match=message):
    data.split_dataset(**{**right, **arguments})


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(client_ids='client_0'), r"list of ids.* use \['client_0'\]"),
        (dict(batch_size='4'), "batch_size must be an integer .* is '4'"),
        (dict(batch_size=4.5), 'batch_size must be an integer .* is 4.5'),
        (dict(seed=float('nan')), 'seed must be an integer .* is nan'),
        (dict(local_steps='1'), "local_steps must be an integer .* is '1'"),
    ],
)
def test_client_dataset(federated, arguments, message):
  right = dict(
      client_ids=['client_0'], seed=0, round_num=1, batch_size=4, local_steps=1
  )
  federated.client_dataset(**right)
  with pytest.raises(TypeError, match=message):
    federated.client_dataset(**{**right, **arguments})


def test_client_dataset_of_a_negative_round(federated):
  with pytest.raises(ValueError, match='round_num=-1 must be a whole number'):
    federated.client_dataset(
        ['client_0'], seed=0, round_num=-1, batch_size=4, local_steps=1
    )


def test_test_dataset(federated):
  with pytest.raises(TypeError, match='batch_size must be an integer'):
    federated.test_dataset('4')


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        (
            ('small_cnn', 8, 10),
            TypeError,
            r'such as \(28, 28, 1\), but is a int',
        ),
        (
            ('small_cnn', (8, 8, 1), 'ten'),
            ValueError,
            "num_classes='ten' must be a whole number",
        ),
        (
            ('small_cnn', (8, 8, 1), 0),
            ValueError,
            'num_classes=0 must be a whole number, at least 1',
        ),
        ((None, (8, 8, 1), 10), TypeError, 'name must be the name of a model'),
        (
            ('mlp3', (None,), 3),
            ValueError,
            'a size in input_shape=None must be a whole number, at least 1',
        ),
    ],
)
def test_build_model_fn(arguments, error, message):
  with pytest.raises(error, match=message):
    models.build_model_fn(*arguments)


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        (dict(client_devices='CPU:0'), TypeError, r"use \['CPU:0'\]"),
        (dict(client_devices=3), TypeError, 'client_devices must be a list'),
        (dict(client_devices=['abc']), ValueError, "no device 'abc'; the dev"),
        (
            dict(max_concurrent_clients='2'),
            ValueError,
            "max_concurrent_clients='2' must be a whole number",
        ),
        (
            dict(max_concurrent_clients=1.5),
            ValueError,
            'max_concurrent_clients=1.5 must be a whole number',
        ),
    ],
)
def test_in_process_context(arguments, error, message):
  with pytest.raises(error, match=message):
    runtime.InProcessContext(**arguments)


def test_process_traffic_of_a_builder():
  with pytest.raises(TypeError, match='a learning process.*but is a function'):
    analysis.ProcessTraffic(algorithms.build_fed_avg)


@pytest.mark.parametrize('roles', [['scale'], frozenset(['scale'])])
def test_partition(roles):
  with pytest.raises(TypeError, match='frozenset of tff_bn.partition.Role'):
    partition.Partition('own', roles)


@pytest.mark.parametrize('name', ['amplitude', 'period', 'personal_share'])
def test_position_encoding(name):
  with pytest.raises(TypeError, match=f"{name} must be a number, but is 'a'"):
    layers.PositionEncoding('add', **{name: 'a'})


@pytest.mark.parametrize('name', ['r_max', 'd_max'])
def test_batch_renormalization(name):
  with pytest.raises(TypeError, match=f"{name} must be a number, but is 'a'"):
    layers.BatchRenormalization(**{name: 'a'})


def test_weight_divergence_of_one_model(toy):
  with pytest.raises(TypeError, match='models must be a list of models'):
    position_aware.weight_divergence_by_layer(toy.keras_model())


@pytest.mark.parametrize(
    ('name', 'value', 'error'),
    [
        ('rounds', '3', ValueError),
        ('rounds', 1.5, ValueError),
        ('batch_size', 0, ValueError),
        ('seed', None, TypeError),
    ],
)
def test_training_config(name, value, error):
  right = dict(rounds=1, batch_size=4, local_steps=1)
  training.TrainingConfig(**right)
  with pytest.raises(error, match=f'{name}.* must be '):
    training.TrainingConfig(**{**right, name: value})


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
      config=training.TrainingConfig(rounds=1, batch_size=4, local_steps=1),
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


@pytest.mark.parametrize(
    ('labels', 'num_classes', 'error', 'message'),
    [
        ([0, -1], 3, ValueError, 'labels contain -1, but must be from 0 to 2'),
        ([0, 3], 3, ValueError, 'labels contain 3, but must be from 0 to 2'),
        ([0.5], 3, TypeError, 'labels must be integers, .* dtype float64'),
        (None, 3, TypeError, 'labels must be integers, .* dtype object'),
        ([0], '3', ValueError, "num_classes='3' must be a whole number"),
    ],
)
def test_flip_labels(labels, num_classes, error, message):
  with pytest.raises(error, match=message):
    data.flip_labels(labels, num_classes)


def test_with_flipped_labels(digits, federated):
  with pytest.raises(TypeError, match='data must be tff_bn.data.Federated'):
    data.with_flipped_labels(digits, 1)
  with pytest.raises(TypeError, match='num_attackers must be .*is 1.5'):
    data.with_flipped_labels(federated, 1.5)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (dict(seed='0'), "seed must be an integer .* is '0'"),
        (dict(train_share='a'), "train_share must be a number, but is 'a'"),
        (dict(samples_per_domain='a'), 'samples_per_domain must be an int'),
    ],
)
def test_draw_training_samples(digits, federated, arguments, message):
  with pytest.raises(TypeError, match=message):
    data.draw_training_samples(digits, **{'seed': 0, **arguments})
  with pytest.raises(TypeError, match='dataset must be a tff_bn.data.Dataset'):
    data.draw_training_samples(federated, 0)


def test_flip_labels_of_a_list():
  np.testing.assert_array_equal(data.flip_labels([0, 2], 3), [2, 0])
