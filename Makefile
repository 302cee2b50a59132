# Two commands for a fresh clone: `make run` trains on the embedded graph, `make test` runs the tests
# of one process; `make test-all` also runs those that start several processes, and `make test-gpu`
# those that need a GPU (all others run on the CPU).
# Each sets up .venv first if need be (scripts/setup.sh).
.PHONY: run test test-all test-gpu check audit setup setup-dev
.DEFAULT_GOAL := run
# Tests at a time: those of several ranks have some processes each, and often wait for one another,
# so one more than a small machine has cores.
JOBS = 3

# Workers share compiled files, also where the environment forbids to write these.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest -n $(JOBS)

run: setup
	.venv/bin/gnnpipe train $(ARGS)

test: setup-dev
	$(PYTEST) --dist worksteal -m "not slow" $(ARGS)

test-all: setup-dev
	$(PYTEST) --dist worksteal $(ARGS)

test-gpu: setup-dev
	GNNPIPE_TEST_DEVICE=cuda $(PYTEST) \
		tests/test_cuda.py tests/ops/test_triton.py tests/tools/test_doctor.py $(ARGS)

check: setup-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

# The pinned versions against the known faults. It asks pypi.org, which .ci/run may not reach; a
# package that could not be asked for is a failure (--strict), not a pass.
audit:
	python3 -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	.venv-audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

setup:
	@bash scripts/setup.sh run

setup-dev:
	@bash scripts/setup.sh dev
