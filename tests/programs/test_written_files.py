"""The files that programs write, on a disk that fails at any operation."""

import faults
import pytest
import written_files

pytestmark = pytest.mark.skipif(
    not faults.IS_POSSIBLE, reason='needs gcc and LD_PRELOAD'
)


def _files(folder):
  return {
      path.relative_to(folder).as_posix(): path.read_bytes()
      for path in folder.rglob('*')
      if path.is_file()
  }


@pytest.fixture(scope='module')
def old(tmp_path_factory):
  """The contents of the files before they are replaced."""
  folder = tmp_path_factory.mktemp('old') / 'old'
  written_files.prepare_write(folder)
  return _files(folder)


@pytest.fixture(scope='module')
def library(tmp_path_factory):
  return faults.build_library(tmp_path_factory.mktemp('library'))


# A file takes five operations, so that every fourth is each of them in turn.
@pytest.mark.slow
@pytest.mark.parametrize(
    ('kinds', 'step'),
    [
        (faults.EVERY_KIND, 13),
        ([(faults.KILL, 1)], 4),
    ],
)
def test_each_file_is_the_old_or_the_new_one(
    kinds, step, library, old, tmp_path
):
  def check_after(folder, is_killed):
    found = _files(folder)
    for name in [name for name in found if '.part' in name]:
      assert is_killed
      del found[name]
    for name, content in found.items():
      assert content in (old.get(name), new[name]), name
    assert found.keys() >= old.keys()

  new = {}

  def snapshot(folder):
    found = _files(folder)
    new.update(found)
    return found

  whole = faults.check(
      library,
      'written_files:write',
      tmp_path,
      [(*kind, step) for kind in kinds],
      snapshot,
      check_after=check_after,
  )
  # Creating, writing, two synchronizations and renaming of each file.
  assert whole['operations'] >= 5 * len(new)
  assert new.keys() == old.keys()
  assert all(new[name] != old[name] for name in new)
