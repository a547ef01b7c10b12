# Short names for the scripts; arguments go in ARGS: make test ARGS="tests/codecs -k qsgd"

.PHONY: help setup demo test test-all soak pythons check bench docs package clean
.DEFAULT_GOAL := help

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv and install farflung in it; most others do this first
	@scripts/setup

demo: ## compare three recipes on slow Wi-Fi, then train with four workers
	@scripts/setup --run
	@scripts/demo $(ARGS)

test: setup ## run the tests, about 7 minutes on two cores
	@scripts/test $(ARGS)

test-all: setup ## run the thorough tests, which make test leaves out
	@scripts/test --thorough $(ARGS)

soak: setup ## elastic runs under seeded faults (ARGS="60 --lab": an hour, with real processes)
	@scripts/soak $(ARGS)

pythons: ## run the fast tests on every Python from 3.11 to 3.13 that is here
	@scripts/pythons $(ARGS)

check: setup ## format, lint and types (ARGS=--fix mends)
	@scripts/check $(ARGS)

bench: setup ## run a benchmark: make bench NAME=...; without NAME, list them
	@scripts/bench $(NAME) $(ARGS)

docs: setup ## build the documentation
	@scripts/docs $(ARGS)

package: setup ## build sdist and wheel, and try the wheel in an empty environment
	@scripts/package

clean: ## remove what builds and tools left behind; keeps .venv and runs
	@rm -rf build dist docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
