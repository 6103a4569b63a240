"""Tests for what `tff-bn-compare` compares without `--algorithms`."""

import pytest

from tff_bn.programs import compare
from tff_bn.programs.cli import command_line
from tff_bn.programs.flags import first_look


def _runs(*arguments):
  """Returns the settings of the runs with the first seed, by title."""
  flags = command_line.parse(compare.define_flags, (*arguments, '--seeds=0'))
  return {
      run.title.removesuffix(', seed 0'): run.settings
      for run in compare.plan(flags).runs
  }


def test_settings():
  runs = _runs()
  assert list(runs) == ['centralized', 'fedavg', 'fedtan', 'fbn', 'fedbn']
  for name, run in runs.items():
    assert (run.algorithm, run.local_steps, run.rounds) == (name, 1, 200)
    assert (run.split, run.classes_per_client) == ('classes', 1)
    has_averages = (run.fbn_backward, run.server_clip_norm) == ('running', 0.3)
    assert has_averages == (name == 'fbn')
  assert runs['fbn'].fbn_backward_restart == 1.5


def test_flags_overrule_the_settings(tmp_path):
  (tmp_path / 'epochs.flags').write_text('--local_epochs=2\n')

  runs = _runs(f'--flagfile={tmp_path / "epochs.flags"}', '--rounds=3')

  assert runs['fbn'].fbn_backward == 'running'
  for run in runs.values():
    assert (run.local_epochs, run.local_steps, run.rounds) == (2, None, 3)


@pytest.mark.parametrize('sweep', [False, True])
def test_one_of_the_flags_of_fbn_replaces_all(sweep):
  if sweep:
    runs = _runs('--sweep=fbn_backward=none')
    fbn = runs['fbn, fbn_backward=none']
  else:
    fbn = _runs('--fbn_backward=none')['fbn']

  assert fbn.fbn_backward == 'none'
  assert fbn.fbn_backward_restart is fbn.server_clip_norm is None


@pytest.mark.parametrize(
    'arguments', [(), ('--sweep=gamma=0,1', '--split=gamma')]
)
def test_flags_txt_repeats_the_first_look(arguments):
  flags = command_line.parse(compare.define_flags, arguments)
  runs = compare.plan(flags)
  texts = compare.comparison_flags(flags, runs)
  assert 'algorithms' not in texts

  lines = [f'--{name}={text}' for name, text in texts.items()]
  again = command_line.parse(compare.define_flags, lines)

  assert compare.plan(again) == runs
  assert compare.comparison_flags(again, runs) == texts


def test_named_algorithms_have_the_usual_defaults():
  fbn = _runs('--algorithms=fbn')['fbn']
  assert (fbn.local_steps, fbn.rounds, fbn.fbn_backward) == (5, 60, 'none')


def test_help_shows_the_settings():
  text = first_look.explain()
  for name, value in {**first_look.FLAGS, 'server_clip_norm': '0.3'}.items():
    assert f'--{name}={value}' in text


def test_next_step_has_the_programs_flags():
  flags = command_line.parse(compare.define_flags, ['--rounds=3'])
  command, _, _ = first_look.next_step(flags).partition('\n')
  flags = command_line.parse(compare.define_flags, command.split()[1:])
  assert (flags.dataset, flags.split) == ('digits_domains', 'domains')
  for flag in ('--dataset=digits', '--split=iid', '--algorithms=fbn'):
    flags = command_line.parse(compare.define_flags, [flag])
    assert first_look.next_step(flags) is None
