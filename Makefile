# The project's two commands are `make compare` and `make test`. Both set up
# .venv first if needed; ARGS="--flag=value ..." is handed on.

ARGS =

# A foreign path here would put other versions before those in .venv.
unexport PYTHONHOME PYTHONPATH

.PHONY: setup compare test

setup:
	@sh scripts/setup.sh

compare: setup
	.venv/bin/tff-bn-compare $(ARGS)

# TensorFlow's own messages would follow pytest's last lines, with the counts.
test:
	@sh scripts/setup.sh requirements-ray.txt
	@style=0; \
	.venv/bin/python -m ruff check . || style=1; \
	.venv/bin/python -m pyink --check . || style=1; \
	TF_CPP_MIN_LOG_LEVEL=3 \
	.venv/bin/python -m pytest -n 2 --dist=loadfile --no-loadscope-reorder \
	$(ARGS) || exit; \
	[ $$style = 0 ] || echo 'The style checks found something: see the top.'; \
	exit $$style
