"""Tests for flags that are checked against one another."""

import dataclasses
import re

from absl import flags as absl_flags
import pytest

from tff_bn.catalog import algorithms
from tff_bn.programs import compare
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import parsers
from tff_bn.programs.flags import logging_flags
from tff_bn.programs.flags import runtime_flags
from tff_bn.programs.plan import settings


def _train_flags(*arguments):
  return command_line.parse(train.define_flags, arguments)


def _resolve(*arguments):
  flags = _train_flags(*arguments)
  settings.check(flags)
  return settings.resolve(flags, flags.algorithm, flags.seed)


def test_every_flag_that_defines_a_run_is_a_setting():
  groups = train.define_flags(absl_flags.FlagValues())
  names = {name for group in groups for name in group.names}
  fields = {field.name for field in dataclasses.fields(settings.RunSettings)}
  # These say where a run is computed and written, not what it is.
  others = {'output_dir', 'overwrite', 'verbosity'}
  others |= set(runtime_flags.RuntimeFlags.specs())
  others |= set(logging_flags.LoggingFlags.specs())
  assert names - others == fields


def test_defaults():
  resolved = _resolve()
  assert resolved.algorithm == 'fedavg'
  assert resolved.local_steps == 5
  assert resolved.local_epochs is None
  assert resolved.split == 'classes'
  assert resolved.classes_per_client == 1
  assert resolved.gamma is None
  assert resolved.statistics == 'naive'
  assert resolved.moments is None
  assert resolved.sync_rounds is None
  assert resolved.after_sync_factor is None
  assert resolved.fixbn_rounds is None
  assert resolved.pooled is None
  assert resolved.model_aggregator == 'mean'
  assert resolved.statistics_aggregator == 'mean'
  assert resolved.attack is None
  assert resolved.attack_target is None
  assert resolved.server_optimizer == 'sgd'
  assert resolved.server_learning_rate == 1.0
  assert resolved.server_momentum is None
  assert resolved.client_weighting == 'num_examples'


def test_every_value_reaches_its_setting():
  # A value for each flag, none of them its default.
  given = dict(
      algorithm='local_affine',
      statistics='pooled',
      model_aggregator='nnm+median',
      statistics_aggregator='bucketing+centered_clipping',
      num_byzantine=2,
      clipping_radius=3.0,
      bucket_size=3,
      attack='foe',
      attack_target='model',
      attack_strength=2.0,
      num_attackers=1,
      dataset='domains:a=digits,b=emnist',
      data_dir='/data',
      image_size='9x8',
      pixel_scaling='standardized',
      train_share=0.5,
      samples_per_domain=20,
      split='dirichlet',
      num_clients=7,
      dirichlet_by='client',
      held_out_clients=('client_1',),
      held_out_prior=8.0,
      dirichlet_alpha=0.25,
      model='mlp3',
      normalization='none',
      precision='mixed_bfloat16',
      batch_norm_momentum=0.5,
      pan='multiply',
      pan_amplitude=0.25,
      pan_period=2.0,
      pan_personal_share=0.5,
      rounds=11,
      clients_per_round=6,
      local_epochs=2,
      batch_size=13,
      client_learning_rate=0.75,
      client_learning_rate_schedule='3:0.5',
      client_momentum=0.5,
      client_weight_decay=0.125,
      client_gradient_clip_norm=2.5,
      client_warmup_rounds=20,
      client_warmup_steps=30,
      max_failed_rounds=5,
      augment='flip_crop',
      client_weighting='uniform',
      jit_compile=True,
      server_optimizer='sgdm',
      server_learning_rate=0.375,
      server_momentum=0.625,
      server_clip_norm=0.25,
      seed=17,
      evaluate_every=3,
      checkpoint_every=4,
      save_client_models='all',
  )
  resolved = _resolve(
      *(f'--{name}={parsers.to_text(value)}' for name, value in given.items())
  )
  no_effect = ('local_steps', 'classes_per_client', 'gamma', 'imbalance')
  no_effect += ('moments', 'sync_rounds', 'after_sync_factor')
  no_effect += ('fixbn_rounds', 'pooled', 'fbn_backward', 'dsgd_momentum')
  no_effect += ('fbn_backward_restart', 'hbn_statistics_rate')
  no_effect += ('proximal_strength',)
  no_effect += ('fedbs_epsilon', 'moon_weight', 'moon_temperature')
  no_effect += ('moon_feature_layer', 'moon_projection', 'samples_per_client')
  no_effect += ('clipping_norm', 'trusted_client', 'client_optimizer')
  no_effect += ('shuffle_times', 'shuffle_probability')
  expected = dict(given, **dict.fromkeys(no_effect))
  assert dataclasses.asdict(resolved) == expected


@pytest.mark.parametrize(
    'arguments',
    [
        [],
        ['--algorithm=fedbn', '--local_epochs=2', '--split=iid'],
        ['--algorithm=single', '--split=gamma', '--gamma=0.3'],
        ['--server_optimizer=yogi', '--statistics=pooled'],
        ['--client_learning_rate=1e-5'],
        ['--dataset=tfds:mnist', '--data_dir=~/my data'],
        ['--client_learning_rate_schedule=6:0.1,8:0.01', '--image_size=8x9'],
        ['--jit_compile', '--precision=mixed_float16'],
        ['--algorithm=fedtan', '--moments=fused'],
        ['--algorithm=fedtan_forward_only', '--local_steps=1'],
        ['--algorithm=fedtan_ii', '--rounds=2'],
        ['--algorithm=fedtan_ii', '--sync_rounds=7', '--statistics=pooled'],
        ['--algorithm=fedtan_ii', '--after_sync_factor=0.02'],
        ['--algorithm=fbn', '--nopooled', '--batch_norm_momentum=0.99'],
        ['--algorithm=fbn', '--fbn_backward=running', '--server_clip_norm=1'],
        [
            *('--algorithm=fbn', '--fbn_backward=running'),
            '--fbn_backward_restart=2',
        ],
        ['--algorithm=dsgd', '--local_steps=1', '--server_clip_norm=0.5'],
        ['--algorithm=fixbn', '--rounds=9', '--fixbn_rounds=8'],
        ['--algorithm=hbn', '--hbn_statistics_rate=1'],
        ['--algorithm=dsgd', '--local_steps=1', '--client_momentum=0.9'],
        ['--algorithm=dsgd', '--local_steps=1', '--dsgd_momentum=0.99'],
        ['--algorithm=centralized', '--dsgd_momentum=0.99'],
        ['--algorithm=dsgd_fbn', '--local_steps=1', '--fbn_backward=mean'],
        ['--algorithm=dsgd_fixbn', '--local_steps=1', '--fixbn_rounds=8']
        + ['--dsgd_momentum=0', '--model_aggregator=median'],
        ['--model_aggregator=geometric_median', '--num_byzantine=3'],
        ['--algorithm=fedprox', '--proximal_strength=0'],
        ['--pan=add'],
        ['--pan=multiply', '--pan_amplitude=0', '--pan_period=0.5'],
        ['--pan=add', '--pan_amplitude=0', '--pan_personal_share=0'],
        ['--algorithm=fixbn', '--pan=add', '--pan_personal_share=0.5'],
        ['--algorithm=single', '--pan=multiply', '--pan_personal_share=1'],
        ['--algorithm=fedbn+fedbs', '--fedbs_epsilon=0.5'],
        ['--algorithm=fixbn+scaffold', '--fixbn_rounds=8'],
        ['--algorithm=moon', '--moon_feature_layer=dense'],
        ['--algorithm=dsgd', '--local_steps=1', '--client_warmup_steps=5'],
        ['--client_gradient_clip_norm=0.5', '--max_failed_rounds=1'],
        ['--attack=label_flip', '--num_attackers=3'],
        ['--held_out_clients=client_1,client_2', '--augment=flip_rotate'],
        ['--dataset=domains:a=npz:x y.npz,digits', '--split=domains'],
        ['--train_share=0.25', '--pixel_scaling=symmetric'],
        ['--split=dirichlet', '--dirichlet_by=client'],
        ['--attack=alie', '--num_attackers=3', '--attack_target=statistics'],
    ],
)
def test_flagfile_round_trip(tmp_path, arguments):
  resolved = _resolve(*arguments)
  path = tmp_path / 'flags.txt'
  path.write_text(
      ''.join(
          f'--{name}={text}\n' for name, text in resolved.to_flags().items()
      )
  )
  assert _resolve(f'--flagfile={path}') == resolved


def test_paths_do_not_depend_on_the_working_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', '/home/ann')
  resolved = _resolve('--dataset=tfds:mnist', '--data_dir=data')
  assert resolved.data_dir == str(tmp_path / 'data')
  resolved = _resolve('--dataset=tfds:mnist', '--data_dir=~/data')
  assert resolved.data_dir == '/home/ann/data'
  assert _resolve('--dataset=digits').dataset == 'digits'
  assert _resolve('--dataset=tfds:mnist').dataset == 'tfds:mnist'
  for prefix in ('', 'npz:', 'folder:'):
    dataset = _resolve(f'--dataset={prefix}a/b.npz').dataset
    assert dataset == f'{prefix}{tmp_path}/a/b.npz'
  npz = f'{tmp_path}/a.npz'
  assert _resolve(f'--dataset={npz}').dataset == npz


@pytest.mark.parametrize(
    ('arguments', 'num_clients'),
    [
        ([], 10),
        (['--split=iid'], 10),
        (['--split=domains'], None),
        (['--split=natural'], None),
        (['--split=domains', '--num_clients=10'], 10),
    ],
)
def test_number_of_clients(arguments, num_clients):
  assert _resolve(*arguments).num_clients == num_clients
  # What can't be known here is checked when the data is there.
  if num_clients is None:
    _resolve(*arguments, '--clients_per_round=1000')


@pytest.mark.parametrize(
    'optimizer, learning_rate, momentum',
    [
        ('sgd', 1.0, None),
        ('sgdm', 0.1, 0.9),
        ('adam', 0.01, None),
        ('yogi', 0.01, None),
    ],
)
def test_server_defaults(optimizer, learning_rate, momentum):
  resolved = _resolve(f'--server_optimizer={optimizer}')
  assert resolved.server_learning_rate == learning_rate
  assert resolved.server_momentum == momentum


@pytest.mark.parametrize(
    'algorithm', ['fedtan', 'fedtan_forward_only', 'fedtan_ii']
)
def test_flags_of_fedtan(algorithm):
  resolved = _resolve(f'--algorithm={algorithm}')
  assert resolved.moments == 'two_pass'
  assert resolved.statistics == 'naive'
  assert resolved.server_optimizer == 'sgd'
  assert resolved.client_weighting == 'num_examples'
  resolved = _resolve(f'--algorithm={algorithm}', '--moments=fused')
  assert resolved.moments == 'fused'


@pytest.mark.parametrize(
    ('arguments', 'sync_rounds'),
    [
        ([], 12),
        (['--rounds=10000'], 2000),
        (['--rounds=18'], 4),
        (['--rounds=2'], 1),
        (['--rounds=10', '--sync_rounds=9'], 9),
    ],
)
def test_sync_rounds(arguments, sync_rounds):
  resolved = _resolve('--algorithm=fedtan_ii', *arguments)
  assert resolved.sync_rounds == sync_rounds
  assert resolved.after_sync_factor == 0.1


def test_after_sync_factor():
  arguments = ['--algorithm=fedtan_ii', '--after_sync_factor=0.02']
  assert _resolve(*arguments).after_sync_factor == 0.02


def test_command_line_overrules_the_sync_rounds_of_a_flagfile(tmp_path):
  path = tmp_path / 'flags'
  path.write_text('--algorithm=fedtan_ii\n--sync_rounds=70\n--rounds=100\n')
  resolved = _resolve(f'--flagfile={path}', '--algorithm=fedtan', '--rounds=60')
  assert resolved.sync_rounds is None
  assert resolved.after_sync_factor is None
  with pytest.raises(ValueError, match='--sync_rounds=70 leaves no round'):
    _resolve(f'--flagfile={path}', '--rounds=60')


@pytest.mark.parametrize(
    ('arguments', 'fixbn_rounds'),
    [([], 30), (['--rounds=3000'], 1500), (['--fixbn_rounds=7'], 7)],
)
def test_fixbn_rounds(arguments, fixbn_rounds):
  resolved = _resolve('--algorithm=fixbn', *arguments)
  assert resolved.fixbn_rounds == fixbn_rounds
  assert resolved.sync_rounds is None


@pytest.mark.parametrize(
    ('algorithm', 'expected'),
    [
        ('fedavg', {}),
        ('fedprox', dict(proximal_strength=0.001)),
        ('scaffold', {}),
        ('fedtan_ii+fedprox', dict(proximal_strength=0.001)),
        ('fbn+moon', dict(moon_weight=1.0, moon_temperature=0.5)),
        (
            'fedbn+fedbs',
            dict(proximal_strength=0.001, fedbs_epsilon=0.01),
        ),
    ],
)
def test_flags_of_corrections(algorithm, expected):
  resolved = dataclasses.asdict(_resolve(f'--algorithm={algorithm}'))
  names = ('proximal_strength', 'fedbs_epsilon', 'moon_weight')
  names += ('moon_temperature', 'moon_feature_layer')
  assert {n: resolved[n] for n in names if resolved[n] is not None} == expected


def test_corrections_keep_the_settings_of_their_algorithm():
  resolved = _resolve('--algorithm=fbn+scaffold')
  assert resolved.pooled is True
  assert resolved.statistics is None
  assert resolved.server_optimizer == 'sgd'
  assert _resolve('--algorithm=moon').statistics == 'naive'
  assert _resolve('--algorithm=fixbn+fedprox').fixbn_rounds == 30


def test_flags_of_position_encodings():
  resolved = _resolve()
  assert resolved.pan == 'off'
  assert resolved.pan_amplitude is resolved.pan_period is None
  assert resolved.pan_personal_share is None
  for mode, amplitude in (('add', 0.05), ('multiply', 0.1)):
    resolved = _resolve(f'--pan={mode}')
    assert resolved.pan_amplitude == amplitude
    assert resolved.pan_period == 1
    assert resolved.pan_personal_share == 0
    resolved = _resolve(f'--pan={mode}', '--pan_personal_share=0.25')
    assert resolved.pan_personal_share == 0.25
  resolved = _resolve('--pan=add', '--pan_amplitude=0', '--pan_period=0')
  assert resolved.pan_amplitude == resolved.pan_period == 0
  assert resolved.pan_personal_share is None


_PERSONAL = ['--pan=add', '--pan_personal_share=0.5']
_ALGORITHMS = [*algorithms.ALGORITHMS, *algorithms.CORRECTIONS, 'fedbn+moon']


@pytest.mark.parametrize('algorithm', [*_ALGORITHMS, 'fedtan+fedprox'])
def test_algorithms_whose_clients_can_have_encodings_of_their_own(algorithm):
  arguments = [f'--algorithm={algorithm}', '--local_steps=1']
  share = ['--pan_personal_share=0']
  assert _resolve(*arguments, *_PERSONAL, *share).pan_personal_share == 0
  if algorithm == 'centralized' or algorithm.startswith('fedtan'):
    message = (
        f'--pan_personal_share=0.5 is impossible with {algorithm}, which'
        ' cannot give clients personal encodings; use 0, or'
        ' fedavg, fedbn, silobn, local_affine, fbn, fixbn, hbn, dsgd, dsgd_fbn,'
        ' dsgd_fixbn, single.'
    )
    with pytest.raises(ValueError, match=f'^{re.escape(message)}$'):
      _resolve(*arguments, *_PERSONAL)
  else:
    assert _resolve(*arguments, *_PERSONAL).pan_personal_share == 0.5


@pytest.mark.parametrize(
    ('arguments', 'expected'),
    [
        (['--algorithm=fedavg'], False),
        (['--algorithm=fbn'], False),
        (['--algorithm=scaffold'], False),
        (['--algorithm=fedbn'], True),
        (['--algorithm=silobn'], True),
        (['--algorithm=fedbn+moon'], True),
        (['--algorithm=single'], True),
        (['--algorithm=fedavg', *_PERSONAL], True),
        (['--algorithm=fedavg', *_PERSONAL, '--pan_personal_share=0'], False),
        (['--algorithm=fedavg', '--pan=add'], False),
    ],
)
def test_clients_with_own_models(arguments, expected):
  assert settings.has_client_models(_resolve(*arguments)) is expected


def test_comparison_with_personal_encodings():
  def check(*arguments):
    settings.check(command_line.parse(compare.define_flags, [*arguments]))

  message = (
      r'--pan_personal_share=0\.5 is impossible with fedtan_ii, which.*'
      r' dsgd_fixbn, single\. The same holds for centralized\.'
  )
  with pytest.raises(ValueError, match=message):
    check(*_PERSONAL, '--algorithms=fedavg,fedtan_ii,centralized')
  with pytest.raises(ValueError, match='impossible with centralized'):
    check(*_PERSONAL)
  check(*_PERSONAL, '--algorithms=fedavg,fedbn+moon,single')
  check('--pan=add')


def test_command_line_switches_encodings_of_a_flagfile_off(tmp_path):
  path = tmp_path / 'flags.txt'
  path.write_text('--pan=add\n--pan_personal_share=0.5\n')
  for arguments in (['--pan=off'], ['--pan_amplitude=0'], ['--pan_period=0']):
    # The same for an algorithm that would else be impossible.
    for algorithm in ('fedavg', 'centralized'):
      resolved = _resolve(
          f'--flagfile={path}', f'--algorithm={algorithm}', *arguments
      )
      assert resolved.pan_personal_share is None
      again = tmp_path / 'again.txt'
      again.write_text(
          ''.join(f'--{n}={t}\n' for n, t in resolved.to_flags().items())
      )
      assert _resolve(f'--flagfile={again}') == resolved


@pytest.mark.parametrize('algorithm', ['hbn', 'hbn+fedprox'])
def test_hbn_has_its_own_batch_normalization(algorithm):
  message = (
      f'--normalization=batch_renorm is impossible with {algorithm}, which has'
      ' its own'
  )
  with pytest.raises(ValueError, match=f'^{re.escape(message)}'):
    _resolve(f'--algorithm={algorithm}', '--normalization=batch_renorm')
  _resolve('--algorithm=fedavg', '--normalization=batch_renorm')


def test_flags_of_hbn(tmp_path):
  resolved = _resolve('--algorithm=hbn')
  assert resolved.hbn_statistics_rate == 0.002
  assert resolved.statistics is None
  assert resolved.statistics_aggregator == 'mean'
  message = (
      '--batch_norm_momentum=0.9 has no effect with --algorithm=hbn, which has'
      ' --hbn_statistics_rate'
  )
  with pytest.raises(ValueError, match=f'^{re.escape(message)}'):
    _resolve('--algorithm=hbn', '--batch_norm_momentum=0.9')
  with pytest.raises(
      ValueError, match='no effect with --algorithm=hbn.fedprox'
  ):
    _resolve('--algorithm=hbn+fedprox', '--batch_norm_momentum=0.9')
  # Of a flagfile, or of a comparison, it is left out.
  path = tmp_path / 'flags.txt'
  path.write_text('--batch_norm_momentum=0.9\n')
  again = _resolve(f'--flagfile={path}', '--algorithm=hbn')
  assert again.batch_norm_momentum is None
  flags = command_line.parse(
      compare.define_flags,
      ['--algorithms=fedavg,hbn', '--batch_norm_momentum=0.5'],
  )
  settings.check(flags)
  for name, momentum in (('fedavg', 0.5), ('hbn', None)):
    resolved = settings.resolve(flags, name, 0)
    assert resolved.batch_norm_momentum == momentum
  for rate in ('0', '1.5', 'nan'):
    with pytest.raises(Exception, match='hbn_statistics_rate'):
      _resolve('--algorithm=hbn', f'--hbn_statistics_rate={rate}')


def test_flags_of_fbn():
  resolved = _resolve('--algorithm=fbn')
  assert resolved.pooled is True
  assert resolved.statistics is None
  assert resolved.statistics_aggregator == 'mean'
  assert _resolve('--algorithm=fbn', '--nopooled').pooled is False


@pytest.mark.parametrize(
    ('arguments', 'weighting'),
    [
        (['--statistics_aggregator=median'], 'num_examples'),
        (['--model_aggregator=median'], 'uniform'),
        (['--attack=sf', '--num_attackers=3'], 'uniform'),
        (['--attack=label_flip', '--num_attackers=3'], 'num_examples'),
        (
            ['--attack=sf', '--num_attackers=3', '--attack_target=statistics'],
            'num_examples',
        ),
    ],
)
def test_rules_count_clients_alike(arguments, weighting):
  assert _resolve(*arguments).client_weighting == weighting


@pytest.mark.parametrize(
    ('algorithm', 'weighting'),
    [
        ('scaffold', 'uniform'),
        ('fbn+scaffold', 'uniform'),
        ('fbn+fedprox', 'num_examples'),
    ],
)
def test_scaffold_counts_clients_alike_by_default(algorithm, weighting):
  argument = f'--algorithm={algorithm}'
  assert _resolve(argument).client_weighting == weighting
  for given in ('uniform', 'num_examples'):
    resolved = _resolve(argument, f'--client_weighting={given}')
    assert resolved.client_weighting == given


def test_shuffles_are_in_flags_txt_if_there_are_some():
  assert _resolve('--shuffle_times=0') == _resolve()
  assert not any('shuffle' in name for name in _resolve().to_flags())
  resolved = _resolve('--shuffle_times=0.2')
  assert resolved.shuffle_times == 0.2
  assert resolved.to_flags()['shuffle_probability'] == '0.1'
  # With epochs, the number of steps depends on the client.
  assert _resolve('--local_epochs=1', '--shuffle_times=8').shuffle_times == 8


def test_sgd_is_not_in_flags_txt():
  resolved = _resolve('--client_optimizer=sgd')
  assert resolved.client_optimizer is None
  assert resolved.client_learning_rate == 0.1
  assert resolved == _resolve()
  resolved = _resolve('--client_optimizer=adam')
  assert resolved.to_flags()['client_optimizer'] == 'adam'
  assert resolved.client_learning_rate == 3e-4
  assert resolved.client_momentum is None


def test_there_are_as_many_attackers_as_the_server_withstands():
  arguments = ['--attack=sf', '--model_aggregator=median', '--num_byzantine=3']
  assert _resolve(*arguments).num_attackers == 3
  assert _resolve(*arguments, '--num_attackers=2').num_attackers == 2
  assert _resolve(*arguments[1:]).num_attackers is None


def test_settings_of_rules_and_attacks_that_are_not_used():
  resolved = _resolve('--model_aggregator=nnm+median', '--num_byzantine=3')
  assert resolved.clipping_radius is None
  assert resolved.bucket_size is None
  assert resolved.attack_target is None
  resolved = _resolve('--statistics_aggregator=bucketing+centered_clipping')
  assert resolved.clipping_radius == 10
  assert resolved.bucket_size == 2
  resolved = _resolve('--attack=label_flip', '--num_attackers=3')
  assert resolved.attack_target is None
  assert _resolve('--attack=sf', '--num_attackers=3').attack_target == 'both'


@pytest.mark.parametrize('algorithm', ['centralized', 'single'])
def test_algorithms_without_a_server_have_no_server_settings(algorithm):
  resolved = _resolve(f'--algorithm={algorithm}')
  assert resolved.server_optimizer is None
  assert resolved.server_learning_rate is None
  assert resolved.client_weighting is None
  assert resolved.statistics is None


@pytest.mark.parametrize(
    'arguments, message',
    [
        (
            ['--split=iid', '--classes_per_client=2'],
            '--classes_per_client=2 is only for --split=classes',
        ),
        (
            ['--samples_per_client=20'],
            '--samples_per_client=20 is only for --split=iid',
        ),
        (
            ['--save_client_models=all'],
            '--save_client_models=all has no effect with --algorithm=fedavg; it'
            ' is for fedbn, silobn, local_affine, single',
        ),
        (
            ['--algorithm=scaffold', '--save_client_models=sampled'],
            '--save_client_models=sampled has no effect with'
            ' --algorithm=scaffold',
        ),
        (
            [
                '--pan=add',
                '--pan_personal_share=0.5',
                '--pan_period=0',
                '--save_client_models=none',
            ],
            '--pan_personal_share=0.5 has no effect',
        ),
        (
            ['--algorithm=fbn', '--fbn_backward_restart=2'],
            '--fbn_backward_restart=2.0 is for --fbn_backward=mean and'
            ' --fbn_backward=running, not for none',
        ),
        (
            ['--algorithm=fbn+scaffold', '--fbn_backward=mean'],
            '--fbn_backward=mean is impossible with fbn+scaffold',
        ),
        (
            [
                *('--algorithm=fbn', '--fbn_backward=mean'),
                '--precision=mixed_float16',
            ],
            '--fbn_backward=mean and --precision=mixed_float16 exclude each'
            ' other with fbn, because float16 needs scaled gradients',
        ),
        (
            [
                *('--algorithm=fbn', '--fbn_backward=running'),
                '--precision=mixed_float16',
            ],
            '--fbn_backward=running and --precision=mixed_float16 exclude',
        ),
        (['--dirichlet_alpha=1'], '--dirichlet_alpha=1.0 is only for'),
        (['--imbalance=1'], '--imbalance=1.0 is only for --split=unbalanced'),
        (['--gamma=0.5'], '--gamma=0.5 is only for --split=gamma'),
        (
            ['--dirichlet_by=client'],
            '--dirichlet_by=client is only for --split=dirichlet',
        ),
        (
            ['--held_out_prior=4'],
            '--held_out_prior=4.0 has no effect without --held_out_clients',
        ),
        (
            ['--num_clients=2', '--held_out_clients=client_1,client_0'],
            '--held_out_clients=client_1,client_0 leaves none of the 2 clients',
        ),
        (
            ['--algorithm=single', '--held_out_clients=client_1'],
            '--held_out_clients=client_1 is impossible with single: its clients'
            ' share nothing, so there is no common model for other clients.',
        ),
        (
            [
                '--held_out_clients=client_1',
                '--num_clients=4',
                '--clients_per_round=4',
            ],
            '--clients_per_round=4 asks for more clients than --num_clients=4'
            ' without --held_out_clients=client_1; use at most 3',
        ),
        (
            [
                '--held_out_clients=client_1,client_2',
                '--attack=sf',
                '--num_attackers=8',
            ],
            '--num_attackers=8 must be less than the 8 clients of a round.',
        ),
        (
            ['--server_momentum=0.5'],
            '--server_momentum=0.5 is only for --server_optimizer=sgdm',
        ),
        (
            ['--algorithm=fedbn', '--statistics=naive'],
            '--statistics=naive has no effect with --algorithm=fedbn; it is for'
            ' fedavg, local_affine',
        ),
        (
            ['--algorithm=centralized', '--server_optimizer=adam'],
            '--server_optimizer=adam has no effect',
        ),
        (
            ['--pan_amplitude=0.1'],
            '--pan_amplitude=0.1 has no effect with --pan=off',
        ),
        (['--pan_period=2'], '--pan_period=2.0 has no effect with --pan=off'),
        (
            ['--pan_personal_share=0.5'],
            '--pan_personal_share=0.5 has no effect with --pan=off',
        ),
        (
            ['--pan=add', '--pan_personal_share=0.5', '--pan_amplitude=0'],
            '--pan_personal_share=0.5 has no effect with --pan_amplitude=0',
        ),
        (
            ['--pan=add', '--pan_personal_share=1', '--pan_period=0'],
            '--pan_personal_share=1.0 has no effect with --pan_period=0',
        ),
        (
            ['--proximal_strength=1'],
            '--proximal_strength=1.0 has no effect with --algorithm=fedavg; it'
            ' is for fedprox, fedbs.',
        ),
        (
            ['--algorithm=fedprox', '--moon_weight=1'],
            '--moon_weight=1.0 has no effect with --algorithm=fedprox; it is'
            ' for moon.',
        ),
        (
            ['--algorithm=fedbn+scaffold', '--statistics=pooled'],
            '--statistics=pooled has no effect with --algorithm=fedbn+scaffold',
        ),
        (
            ['--algorithm=fbn+scaffold', '--client_momentum=0.9'],
            '--client_momentum=0.9 is impossible with fbn+scaffold',
        ),
        (
            ['--algorithm=fedbs', '--model_aggregator=median'],
            '--model_aggregator=median is impossible with fedbs, which weights'
            ' the clients by their losses',
        ),
        (
            ['--algorithm=fedbs', '--attack=sf', '--num_attackers=2'],
            '--attack=sf is impossible with fedbs, which weights the clients',
        ),
        (
            ['--algorithm=fixbn+moon', '--rounds=1'],
            '--rounds=1 is too few for fixbn',
        ),
        (
            ['--moments=fused'],
            '--moments=fused has no effect with --algorithm=fedavg; it is for'
            ' fedtan, fedtan_forward_only, fedtan_ii',
        ),
        (
            ['--algorithm=fedtan', '--sync_rounds=5'],
            '--sync_rounds=5 has no effect with --algorithm=fedtan; it is for'
            ' fedtan_ii.',
        ),
        (
            ['--algorithm=fedtan', '--after_sync_factor=0.5'],
            '--after_sync_factor=0.5 has no effect with --algorithm=fedtan',
        ),
        (
            ['--algorithm=fedtan_ii', '--rounds=20', '--sync_rounds=20'],
            '--sync_rounds=20 leaves no round in which the BN statistics of'
            ' fedtan_ii are fixed; it must be less than --rounds=20.',
        ),
        (
            ['--algorithm=fedtan_ii', '--rounds=1'],
            '--rounds=1 is too few for fedtan_ii',
        ),
        (
            ['--algorithm=fedtan_forward_only', '--precision=mixed_float16'],
            '--precision=mixed_float16 is impossible with'
            ' fedtan_forward_only, which cannot scale the loss',
        ),
        (
            ['--fixbn_rounds=5'],
            '--fixbn_rounds=5 has no effect with --algorithm=fedavg; it is for'
            ' fixbn, dsgd_fixbn.',
        ),
        (
            ['--algorithm=fixbn', '--rounds=20', '--fixbn_rounds=20'],
            '--fixbn_rounds=20 leaves no round in which the BN statistics of'
            ' fixbn are fixed; it must be less than --rounds=20.',
        ),
        (
            ['--algorithm=fixbn', '--rounds=1'],
            '--rounds=1 is too few for fixbn',
        ),
        (
            ['--nopooled'],
            '--pooled=false has no effect with --algorithm=fedavg; it is for'
            ' fbn, dsgd_fbn.',
        ),
        (
            ['--algorithm=dsgd'],
            'dsgd needs --local_steps=1, but got --local_steps=5.',
        ),
        (
            ['--algorithm=dsgd', '--local_epochs=1'],
            'dsgd needs --local_steps=1, but got --local_epochs=1.',
        ),
        (
            ['--algorithm=dsgd', '--local_steps=1', '--server_optimizer=adam'],
            '--server_optimizer=adam has no effect with --algorithm=dsgd',
        ),
        (
            ['--algorithm=fbn', '--dsgd_momentum=0.9'],
            '--dsgd_momentum=0.9 has no effect with --algorithm=fbn; it is for'
            ' centralized, dsgd, dsgd_fbn, dsgd_fixbn.',
        ),
        (
            ['--algorithm=dsgd', '--local_steps=1', '--client_momentum=0.9']
            + ['--dsgd_momentum=0.99'],
            '--dsgd_momentum=0.99 and --client_momentum=0.9 exclude each other'
            ' with dsgd: the first is the momentum of each client, the second'
            ' of the mean of the gradients. Give one of them.',
        ),
        (
            ['--algorithm=dsgd', '--local_steps=1', '--client_momentum=0.9']
            + ['--dsgd_momentum=0'],
            '--dsgd_momentum=0.0 and --client_momentum=0.9 exclude each other',
        ),
        (
            ['--shuffle_times=6'],
            '--shuffle_times=6 must be at most --local_steps=5: a step permutes'
            ' the units at most once.',
        ),
        (
            ['--shuffle_probability=0.2'],
            '--shuffle_probability=0.2 has no effect with --shuffle_times=0',
        ),
        (
            ['--algorithm=fedtan+fedprox', '--shuffle_times=0.5'],
            '--shuffle_times=0.5 is impossible with fedtan+fedprox, which needs'
            ' the gradients of all clients for the same units; use 0.',
        ),
        (
            ['--algorithm=dsgd', '--local_steps=1', '--shuffle_times=0.5'],
            '--shuffle_times=0.5 is impossible with dsgd',
        ),
        (
            ['--client_optimizer=adam', '--client_momentum=0.9'],
            '--client_momentum=0.9 is only for --client_optimizer=sgd',
        ),
        (
            ['--algorithm=dsgd_fbn', '--local_steps=1']
            + ['--client_optimizer=adam'],
            '--client_optimizer=adam is impossible with dsgd_fbn, whose steps'
            ' are steps of SGD with the mean gradient; use sgd.',
        ),
        (
            ['--algorithm=fbn+scaffold', '--client_optimizer=adam'],
            '--client_optimizer=adam is impossible with fbn+scaffold, which'
            ' computes the mean gradient of a client from the change by its'
            ' steps of plain SGD; use sgd.',
        ),
        (
            ['--algorithm=centralized', '--client_momentum=0.9']
            + ['--dsgd_momentum=0.99'],
            '--dsgd_momentum=0.99 and --client_momentum=0.9 exclude each other'
            ' with centralized: the first is an average, the second a sum of'
            ' the gradients. Give one of them.',
        ),
        (
            ['--algorithm=dsgd_fbn', '--local_steps=1', '--fbn_backward=mean']
            + ['--dsgd_momentum=0.99'],
            '--dsgd_momentum=0.99 and --fbn_backward=mean exclude each other'
            ' with dsgd_fbn',
        ),
        (
            ['--algorithm=dsgd_fixbn', '--local_steps=1', '--rounds=1'],
            '--rounds=1 is too few for dsgd_fixbn',
        ),
        (
            ['--algorithm=dsgd_fbn'],
            'dsgd_fbn needs --local_steps=1, but got --local_steps=5.',
        ),
        (
            ['--model_aggregator=nnm+median'],
            '--model_aggregator=nnm+median needs --num_byzantine, the number of'
            ' clients that nnm has to withstand.',
        ),
        (
            ['--algorithm=fbn', '--statistics_aggregator=trimmed_mean'],
            '--statistics_aggregator=trimmed_mean needs --num_byzantine',
        ),
        (
            ['--model_aggregator=krum', '--num_byzantine=5'],
            '--num_byzantine=5 must be less than half of the 10 clients',
        ),
        (
            [
                '--model_aggregator=median',
                '--num_byzantine=2',
                '--clients_per_round=4',
            ],
            '--num_byzantine=2 must be less than half of the 4 clients',
        ),
        (
            ['--num_byzantine=2'],
            '--num_byzantine=2 has no effect without another --model_aggregator'
            ' or --statistics_aggregator than the mean.',
        ),
        (
            ['--clipping_radius=2'],
            '--clipping_radius=2.0 is only for centered_clipping',
        ),
        (['--bucket_size=2'], '--bucket_size=2 is only for bucketing'),
        (
            ['--batch_size=1000000', '--local_steps=11'],
            '--local_steps=11 with --batch_size=1000000 makes 11000000 examples'
            ' of a client in a round; at most 10000000 are possible.',
        ),
        (
            [
                '--split=iid',
                '--num_clients=100000',
                '--samples_per_client=1001',
            ],
            '--num_clients=100000 with --samples_per_client=1001 makes'
            ' 100100000 samples of all clients; at most 100000000 are',
        ),
        (['--clipping_norm=2'], '--clipping_norm=2.0 is only for clipping'),
        (['--trusted_client=1'], '--trusted_client=1 is only for monna'),
        (
            [
                '--model_aggregator=nnm+monna',
                '--num_byzantine=1',
                '--attack=sf',
                '--num_attackers=2',
                '--trusted_client=-9',
            ],
            '--trusted_client=-9 is one of the first 2 of 10 clients of a'
            ' round, which are the attackers; trust a later one.',
        ),
        (
            ['--model_aggregator=arc+median'],
            '--model_aggregator=arc+median needs --num_byzantine',
        ),
        (
            ['--attack=inf', '--num_attackers=3', '--attack_strength=2'],
            '--attack_strength=2.0 has no effect on --attack=inf',
        ),
        (['--num_attackers=2'], '--num_attackers=2 needs --attack.'),
        (['--attack_strength=2'], '--attack_strength=2.0 needs --attack.'),
        (['--attack_target=model'], '--attack_target=model needs --attack.'),
        (['--attack=sf'], '--attack=sf needs --num_attackers'),
        (
            ['--attack=sf', '--num_attackers=3', '--attack_strength=2'],
            '--attack_strength=2.0 has no effect on --attack=sf, which has no'
            ' strength.',
        ),
        (
            [
                '--attack=label_flip',
                '--num_attackers=3',
                '--attack_target=model',
            ],
            '--attack_target=model has no effect on --attack=label_flip, which'
            ' falsifies labels.',
        ),
        (
            ['--attack=sf', '--num_attackers=10'],
            '--num_attackers=10 must be less than the 10 clients of a round.',
        ),
        (
            [
                '--algorithm=fedbn',
                '--attack=sf',
                '--num_attackers=3',
                '--attack_target=statistics',
            ],
            '--attack_target=statistics has no effect with --algorithm=fedbn,'
            ' whose clients send no BN statistics.',
        ),
        (
            ['--model_aggregator=median', '--client_weighting=num_examples'],
            '--client_weighting=num_examples is impossible with'
            ' --model_aggregator=median, which takes no weights; use uniform.',
        ),
        (
            [
                '--attack=sf',
                '--num_attackers=1',
                '--client_weighting=num_examples',
            ],
            '--client_weighting=num_examples is impossible with'
            ' --model_aggregator=mean and --attack=sf',
        ),
        (
            ['--local_steps=3', '--local_epochs=1'],
            '--local_steps=3 and --local_epochs=1 exclude each other',
        ),
        (
            ['--num_clients=4', '--clients_per_round=5'],
            '--clients_per_round=5 asks for more clients than --num_clients=4',
        ),
    ],
)
def test_contradictions(arguments, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    _resolve(*arguments)


def test_contradiction_in_a_flagfile(tmp_path):
  path = tmp_path / 'flags'
  path.write_text('--split=iid\n--gamma=0.5\n')
  with pytest.raises(ValueError, match='--gamma=0.5 is only for'):
    _resolve(f'--flagfile={path}')


@pytest.mark.parametrize('order', [1, -1])
def test_command_line_overrules_what_a_flagfile_made_necessary(tmp_path, order):
  path = tmp_path / 'flags'
  path.write_text(
      '--split=gamma\n--gamma=0.5\n--local_steps=4\n--algorithm=fedavg\n'
      '--statistics=pooled\n'
  )
  arguments = [f'--flagfile={path}', '--local_epochs=2'][::order]
  resolved = _resolve(*arguments, '--split=dirichlet', '--algorithm=fedbn')
  assert resolved.gamma is None
  assert resolved.dirichlet_alpha == 0.5
  assert resolved.local_steps is None
  assert resolved.local_epochs == 2
  assert resolved.statistics is None


def _compare_flags(*arguments):
  return command_line.parse(compare.define_flags, arguments)


def test_flag_for_some_of_the_compared_algorithms():
  flags = _compare_flags('--algorithms=fedavg,fedbn', '--statistics=pooled')
  settings.check(flags)
  assert settings.resolve(flags, 'fedavg', 0).statistics == 'pooled'
  assert settings.resolve(flags, 'fedbn', 0).statistics is None


@pytest.mark.parametrize(
    ('arguments', 'expected'),
    [
        ([], None),
        (['--algorithm=fedbn'], None),
        (['--algorithm=fedbn', '--save_client_models=none'], None),
        (['--algorithm=fedbn+moon', '--save_client_models=all'], 'all'),
        (['--algorithm=silobn', '--save_client_models=all'], 'all'),
        (['--algorithm=local_affine', '--save_client_models=all'], 'all'),
        (['--algorithm=single', '--save_client_models=all'], 'all'),
        (
            [
                '--algorithm=fbn',
                '--pan=add',
                '--pan_personal_share=0.5',
                '--save_client_models=sampled',
            ],
            'sampled',
        ),
    ],
)
def test_whose_clients_have_own_models(arguments, expected):
  assert _resolve(*arguments).save_client_models == expected


def test_client_models_of_some_of_the_compared_algorithms():
  flags = _compare_flags(
      '--algorithms=fedavg,fedbn', '--save_client_models=sampled'
  )
  settings.check(flags)
  assert settings.resolve(flags, 'fedavg', 0).save_client_models is None
  assert settings.resolve(flags, 'fedbn', 0).save_client_models == 'sampled'


def test_clients_that_share_samples():
  assert _resolve('--split=iid').samples_per_client is None
  resolved = _resolve(
      '--split=iid', '--samples_per_client=20', '--num_clients=100000'
  )
  assert resolved.samples_per_client == 20
  assert resolved.num_clients == 100_000


def test_flag_for_none_of_the_compared_algorithms():
  flags = _compare_flags('--algorithms=fedbn,silobn', '--statistics=pooled')
  with pytest.raises(ValueError, match='--algorithms=fedbn,silobn; it is for'):
    settings.check(flags)


def test_sync_rounds_of_some_of_the_compared_algorithms():
  flags = _compare_flags(
      '--algorithms=fedavg,fedtan,fedtan_ii',
      '--sync_rounds=7',
      '--moments=fused',
  )
  settings.check(flags)
  assert settings.resolve(flags, 'fedtan_ii', 0).sync_rounds == 7
  assert settings.resolve(flags, 'fedtan', 0).sync_rounds is None
  assert settings.resolve(flags, 'fedtan', 0).moments == 'fused'
  assert settings.resolve(flags, 'fedavg', 0).moments is None


def test_float16_of_some_of_the_compared_algorithms():
  flags = _compare_flags(
      '--algorithms=fedavg,fedtan,fedtan_ii', '--precision=mixed_float16'
  )
  with pytest.raises(
      ValueError, match='fedtan, which cannot scale.*same holds for fedtan_ii'
  ):
    settings.check(flags)
  settings.check(
      _compare_flags('--algorithms=fedavg', '--precision=mixed_float16')
  )
  settings.check(_compare_flags('--precision=mixed_bfloat16'))


def test_flags_of_a_comparison():
  flags = _compare_flags('--algorithms=centralized,fedavg', '--seeds=3,4')
  texts = compare.comparison_flags(flags, compare.plan(flags))
  assert texts['algorithms'] == 'centralized,fedavg'
  assert texts['seeds'] == '3,4'
  assert texts['statistics'] == 'naive'
  assert 'algorithm' not in texts and 'seed' not in texts
  again = _compare_flags(*(f'--{name}={text}' for name, text in texts.items()))
  assert compare.comparison_flags(again, compare.plan(again)) == texts


def test_arguments_of_the_library_become_flags():
  resolved = _resolve('--algorithm=moon', '--moon_feature_layer=nope')
  assert resolved.name_flags("feature_layer='nope' names no layer") == (
      "moon_feature_layer='nope' names no layer"
  )
  # It is no argument of this algorithm.
  assert _resolve('--algorithm=fedavg').name_flags('x (feature_layer=1)') == (
      'x (feature_layer=1)'
  )


@pytest.mark.parametrize(
    ('name', 'words'),
    [
        ('a\n--seed=1', r"must not contain the character '\\n'"),
        ('a\x85b', r"must not contain the character '\\x85'"),
        ('a ', 'must not begin or end with a space'),
    ],
)
def test_paths_that_flags_txt_cannot_hold(name, words, tmp_path, monkeypatch):
  """The working folder becomes a part of a relative path."""
  folder = tmp_path / name
  folder.mkdir()
  monkeypatch.chdir(folder)
  flags = command_line.parse(train.define_flags, ['--dataset=folder:.'])
  with pytest.raises(ValueError, match=f'--dataset=folder:.*{words}'):
    settings.resolve(flags, 'fedavg', 0)
  # Presets and digits have no path.
  flags = command_line.parse(train.define_flags, ['--dataset=digits'])
  assert settings.resolve(flags, 'fedavg', 0).dataset == 'digits'
