# The project's two commands are `make compare` and `make test`. Both set up
# .venv first if needed and pass on ARGS="--flag=value ...". Without ARGS, the
# comparison trains two runs at a time. `make docs` builds the documentation.

ARGS =
compare: ARGS = --jobs=2

# Foreign paths would take precedence over the versions in .venv.
unexport PYTHONHOME PYTHONPATH

.PHONY: setup compare test docs

setup:
	@sh scripts/setup.sh

compare: setup
	.venv/bin/tff-bn-compare $(ARGS)

# TensorFlow's own messages would follow pytest's last lines, with the counts.
# Files run in the order of tests/conftest.py: sorted by their number of tests,
# the longest one could come last and occupy a single worker. Tests of time
# limits only wait, so the checks of style and types run beside the tests.
# Ctrl-C ends them, too: a shell's background commands ignore it.
test:
	@sh scripts/setup.sh requirements-ray.txt requirements-logging.txt \
	requirements-files.txt requirements-docs.txt
	@mkdir -p build; trap 'kill 0' INT; \
	{ style=0; \
	.venv/bin/python -m ruff check . || style=1; \
	.venv/bin/python -m pyink --check . || style=1; \
	sh scripts/check_types.sh || style=1; \
	exit $$style; } > build/style.txt 2>&1 & style=$$!; \
	TF_CPP_MIN_LOG_LEVEL=3 \
	.venv/bin/python -m pytest -n 2 --dist=loadfile --no-loadscope-reorder \
	$(ARGS); tests=$$?; \
	wait $$style || { echo 'Style and types:'; cat build/style.txt; exit 1; }; \
	exit $$tests

docs:
	@sh scripts/setup.sh requirements-docs.txt
	@TF_CPP_MIN_LOG_LEVEL=3 .venv/bin/python -m sphinx --quiet --fail-on-warning \
	--keep-going --conf-dir docs . build/site && \
	echo 'The documentation is in build/site/docs/index.html.'
