"""Tests that builders explain wrong arguments."""

import inspect

import client_rounds
import keras
import pytest
import tensorflow_federated as tff

from tff_bn import algorithms

_SGD = tff.learning.optimizers.build_sgdm(0.1)


@pytest.mark.parametrize('name', client_rounds.BUILDERS)
def test_a_keras_model_in_place_of_a_batch_norm_model(toy, name):
  for model in (toy.keras_model(), toy.keras_model):
    with pytest.raises(TypeError, match='model must be a tff_bn.BatchNormMo'):
      client_rounds.build(name, model)


@pytest.mark.parametrize('name', client_rounds.BUILDERS)
def test_misspelt_argument(name):
  with pytest.raises(
      TypeError, match="'client_wait_decay' is not an.*mean client_weight_decay"
  ):
    client_rounds.build(
        name, client_rounds.toy_model(name), client_wait_decay=0.1
    )


@pytest.mark.parametrize(
    ('options', 'error', 'message'),
    [
        (dict(local_steps=2, local_epochs=2), ValueError, 'exclude each other'),
        (dict(local_steps=True), TypeError, 'whole number, .* but is True'),
        (dict(local_steps='2'), TypeError, 'local_steps must be a whole'),
        (dict(jit_compile=1), TypeError, 'jit_compile must be True or False'),
        (dict(client_weight_decay='0.1'), TypeError, "but is '0.1'"),
        (dict(client_gradient_clip_norm='1'), TypeError, 'clip_norm must be a'),
        (
            dict(server_clip_norm='1'),
            TypeError,
            'server_clip_norm must be a nu',
        ),
        (dict(shuffle_times='1'), TypeError, 'shuffle_times must be a number'),
        (
            dict(client_learning_rate_schedule=0.1),
            TypeError,
            'must be a function that maps the number of finished rounds',
        ),
        (dict(local_steps=0), ValueError, 'local_steps=0 must be a whole'),
        (dict(local_steps=2.5), ValueError, 'local_steps=2.5 must be a whole'),
        (dict(local_epochs=0), ValueError, 'local_epochs=0 must be a whole'),
        (dict(local_epochs=None), TypeError, 'local_epochs must be a whole'),
        (
            dict(client_weighting='size'),
            ValueError,
            "client_weighting='size' must be one of num_examples, sample_weigh",
        ),
        (
            dict(client_weighting=None),
            TypeError,
            'client_weighting must be one of .*, sample_weights, .*, but is No',
        ),
        (
            dict(client_weight_decay=-1.0),
            ValueError,
            'client_weight_decay=-1.0 must be a number, at least 0',
        ),
        (
            dict(server_optimizer=keras.optimizers.SGD()),
            TypeError,
            'server_optimizer must be a tff.learning.optimizers.Optimizer',
        ),
        (
            dict(model_aggregator=tff.aggregators.UnweightedMeanFactory()),
            ValueError,
            'client_weighting=num_examples is impossible with model_agg',
        ),
        (dict(model_aggregator='mean'), TypeError, 'model_aggregator must be'),
        (
            dict(statistics_aggregator=tff.aggregators.MeanFactory()),
            TypeError,
            'statistics_aggregator must be an unweighted factory',
        ),
        (dict(seed=None), TypeError, 'seed must be an integer .* but is None'),
        (dict(seed=1.5), TypeError, 'seed must be an integer .* but is 1.5'),
        (dict(seed=2**63), TypeError, 'seed must be an integer of 64 bits'),
    ],
    ids=lambda value: ','.join(value) if isinstance(value, dict) else '',
)
def test_options(options, error, message):
  with pytest.raises(error, match=message):
    client_rounds.build('build_fed_avg', client_rounds.toy_model(), **options)


_NAN, _INFINITY = float('nan'), float('inf')
_POSITIVE = ((0, -1.0, _NAN, _INFINITY), 'a number, greater than 0')
_NOT_NEGATIVE = ((-0.1, _NAN, _INFINITY, -_INFINITY), 'a number, at least 0')
_SHARE = ((1.0, -0.1, _NAN), 'at least 0 and less')
_COUNT = ((0, -1, 1.5), 'a whole number, at least 1')


@pytest.mark.parametrize(
    ('name', 'argument', 'values', 'message'),
    [
        ('build_fed_bs', 'epsilon', *_POSITIVE),
        ('build_fed_bs', 'proximal_strength', *_NOT_NEGATIVE),
        ('build_fed_prox', 'proximal_strength', *_NOT_NEGATIVE),
        ('build_moon', 'contrastive_weight', *_NOT_NEGATIVE),
        ('build_moon', 'temperature', *_POSITIVE),
        ('build_greg', 'consistency_weight', *_NOT_NEGATIVE),
        ('build_dsgd', 'momentum', *_SHARE),
        ('build_centralized', 'momentum', *_SHARE),
        ('build_hbn', 'statistics_rate', (0, -0.1, 1.5, _NAN), 'at most 1'),
        ('build_fed_avg', 'server_clip_norm', *_POSITIVE),
        ('build_fixbn', 'fixbn_rounds', *_COUNT),
        ('build_scaffold', 'num_clients', *_COUNT),
        ('build_fed_dyn', 'num_clients', *_COUNT),
        ('build_fed_dyn', 'feddyn_strength', *_POSITIVE),
    ],
)
def test_wrong_numbers(name, argument, values, message):
  for value in values:
    with pytest.raises(ValueError, match=f'{argument}={value} .*{message}'):
      client_rounds.build(
          name, client_rounds.toy_model(name), **{argument: value}
      )


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        ('build_fed_prox', dict(proximal_strength='1')),
        ('build_fed_bs', dict(epsilon='1')),
        ('build_moon', dict(temperature='1')),
        ('build_fed_dyn', dict(feddyn_strength='1')),
        ('build_dsgd', dict(momentum='1')),
        ('build_centralized', dict(momentum='1')),
        ('build_hbn', dict(statistics_rate='1')),
        ('build_fbn', dict(backward='mean', backward_restart='1')),
    ],
)
def test_texts_in_place_of_numbers(name, options):
  builder = getattr(algorithms, name)
  assert options.keys() <= inspect.signature(builder).parameters.keys()
  with pytest.raises(TypeError, match="must be a number, .* but is '1'"):
    builder(client_rounds.toy_model(name), _SGD, **options)


@pytest.mark.parametrize('name', ['build_scaffold', 'build_fed_prox'])
def test_the_name_of_a_builder_in_place_of_the_builder(name):
  with pytest.raises(TypeError, match="build_process .* but is 'fbn'"):
    client_rounds.build(
        name, client_rounds.toy_model(name), build_process='fbn'
    )


def test_keras_optimizer():
  with pytest.raises(
      TypeError,
      match='client_optimizer must be a .*tff.learning.optimizers.build_sgdm',
  ):
    algorithms.build_fed_avg(
        client_rounds.toy_model(), keras.optimizers.SGD(0.1)
    )
