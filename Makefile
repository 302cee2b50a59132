# Two commands for a fresh clone: `make run` trains on the embedded graph, `make test` runs the tests.
# Each sets up .venv first if need be (scripts/setup.sh).
.PHONY: run test check setup setup-dev
.DEFAULT_GOAL := run
# Tests at a time: those of several ranks have some processes each, most others one.
JOBS = 2

run: setup
	.venv/bin/gnnpipe train $(ARGS)

test: setup-dev
	.venv/bin/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

check: setup-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

setup:
	@bash scripts/setup.sh run

setup-dev:
	@bash scripts/setup.sh dev
