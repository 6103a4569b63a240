"""Tests of scripts/setup.sh and the Makefile with fake Python interpreters."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import time

import ended_programs
import psutil
import pytest

_ROOT = pathlib.Path(__file__).parents[2]

# The commands that the script may use besides Python.
_TOOLS = (
    'bash',
    'cat',
    'cksum',
    'cp',
    'dirname',
    'grep',
    'make',
    'mkdir',
    'rm',
    'sh',
)

# A fake interpreter. It prints its version, copies itself to create a virtual
# environment or a console script, and records its other calls.
_INTERPRETER = """#!/bin/sh
case "$*" in
  *version_info*) echo {version} ;;
  *ensurepip*) exit {no_venv} ;;
  '-m venv --clear .venv')
    [ -n "$FAIL_VENV" ] && exit 1
    mkdir -p .venv/bin
    cp "$0" .venv/bin/python
    echo "{name}: new" >>"$CALLS"
    ;;
  *)
    echo "{name}: $*" >>"$CALLS"
    [ -z "$PYTHONPATH$PYTHONHOME$PIP_PREFIX$PIP_TARGET" ] ||
      echo 'path!' >>"$CALLS"
    case "$*" in
      '-m pip '*) [ "$PIP_USER" = 0 ] || echo 'user!' >>"$CALLS" ;;
    esac
    case "$*" in
      ${{FAIL:-none}}) echo "failed: $*"; exit 7 ;;
      *--editable*) cp "$0" .venv/bin/tff-bn-compare ;;
    esac
    ;;
esac
"""

_NEW = '{}: new'
_INSTALLS = tuple(
    f'{{}}: -m pip install --quiet --no-deps --ignore-requires-python {what}'
    for what in (
        '-r .venv/build-requirements.txt',
        '--no-build-isolation -r requirements.txt',
        '--no-build-isolation --editable .',
    )
)


# `make test` installs these, too.
_FURTHER = tuple(
    '{}: -m pip install --quiet --no-deps --ignore-requires-python -r'
    f' requirements-{name}.txt'
    for name in ('ray', 'logging', 'files', 'docs')
)


class Machine:
  """A machine with a copy of the set-up and with fake interpreters."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.project = folder / 'a clone'
    self._calls = folder / 'calls'
    self._bin = folder / 'bin'
    self._bin.mkdir()
    for tool in _TOOLS:
      if path := shutil.which(tool):
        (self._bin / tool).symlink_to(path)
    self.add_script('chromium', '#!/bin/sh\n')
    for file in (
        'scripts/check_types.sh',
        'scripts/setup.sh',
        'requirements.txt',
        'locked/requirements.txt',
        'setup.py',
        'tff_bn/imports/tff_imports.py',
        'Makefile',
        '.ci/run',
    ):
      target = self.project / file
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(_ROOT / file, target)

  def add(
      self, name: str, version: str, *, venv: bool = True, folder: str = 'bin'
  ) -> pathlib.Path:
    """Adds an interpreter, on the PATH unless `folder` is given."""
    return self.add_script(
        name,
        _INTERPRETER.format(name=name, version=version, no_venv=int(not venv)),
        folder,
    )

  def add_script(
      self, name: str, text: str, folder: str = 'bin'
  ) -> pathlib.Path:
    path = self.folder / folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path

  def run(self, *command: str, **environment: str):
    """Runs a command, the set-up by default, from outside the project."""
    return subprocess.run(
        command or ('sh', str(self.project / 'scripts' / 'setup.sh')),
        cwd=self.folder if not command else self.project,
        env={
            'PATH': str(self._bin),
            'CALLS': str(self._calls),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )

  def calls(self) -> list[str]:
    """Returns the calls of interpreters since the last call of this method."""
    if not self._calls.exists():
      return []
    lines = self._calls.read_text().splitlines()
    self._calls.unlink()
    return lines


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Machine:
  return Machine(tmp_path)


@pytest.fixture
def ready(machine: Machine) -> Machine:
  """A machine that is set up."""
  machine.add('python3.13', '3.13')
  machine.run()
  machine.calls()
  return machine


def _installation(name: str) -> list[str]:
  return [each.format(name) for each in (_NEW, *_INSTALLS)]


def test_without_python_says_which_versions_work(machine: Machine):
  result = machine.run()
  assert result.returncode != 0
  assert not result.stdout
  assert 'Python 3.11, 3.12 or 3.13' in result.stderr
  assert 'python3.13 is not there' in result.stderr
  # One paragraph.
  assert result.stderr.count('\n') == 1


def test_says_why_each_python_is_unusable(machine: Machine):
  machine.add('python3', '3.14')
  machine.add('python', '2.7')
  machine.add('python3.12', '3.12', venv=False)
  machine.add_script('python3.13', '#!/bin/sh\necho not selected >&2\nexit 127')
  result = machine.run()
  assert result.returncode != 0
  assert 'Python 3.11, 3.12 or 3.13' in result.stderr
  assert 'python3 is Python 3.14' in result.stderr
  assert 'python is Python 2.7' in result.stderr
  assert 'python3.13 does not run' in result.stderr
  assert 'python3.12 has no venv module' in result.stderr
  assert 'apt install python3.12-venv' in result.stderr
  assert 'not selected' not in result.stderr
  assert not machine.calls()
  assert not (machine.project / '.venv').exists()


@pytest.mark.parametrize(
    ('interpreters', 'chosen'),
    [
        ({'python3.12': '3.12', 'python3.13': '3.13'}, 'python3.13'),
        ({'python3.11': '3.11', 'python3.12': '3.12'}, 'python3.12'),
        ({'python3.11': '3.11', 'python3': '3.13'}, 'python3.11'),
        ({'python3': '3.14', 'python': '3.12'}, 'python'),
        ({'python3': '3.1', 'python': '3.13'}, 'python'),
        ({'python3': '3.10', 'python': '3.11'}, 'python'),
        ({'python3.13': None, 'python3': '3.12'}, 'python3'),
        ({'python3.13': 'without venv', 'python3': '3.12'}, 'python3'),
    ],
)
def test_takes_the_first_usable_python(
    machine: Machine, interpreters: dict[str, str | None], chosen: str
):
  for name, version in interpreters.items():
    if version == 'without venv':
      machine.add(name, '3.13', venv=False)
    elif version:
      machine.add(name, version)
    else:
      machine.add_script(name, '#!/bin/sh\nexit 127\n')
  result = machine.run()
  assert result.returncode == 0, result.stderr
  assert machine.calls() == _installation(chosen)


def test_takes_the_python_that_is_named(machine: Machine):
  machine.add('python3.13', '3.13')
  named = machine.add('mine', '3.12', folder='else where')
  assert machine.run(PYTHON=str(named)).returncode == 0
  assert machine.calls() == _installation('mine')


@pytest.mark.parametrize(
    ('version', 'reason'), [('3.14', 'is Python 3.14'), ('', 'is not there')]
)
def test_unusable_named_python_is_reported(
    machine: Machine, version: str, reason: str
):
  machine.add('python3.13', '3.13')
  if version:
    machine.add('mine', version)
  result = machine.run(PYTHON='mine')
  assert result.returncode == 0
  assert f'PYTHON=mine {reason}' in result.stderr
  assert machine.calls() == _installation('python3.13')


def test_each_python_is_reported_once(machine: Machine):
  machine.add('python3', '3.14')
  error = machine.run(PYTHON='python3').stderr.splitlines()[-1]
  assert error.count('python3 is Python 3.14') == 1
  assert 'none was found here: python3 is' in error
  assert 'python is not there. Install' in error


def test_second_run_does_nothing(machine: Machine):
  machine.add('python3.13', '3.13')
  first = machine.run()
  assert 'Python 3.13' in first.stdout
  assert machine.calls() == _installation('python3.13')
  # It looks for no interpreter: another environment may be active.
  machine.add('python3.13', '3.14')
  for environment in ({}, {'PYTHON': 'python3.13'}, {'PYTHON': 'no_such'}):
    second = machine.run(**environment)
    assert (second.returncode, second.stdout, second.stderr) == (0, '', '')
  assert not machine.calls()


def test_changed_file_installs_again(ready: Machine):
  for file in (
      *('requirements.txt', 'setup.py'),
      'tff_bn/imports/tff_imports.py',
  ):
    with (ready.project / file).open('a') as changed:
      changed.write('# changed\n')
    ready.run()
    assert ready.calls() == _installation('python3.13')
    ready.run()
    assert not ready.calls()


def test_moved_project_installs_again(ready: Machine):
  ready.project = ready.project.rename(ready.folder / 'moved')
  ready.run()
  assert ready.calls() == _installation('python3.13')


def test_broken_environment_is_rebuilt(ready: Machine):
  (ready.project / '.venv' / 'bin' / 'python').unlink()
  ready.run()
  assert ready.calls() == _installation('python3.13')


def test_other_named_version_rebuilds(ready: Machine):
  ready.add('python3.12', '3.12')
  ready.run(PYTHON='python3.12')
  assert ready.calls() == _installation('python3.12')
  # The environment stays if the interpreter is not named again.
  ready.run()
  assert not ready.calls()


@pytest.mark.parametrize(
    ('step', 'failing'),
    [
        (0, '* .venv/build-requirements.txt'),
        (1, '* requirements.txt'),
        (2, '* --editable .'),
    ],
)
def test_failed_installation_is_repeated(
    machine: Machine, step: int, failing: str
):
  machine.add('python3.13', '3.13')
  result = machine.run(FAIL=failing)
  assert result.returncode == 7
  assert 'The set-up failed' in result.stderr
  assert machine.calls() == _installation('python3.13')[: step + 2]
  assert machine.run().returncode == 0
  assert machine.calls() == _installation('python3.13')


def test_failed_rebuild_is_repeated(machine: Machine):
  machine.add('python3.13', '3.13')
  machine.run()
  (machine.project / 'requirements.txt').write_text('setuptools==1\nwheel==1')
  machine.calls()
  assert machine.run(FAIL='*-r requirements.txt').returncode == 7
  machine.calls()
  # Back to the requirements before the failed attempt.
  shutil.copy(_ROOT / 'requirements.txt', machine.project)
  assert machine.run().returncode == 0
  assert machine.calls() == _installation('python3.13')


def test_failed_environment_is_an_error(machine: Machine):
  machine.add('python3.13', '3.13')
  result = machine.run(FAIL_VENV='1')
  assert result.returncode != 0
  assert 'The set-up failed' in result.stderr


def test_foreign_paths_do_not_reach_pip(machine: Machine):
  machine.add('python3.13', '3.13')
  machine.run(
      PYTHONPATH='/a',
      PYTHONHOME='/b',
      PIP_TARGET='/c',
      PIP_PREFIX='/d',
      PIP_USER='1',
  )
  assert machine.calls() == _installation('python3.13')


def test_pinned_build_tools_come_first(machine: Machine):
  machine.add('python3.13', '3.13')
  machine.run()
  lines = machine.project / '.venv' / 'build-requirements.txt'
  names = [line.partition('==')[0] for line in lines.read_text().splitlines()]
  assert names == ['setuptools', 'wheel']


def test_locked_requirements(machine: Machine):
  machine.add('python3.13', '3.13')
  command = 'sh', 'scripts/setup.sh', 'requirements-ray.txt'
  assert machine.run(*command, LOCKED='1').returncode == 0
  calls = machine.calls()
  files = [call.rpartition('-r ')[2] for call in calls if '-r ' in call]
  assert files == [
      '.venv/build-requirements.txt',
      'locked/requirements.txt',
      'locked/requirements-ray.txt',
  ]
  lines = machine.project / '.venv' / 'build-requirements.txt'
  for line in lines.read_text().splitlines():
    assert ' --hash=sha256:' in line
  # Only a change of LOCKED installs everything again.
  machine.run(*command, LOCKED='1')
  assert len(machine.calls()) == 1
  machine.run(*command)
  assert len(machine.calls()) == len(calls)


class TestMakefile:
  """The project's commands."""

  @pytest.fixture(autouse=True)
  def _needs_make(self):
    if not shutil.which('make'):
      pytest.skip('make is not installed')

  def test_compare_sets_up_and_compares(self, machine: Machine):
    machine.add('python3.13', '3.13')
    result = machine.run('make', 'compare')
    assert result.returncode == 0, result.stderr
    assert machine.calls() == [
        *_installation('python3.13'),
        'python3.13: --jobs=2',
    ]

  def test_compare_hands_flags_on(self, ready: Machine):
    result = ready.run(
        'make', 'compare', 'ARGS=--rounds=10 --seeds=1,2', FAIL='--rounds=10 *'
    )
    assert ready.calls() == ['python3.13: --rounds=10 --seeds=1,2']
    assert result.returncode != 0

  def test_test_runs_everything(self, ready: Machine):
    result = ready.run('make', 'test', PYTHONPATH='/a')
    assert result.returncode == 0, result.stderr
    calls = ready.calls()
    assert calls[: len(_FURTHER)] == [
        call.format('python3.13') for call in _FURTHER
    ]
    # At the same time as the checks of style and types.
    tests = 'python3.13: -m pytest -n 2 --dist=loadfile --no-loadscope-reorder'
    calls.remove(tests)
    assert calls[len(_FURTHER) :] == [
        'python3.13: -m ruff check .',
        'python3.13: -m pyink --check .',
        'python3.13: setup.py -q build_py --build-lib build/types',
        'python3.13: -m mypy --config-file ../../pyproject.toml --cache-dir'
        ' ../types_cache --package tff_bn',
    ]

  def test_ctrl_c_ends_the_checks_beside_the_tests(self, ready: Machine):
    number = ready.folder / 'number'
    (ready.project / 'scripts' / 'check_types.sh').write_text(
        f'echo $$ >"{number}.new"; mv "{number}.new" "{number}"; exec sleep 300'
    )
    (ready.project / 'scripts' / 'setup.sh').write_text('')
    python = ready.project / '.venv' / 'bin' / 'python'
    tests_started = ready.folder / 'tests_started'
    python.write_text(
        '#!/bin/sh\ncase "$*" in *pytest*) '
        f'touch "{tests_started}"; exec sleep 300 ;; esac'
    )
    with subprocess.Popen(
        ['make', 'test'],
        cwd=ready.project,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=ended_programs.obey_ctrl_c,
    ) as command:
      # A shell that has just started a program can lose the signal.
      while not (number.exists() and tests_started.exists()):
        assert command.poll() is None
        time.sleep(0.01)
      os.killpg(command.pid, signal.SIGINT)
      assert command.wait(timeout=60)
    with contextlib.suppress(psutil.NoSuchProcess):
      psutil.Process(int(number.read_text())).wait(timeout=60)

  def test_docs_fail_on_warnings(self, ready: Machine):
    result = ready.run('make', 'docs')
    assert result.returncode == 0, result.stderr
    installs, builds = ready.calls()
    assert installs == _FURTHER[-1].format('python3.13')
    assert builds == (
        'python3.13: -m sphinx --quiet --fail-on-warning --keep-going'
        ' --conf-dir docs . build/site'
    )
    assert 'build/site/docs/index.html' in result.stdout

  @pytest.mark.parametrize('tool', ['ruff', 'pyink', 'mypy', 'pytest'])
  def test_any_failure_fails(self, ready: Machine, tool: str):
    result = ready.run('.ci/run', FAIL=f'-m {tool}*')
    assert result.returncode != 0
    assert f'failed: -m {tool} ' in result.stdout
    assert len(ready.calls()) == len(_FURTHER) + 5  # Nothing is left out.

  def test_ci_installs_a_browser_where_it_is_missing(self, ready: Machine):
    browser = ready.add_script('chromium', '#!/bin/sh\n')
    installed = ready.folder / 'installed'
    ready.add_script('apt-get', f'#!/bin/sh\necho "$@" >> "{installed}"\n')
    ready.run('.ci/run')
    assert not installed.exists()
    browser.unlink()
    ready.run('.ci/run')
    update, install = installed.read_text().splitlines()
    assert update == 'update'
    assert install.startswith('install ') and install.endswith(' chromium')

  def test_ci_sets_up_and_tests(self, machine: Machine):
    machine.add('python3.13', '3.13')
    result = machine.run('.ci/run')
    assert result.returncode == 0, result.stderr
    calls = machine.calls()
    assert calls[:4] == _installation('python3.13')
    assert calls[4 : 4 + len(_FURTHER)] == [
        call.format('python3.13') for call in _FURTHER
    ]
    (tests,) = (c for c in calls if c.startswith('python3.13: -m pytest'))
    assert '--slow' in tests.split()
