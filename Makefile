# CONTRIBUTING.md describes the targets and their variables.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The environments that not every developer needs.
ENVIRONMENTS := .environments
CHAT := $(ENVIRONMENTS)/chat
CLIENTS := $(ENVIRONMENTS)/clients
LITELLM := $(ENVIRONMENTS)/litellm
WEBUI := $(ENVIRONMENTS)/webui
PEERS := $(ENVIRONMENTS)/peers
NODE_CLIENTS := $(ENVIRONMENTS)/node
# Twice the cores of the machines that run the tests: many tests wait for processes.
WORKERS ?= 4
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# The tests start hundreds of Python processes, each of which would compile Kedge again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: docs install-size test suite style types test-fast test-clients test-recordings chromium chat check fuzz campaign bench bench-peers fmt schema lock clean
.DEFAULT_GOAL := test

# The dependency groups of pyproject.toml. The pip of Python 3.11 has no --group, which came with pip 25.1.
LIST_GROUPS := import tomllib; groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]; \
  print(*sum(groups.values(), []), sep="\n")

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Kedge needs Python 3.11 or newer; say which with: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -c '$(LIST_GROUPS)' > $(VENV)/groups.txt
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet -e . -r $(VENV)/groups.txt
	@touch $@

# All tests, too, which takes as long again: make test checks those that are about types.
check: TYPED :=
check: style types

style: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python tests/dense_statements.py

TYPED := src benchmarks examples build/snippets tests/typing_samples.py tests/test_public.py tests/workflows/test_refine.py

# With a larger young generation, Node collects garbage less often.
types: $(VENV)/.ready
	$(BIN)/python tests/snippets.py build/snippets
	NODE_OPTIONS=--max-semi-space-size=128 $(BIN)/basedpyright $(TYPED)

# Without garbage collection, which would find little, the build takes an eighth less.
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -c 'import gc; gc.disable(); from mkdocs.__main__ import cli; cli()' build

# What to run when tests have failed, and not when pytest itself has: .ci/run repeats them.
IF_TESTS_FAIL ?= false

# With coverage the tests take about half as long again, and fail below the floor of pyproject.toml.
COVERAGE ?=
PYTEST := $(BIN)/$(if $(COVERAGE),coverage run,python) -m pytest

# The order of tests/conftest.py, slow files first, keeps all workers busy to the end.
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# .ci/run selects a part of all checks and tests for a second user.
CHECKS ?= style types docs
TESTS ?=

# The type check needs one core for minutes, so everything runs side by side.
test: $(VENV)/.ready
	$(MAKE) --no-print-directory chromium
	$(MAKE) --no-print-directory --jobs=4 $(CHECKS) suite

suite:
	$(if $(COVERAGE),$(BIN)/coverage erase)
	$(PYTEST) $(PARALLEL) --durations=15 $(TESTS) || { [ $$? = 1 ] && $(IF_TESTS_FAIL); }
	$(if $(COVERAGE),$(BIN)/coverage combine --quiet)
	$(if $(COVERAGE),$(BIN)/coverage report)

test-fast: $(VENV)/.ready
	$(BIN)/python -m pytest -q $(PARALLEL) -k "not postgres and not browser and not campaign"

APT_INSTALL := DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends

# The headless browser needs two thirds of the time of the complete one. Where neither is installed nor can be
# (no root, no Debian), the tests of the web page are skipped.
chromium:
	@if ! command -v chromium-headless-shell > /dev/null && ! command -v chromium > /dev/null && \
	    [ -z "$$KEDGE_CHROMIUM" ] && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  echo "Installing Chromium for the tests of the page"; \
	  { apt-get update && { $(APT_INSTALL) chromium-headless-shell || $(APT_INSTALL) chromium; }; } \
	    > /dev/null 2>&1 || echo "Chromium could not be installed; see tests/web/browser/chromium.py"; \
	fi

# Chat needs no development tools: unless they are installed already, it has a small environment of its own.
chat:
	@if [ -e $(VENV)/.ready ] && [ -z "$$(find pyproject.toml constraints.txt -newer $(VENV)/.ready)" ]; then \
	  bin=$(BIN); \
	else \
	  $(MAKE) --no-print-directory $(CHAT)/.ready && bin=$(CHAT)/bin; \
	fi && $$bin/python -m kedge chat $(ARGS)

$(CHAT)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Kedge needs Python 3.11 or newer; say which with: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing what chat needs (once)"
	@$(PYTHON) -m venv $(CHAT)
	@PIP_CONSTRAINT=constraints.txt $(CHAT)/bin/pip install --quiet --no-compile -e .
	@touch $@

# Open WebUI is large, so it is installed only to be run.
test-clients: $(CLIENTS)/.ready $(LITELLM)/.ready $(NODE_CLIENTS)/.ready $(if $(and $(ONLY),$(if $(findstring WebUI,$(ONLY)),,other)),,$(WEBUI)/.ready)
	$(CLIENTS)/bin/python tests/clients/check_clients.py $(if $(ONLY),"$(ONLY)")

$(CLIENTS)/.ready: pyproject.toml tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet -e . -r tests/clients/requirements.txt
	@touch $@

$(LITELLM)/.ready: tests/clients/requirements-litellm.txt
	$(PYTHON) -m venv $(LITELLM)
	$(LITELLM)/bin/pip install --quiet -r tests/clients/requirements-litellm.txt
	@touch $@

# What Open WebUI needs, without the packages that run models locally: these are larger than everything else.
LIST_WEBUI := import re; from importlib.metadata import requires; \
  local = {"accelerate", "faster-whisper", "opencv-python-headless", "rapidocr", "sentence-transformers"}; \
  print(*(line for line in requires("open-webui") if "extra ==" not in line and re.split(r"[=\[]", line)[0] not in local), sep="\n")

$(WEBUI)/.ready: tests/clients/requirements-webui.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || \
	  { echo "Open WebUI needs Python 3.11 or 3.12; say which with: make PYTHON=/path/to/python3.12"; exit 1; }
	@echo "Installing Open WebUI (once): about 1.5 GB, which takes several minutes"
	$(PYTHON) -m venv $(WEBUI)
	$(WEBUI)/bin/pip install --quiet --no-deps -r tests/clients/requirements-webui.txt
	$(WEBUI)/bin/python -c '$(LIST_WEBUI)' > $(WEBUI)/requirements.txt
	$(WEBUI)/bin/pip install --quiet --no-warn-conflicts -r $(WEBUI)/requirements.txt
	@touch $@

$(NODE_CLIENTS)/.ready: tests/clients/package.json
	@command -v npm > /dev/null || { echo "make test-clients needs Node.js 20 or newer, with npm"; exit 1; }
	mkdir -p $(NODE_CLIENTS)
	cp tests/clients/package.json $(NODE_CLIENTS)
	npm install --prefix $(NODE_CLIENTS) --no-package-lock --no-audit --no-fund --loglevel=error
	@touch $@

test-recordings: $(VENV)/.ready
	@[ -n "$(RECORDINGS)" ] || { echo "say which folder to replay: make test-recordings RECORDINGS=FOLDER"; exit 2; }
	$(BIN)/python tests/recordings/check_recordings.py "$(RECORDINGS)"

fuzz: $(VENV)/.ready
	$(BIN)/python tests/law/fuzz.py $(or $(N),600) $(or $(SEED),0)

campaign: $(VENV)/.ready
	$(BIN)/python tests/campaign.py --scale $(or $(SCALE),1) --only "$(ONLY)"

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks $(ONLY)

install-size: $(VENV)/.ready
	$(BIN)/python -m benchmarks.installed_size

# Every library in an environment of its own; CPU figures need a quiet machine.
bench-peers: $(VENV)/.ready $(patsubst benchmarks/peers/requirements/%.txt,$(PEERS)/%/.ready,$(wildcard benchmarks/peers/requirements/*.txt))
	$(BIN)/python -m benchmarks.peers.programs $(PEERS) $(ONLY)
	$(BIN)/python -m benchmarks.peers $(PEERS) $(ONLY)

$(PEERS)/%/.ready: benchmarks/peers/requirements/%.txt pyproject.toml
	$(PYTHON) -m venv $(PEERS)/$*
	$(PEERS)/$*/bin/pip install --quiet -e . -r $<
	@touch $@

fmt: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schema: $(VENV)/.ready
	$(BIN)/python tests/sdk_schema.py

lock:
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -c '$(LIST_GROUPS)' > $(VENV)/groups.txt
	$(BIN)/pip install --quiet -e . -r $(VENV)/groups.txt hatchling editables
	{ echo "# Exact versions of everything make installs. Renew with: make lock"; \
	  $(BIN)/pip freeze --exclude-editable; } > constraints.txt
	touch $(VENV)/.ready

clean:
	rm -rf $(VENV) $(ENVIRONMENTS) .pytest_cache .ruff_cache .hypothesis .coverage* benchmarks/results site build
