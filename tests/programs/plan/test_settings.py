"""Tests for flags that are checked against one another."""

import dataclasses
import hashlib
import re
import zipfile

from absl import flags as absl_flags
import flag_cases
import pytest

from tff_bn.catalog import algorithms
from tff_bn.programs import compare
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.flags import logging_flags
from tff_bn.programs.flags import runtime_flags
from tff_bn.programs.plan import settings


def _train_flags(*arguments):
  return command_line.parse(train.define_flags, arguments)


def _compare_flags(*arguments):
  return command_line.parse(compare.define_flags, arguments)


def _resolve(*arguments):
  flags = _train_flags(*arguments)
  settings.check(flags)
  return settings.resolve(flags, flags.algorithm, flags.seed)


def _again(resolved, folder):
  """Resolves the flags that the flags.txt of a run has."""
  path = folder / 'flags.txt'
  texts = resolved.to_flags()
  path.write_text(''.join(f'--{name}={texts[name]}\n' for name in texts))
  return _resolve(f'--flagfile={path}')


def test_every_flag_that_defines_a_run_is_a_setting():
  groups = train.define_flags(absl_flags.FlagValues())
  names = {name for group in groups for name in group.names}
  fields = {field.name for field in dataclasses.fields(settings.RunSettings)}
  # These decide where a run is computed and written, but not its result.
  others = {'output_dir', 'overwrite', 'verbosity'}
  others |= set(runtime_flags.RuntimeFlags.specs())
  others |= set(logging_flags.LoggingFlags.specs())
  assert names - others == fields


def test_defaults(tmp_path):
  resolved = _resolve()
  flag_cases.check_settings(
      resolved,
      """
      algorithm=fedavg local_steps=5 local_epochs= num_clients=10 split=classes
      classes_per_client=1 gamma= samples_per_client= statistics=naive moments=
      sync_rounds= after_sync_factor= fixbn_rounds= pooled= attack=
      attack_target= model_aggregator=mean statistics_aggregator=mean
      server_optimizer=sgd server_learning_rate=1.0 server_momentum=
      client_optimizer= client_learning_rate=0.1 client_weighting=num_examples
      pan=off pan_amplitude= pan_period= pan_personal_share= shuffle_times=
      shuffle_probability= proximal_strength= fedbs_epsilon= moon_weight=
      moon_temperature= moon_feature_layer= greg_weight= save_client_models=
      feddyn_strength=
      """,
  )
  assert _again(resolved, tmp_path) == resolved


# A value for each flag that has an effect here, none of them its default.
_VALUES = """
algorithm=local_affine statistics=pooled model_aggregator=nnm+median
statistics_aggregator=bucketing+centered_clipping num_byzantine=2
clipping_radius=3.0 bucket_size=3 attack=foe attack_target=model
attack_strength=2.0 num_attackers=1 dataset=domains:a=digits,b=emnist
data_dir=/data image_size=9x8 pixel_scaling=standardized train_share=0.5
samples_per_domain=20 split=dirichlet num_clients=7 dirichlet_by=client
dirichlet_prior=proportional held_out_clients=client_1 held_out_prior=8.0
dirichlet_alpha=0.25 model=mlp3
task=binary loss=focal metrics=auc,f1 class_weight=balanced
normalization=none precision=mixed_bfloat16 batch_norm_momentum=0.5 pan=multiply
pan_amplitude=0.25 pan_period=2.0 pan_personal_share=0.5 rounds=11
clients_per_round=6 local_epochs=2 batch_size=13 client_learning_rate=0.75
client_learning_rate_schedule=3:0.5 client_momentum=0.5
client_weight_decay=0.125 client_gradient_clip_norm=2.5 client_warmup_rounds=20
client_warmup_steps=30 max_failed_rounds=5 augment=flip_crop
client_weighting=uniform jit_compile=true server_optimizer=sgdm
server_learning_rate=0.375 server_momentum=0.625 server_clip_norm=0.25 seed=17
evaluate_every=3 checkpoint_every=4 save_client_models=all privacy=none
"""


def test_every_value_reaches_its_setting():
  words = _VALUES.split()
  resolved = _resolve(*(f'--{word}' for word in words))
  # All other flags have no effect.
  assert resolved.to_flags() == dict(word.split('=', 1) for word in words)
  assert resolved.held_out_clients == ('client_1',)
  assert resolved.jit_compile is True


# The flags of a run, and the settings that follow; empty: without effect.
_SETTINGS = """
--algorithm=fedbn --local_epochs=2 --split=iid
    local_epochs=2 local_steps= num_clients=10 classes_per_client= statistics=
--algorithm=single --split=gamma --gamma=0.3
    gamma=0.3 server_optimizer= server_learning_rate= client_weighting=
    statistics=
--algorithm=centralized
    server_optimizer= server_learning_rate= client_weighting= statistics=
--split=domains
    num_clients=
--split=natural --clients_per_round=1000
    num_clients= clients_per_round=1000
--server_optimizer=sgd
    server_learning_rate=1.0 server_momentum=
--server_optimizer=sgdm
    server_learning_rate=0.1 server_momentum=0.9
--server_optimizer=adam
    server_learning_rate=0.01 server_momentum=
--server_optimizer=yogi --statistics=pooled
    server_learning_rate=0.01 server_momentum= statistics=pooled
--client_learning_rate=1e-5
    client_learning_rate=1e-05
--dataset=tfds:mnist --data_dir='/my data'
    dataset=tfds:mnist
--algorithm=fedtan
    moments=two_pass statistics=naive server_optimizer=sgd
    client_weighting=num_examples sync_rounds= after_sync_factor=
--algorithm=fedtan --local_steps=1
    fedtan_statistics= fedtan_every=1
--algorithm=fedtan --local_steps=1 --fedtan_every=2
    fedtan_statistics=all_steps fedtan_every=2
--algorithm=fedtan_ii
    moments=two_pass statistics=naive sync_rounds=12 after_sync_factor=0.1
    fedtan_statistics=all_steps fedtan_every=
--algorithm=fedtan_ii --rounds=10000
    sync_rounds=2000
--algorithm=fedtan_ii --rounds=2
    sync_rounds=1
--algorithm=fedtan_ii --rounds=10 --sync_rounds=9 --statistics=pooled
    sync_rounds=9 statistics=pooled after_sync_factor=0.1
--algorithm=fbn --batch_norm_momentum=0.99
    pooled=true statistics= statistics_aggregator=mean batch_norm_momentum=0.99
--algorithm=fbn --nopooled
    pooled=false
--algorithm=fbn --fbn_backward=running --fbn_backward_restart=2
    fbn_backward_restart=2.0
--algorithm=fixbn
    fixbn_rounds=30 sync_rounds=
--algorithm=fixbn --rounds=3000
    fixbn_rounds=1500
--algorithm=fixbn+fedprox
    fixbn_rounds=30 proximal_strength=0.001
--algorithm=hbn
    hbn_statistics_rate=0.002 statistics= statistics_aggregator=mean
--algorithm=dsgd --local_steps=1 --client_momentum=0.9
    client_momentum=0.9 dsgd_momentum=
--algorithm=dsgd --local_steps=1 --dsgd_momentum=0.99
    dsgd_momentum=0.99
--algorithm=centralized --dsgd_momentum=0.99
    dsgd_momentum=0.99
--algorithm=dsgd_fixbn --local_steps=1 --fixbn_rounds=8 --dsgd_momentum=0
--model_aggregator=median
    dsgd_momentum=0.0 fixbn_rounds=8 model_aggregator=median
--algorithm=fedprox
    proximal_strength=0.001 fedbs_epsilon= moon_weight=
--algorithm=scaffold
    client_weighting=uniform proximal_strength= moon_weight= fedbs_epsilon=
--algorithm=scaffold --client_weighting=num_examples
    client_weighting=num_examples
--algorithm=fednova --client_momentum=0.9
    client_weighting=num_examples client_momentum=0.9 feddyn_strength=
--algorithm=silobn+feddyn
    client_weighting=uniform feddyn_strength=0.01 proximal_strength=
--algorithm=fbn+scaffold
    client_weighting=uniform pooled=true statistics= server_optimizer=sgd
--algorithm=fedtan_ii+fedprox
    proximal_strength=0.001 fedbs_epsilon= moon_weight=
--algorithm=moon
    statistics=naive moon_weight=1.0 moon_temperature=0.5 moon_feature_layer=
--algorithm=fedbn+fedbs
    proximal_strength=0.001 fedbs_epsilon=0.01 moon_weight=
--algorithm=local_affine+greg --loss=SparseCategoricalCrossentropy
    greg_weight=0.1 moon_weight=
--pan=add
    pan_amplitude=0.05 pan_period=1.0 pan_personal_share=0.0
--pan=multiply
    pan_amplitude=0.1 pan_period=1.0 pan_personal_share=0.0
--pan=add --pan_amplitude=0 --pan_period=0
    pan_amplitude=0.0 pan_period=0.0 pan_personal_share=
--pan=add --pan_amplitude=0 --pan_personal_share=0
    pan_personal_share=
--shuffle_times=0
    shuffle_times= shuffle_probability=
--shuffle_times=0.2
    shuffle_times=0.2 shuffle_probability=0.1
--client_optimizer=sgd
    client_optimizer= client_learning_rate=0.1
--client_optimizer=adam
    client_optimizer=adam client_learning_rate=0.0003 client_momentum=
--statistics_aggregator=median
    client_weighting=num_examples
--model_aggregator=median
    client_weighting=uniform
--model_aggregator=nnm+median --num_byzantine=3
    clipping_radius= bucket_size= attack_target= num_attackers=
--statistics_aggregator=bucketing+centered_clipping
    clipping_radius=10.0 bucket_size=2
--attack=sf --num_attackers=3
    client_weighting=uniform attack_target=both
--attack=sf --model_aggregator=median --num_byzantine=3
    num_attackers=3
--attack=sf --model_aggregator=median --num_byzantine=3 --num_attackers=2
    num_attackers=2
--attack=label_flip --num_attackers=3
    client_weighting=num_examples attack_target=
--attack=alie --num_attackers=3 --attack_target=statistics
    client_weighting=num_examples attack_target=statistics
--algorithm=fedbn --save_client_models=none
    save_client_models=
--algorithm=fbn --pan=add --pan_personal_share=0.5 --save_client_models=sampled
    save_client_models=sampled
"""


@flag_cases.parametrize(_SETTINGS)
def test_settings_that_follow_from_flags(arguments, expected, tmp_path):
  resolved = _resolve(*arguments)
  flag_cases.check_settings(resolved, expected)
  assert _again(resolved, tmp_path) == resolved


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
        ' fedavg, fedbn, silobn, local_affine, fedstein, fedap, fedper,'
        ' fedrep, lg_fedavg, fedbabu, ditto, fbn, bn_scaffold, fixbn, hbn,'
        ' dsgd, dsgd_fbn, dsgd_fixbn, single.'
    )
    with pytest.raises(ValueError, match=f'^{re.escape(message)}$'):
      _resolve(*arguments, *_PERSONAL)
  else:
    assert _resolve(*arguments, *_PERSONAL).pan_personal_share == 0.5


@pytest.mark.parametrize(
    ('arguments', 'expected'),
    [
        (['--algorithm=fedavg'], False),
        (['--algorithm=fedbn+moon'], True),
        (['--algorithm=fedavg', '--local_layers=dense'], True),
        (['--algorithm=fedprox', '--local_layers=dense'], True),
        (['--algorithm=fedrep'], True),
        (['--algorithm=fedbabu'], False),
        (['--algorithm=fedavg', *_PERSONAL], True),
        (['--algorithm=fedavg', *_PERSONAL, '--pan_personal_share=0'], False),
    ],
)
def test_clients_with_own_models(arguments, expected):
  assert settings.has_client_models(_resolve(*arguments)) is expected


# The flags in FILE, a command with FILE, and the settings that follow.
_OF_A_FLAGFILE = """
--algorithm=fedtan_ii --sync_rounds=70 --rounds=100
    FILE --algorithm=fedtan --rounds=60 → sync_rounds= after_sync_factor=
--pan=add --pan_personal_share=0.5
    FILE --pan=off → pan_personal_share=
--pan=add --pan_personal_share=0.5
    FILE --pan_amplitude=0 → pan_personal_share=
--pan=add --pan_personal_share=0.5
    FILE --algorithm=centralized --pan_period=0 → pan_personal_share=
--batch_norm_momentum=0.9
    FILE --algorithm=hbn → batch_norm_momentum=
--split=gamma --gamma=0.5
    FILE --split=dirichlet → gamma= dirichlet_alpha=0.5
--statistics=pooled
    FILE --algorithm=fedbn → statistics=
--local_steps=4
    FILE --local_epochs=2 → local_steps= local_epochs=2
--local_steps=4
    --local_epochs=2 FILE → local_steps= local_epochs=2
"""


@flag_cases.parametrize(_OF_A_FLAGFILE)
def test_command_line_overrules_a_flagfile(arguments, expected, tmp_path):
  path = tmp_path / 'flags'
  path.write_text('\n'.join(arguments))
  command, _, values = expected.partition('→')
  command = command.replace('FILE', f'--flagfile={path}')
  resolved = _resolve(*command.split())
  flag_cases.check_settings(resolved, values)
  assert _again(resolved, tmp_path) == resolved


@pytest.mark.parametrize(
    ('flags', 'arguments', 'message'),
    [
        ('--split=iid\n--gamma=0.5', [], '--gamma=0.5 is only for'),
        (
            '--algorithm=fedtan_ii\n--sync_rounds=70\n--rounds=100',
            ['--rounds=60'],
            '--sync_rounds=70 leaves no round',
        ),
    ],
)
def test_contradiction_in_a_flagfile(flags, arguments, message, tmp_path):
  path = tmp_path / 'flags'
  path.write_text(flags)
  with pytest.raises(ValueError, match=message):
    _resolve(f'--flagfile={path}', *arguments)


class TestInitialModel:

  @pytest.fixture
  def path(self, tmp_path):
    """A file that looks like one of Keras until it is loaded."""
    path = tmp_path / 'model.keras'
    with zipfile.ZipFile(path, 'w') as archive:
      archive.writestr('config.json', '{}')
    return path

  @pytest.mark.parametrize(
      'other',
      [
          *('model=mlp3', 'normalization=layer', 'precision=mixed_bfloat16'),
          *('pan=add', 'pan_period=2.0', 'moon_projection=8'),
      ],
  )
  def test_excludes_what_builds_a_model(self, other, path, tmp_path):
    with pytest.raises(
        ValueError,
        match=f'--{other} has no effect with --initial_model={path}',
    ):
      _resolve(f'--initial_model={path}', f'--{other}')
    # The command line overrules a flagfile.
    flagfile = tmp_path / 'flags'
    flagfile.write_text(f'--{other}\n')
    given = f'--flagfile={flagfile}', f'--initial_model={path}'
    if other == 'pan_period=2.0':
      return
    resolved = _resolve(*given)
    assert getattr(resolved, other.partition('=')[0]) is None
    assert resolved.pan_amplitude is None

  def test_overruled_personal_encodings(self, path, tmp_path):
    flagfile = tmp_path / 'flags'
    flagfile.write_text('--pan=add\n--pan_personal_share=0.5\n')
    resolved = _resolve(f'--flagfile={flagfile}', f'--initial_model={path}')
    assert resolved.pan_personal_share is None
    assert not settings.has_client_models(resolved)

  def test_absolute_path_and_checksum(self, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resolved = _resolve('--initial_model=model.keras', '--frozen_layers=a.*')
    assert resolved.initial_model == str(path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert resolved.initial_model_sha256 == sha256
    assert resolved.frozen_layers == 'a.*'
    assert resolved.model is None and resolved.normalization is None
    assert settings.trust_flag(resolved)
    # A new content has a new checksum.
    path.write_bytes(path.read_bytes() + b' ')
    again = _resolve(f'--initial_model={path}')
    assert again.initial_model_sha256 != sha256

  def test_a_new_model_has_no_file(self):
    resolved = _resolve('--model=mlp3')
    assert resolved.initial_model is resolved.initial_model_sha256 is None
    assert not settings.trust_flag(resolved)


# Flags that are impossible together, and a part of the error.
_CONTRADICTIONS = """
--split=iid --classes_per_client=2
    --classes_per_client=2 is only for --split=classes
--save_client_models=all
    --save_client_models=all has no effect with --algorithm=fedavg; it is for
    fedbn, silobn, local_affine, fedstein, fedap, fedper, fedrep, lg_fedavg,
    ditto, single
--algorithm=fbn --local_layers=logits
    --local_layers=logits has no effect with --algorithm=fbn; it is for fedavg,
    fedbn, silobn, local_affine
--algorithm=fedrep --shuffle_times=1
    --shuffle_times=1.0 is impossible with fedrep, which fixes some layers
--local_layers=(
    --local_layers=(: is no regular expression
--pan=add --pan_personal_share=0.5 --pan_period=0 --save_client_models=none
    --pan_personal_share=0.5 has no effect
--algorithm=fbn --fbn_backward_restart=2
    --fbn_backward_restart=2.0 is for --fbn_backward=mean and
--algorithm=fbn+scaffold --fbn_backward=mean
    --fbn_backward=mean is impossible with fbn+scaffold
--algorithm=fbn --fbn_backward=mean --precision=mixed_float16
    --fbn_backward=mean and --precision=mixed_float16 exclude each other with
--dirichlet_by=client
    --dirichlet_by=client is only for --split=dirichlet
--split=dirichlet --dirichlet_prior=proportional
    --dirichlet_prior=proportional is only for --dirichlet_by=client
--initial_model_sha256=0000000000000000000000000000000000000000000000000000000000000000
    has no effect without --initial_model
--initial_model=no/such.keras
    --initial_model=no/such.keras: there is no such file.
--held_out_prior=4
    --held_out_prior=4.0 has no effect without --held_out_clients
--num_clients=2 --held_out_clients=client_1,client_0
    --held_out_clients=client_1,client_0 leaves none of the 2 clients
--algorithm=single --held_out_clients=client_1
    --held_out_clients=client_1 is impossible with single: its clients share
--held_out_clients=client_1 --num_clients=4 --clients_per_round=4
    --clients_per_round=4 asks for more clients than --num_clients=4 without
    --held_out_clients=client_1; use at most 3
--held_out_clients=client_1,client_2 --attack=sf --num_attackers=8
    --num_attackers=8 must be less than the 8 clients of a round.
--server_momentum=0.5
    --server_momentum=0.5 is only for --server_optimizer=sgdm
--algorithm=fedbn --statistics=naive
    --statistics=naive has no effect with --algorithm=fedbn; it is for fedavg,
--pan_amplitude=0.1
    --pan_amplitude=0.1 has no effect with --pan=off
--pan_period=2
    --pan_period=2.0 has no effect with --pan=off
--pan_personal_share=0.5
    --pan_personal_share=0.5 has no effect with --pan=off
--pan=add --pan_personal_share=0.5 --pan_amplitude=0
    --pan_personal_share=0.5 has no effect with --pan_amplitude=0
--proximal_strength=1
    --proximal_strength=1.0 has no effect with --algorithm=fedavg; it is for
    fedprox, fedbs.
--algorithm=fedprox --moon_weight=1
    --moon_weight=1.0 has no effect with --algorithm=fedprox; it is for moon.
--algorithm=moon --greg_weight=1
    --greg_weight=1.0 has no effect with --algorithm=moon; it is for greg.
--algorithm=greg --task=regression
    --task=regression is impossible with greg, which compares probabilities of
    exclusive classes; use classification or segmentation.
--algorithm=greg --loss=focal
    --loss=focal is impossible with greg, which compares probabilities of
    exclusive classes by the softmax of its loss; use cross_entropy or
    categorical_focal_crossentropy.
--algorithm=fbn+scaffold --client_momentum=0.9
    --client_momentum=0.9 is impossible with fbn+scaffold
--algorithm=fedbs --model_aggregator=median
    --model_aggregator=median is impossible with fedbs, which weights the
--algorithm=fednova --model_aggregator=median
    --model_aggregator=median is impossible with fednova, which needs the
    weighted mean
--algorithm=feddyn --attack=foe --num_attackers=1
    --attack=foe is impossible with feddyn, which needs the weighted mean
--algorithm=fednova --client_optimizer=adam
    --client_optimizer=adam is impossible with fednova, which needs the factor
--algorithm=feddyn --feddyn_strength=0
    --feddyn_strength=0
--algorithm=fedtan+fednova
    fednova can't be combined with fedtan
--moments=fused
    --moments=fused has no effect with --algorithm=fedavg; it is for fedtan,
--algorithm=fedtan --sync_rounds=5
    --sync_rounds=5 has no effect with --algorithm=fedtan; it is for
--algorithm=fedtan_ii --fedtan_every=2
    --fedtan_every=2 has no effect with --algorithm=fedtan_ii; it is for fedtan,
    fedtan_forward_only
--algorithm=fedtan --fedtan_every=0
    --fedtan_every=0
--algorithm=fedtan --local_steps=1 --fedtan_statistics=first_step
    --fedtan_statistics=first_step has no effect with --local_steps=1, unless
    --fedtan_every is at least 2
--algorithm=fedtan_ii --local_steps=1 --fedtan_statistics=first_step
    --fedtan_statistics=first_step has no effect with --local_steps=1
--algorithm=fedtan_ii --rounds=20 --sync_rounds=20
    --sync_rounds=20 leaves no round in which the BN statistics of fedtan_ii
--algorithm=fedtan_ii --rounds=1
    --rounds=1 is too few for fedtan_ii
--algorithm=fedtan_forward_only --precision=mixed_float16
    --precision=mixed_float16 is impossible with fedtan_forward_only, which
--fixbn_rounds=5
    --fixbn_rounds=5 has no effect with --algorithm=fedavg; it is for fixbn,
--algorithm=fixbn --rounds=20 --fixbn_rounds=20
    --fixbn_rounds=20 leaves no round in which the BN statistics of fixbn are
--algorithm=fixbn --rounds=1
    --rounds=1 is too few for fixbn
--nopooled
    --pooled=false has no effect with --algorithm=fedavg; it is for fbn,
--algorithm=dsgd
    dsgd needs --local_steps=1, but got --local_steps=5.
--algorithm=dsgd --local_epochs=1
    dsgd needs --local_steps=1, but got --local_epochs=1.
--algorithm=dsgd --local_steps=1 --server_optimizer=adam
    --server_optimizer=adam has no effect with --algorithm=dsgd
--algorithm=fbn --dsgd_momentum=0.9
    --dsgd_momentum=0.9 has no effect with --algorithm=fbn; it is for
--algorithm=dsgd --local_steps=1 --client_momentum=0.9 --dsgd_momentum=0.99
    --dsgd_momentum=0.99 and --client_momentum=0.9 exclude each other with
--shuffle_times=6
    --shuffle_times=6 must be at most --local_steps=5: a step permutes the
--shuffle_probability=0.2
    --shuffle_probability=0.2 has no effect with --shuffle_times=0
--algorithm=fedtan+fedprox --shuffle_times=0.5
    --shuffle_times=0.5 is impossible with fedtan+fedprox, which needs the
--client_optimizer=adam --client_momentum=0.9
    --client_momentum=0.9 is only for --client_optimizer=sgd
--algorithm=dsgd_fbn --local_steps=1 --client_optimizer=adam
    --client_optimizer=adam is impossible with dsgd_fbn, whose steps are steps
--algorithm=fbn+scaffold --client_optimizer=adam
    --client_optimizer=adam is impossible with fbn+scaffold, which computes
--algorithm=centralized --client_momentum=0.9 --dsgd_momentum=0.99
    --dsgd_momentum=0.99 and --client_momentum=0.9 exclude each other with
--algorithm=dsgd_fbn --local_steps=1 --fbn_backward=mean --dsgd_momentum=0.99
    --dsgd_momentum=0.99 and --fbn_backward=mean exclude each other with
--model_aggregator=nnm+median
    --model_aggregator=nnm+median needs --num_byzantine, the number of clients
--model_aggregator=krum --num_byzantine=5
    --num_byzantine=5 must be less than half of the 10 clients
--model_aggregator=median --num_byzantine=2 --clients_per_round=4
    --num_byzantine=2 must be less than half of the 4 clients
--num_byzantine=2
    --num_byzantine=2 has no effect without another --model_aggregator,
--clipping_radius=2
    --clipping_radius=2.0 is only for centered_clipping
--bucket_size=2
    --bucket_size=2 is only for bucketing
--batch_size=1000000 --local_steps=11
    --local_steps=11 with --batch_size=1000000 makes 11000000 examples of a
--algorithm=centralized --centralized_batch_size=1000000 --local_steps=11
    --local_steps=11 with --centralized_batch_size=1000000 makes 11000000
--centralized_batch_size=5
    --centralized_batch_size=5 has no effect with --algorithm=fedavg; it is for
--split=iid --num_clients=100000 --samples_per_client=1001
    --num_clients=100000 with --samples_per_client=1001 makes 100100000
--clipping_norm=2
    --clipping_norm=2.0 is only for clipping
--trusted_client=1
    --trusted_client=1 is only for monna
--model_aggregator=nnm+monna --num_byzantine=1 --attack=sf --num_attackers=2
--trusted_client=-9
    --trusted_client=-9 is one of the first 2 of 10 clients of a round, which
--attack=inf --num_attackers=3 --attack_strength=2
    --attack_strength=2.0 has no effect on --attack=inf
--num_attackers=2
    --num_attackers=2 needs --attack.
--attack_strength=2
    --attack_strength=2.0 needs --attack.
--attack=sf
    --attack=sf needs --num_attackers
--attack=label_flip --num_attackers=3 --attack_target=model
    --attack_target=model has no effect on --attack=label_flip, which
--algorithm=fedavg --attack=sf --num_attackers=3 --attack_target=exchanges
    --attack_target=exchanges has no effect with --algorithm=fedavg, whose
--algorithm=fedtan --attack=sf --num_attackers=3 --attack_target=all
    moments=two_pass is impossible with fedtan if its exchanges have a rule or
--algorithm=fedtan --exchange_aggregator=median
    moments=two_pass is impossible with fedtan if its exchanges have a rule or
--algorithm=fedavg --exchange_aggregator=median
    --exchange_aggregator=median has no effect with --algorithm=fedavg; it is
--algorithm=fedavg --client_filter=bnguard --model_aggregator=median
    --client_filter=bnguard is impossible with --model_aggregator=median: the
--client_filter=bnguard --statistics_aggregator=nnm+median --num_byzantine=1
    --client_filter=bnguard is impossible with --statistics_aggregator=nnm+med
--client_filter=bnguard --attack=sf --num_attackers=3
    --client_filter=bnguard is impossible with --attack=sf, which needs a rule
--client_filter=bnguard --privacy=secure_sum
    --client_filter=bnguard is impossible with --privacy=secure_sum, which hide
--algorithm=fedtan --exchange_aggregator=median --privacy=secure_sum
    --privacy=secure_sum gives the server sums, but rules and attacks need
--algorithm=fedbn --client_filter=bnguard
    --client_filter=bnguard has no effect with --algorithm=fedbn; it is for
--algorithm=fedprox --client_filter=bnguard
    client_filter=bnguard is impossible with fedprox, which corrects drift
--algorithm=fbn --fbn_backward=mean --client_filter=bnguard
    exclude each other with fbn: the averages of the backward pass are those
--attack=sf --num_attackers=10
    --num_attackers=10 must be less than the 10 clients of a round.
--algorithm=fedbn --attack=sf --num_attackers=3 --attack_target=statistics
    --attack_target=statistics has no effect with --algorithm=fedbn, whose
--model_aggregator=median --client_weighting=num_examples
    --client_weighting=num_examples is impossible with
--attack=sf --num_attackers=1 --client_weighting=num_examples
    --client_weighting=num_examples is impossible with --model_aggregator=mean
--local_steps=3 --local_epochs=1
    --local_steps=3 and --local_epochs=1 exclude each other
--num_clients=4 --clients_per_round=5
    --clients_per_round=5 asks for more clients than --num_clients=4
--algorithm=hbn --normalization=batch_renorm
    --normalization=batch_renorm is impossible with hbn, which has its own
--algorithm=hbn --batch_norm_momentum=0.9
    --batch_norm_momentum=0.9 has no effect with --algorithm=hbn, which has
"""


@flag_cases.parametrize(_CONTRADICTIONS)
def test_contradictions(arguments, expected):
  with pytest.raises((ValueError, command_line.UsageError)) as error:
    _resolve(*arguments)
  assert expected in str(error.value)


_CONTRADICTIONS_OF_COMPARISONS = """
--algorithms=fedbn,silobn --statistics=pooled
    --statistics=pooled has no effect with --algorithms=fedbn,silobn; it is for
--algorithms=fedavg,fedtan,fedtan_ii --precision=mixed_float16
    The same holds for fedtan_ii.
--algorithms=fedavg,fedtan_ii,centralized --pan=add --pan_personal_share=0.5
    The same holds for centralized.
--seeds=0 --pan=add --pan_personal_share=0.5
    --pan_personal_share=0.5 is impossible with centralized
"""


@flag_cases.parametrize(_CONTRADICTIONS_OF_COMPARISONS)
def test_contradictions_of_comparisons(arguments, expected):
  with pytest.raises(ValueError, match=re.escape(expected)):
    settings.check(_compare_flags(*arguments))


# A flag for some of the compared algorithms has no effect on the others.
_COMPARISONS = """
--algorithms=fedavg,fedbn --statistics=pooled
    fedavg: statistics=pooled fedbn: statistics=
--algorithms=fedavg,fedbn --save_client_models=sampled
    fedavg: save_client_models= fedbn: save_client_models=sampled
--algorithms=fedavg,fedtan,fedtan_ii --sync_rounds=7 --moments=fused
    fedavg: moments= fedtan: sync_rounds= moments=fused fedtan_ii: sync_rounds=7
--algorithms=fedavg,hbn --batch_norm_momentum=0.5
    fedavg: batch_norm_momentum=0.5 hbn: batch_norm_momentum=
--algorithms=fedavg --precision=mixed_float16
    fedavg: precision=mixed_float16
--precision=mixed_bfloat16
    fedtan: precision=mixed_bfloat16
--algorithms=fedavg,fedbn+moon,single --pan=add --pan_personal_share=0.5
    single: pan_personal_share=0.5
--pan=add
    centralized: pan=add pan_personal_share=0.0
"""


@flag_cases.parametrize(_COMPARISONS)
def test_settings_of_compared_algorithms(arguments, expected):
  flags = _compare_flags(*arguments)
  settings.check(flags)
  for algorithm, values in re.findall('(\\S+): ([^:]*)(?= |$)', expected):
    flag_cases.check_settings(settings.resolve(flags, algorithm, 0), values)


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
