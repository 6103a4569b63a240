"""Tests that settings reach the data, the model and the process."""

import collections
import functools
import types

import flag_cases
import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import aggregators
from tff_bn import algorithms
from tff_bn import runtime
from tff_bn.catalog import algorithms as catalog
from tff_bn.common import cores
from tff_bn.keras_model.partition import Role
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.programs.runs import jobs
from tff_bn.programs.runs import run_building
from tff_bn.programs.runs import run_data


def _settings(*arguments):
  flags = command_line.parse(train.define_flags, arguments)
  settings_lib.check(flags)
  return settings_lib.resolve(flags, flags.algorithm, flags.seed)


@pytest.mark.parametrize(
    ('runs', 'expected', 'jit_compile'),
    [
        ([['--num_clients=7']], 7, False),
        ([['--num_clients=7', '--clients_per_round=3']], 3, False),
        ([['--algorithm=centralized', '--num_clients=7']], 1, False),
        ([['--algorithm=centralized', '--num_clients=7'], []], 10, False),
        ([[], ['--jit_compile']], 10, True),
        ([['--dataset=digits_domains', '--split=domains']], 6, False),
    ],
)
def test_the_clients_of_a_round_share_the_cores(
    monkeypatch, runs, expected, jit_compile
):
  calls = []
  monkeypatch.setattr(
      runtime,
      'divide_cores',
      lambda *args, **kwargs: calls.append((args, kwargs)),
  )
  monkeypatch.setattr(cores, 'num_cores', lambda: 6)
  run_building.divide_cores([_settings(*arguments) for arguments in runs])
  assert calls == [((expected,), dict(jit_compile=jit_compile))]


def test_cores_stay_as_they_are_if_tensorflow_is_in_use(monkeypatch):
  monkeypatch.delenv('TF_NUM_INTRAOP_THREADS', raising=False)
  tf.constant(0)
  run_building.divide_cores([_settings('--num_clients=1000')])


def _data(*arguments):
  settings = _settings(*arguments)
  return run_building.split_dataset(settings, settings.load())


def _process(settings, model, num_clients):
  """Builds the process for data of this number of clients."""
  ids = tuple(map(str, range(num_clients)))
  data = types.SimpleNamespace(client_ids=ids)
  return run_building.build_process(settings, model, data)


def _arguments(monkeypatch, *flags):
  """Returns the arguments that the builder of an algorithm gets."""
  calls = []

  def build(model, client_optimizer, **options):
    calls.append((model, dict(options, client_optimizer=client_optimizer)))
    return 'a process'

  settings = _settings(*flags)
  algorithm = catalog.find(settings.algorithm)
  entry = algorithm.correction or algorithm
  monkeypatch.setattr(entry.builds.replace(':', '.'), build)
  assert _process(settings, 'a model', 7) == 'a process'
  ((model, arguments),) = calls
  assert model == 'a model'
  return arguments


def _text(value):
  """Describes an argument: its value, or its parts."""
  if isinstance(value, functools.partial):
    return f'{_text(value.func)}({_listed(value.keywords)})'
  if isinstance(value, tff.learning.optimizers.Optimizer):
    spec = tf.TensorSpec([], tf.float32)
    hparams = value.get_hparams(value.initialize(spec))
    return f'{type(value).__name__}({_listed(hparams)})'
  if hasattr(value, 'rule'):
    parts = [vars(value).get('attack'), value.rule]
    return (
        f'{type(value).__name__}({",".join(map(_text, filter(None, parts)))})'
    )
  if isinstance(value, (bool, int, float, str)):
    return f'{value:g}' if isinstance(value, float) else str(value)
  return getattr(value, '__name__', None) or type(value).__name__


def _listed(arguments):
  return ','.join(f'{name}={_text(x)}' for name, x in arguments.items())


# Flags, and the arguments of the builder; empty: no argument, or None.
_ARGUMENTS = """
--client_learning_rate=0.25 --client_momentum=0.5 --client_weight_decay=0.125
--client_weighting=uniform --seed=7 --jit_compile
    client_optimizer=_SGD(learning_rate=0.25,momentum=0.5)
    client_weight_decay=0.125 client_weighting=uniform seed=7 jit_compile=True
--algorithm=fedavg
    model_aggregator= statistics_aggregator=NaiveMomentsFactory()
    client_weighting=num_examples client_learning_rate_schedule= local_steps=5
    client_gradient_clip_norm= client_warmup_rounds=0 client_warmup_steps=0
    server_optimizer=_SGD(learning_rate=1)
--algorithm=centralized --client_gradient_clip_norm=2.5
--client_warmup_rounds=20 --client_warmup_steps=30
    client_gradient_clip_norm=2.5 client_warmup_rounds=20
    client_warmup_steps=30 client_learning_rate_schedule=
    statistics_aggregator= server_optimizer= momentum=
--algorithm=centralized --dsgd_momentum=0.9
    momentum=0.9
--algorithm=single
    statistics_aggregator= server_optimizer=
--algorithm=fedbn
    statistics_aggregator= server_optimizer=_SGD(learning_rate=1)
--client_optimizer=adam --shuffle_times=0.5
    client_optimizer=_Adam(learning_rate=0.0003,beta_1=0.9,beta_2=0.999,epsilon=1e-07)
    shuffle_times=0.5 shuffle_probability=0.1
--server_optimizer=sgd --server_learning_rate=0.5
    server_optimizer=_SGD(learning_rate=0.5)
--server_optimizer=sgdm --server_momentum=0.75 --server_learning_rate=0.5
    server_optimizer=_SGD(learning_rate=0.5,momentum=0.75)
--server_optimizer=adam --server_learning_rate=0.5
    server_optimizer=_Adam(learning_rate=0.5,beta_1=0.9,beta_2=0.999,epsilon=0.001)
--server_optimizer=yogi --server_learning_rate=0.5
    server_optimizer=_Yogi(learning_rate=0.5,beta_1=0.9,beta_2=0.999,epsilon=0.001)
--statistics=pooled
    statistics_aggregator=PooledMomentsFactory()
--algorithm=fedtan
    moments=two_pass synchronize= sync_rounds= client_learning_rate_schedule=
    statistics_aggregator=NaiveMomentsFactory()
--algorithm=fedtan_forward_only --moments=fused
    moments=fused synchronize=forward sync_rounds=
    statistics_aggregator=NaiveMomentsFactory()
--algorithm=fedtan_ii --sync_rounds=4 --moments=fused
    moments=fused synchronize= sync_rounds=4
--algorithm=fedtan_ii --rounds=10
    moments=two_pass sync_rounds=2
--algorithm=fbn
    pooled=True fixbn_rounds= statistics_rate= statistics_aggregator=
--algorithm=fbn --nopooled
    pooled=False statistics_aggregator=
--algorithm=fixbn --fixbn_rounds=7
    fixbn_rounds=7 pooled= statistics_aggregator=NaiveMomentsFactory()
--algorithm=fixbn --rounds=10
    fixbn_rounds=5
--algorithm=hbn --hbn_statistics_rate=0.25
    statistics_rate=0.25 pooled= statistics_aggregator=
--algorithm=fedprox --proximal_strength=0.25
    proximal_strength=0.25 epsilon= contrastive_weight= temperature=
    feature_layer= num_clients= build_process=build_fed_avg()
--algorithm=fedbn+fedbs --fedbs_epsilon=0.5
    epsilon=0.5 proximal_strength=0.001 num_clients=
    build_process=build_fed_bn()
--algorithm=fbn+scaffold
    num_clients=7 proximal_strength= build_process=build_fbn()
--algorithm=fedbn+fednova
    num_clients= build_process=build_fed_bn()
--algorithm=fixbn+feddyn --feddyn_strength=0.5
    feddyn_strength=0.5 num_clients=7 build_process=build_fixbn()
--algorithm=moon --moon_weight=5 --moon_temperature=0.25
--moon_feature_layer=last
    contrastive_weight=5 temperature=0.25 feature_layer=last
    proximal_strength= build_process=build_fed_avg()
--algorithm=silobn+moon
    contrastive_weight=1 temperature=0.5 feature_layer=
    build_process=build_silo_bn()
--algorithm=fedtan_forward_only+fedprox
    build_process=build_fedtan(synchronize=forward)
--algorithm=dsgd --local_steps=1 --dsgd_momentum=0.9
    momentum=0.9 build_process= client_optimizer=_SGD(learning_rate=0.1)
--algorithm=dsgd_fbn --local_steps=1 --dsgd_momentum=0.9
    momentum=0.9 pooled=True build_process=build_fbn
    client_optimizer=_SGD(learning_rate=0.1)
--algorithm=dsgd_fixbn --local_steps=1 --dsgd_momentum=0.9
    momentum=0.9 fixbn_rounds=30 build_process=build_fixbn
--statistics=naive --statistics_aggregator=median
    statistics_aggregator=NaiveMomentsFactory(CoordinateMedian)
--statistics=pooled --statistics_aggregator=median
    statistics_aggregator=PooledMomentsFactory(CoordinateMedian)
    client_weighting=num_examples
"""


@flag_cases.parametrize(_ARGUMENTS)
def test_arguments_of_builders(arguments, expected, monkeypatch):
  found = _arguments(monkeypatch, *arguments)
  for word in expected.split():
    name, _, text = word.partition('=')
    value = found.get(name)
    assert ('' if value is None else _text(value)) == text, name


@pytest.mark.parametrize(
    ('algorithm', 'flags', 'expected'),
    [
        (
            'fedavg',
            '--client_learning_rate_schedule=3:0.5,5:0.125',
            [2, 2, 1, 1, 0.25, 0.25],
        ),
        ('fedtan_ii', '', [2, 2, 2, 0.5, 0.5, 0.5]),
        (
            'fedtan_ii',
            '--client_learning_rate_schedule=3:0.5',
            [2, 2, 1, 0.25, 0.25, 0.25],
        ),
        (
            'fedtan_ii',
            '--client_learning_rate_schedule=5:0.5',
            [2, 2, 2, 0.5, 0.25, 0.25],
        ),
    ],
)
def test_schedules(monkeypatch, algorithm, flags, expected):
  if algorithm == 'fedtan_ii':
    flags += ' --sync_rounds=3 --after_sync_factor=0.25'
  arguments = _arguments(
      monkeypatch,
      *(f'--algorithm={algorithm}', '--client_learning_rate=2', *flags.split()),
  )
  schedule = arguments['client_learning_rate_schedule']
  # The rates of rounds 1 to 6.
  rates = [float(schedule(tf.constant(finished))) for finished in range(6)]
  assert rates == expected


_CONTROL_VARIATES = {'last', 'last_rate'} | {
    f'{prefix}_{role}'
    for prefix in ('control_variate', 'received')
    for role in ('kernel', 'scale', 'shift')
}
_MOMENTUMS = {f'momentum_{role}' for role in ('kernel', 'scale', 'shift')}


@pytest.mark.parametrize(
    ('name', 'local'),
    [
        ('fedbn', {'scale', 'shift', 'moving_mean', 'moving_variance'}),
        pytest.param('hbn+fedprox', {'mixing'}, marks=pytest.mark.slow),
        pytest.param('scaffold', _CONTROL_VARIATES, marks=pytest.mark.slow),
        ('fednova', None),
        pytest.param(
            'feddyn',
            {f'feddyn_gradient_{r}' for r in ('kernel', 'scale', 'shift')},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            'fedbn+moon',
            {'scale', 'shift', 'moving_mean', 'moving_variance'}
            | {'previous_kernel'},
            marks=pytest.mark.slow,
        ),
        ('fedtan+fedprox', None),
        pytest.param(
            'dsgd_fbn --dsgd_momentum=0.9', _MOMENTUMS, marks=pytest.mark.slow
        ),
    ],
)
def test_name_decides_what_clients_keep(name, local):
  name, *arguments = name.split()
  assert catalog.find(name).name == name
  settings = _settings(
      f'--algorithm={name}', '--model=mlp3', '--local_steps=1', *arguments
  )
  model = run_building.build_model(settings, _data())
  process = _process(settings, model, 10)
  if local is None:
    assert isinstance(process, tff.learning.templates.LearningProcess)
    return
  client_state = process.initialize_client.type_signature.result
  names = [n for n, _ in tff.structure.iter_elements(client_state)]
  assert {n.rsplit('_', 1)[0] for n in names} == local


_BUILDERS = {
    **dict(centralized='centralized', fedavg='fed_avg', fedbn='fed_bn'),
    **dict(silobn='silo_bn', local_affine='local_affine', single='single'),
    **dict(
        fedtan='fedtan', fedtan_forward_only='fedtan', fedtan_ii='fedtan_ii'
    ),
    **dict(fbn='fbn', fixbn='fixbn', hbn='hbn', dsgd='dsgd', dsgd_fbn='dsgd'),
    **dict(dsgd_fixbn='dsgd', fedprox='fed_prox', fedbs='fed_bs'),
    **dict(fednova='fed_nova', feddyn='fed_dyn'),
    **dict(
        fedap='fed_ap',
        fedper='fed_per',
        fedrep='fed_rep',
        lg_fedavg='lg_fed_avg',
    ),
    **dict(fedbabu='fed_babu', ditto='ditto'),
}


@pytest.mark.parametrize('name', _BUILDERS)
def test_algorithms_and_their_steps(name, monkeypatch):
  algorithm = catalog.find(name)
  builder = (algorithm.correction or algorithm).load()
  assert builder.__name__ == f'build_{_BUILDERS[name]}'
  arguments = _arguments(monkeypatch, f'--algorithm={name}', '--local_steps=1')
  assert arguments['local_steps'] == 1
  if algorithm.local_steps is None:
    flags = f'--algorithm={name}', '--local_epochs=3'
    arguments = _arguments(monkeypatch, *flags)
    assert not {'local_steps', 'local_epochs'} & set(arguments)


def test_registry_has_all_algorithms():
  entries = [*catalog.ALGORITHMS.values(), *catalog.CORRECTIONS.values()]
  builders = {entry.load().__name__ for entry in entries}
  assert builders == {n for n in dir(algorithms) if n.startswith('build_')}


def test_split_settings_reach_the_data():
  def sizes(*arguments):
    return [len(i) for i in _data(*arguments).train_indices.values()]

  counts = _data('--classes_per_client=3', '--num_clients=4')
  assert ((counts.label_distribution() > 0).sum(axis=1) == 3).all()
  assert len(sizes('--split=iid', '--num_clients=6')) == 6
  unequal = sizes('--split=unbalanced', '--imbalance=3')
  assert max(unequal) > 5 * min(unequal)
  assert np.ptp(sizes('--split=unbalanced', '--imbalance=0')) <= 1
  by_client = sizes('--split=dirichlet', '--dirichlet_by=client')
  assert np.ptp(by_client) <= 1 < np.ptp(sizes('--split=dirichlet'))
  few = _data('--split=dirichlet', '--dirichlet_alpha=0.01')
  many = _data('--split=dirichlet', '--dirichlet_alpha=100')
  assert (few.label_distribution() == 0).mean() > 0.5
  assert (many.label_distribution() > 0).all()
  assert (_data('--split=gamma', '--gamma=1').label_distribution() > 0).all()
  assert (_data('--split=gamma', '--gamma=0').label_distribution() == 0).any()
  resized = _data('--image_size=10x12')
  assert resized.dataset.input_shape == (10, 12, 1)
  part = _data('--split=iid', '--train_share=0.25')
  assert len(part.dataset.y_train) == round(0.25 * 1437)
  few_of_each = _data(
      *('--split=domains', '--dataset=digits_domains'),
      *('--samples_per_domain=7', '--num_clients=5'),
  )
  assert [len(i) for i in few_of_each.train_indices.values()] == 5 * [7]
  domains = _data('--split=domains', '--dataset=digits_domains')
  assert 'inverted' in domains.client_ids


def test_seed_decides_the_split_and_which_part_is_used():
  def first(seed):
    data = _data('--split=iid', '--train_share=0.1', f'--seed={seed}')
    indices = data.train_indices['client_0']
    return list(indices), data.dataset.x_train.tobytes()

  assert first(3) == first(3)
  for a, b in zip(first(3), first(4), strict=True):
    assert a != b


def test_seed_decides_the_initial_weights():
  def weights(*arguments):
    settings = _settings('--model=mlp3', *arguments)
    tf.random.uniform([])  # Earlier draws make no difference.
    model = run_building.build_model(settings, _data(*arguments))
    return [np.asarray(v) for v in model.initial_weights.trainable]

  for a, b in zip(weights('--seed=3'), weights('--seed=3')):
    np.testing.assert_array_equal(a, b)
  assert (weights('--seed=3')[0] != weights('--seed=4')[0]).any()


def test_model_settings_reach_the_model():
  data = _data()
  settings = _settings('--model=mlp3')
  assert run_building.build_model(settings, data).has_batch_norm
  settings = _settings('--model=mlp3', '--normalization=group2')
  model = run_building.build_model(settings, data)
  assert not model.has_batch_norm
  (layer,) = [
      layer
      for layer in model.to_keras().layers
      if isinstance(layer, keras.layers.GroupNormalization)
  ]
  assert layer.groups == 2
  # The loss takes logits: of equal ones, each class has the same probability.
  loss = model.loss_fn()(tf.constant([3]), tf.ones((1, 10)))
  assert float(loss) == pytest.approx(np.log(10), rel=1e-5)


def test_precision_reaches_the_model():
  data = _data()
  settings = _settings('--model=mlp3', '--precision=mixed_bfloat16')
  model = run_building.build_model(settings, data)
  hidden = model.keras_model.get_layer('hidden')
  assert hidden.dtype_policy.name == 'mixed_bfloat16'
  assert {variable.dtype for variable in model.variables} == {tf.float32}
  # The default is float32.
  model = run_building.build_model(_settings('--model=mlp3'), data)
  assert model.keras_model.get_layer('hidden').compute_dtype == 'float32'


def _robust(monkeypatch, *flags):
  """The aggregators that a builder gets."""
  arguments = _arguments(
      monkeypatch,
      *(*flags, '--num_byzantine=2', '--algorithm=fbn', '--num_clients=11'),
      '--seed=5',
  )
  assert arguments.get('client_weighting') == (
      'num_examples' if arguments['model_aggregator'] is None else 'uniform'
  )
  return arguments['model_aggregator'], arguments.get('statistics_aggregator')


_RULES = {
    'median': aggregators.CoordinateMedian,
    'trimmed_mean': aggregators.TrimmedMean,
    'geometric_median': aggregators.GeometricMedian,
    'krum': aggregators.Krum,
    'multi_krum': aggregators.MultiKrum,
    'mea_med': aggregators.MeaMed,
    'centered_clipping': aggregators.CenteredClipping,
    'mda': aggregators.MinimumDiameterAveraging,
    'monna': aggregators.NearestNeighborAveraging,
    'caf': aggregators.CovarianceBoundAgnosticFilter,
    'smea': aggregators.SmallestMaximumEigenvalueAveraging,
    'bulyan': aggregators.Bulyan,
}


@pytest.mark.parametrize('name', _RULES)
def test_rules(monkeypatch, name):
  model, statistics = _robust(monkeypatch, f'--model_aggregator={name}')
  assert type(model) is _RULES[name]
  assert (model.num_byzantine, model.num_clients) == (2, 11)
  assert statistics is None
  model, statistics = _robust(monkeypatch, f'--statistics_aggregator={name}')
  assert model is None
  assert type(statistics) is _RULES[name]


def test_wrapped_rules(monkeypatch):
  rule, _ = _robust(
      monkeypatch,
      '--model_aggregator=nnm+bucketing+centered_clipping',
      '--clipping_radius=0.25',
  )
  assert type(rule) is aggregators.NearestNeighborMixing
  assert rule.num_byzantine == 2
  assert type(rule.rule) is aggregators.Bucketing
  assert rule.rule.bucket_size == 2
  assert rule.rule.seed == 5
  assert type(rule.rule.rule) is aggregators.CenteredClipping
  assert rule.rule.rule.radius == 0.25


def test_clipping_and_the_trusted_client(monkeypatch):
  rule, _ = _robust(
      monkeypatch,
      '--model_aggregator=arc+clipping+monna',
      '--clipping_norm=0.5',
      '--trusted_client=3',
  )
  assert type(rule) is aggregators.AdaptiveRobustClipping
  assert type(rule.rule) is aggregators.StaticClipping
  assert rule.rule.max_norm == 0.5
  assert rule.rule.rule.trusted_client == 3


# An attack, with its strength, and its class and attributes.
_ATTACKS = """
sf
    SignFlipping
foe
    FallOfEmpires factor=3
foe --attack_strength=1.5
    FallOfEmpires factor=1.5
alie
    ALittleIsEnough deviations=None
alie --attack_strength=1.5
    ALittleIsEnough deviations=1.5
ipm
    InnerProductManipulation epsilon=0.5
mimic
    Mimic
inf
    Infinity
optimized_alie
    OptimizedALittleIsEnough
optimized_ipm
    OptimizedInnerProductManipulation
gaussian --attack_strength=4
    GaussianNoise stddev=4 seed=5
"""


@flag_cases.parametrize(_ATTACKS)
def test_attacks(monkeypatch, arguments, expected):
  name, *strength = arguments
  attack, *values = expected.split()
  flags = (f'--attack={name}', *strength, '--num_attackers=4')
  for rule in _robust(monkeypatch, *flags):
    assert type(rule) is aggregators.Attacked
    assert type(rule.rule) is aggregators.Mean
    assert rule.num_attackers == 4
    assert type(rule.attack).__name__ == attack
    for value in values:
      name, _, text = value.partition('=')
      assert f'{getattr(rule.attack, name)}'.removesuffix('.0') == text


def test_targets_of_attacks(monkeypatch):
  model, statistics = _robust(
      monkeypatch,
      '--attack=sf',
      '--attack_target=statistics',
      '--statistics_aggregator=nnm+median',
  )
  assert model is None
  assert type(statistics) is aggregators.Attacked
  assert statistics.num_attackers == 2
  assert type(statistics.rule) is aggregators.NearestNeighborMixing
  model, statistics = _robust(
      monkeypatch, '--attack=sf', '--attack_target=model'
  )
  assert type(model) is aggregators.Attacked
  assert statistics is None


def test_label_flipping_is_an_attack_on_the_data():
  arguments = ('--split=iid', '--attack=label_flip', '--num_attackers=3')
  honest, attacked = _data(*arguments[:1]), _data(*arguments)
  labels = [
      [data.dataset.y_train[data.train_indices[c]] for c in data.client_ids]
      for data in (honest, attacked)
  ]
  for number, (before, after) in enumerate(zip(*labels)):
    expected = 9 - before if number < 3 else before
    np.testing.assert_array_equal(after, expected)
  # Workers make the same data.
  again = attacked.recipe()
  np.testing.assert_array_equal(again.dataset.y_train, attacked.dataset.y_train)


def test_shifted_inputs_are_an_attack_on_the_data():
  arguments = ('--split=iid', '--attack=soda', '--num_attackers=3')
  honest = _data(*arguments[:1])
  for strength, share in (((), 0.5), (('--attack_strength=0.25',), 0.25)):
    attacked = _data(*arguments, *strength)
    for number, client in enumerate(honest.client_ids):
      samples = honest.train_indices[client]
      expected = honest.dataset.x_train[samples]
      if number < 3:
        largest = honest.dataset.x_train.max()
        expected = (1 - share) * expected + share * largest
      np.testing.assert_allclose(
          attacked.dataset.x_train[samples], expected, rtol=1e-6
      )
    assert attacked.recipe().fingerprint() == attacked.fingerprint()


def test_the_client_filter(monkeypatch):
  flags = ('--algorithm=fbn', '--client_filter=bnguard')
  attacks = ((), ('--attack=soda', '--num_attackers=2'))
  for attack in attacks:
    arguments = _arguments(monkeypatch, *flags, *attack)
    assert arguments['client_filter'] == 'bnguard'
    assert arguments['model_aggregator'] is None
    assert arguments.get('statistics_aggregator') is None
  assert 'client_filter' not in _arguments(monkeypatch, *flags[:1])


def test_rules_and_attacks_in_exchanges(monkeypatch):
  names = ('model', 'statistics', 'exchange')

  def build(*flags):
    arguments = _arguments(
        monkeypatch, '--algorithm=fedtan', '--moments=fused', *flags
    )
    rules = [arguments.get(f'{name}_aggregator') for name in names]
    assert type(rules[1]) is aggregators.NaiveMomentsFactory
    rules[1] = rules[1].rule
    return rules

  assert build() == [None] * 3
  robust = ('--exchange_aggregator=nnm+median', '--num_byzantine=2')
  *others, rule = build(*robust)
  assert others == [None] * 2
  assert type(rule) is aggregators.NearestNeighborMixing
  for target, expected in (
      ('both', (True, True, False)),
      ('exchanges', (False, False, True)),
      ('all', (True, True, True)),
  ):
    attack = ('--attack=foe', '--num_attackers=3', f'--attack_target={target}')
    rules = build(*attack, *robust)
    is_attacked = [type(found) is aggregators.Attacked for found in rules]
    assert tuple(is_attacked) == expected
  assert type(rule) is aggregators.NearestNeighborMixing
  assert rules[2].num_attackers == 3
  assert type(rules[2].rule) is aggregators.NearestNeighborMixing


def test_errors_of_algorithms_name_the_flags():
  settings = _settings(
      '--algorithm=moon', '--model=mlp3', '--moon_feature_layer=none'
  )
  model = run_building.build_model(settings, _data())
  with pytest.raises(ValueError, match="^moon_feature_layer='none' is the n"):
    _process(settings, model, 7)


def test_position_encodings_reach_the_model():
  arguments = ('--model=mlp3', '--seed=3')
  plain = run_building.build_model(_settings(*arguments), _data())
  settings = _settings(
      *arguments, '--pan=multiply', '--pan_amplitude=0.5', '--pan_period=2'
  )
  model = run_building.build_model(settings, _data())
  encoding = model.keras_model.get_layer('hidden_position')
  assert (encoding.mode, encoding.amplitude, encoding.period) == (
      *('multiply', 0.5, 2),
  )
  assert Role.PERSONAL_PHASE not in {v.role for v in model.variables}
  # Runs with and without encodings start from the same weights.
  for a, b in zip(model.initial_weights, plain.initial_weights, strict=True):
    for x, y in zip(a, b, strict=True):
      np.testing.assert_array_equal(x, y)


def test_personal_position_encodings_reach_the_model_and_the_process():
  settings = _settings(
      *('--model=mlp3', '--seed=3', '--pan=add', '--pan_personal_share=0.5')
  )
  model = run_building.build_model(settings, _data())
  encoding = model.keras_model.get_layer('hidden_position')
  assert encoding.personal_share == 0.5
  process = _process(settings, model, 10)
  client = process.personalize(collections.OrderedDict(), 4)
  # The seed of the generator: --seed, and the client's number.
  expected = np.random.default_rng([3, 4, 0x70686173]).random(dtype=np.float32)
  assert list(client.values()) == [expected]


def test_training_config():
  expected = dict(rounds=11, clients_per_round=2, batch_size=13, local_epochs=3)
  expected |= dict(seed=5, evaluate_every=7, checkpoint_every=6)
  config = run_building.training_config(
      _settings(*(f'--{name}={value}' for name, value in expected.items()))
  )
  assert config.local_steps is None
  for name, value in expected.items():
    assert getattr(config, name) == value


def test_settings_of_the_pixels_reach_the_data():
  data = _data('--split=iid')
  assert data.dataset.scaling is None
  assert data.augmentation == 'none'
  data = _data('--pixel_scaling=symmetric', '--augment=flip_rotate')
  np.testing.assert_array_equal(data.dataset.scaling.mean, [0.5])
  assert data.augmentation == 'flip_rotate'
  # Workers make the same data.
  again = data.recipe()
  assert again.augmentation == 'flip_rotate'
  assert again.fingerprint() == data.fingerprint()
  data = _data('--pixel_scaling=random_client', '--split=iid')
  assert data.client_scalings.are_drawn
  assert data.recipe().fingerprint() == data.fingerprint()


def test_held_out_clients_are_not_in_the_data(monkeypatch):
  arguments = (
      *('--split=iid', '--num_clients=5', '--attack=label_flip'),
      *('--num_attackers=1', '--pixel_scaling=standardized'),
  )
  settings = _settings(*arguments, '--held_out_clients=client_0,client_3')
  recipe = run_data.DataRecipe.of(settings)
  everything = _data(*arguments[:2])
  training, held_out = recipe.split_and_hold_out(settings.load())
  assert training.client_ids == ('client_1', 'client_2', 'client_4')
  assert held_out.client_ids == ('client_0', 'client_3')
  assert held_out.dataset.scaling is training.dataset.scaling
  used = np.concatenate(list(training.train_indices.values()))
  np.testing.assert_allclose(
      training.dataset.scaling.mean[0],
      everything.dataset.x_train[used].mean(),
      rtol=1e-5,
  )
  # The first client that trains is the attacker.
  labels = everything.dataset.y_train
  flipped = np.flatnonzero(training.dataset.y_train != labels)
  assert set(flipped) <= set(everything.train_indices['client_1'])
  np.testing.assert_array_equal(held_out.dataset.y_train, labels)
  assert recipe().fingerprint() == training.fingerprint()
  # Rules count the clients that train.
  numbers = []
  monkeypatch.setattr(
      settings_lib.RunSettings,
      'build_rule',
      lambda self, target, seed, num_clients: numbers.append(num_clients),
  )
  run_building._rule(settings, 'model', 9)
  assert numbers == [3]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (
            ['--model_aggregator=median', '--num_byzantine=1'],
            'num_byzantine=1 is too large for CoordinateMedian of 2 clients',
        ),
        (
            ['--attack=sf', '--num_attackers=5'],
            'num_attackers=5 leaves none of 2 clients honest',
        ),
        (
            ['--statistics_aggregator=bucketing+median'],
            'bucket_size=2 makes too few buckets of 2 clients',
        ),
    ],
)
def test_rules_count_the_clients_of_the_data(arguments, message):
  settings = _settings('--split=natural', '--model=mlp3', *arguments)
  model = run_building.build_model(settings, _data())
  with pytest.raises(ValueError, match=message):
    _process(settings, model, 2)


def test_unknown_held_out_client():
  with pytest.raises(
      ValueError,
      match='held_out_clients=client_7: there is no client client_7. The 5 cl',
  ):
    _data('--num_clients=5', '--split=iid', '--held_out_clients=client_7')


def test_held_out_clients_need_batch_normalization(tmp_path):
  settings = _settings(
      *('--held_out_clients=client_1', '--normalization=layer'),
      '--model=mlp3',
  )
  with pytest.raises(
      ValueError,
      match=(
          '--held_out_clients=client_1 tests BN statistics, but there is no'
          ' batch normalization with --model=mlp3 and --normalization=layer'
      ),
  ):
    jobs.Builder().build(settings, tmp_path)


def test_projection_head_reaches_the_model():
  settings = _settings('--model=mlp3', '--moon_projection=7')
  model = run_building.build_model(settings, _data())
  assert model.keras_model.get_layer('projection').units == 7
