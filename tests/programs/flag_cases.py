"""Tables of test cases as texts: flags, and indented below, the expectation."""

import re
import shlex

import pytest

_CASE = re.compile(r'((?:^\S.*\n)+)((?:^ +.*\n)+)', re.M)


def parametrize(text: str) -> pytest.MarkDecorator:
  """Runs a test with the `arguments` and the `expected` text of each case."""
  cases = _CASE.findall(text)
  return pytest.mark.parametrize(
      ('arguments', 'expected'),
      [(shlex.split(flags), ' '.join(rest.split())) for flags, rest in cases],
      ids=[' '.join(flags.split()) for flags, _ in cases],
  )


def check_settings(settings, expected: str) -> None:
  """Checks the texts of settings: `name=text`, or `name=` for no effect."""
  found = settings.to_flags()
  for word in expected.split():
    name, _, text = word.partition('=')
    assert name in settings.specs()
    assert found.get(name, '') == text, word
