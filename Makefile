# Two commands for a fresh clone: `make demo` and `make test`. Both make the environment first, in .venv.
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
NEW := import sys; sys.exit(sys.version_info < (3, 12))
# A candidate must be run: a version manager's shim may exist for a version that does not.
PYTHON ?= $(firstword $(foreach p,python3 python3.12 python3.13 python3.14,$(shell $(p) -c '$(NEW)' 2>/dev/null && echo $(p))))

export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean

help:
	@echo "make demo   environment, then text from the shipped model, next to plain decoding"
	@echo "make test   environment, then the tests (PYTEST_ARGS='-m \"not slow\"' for the fast ones)"
	@echo "make lint   ruff, pyrefly and the import contracts"
	@echo "make clean  remove the environments and caches"

demo: $(VENV)/installed
	$(VENV)/bin/tfm generate --demo --compare-ar --prompt "def fibonacci(n):"

test: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyrefly check --python-interpreter-path $(VENV)/bin/python
	$(VENV)/bin/lint-imports --no-logo --cache-dir .cache/import-linter

clean:
	rm -rf .venv .venv-newest .cache

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "tfm-jax needs Python 3.12 or newer; python3 here is $$(python3 -c 'import platform; print(platform.python_version())' 2>/dev/null || echo missing)." \
	  "Install one (pyenv install 3.12, or uv python install 3.12) and run: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -c '$(NEW)' || { echo "$(PYTHON) is older than Python 3.12 or cannot be run." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# The build backend is installed first and used without isolation, so that constraints.txt pins it too.
$(VENV)/installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(PIP) -c $(CONSTRAINTS) hatchling
	$(PIP) -c $(CONSTRAINTS) --no-build-isolation -e .
	@touch $@

$(VENV)/installed-%: $(VENV)/installed
	$(PIP) -c $(CONSTRAINTS) --no-build-isolation -e '.[$*]'
	@touch $@
