# Each target sets up what it needs. `make` alone lists them.
PYTHON ?= python3
PYTEST_ARGS ?=

# One environment for everything but the benchmarks, rebuilt when what it is made of changes.
VENV := .venv
STAMP := $(VENV)/.installed
# The benchmarks' peers pin each other's dependencies, so they get an environment of their own.
BENCH_VENV := .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.installed
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# Other environments than the first compile a module when it is first imported: they import few of those that they have.
PIP_INSTALL_ASIDE := $(PIP_INSTALL) --no-compile
# Install the packages of a file, one per line, all at once, or one by one if that fails: what cannot be installed is said.
# $(1): the interpreter, $(2): options, $(3): the file.
install_listed = packages=$$(sed 's/\#.*//' $(3)); \
	$(1) $(PIP_INSTALL_ASIDE) $(2) $$packages || for package in $$packages; do \
		$(1) $(PIP_INSTALL_ASIDE) $(2) "$$package" || echo "Not installed: $$package"; \
	done
# Third-party libraries that train with Lightning, beside Lightning and drivetrain.
COMPAT_VENV := .venv-compat
COMPAT_STAMP := $(COMPAT_VENV)/.installed
COMPAT_PINS := tests/interop_compat/compat-constraints.txt
COMPAT_LIBRARIES := "gluonts[torch]" pytorch-forecasting darts scvi-tools pytorch-tabular chemprop deeptab neuralforecast \
	mlcolvar pina-mathlab finetuning-scheduler torchgeo anomalib nequip torch-geometric
# These ask for older versions of packages than the others do, and work with the newer ones; with what they need.
COMPAT_BARE := litgpt tokenizers neuralprophet captum plotly
# Real cluster managers: their Python packages, and beside them what Debian has of them.
CLUSTERS_VENV := .venv-clusters
CLUSTERS_STAMP := $(CLUSTERS_VENV)/.installed
CLUSTERS_PACKAGES := tests/real_clusters/requirements.txt
# Packages that parts of drivetrain need and most users do not have. DeepSpeed compiles what it needs once, into here.
EXTRAS_VENV := .venv-extras
EXTRAS_STAMP := $(EXTRAS_VENV)/.installed
EXTRAS_PACKAGES := tests/extras/requirements.txt
EXTRAS_BARE := tests/extras/bare_requirements.txt
EXTRAS_ENVIRON := TORCH_EXTENSIONS_DIR=$(CURDIR)/$(EXTRAS_VENV)/extensions PATH="$(CURDIR)/$(EXTRAS_VENV)/bin:$$PATH"
# torch_xla, and the older torch that it fits, with torch_xla's devices on the processor.
XLA_VENV := .venv-xla
XLA_STAMP := $(XLA_VENV)/.installed
XLA_ENVIRON := DRIVETRAIN_XLA=1 PJRT_DEVICE=CPU
# Another torch than the pinned one, from PyPI's wheel and without CUDA's libraries: make test-torch TORCH=2.9.1
TORCH ?= 2.14.1
TORCH_VENV := .venv-torch-$(TORCH)
TORCH_STAMP := $(TORCH_VENV)/.installed
# The official examples of earlier generations, from the wheels of their time, and the packages that they import.
LEGACY_VENV := .venv-legacy
LEGACY_STAMP := $(LEGACY_VENV)/.installed
LEGACY_PACKAGES := tests/legacy_examples/requirements.txt
# Other trainers, on whose programs prove-resume is tried.
PROOF_VENV := .venv-proof
PROOF_STAMP := $(PROOF_VENV)/.installed
PROOF_PACKAGES := tests/proof/peers/requirements.txt
# Zensical and mkdocstrings, which build the site; they read the package and do not import it, so no torch is needed.
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
DOCS_PACKAGES := docs/requirements.txt
BENCH_RESULTS := benchmarks/results
# Three workers for two cores, because many tests wait for processes; tests/conftest.py says which tests go together, and in which order. `make test PARALLEL=` has none.
PARALLEL ?= --numprocesses 3 --dist loadgroup --no-loadscope-reorder
# The random sweeps, and what `make test` leaves out of runs that are equal.
LONG_TESTS := tests/faults tests/conformance tests/clusters/test_machines.py tests/test_examples.py \
	tests/advice/test_thread_stack.py tests/distributed/test_fsdp*.py \
	tests/distributed/test_model_parallel.py tests/distributed/test_pipeline.py tests/distributed/test_precisions.py \
	tests/distributed/test_parity.py tests/distributed/test_context_parallel.py \
	tests/distributed/test_replica_check.py tests/legacy/v1_1/test_started.py \
	tests/trainer/test_shown.py tests/trainer/test_other_ranks.py tests/trainer/test_resume.py tests/proof \
	tests/data/test_batched.py tests/loops/test_graphs.py tests/test_wheel.py tests/cli/test_new.py

# Many tests start programs: they should not compile the package anew each time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test tree where test-faults test-interop test-compat test-clusters test-extras test-xla test-torch test-legacy test-proof environments check docs dist notes bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(STAMP) ## train a digit classifier, with its curves in demo_output/
	@$(VENV)/bin/python examples/digits.py --output demo_output

test: $(STAMP) ## run the whole test suite (PYTEST_ARGS="-k name" for a part of it)
	@$(VENV)/bin/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

tree: ## print each file of the package with its first sentence, by layer
	@$(PYTHON) tools/tree.py

where: $(STAMP) ## print where the tests of a file are (FILE=src/drivetrain/loops/step.py)
	@$(VENV)/bin/python tests/test_map.py $(FILE)

test-faults: $(STAMP) ## long random fault sweeps; a failure prints the seed to repeat it (DRIVETRAIN_SEED=n)
	@DRIVETRAIN_FAULTS=long $(VENV)/bin/python -m pytest $(LONG_TESTS) $(PYTEST_ARGS)

test-interop: $(STAMP) $(BENCH_STAMP) ## exchange checkpoints with real Lightning, in the benchmarks' environment
	@DRIVETRAIN_LIGHTNING_PYTHON=$(CURDIR)/$(BENCH_VENV)/bin/python $(VENV)/bin/python -m pytest tests/interop tests/compat/test_beside_the_original.py $(PYTEST_ARGS)

test-compat: $(STAMP) $(COMPAT_STAMP) ## run third-party libraries on Lightning and on drivetrain, and compare
	@DRIVETRAIN_COMPAT_PYTHON=$(CURDIR)/$(COMPAT_VENV)/bin/python $(VENV)/bin/python -m pytest tests/interop_compat $(PYTEST_ARGS)

test-clusters: $(CLUSTERS_STAMP) ## run the tests on real cluster managers: torchrun, SLURM, Open MPI (root on Debian)
	@sh tests/real_clusters/install.sh $(CURDIR)/$(CLUSTERS_VENV)/debian
	@DRIVETRAIN_REAL_CLUSTERS=1 $(CLUSTERS_VENV)/bin/python -m pytest tests/real_clusters $(PYTEST_ARGS)

test-extras: $(EXTRAS_STAMP) ## run the tests of parts that need packages of their own: DeepSpeed (builds for minutes), torchao, bitsandbytes, loggers, data loaders
	@$(EXTRAS_ENVIRON) DRIVETRAIN_EXTRAS=1 $(EXTRAS_VENV)/bin/python -m pytest tests/extras $(PYTEST_ARGS)

test-xla: $(XLA_STAMP) ## run the tests on torch_xla's devices on the processor, in an environment of its own
	@if $(XLA_VENV)/bin/python tests/xla/install.py --is-installed; then \
		$(XLA_VENV)/bin/python -m pytest tests/loops/test_direct.py tests/budget/test_step_calls.py $(PYTEST_ARGS) && \
		$(XLA_ENVIRON) $(XLA_VENV)/bin/python -m pytest tests/xla $(PYTEST_ARGS) && \
		$(XLA_ENVIRON) CPU_NUM_DEVICES=4 $(XLA_VENV)/bin/python -m pytest tests/xla/spmd $(PYTEST_ARGS); \
	fi

test-torch: $(TORCH_STAMP) ## run the whole test suite on another torch (TORCH=2.9.1; 2 GB of disk for each)
	@$(TORCH_VENV)/bin/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

test-legacy: $(LEGACY_STAMP) ## run the official examples of Lightning 1.0, 1.1 and 1.3, fetched from their wheels, on stand-in data
	@DRIVETRAIN_LEGACY=1 $(LEGACY_VENV)/bin/python -m pytest tests/legacy_examples $(PYTEST_ARGS)

test-proof: $(PROOF_STAMP) ## prove-resume on programs of Accelerate, transformers and Lightning; those that pages show of them and of Ignite; in an environment of their own
	@DRIVETRAIN_PEERS=1 $(PROOF_VENV)/bin/python -m pytest tests/proof/peers $(PYTEST_ARGS)

check: $(STAMP) ## lint, format, types, layers, and other rules of the source
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports
	@$(VENV)/bin/python -m pytest --quiet tests/test_architecture.py

docs: $(DOCS_STAMP) ## build the site in build/site, and check its links and pages (in Chromium, if it is installed)
	@rm -rf build/site
	@$(DOCS_VENV)/bin/python tools/site/pages.py
	@$(DOCS_VENV)/bin/zensical build --strict --clean
	@$(DOCS_VENV)/bin/python tools/site/check.py

# DIST_PYTHONS="3.11 3.13" takes these interpreters; DIST_TORCH says where pip finds torch: see tools/dist.py.
dist: $(STAMP) ## build wheel, sdist and bill of materials, and run README's example from each on every Python found
	@$(VENV)/bin/python tools/dist.py

VERSION ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
notes: ## print the notes of a release, from CHANGELOG.md (VERSION=Unreleased; by default the one of pyproject.toml)
	@$(PYTHON) tools/release_notes.py $(VERSION)

bench: $(BENCH_STAMP) ## measure steps, imports and memory beside other libraries (about three quarters of an hour)
	@mkdir -p $(BENCH_RESULTS)
	@$(BENCH_VENV)/bin/python benchmarks/step_overhead.py --json $(BENCH_RESULTS)/step_overhead.json
	@$(BENCH_VENV)/bin/python benchmarks/step_overhead.py --model cnn --sources loader workers --rounds 5
	@$(BENCH_VENV)/bin/python benchmarks/step_overhead.py --model gpt --sources loader workers --rounds 5
	@$(BENCH_VENV)/bin/python benchmarks/step_overhead.py --model gpt --peak
	@$(BENCH_VENV)/bin/python benchmarks/batched_fetch.py --json $(BENCH_RESULTS)/batched_fetch.json
	@$(BENCH_VENV)/bin/python benchmarks/optimizer_kernels.py --json $(BENCH_RESULTS)/optimizer_kernels.json
	@$(BENCH_VENV)/bin/python benchmarks/log_cost.py --json $(BENCH_RESULTS)/log_cost.json
	@$(BENCH_VENV)/bin/python benchmarks/import_time.py --json $(BENCH_RESULTS)/import_time.json
	@$(BENCH_VENV)/bin/python benchmarks/memory.py --json $(BENCH_RESULTS)/memory.json
	@$(BENCH_VENV)/bin/python benchmarks/engine_cost.py --json $(BENCH_RESULTS)/engine_cost.json
	@$(BENCH_VENV)/bin/python benchmarks/ddp_cost.py --json $(BENCH_RESULTS)/ddp_cost.json
	@$(BENCH_VENV)/bin/python benchmarks/saving_cost.py
	@$(BENCH_VENV)/bin/python benchmarks/parallel_cost.py --json $(BENCH_RESULTS)/parallel_cost.json
	@$(BENCH_VENV)/bin/python benchmarks/collectives_cost.py --json $(BENCH_RESULTS)/collectives_cost.json
	@$(BENCH_VENV)/bin/python benchmarks/growth.py --svg $(BENCH_RESULTS)/growth.svg --json $(BENCH_RESULTS)/growth.json
	@$(BENCH_VENV)/bin/python benchmarks/many_ranks.py --json $(BENCH_RESULTS)/many_ranks.json
	@$(BENCH_VENV)/bin/python benchmarks/start_up.py --json $(BENCH_RESULTS)/start_up.json
	@$(BENCH_VENV)/bin/python benchmarks/worker_start.py --json $(BENCH_RESULTS)/worker_start.json

clean: ## remove the environments and everything that the targets wrote
	rm -rf $(VENV) $(BENCH_VENV) $(COMPAT_VENV) $(CLUSTERS_VENV) $(EXTRAS_VENV) $(XLA_VENV) $(LEGACY_VENV) \
		$(PROOF_VENV) $(DOCS_VENV) .venv-torch-* build dist demo_output
	rm -rf .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find src tests tools examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

environments: $(STAMP) $(DOCS_STAMP) $(EXTRAS_STAMP) $(XLA_STAMP) $(LEGACY_STAMP) $(PROOF_STAMP) $(CLUSTERS_STAMP) ## set up all environments of .ci/run (-j2 for two at once)

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): torch, drivetrain and what its tests need, 1.7 GB, some minutes ..."
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e ".[dev]"
	@touch $@

$(BENCH_STAMP): pyproject.toml benchmarks/constraints.txt
	@echo "Setting up $(BENCH_VENV) ..."
	@$(PYTHON) -m venv $(BENCH_VENV)
	@$(BENCH_VENV)/bin/python $(PIP_INSTALL) -c benchmarks/constraints.txt \
		torch setuptools rich psutil lightning accelerate pytorch-ignite torchtnt "jsonargparse[signatures]" requests
	@$(BENCH_VENV)/bin/python $(PIP_INSTALL) --no-deps -e .
	@touch $@

$(COMPAT_STAMP): pyproject.toml $(COMPAT_PINS)
	@echo "Setting up $(COMPAT_VENV) ..."
	@$(PYTHON) -m venv $(COMPAT_VENV)
	@$(COMPAT_VENV)/bin/python $(PIP_INSTALL) -c $(COMPAT_PINS) \
		torch lightning tensorboard rich psutil $(COMPAT_LIBRARIES)
	@$(COMPAT_VENV)/bin/python $(PIP_INSTALL) --no-deps -c $(COMPAT_PINS) $(COMPAT_BARE)
	@$(COMPAT_VENV)/bin/python $(PIP_INSTALL) --no-deps -e .
	@touch $@

# What cannot be installed is said; the tests that need it are skipped.
$(CLUSTERS_STAMP): pyproject.toml constraints.txt $(CLUSTERS_PACKAGES)
	@echo "Setting up $(CLUSTERS_VENV) ..."
	@$(PYTHON) -m venv $(CLUSTERS_VENV)
	@$(CLUSTERS_VENV)/bin/python $(PIP_INSTALL_ASIDE) -c constraints.txt -e ".[examples]" pytest pytest-timeout
	@$(call install_listed,$(CLUSTERS_VENV)/bin/python,-c constraints.txt,$(CLUSTERS_PACKAGES))
	@touch $@

# The same: an installed package whose parts cannot be compiled fails its tests.
$(EXTRAS_STAMP): pyproject.toml constraints.txt $(EXTRAS_PACKAGES) $(EXTRAS_BARE) tests/extras/prepare.py
	@echo "Setting up $(EXTRAS_VENV) ..."
	@$(PYTHON) -m venv $(EXTRAS_VENV)
	@$(EXTRAS_VENV)/bin/python $(PIP_INSTALL_ASIDE) -c constraints.txt -e . pytest pytest-timeout
	@$(call install_listed,$(EXTRAS_VENV)/bin/python,-c constraints.txt,$(EXTRAS_PACKAGES))
	@$(call install_listed,$(EXTRAS_VENV)/bin/python,--no-deps,$(EXTRAS_BARE))
	@$(EXTRAS_ENVIRON) $(EXTRAS_VENV)/bin/python tests/extras/prepare.py
	@touch $@

# The same.
$(XLA_STAMP): pyproject.toml constraints.txt tests/xla/requirements.txt tests/xla/install.py tools/torch_without_cuda.py
	@echo "Setting up $(XLA_VENV) ..."
	@$(PYTHON) -m venv $(XLA_VENV)
	@$(XLA_VENV)/bin/python tests/xla/install.py
	@touch $@

$(TORCH_STAMP): pyproject.toml constraints.txt tools/torch_without_cuda.py
	@echo "Setting up $(TORCH_VENV) ..."
	@$(PYTHON) -m venv $(TORCH_VENV)
	@$(TORCH_VENV)/bin/python tools/torch_without_cuda.py torch==$(TORCH)
	@touch $@

# The same.
$(LEGACY_STAMP): pyproject.toml constraints.txt $(LEGACY_PACKAGES) tests/legacy_examples/fetch.py
	@echo "Setting up $(LEGACY_VENV) ..."
	@$(PYTHON) -m venv $(LEGACY_VENV)
	@$(LEGACY_VENV)/bin/python $(PIP_INSTALL_ASIDE) -c constraints.txt -e ".[cli,tensorboard,torchmetrics]" pytest pytest-timeout
	@$(call install_listed,$(LEGACY_VENV)/bin/python,--no-deps -c constraints.txt,$(LEGACY_PACKAGES))
	@$(LEGACY_VENV)/bin/python tests/legacy_examples/fetch.py
	@touch $@

$(PROOF_STAMP): pyproject.toml constraints.txt $(PROOF_PACKAGES)
	@echo "Setting up $(PROOF_VENV) ..."
	@$(PYTHON) -m venv $(PROOF_VENV)
	@$(PROOF_VENV)/bin/python $(PIP_INSTALL_ASIDE) -c constraints.txt -e . -r $(PROOF_PACKAGES) pytest pytest-timeout
	@touch $@

$(DOCS_STAMP): $(DOCS_PACKAGES)
	@echo "Setting up $(DOCS_VENV) ..."
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python $(PIP_INSTALL_ASIDE) -r $(DOCS_PACKAGES)
	@touch $@
