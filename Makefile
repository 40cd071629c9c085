# make serve and make test set up all that they need, once; the rest are parts of them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Tests compare the signatures of their FlashInfer stand-in with the real one, which they never run: what it would pull
# in for a GPU is left out.
STANDIN_FOR := flashinfer-python apache-tvm-ffi nvidia-ml-py
# What `make test-gpu` installs on a machine where nothing can be downloaded. GPU_PYTHON is the Python there, and
# GPU_ARCH its card: 8.0 A100, 8.6 and 8.9 RTX 30 and 40, 9.0a H100 and H200, 10.0a B200.
GPU_PYTHON ?= 3.12
GPU_ARCH ?= 9.0a
GPU_PLATFORMS := $(foreach n,28 27 24 17,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64
GPU_RUN := $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
WEB_SOURCES := $(shell find web -type f -not -path 'web/node_modules/*' -not -path 'web/dist/*' 2>/dev/null)

.PHONY: serve test test-fast test-gpu gpu-wheels gpu-kernels lint format setup clean

serve: setup
	exec $(BIN)/chatd serve $(ARGS)

test: setup
	cd web && npm test --silent
	$(BIN)/python -m pytest $(ARGS)

test-fast: setup
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

# Needs no setup: it runs with the torch that is there. ARGS="--help" tells its options, docs/gpu.md the rest.
test-gpu:
	$(GPU_RUN) -m tests.gpu $(ARGS)

gpu-wheels:
	rm -rf .gpu/wheels
	$(GPU_RUN) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --constraint constraints.txt \
		--implementation cp --python-version $(GPU_PYTHON) $(GPU_PLATFORMS) --dest .gpu/wheels $(STANDIN_FOR) ninja
	@du -sh .gpu/wheels

# FlashInfer's kernels for GPU_ARCH, compiled here with CUDA's compiler: two and a half minutes of one core for each.
gpu-kernels:
	$(GPU_RUN) -m tests.gpu.kernels .gpu/kernels/$(GPU_ARCH) $(GPU_ARCH)

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
	$(PIP) --no-deps $(STANDIN_FOR)
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
	rm -rf $(VENV) .gpu web/node_modules web/dist
