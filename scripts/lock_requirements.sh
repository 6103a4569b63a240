#!/bin/sh
# Writes locked/: the requirements with the SHA-256 of each of their files on
# PyPI, for all platforms, one requirement in a line. Needs uv.

set -eu
CDPATH='' cd -- "$(dirname -- "$0")/.."

mkdir -p locked
for file in requirements*.txt; do
  # soupsieve needs 3.11.5.
  uv pip compile --quiet --no-config --no-deps --universal \
      --python-version 3.11.5 --generate-hashes --no-header --no-annotate \
      --output-file "locked/$file.part" "$file"
  sed -e ':next' -e '/\\$/ { N; s/ *\\\n */ /; b next' -e '}' \
      "locked/$file.part" >"locked/$file"
  rm -- "locked/$file.part"
done
