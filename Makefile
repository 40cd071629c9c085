# make serve and make test set up all that they need, once; the rest are parts of them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WEB_SOURCES := $(shell find web -type f -not -path 'web/node_modules/*' -not -path 'web/dist/*' 2>/dev/null)

.PHONY: serve test test-fast lint format setup clean

serve: setup
	exec $(BIN)/chatd serve $(ARGS)

test: setup
	cd web && npm test --silent
	$(BIN)/python -m pytest $(ARGS)

test-fast: setup
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd web && npm run --silent check

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/installed web/dist/index.html $(VENV)/model

# TORCH_INDEX may name another index for torch alone, such as PyTorch's CPU builds.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("chatd needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch and the other packages: a minute or two ..."
	$(PIP) torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) --editable '.[dev]'
	@touch $@

web/node_modules/.package-lock.json: web/package-lock.json web/package.json
	cd web && npm ci --no-audit --no-fund --loglevel=error
	@touch $@

web/dist/index.html: web/node_modules/.package-lock.json $(WEB_SOURCES)
	cd web && npm run --silent build
	@touch $@

# The default model, fetched and converted, so that the first start is as quick as the second.
$(VENV)/model: $(VENV)/installed
	$(BIN)/chatd pull
	@touch $@

clean:
	rm -rf $(VENV) web/node_modules web/dist
