# The commands of this project. `make help` lists them.

PYTHON ?= python3
EXTRAS ?= cpu,hf,dev
PYTEST_ARGS ?=
FUZZ ?= 2000
SOAK ?= 2000

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Tools start other tools (ninja, pip, ranks): they must find those of the environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)

# What needs one core each runs side by side, and then what wants the machine for itself.
QUICK := unit crash
SLOW := harness engine
TIERS := $(QUICK) $(SLOW)
FOLDERS_unit := tests/unit tests/contracts
FOLDERS_crash := tests/crash
FOLDERS_harness := tests/harness
FOLDERS_engine := tests/engine tests/examples

.DEFAULT_GOAL := help
.PHONY: help setup model demo test lint format fuzz matrix soak sanitize clean $(addprefix test-,$(TIERS))

help:  ## List the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1@\2/p' $(MAKEFILE_LIST) | column -t -s @

setup: $(READY)  ## Make .venv and install the package into it, editable

# The compiled module is built by the editable install, so its sources count.
$(READY): pyproject.toml scripts/setup_env.py $(wildcard setup.py csrc/*)
	$(PYTHON) scripts/setup_env.py --venv $(VENV) --extras $(EXTRAS)
	@touch $@

model: $(READY)  ## Prepare SmolLM2-135M-Instruct in the user's cache
	@$(BIN)/python scripts/prepare_smollm2.py

demo: model  ## Run examples/quickstart.py on a two-stage engine
	$(BIN)/python examples/quickstart.py

# Cheapest first; the first that fails ends it. What runs side by side prints when it is over.
test: model  ## Run lint and all tests, cheapest tier first
	@$(MAKE) --no-print-directory -j2 -O lint $(addprefix test-,$(QUICK))
	@for tier in $(SLOW); do $(MAKE) --no-print-directory test-$$tier || exit 1; done
	@echo "== all tiers passed"

$(addprefix test-,$(TIERS)): test-%: $(READY)
	@bash scripts/run_tier.sh $* "$(FOLDERS_$*)" $(PYTEST_ARGS)

lint: $(READY)  ## Check style, types, import direction and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell

format: $(READY)  ## Let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Always new programs; one that fails is made small and printed.
fuzz: model  ## Run FUZZ random programs on one, two and three stages, a fifth of them on engines
	NNSIGHT_PP_FUZZ=$(FUZZ) $(BIN)/pytest tests/harness/test_random_programs.py -o faulthandler_timeout=0
	NNSIGHT_PP_FUZZ=$$(( $(FUZZ) / 5 )) $(BIN)/pytest tests/engine/test_one_and_two_stages.py -k random \
		-o faulthandler_timeout=0

# One cell that hangs is ended and the rest goes on; MATRIX_ARGS="--columns local,2" runs less.
matrix: model  ## Run every block on every backend, alone and beside others; write docs/matrix.md
	PYTHONPATH=$(CURDIR):tests $(BIN)/python -m matrix $(MATRIX_ARGS)

soak: model  ## Run SOAK requests of mixed kinds on two stages, and fail where anything grows
	PYTHONPATH=$(CURDIR):tests $(BIN)/python -m soak --requests $(SOAK)

sanitize: $(READY)  ## Run the extension's tests under AddressSanitizer
	sh csrc/sanitize.sh $(BIN)/python

clean:  ## Remove .venv and everything built; the user's cache stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f nnsight_pp/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
