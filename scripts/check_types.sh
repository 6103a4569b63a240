#!/bin/sh
# Checks the types in tff_bn, layers, papers and programs. mypy has to see the folders
# under the names they are imported by, so it reads a build of the package.

set -eu
CDPATH='' cd -- "$(dirname -- "$0")/.."

lib=build/types
rm -rf -- "$lib"
mkdir -p -- "$lib"
.venv/bin/python setup.py -q build_py --build-lib "$lib" 2>/dev/null
cd "$lib"
exec ../../.venv/bin/python -m mypy --config-file ../../pyproject.toml \
    --cache-dir ../types_cache --package tff_bn
