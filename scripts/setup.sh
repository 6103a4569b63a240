#!/bin/sh
# Installs the project and its requirements into .venv, with the newest Python
# that it finds: 3.13, 3.12 or 3.11. Does nothing if .venv is up to date. Set
# PYTHON to choose the interpreter. Arguments are further requirements files to
# install. With LOCKED=1, pip checks the hashes of all packages.

set -eu
CDPATH='' cd -- "$(dirname -- "$0")/.."

venv=.venv
stamp=$venv/installed
# The same requirements with hashes.
locked=${LOCKED:+locked/}

# Settings that would make pip or Python look or install outside .venv.
unset PYTHONHOME PYTHONPATH PIP_PREFIX PIP_TARGET
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

# Prints the version of the interpreter $1, such as 3.11. Fails if it does not
# run (for example, pyenv has commands for versions that are not selected).
version_of() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' \
      2>/dev/null </dev/null
}

is_supported() {
  case $1 in
    3.11 | 3.12 | 3.13) ;;
    *) return 1 ;;
  esac
}

# Sets python to the first usable interpreter; exits if there is none.
find_python() {
  rejected=
  for python in "${PYTHON:-}" python3.13 python3.12 python3.11 python3 \
      python; do
    # Skip an empty PYTHON, and one that was already tried.
    case ";$rejected;  " in
      *"; $python "*) continue ;;
    esac
    if ! command -v "$python" >/dev/null 2>&1; then
      reason='is not there'
    elif ! version=$(version_of "$python"); then
      reason='does not run'
    elif ! is_supported "$version"; then
      reason="is Python $version"
    elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null </dev/null; then
      reason="has no venv module (Debian and Ubuntu have it in a package of \
its own: apt install python$version-venv)"
    else
      return 0
    fi
    if [ "$python" = "${PYTHON:-}" ]; then
      echo "PYTHON=$python $reason; looking for another one." >&2
    fi
    rejected="$rejected $python $reason;"
  done
  cat >&2 <<EOF
tff_bn needs Python 3.11, 3.12 or 3.13 on Linux, and none was found here:\
${rejected%;}. Install one (Debian and Ubuntu: apt install python3-venv), or \
say where one is: make test PYTHON=/path/to/python3.13.
EOF
  exit 1
}

# Prints a checksum of everything that the installation depends on: Python's
# version, the requirements, and the folder, because .venv holds absolute paths.
fingerprint() {
  {
    echo "$1"
    pwd -P
    # setup.py copies the text of the import hook.
    cat "${locked}requirements.txt" setup.py tff_bn/imports/tff_imports.py
  } | cksum
}

is_up_to_date() {
  [ -f "$stamp" ] || return 1
  installed=$(version_of "$venv/bin/python") || return 1
  [ "$(cat "$stamp")" = "$(fingerprint "$installed")" ] || return 1
  # A usable interpreter that the user chose must be the installed one.
  if [ -n "${PYTHON:-}" ] && version=$(version_of "$PYTHON") &&
      is_supported "$version"; then
    [ "$version" = "$installed" ]
  fi
}

# The metadata of TensorFlow Federated asks for Python 3.11 or older.
install() {
  "$venv/bin/python" -m pip install --quiet --no-deps \
      --ignore-requires-python "$@"
}

install_files() {
  for file; do
    install -r "$locked$file"
  done
}

if is_up_to_date; then
  install_files "$@"
  exit 0
fi
find_python
echo "Setting up $venv with Python $version: about 3.4 GB of packages," \
    'which takes a few minutes.'
trap '[ $? = 0 ] ||
  echo "The set-up failed; the next run starts it afresh." >&2' EXIT
# Removed first and written last, so that an interrupted installation does not
# count as complete.
rm -f -- "$stamp"
"$python" -m venv --clear "$venv"
# Some packages are built here, with the pinned setuptools.
grep -E '^(setuptools|wheel)==' "${locked}requirements.txt" \
    >"$venv/build-requirements.txt"
install -r "$venv/build-requirements.txt"
install --no-build-isolation -r "${locked}requirements.txt"
install --no-build-isolation --editable .
fingerprint "$version" >"$stamp"
install_files "$@"
