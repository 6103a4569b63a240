"""Tests of programs draw pictures only where the pictures matter."""

import pytest

_DRAWING = ('results', 'test_programs.py', 'test_sweep_runs.py')


@pytest.fixture(scope='module', autouse=True)
def empty_pictures(request):
  """Writes empty PNG files: a picture takes a fifth of the time of a run."""
  if {request.path.name, request.path.parent.name}.intersection(_DRAWING):
    yield
    return
  import vl_convert

  with pytest.MonkeyPatch.context() as monkeypatch:
    monkeypatch.setattr(vl_convert, 'vegalite_to_png', lambda *_, **__: b'')
    yield
