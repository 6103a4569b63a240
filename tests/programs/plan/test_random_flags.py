"""Random flags: settings that flags.txt keeps, or an error that explains."""

import math
import os
import pathlib

import hypothesis
from hypothesis import strategies as st
import pytest
import random_flags

from tff_bn.catalog import value_types
from tff_bn.programs import compare
from tff_bn.programs import evaluate
from tff_bn.programs import train
from tff_bn.programs.cli import command_line
from tff_bn.programs.cli import parsers
from tff_bn.programs.flags import runtime_flags
from tff_bn.programs.plan import settings as settings_lib

_PROGRAMS = (train.PROGRAM, compare.PROGRAM, evaluate.PROGRAM)


@pytest.fixture(autouse=True, scope='module')
def working_folder(tmp_path_factory):
  """Relative paths, and modules of the user, are searched in a new folder."""
  with pytest.MonkeyPatch.context() as monkeypatch:
    monkeypatch.chdir(tmp_path_factory.mktemp('folder'))
    yield


def _parse(define_flags, texts):
  return command_line.parse(
      define_flags, [f'--{name}={text}' for name, text in texts.items()]
  )


def _shown(text):
  """A text as messages have it."""
  try:
    parsers.check_characters(text)
  except ValueError:
    return ascii(text)[1:-1]
  return text


def _assert_is_in_range(value, allowed):
  assert math.isfinite(value)
  assert allowed.minimum is None or value >= allowed.minimum
  assert allowed.maximum is None or value <= allowed.maximum
  assert allowed.above is None or value > allowed.above
  assert allowed.below is None or value < allowed.below


@pytest.mark.parametrize(
    'program', _PROGRAMS, ids=[program.name for program in _PROGRAMS]
)
@hypothesis.given(data=st.data())
def test_a_flag_is_read_or_its_error_names_it(program, data):
  types = random_flags.flags_of(program.define_flags)
  name = data.draw(st.sampled_from(sorted(types)))
  text = data.draw(random_flags.texts(types[name]))
  try:
    flags = _parse(program.define_flags, {name: text})
  except command_line.UsageError as error:
    start = f'--{name}={_shown(text)}'
    message = str(error)
    assert message.startswith(start)
    assert message[len(start) :].lstrip(': ')
    assert message.endswith(('.', '?'))
    return
  value = getattr(flags, name)
  if isinstance(types[name], value_types.Number) and value is not None:
    _assert_is_in_range(value, types[name])
  # A flag that can be repeated has a list.
  values = value if isinstance(value, list) else [value]
  again = command_line.parse(
      program.define_flags, [f'--{name}={parsers.to_text(v)}' for v in values]
  )
  assert getattr(again, name) == value


def _resolve_train(texts):
  with command_line.checking_input():
    flags = _parse(train.define_flags, texts)
    settings_lib.check(flags)
    runtime_flags.RuntimeFlags.check(flags)
    runtime_flags.RuntimeFlags.read(flags)
    return settings_lib.resolve(flags, flags.algorithm, flags.seed).to_flags()


def _resolve_comparison(texts):
  with command_line.checking_input():
    flags = _parse(compare.define_flags, texts)
    return compare.comparison_flags(flags, compare.plan(flags))


def _without_wrong_flags(resolve, texts):
  """Leaves out the flags that errors name until there is no error."""
  texts = dict(texts)
  while True:
    try:
      return resolve(texts)
    except command_line.UsageError as error:
      message = str(error)
    named = [name for name in texts if f'--{name}' in message]
    assert named, message
    # Long messages are cut.
    assert message.endswith(('.', '?', '…')), message
    del texts[named[-1]]


@pytest.mark.parametrize(
    ('define_flags', 'resolve'),
    [
        (train.define_flags, _resolve_train),
        (compare.define_flags, _resolve_comparison),
    ],
    ids=['train', 'compare'],
)
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 2)
@hypothesis.given(data=st.data())
def test_flags_are_kept_by_flags_txt_or_an_error_names_them(
    define_flags, resolve, data, working_folder
):
  texts = data.draw(random_flags.arguments(define_flags, 6))
  resolved = _without_wrong_flags(resolve, texts)
  path = pathlib.Path('flags')
  lines = [
      f'--{name}={line}\n'
      for name, lines in resolved.items()
      for line in lines.split('\n')
  ]
  path.write_text(''.join(lines), encoding='utf-8')
  assert resolve({'flagfile': os.fspath(path)}) == resolved
