# Nothing has to be installed by hand besides Python 3.11 or 3.12 and make: each target runs the set-up that it needs.

PYTHON ?= python3
# Images of containers set it. Each of hundreds of processes would compile all that it imports, torch and SGLang included.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DATA := data/arithmetic
# Processes that share the tests: as many as there are cores, if each has 6 GB of memory. With more, a Ray that starts beside
# the others misses its own deadline of 30 s. The longest file bounds what more than eight could gain.
WORKERS ?= $(shell awk -v cores=$$(nproc) '/MemTotal/ {n = int($$2 / 6e6); if (n > cores) n = cores; \
	if (n > 8) n = 8; if (n < 1) n = 1; print n}' /proc/meminfo)

.DEFAULT_GOAL := help
.PHONY: help setup hashes kernels packages patches quickstart test test-quick test-slow faults soak simulate test-gpu bench-gpu check fmt docs docs-site clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## build .venv for this machine (GPU=1: for machines with GPUs); does nothing when it is up to date

$(INSTALLED): requirements-hashes.txt requirements-cuda-hashes.txt pyproject.toml scripts/setup.py
	@$(PYTHON) scripts/setup.py $(if $(GPU),--gpu)
	@touch $@

# Of every file that PyPI has of a version: wheels of all platforms and Pythons, and the source of what is compiled.
HASHES := $(BIN)/uv pip compile --quiet --no-config --no-deps --generate-hashes --no-header --no-annotate
hashes: setup ## write requirements-hashes.txt and requirements-cuda-hashes.txt after a version was changed
	$(HASHES) --universal --python-version 3.11.5 requirements.txt --output-file requirements-hashes.txt
	$(HASHES) --python-version 3.12 --python-platform x86_64-manylinux_2_39 requirements-cuda.txt \
		--output-file requirements-cuda-hashes.txt

# Needs nvcc, the headers of cuDNN and a C++ compiler; the digest of the source is compared.
kernels: setup ## compile the part of Transformer Engine that is built for one torch; for GPUs, without Docker
	grep -A1 '^transformer-engine-torch==' requirements-cuda-hashes.txt | NVTE_FRAMEWORK=pytorch $(BIN)/pip install --no-deps \
		--no-build-isolation --no-binary transformer-engine-torch --require-hashes -r /dev/stdin

patches: setup ## apply the patches of patches/ to the packages in .venv; optional
	$(BIN)/python -m megarl.tools.doctor.packages

quickstart: setup ## train a small policy on this machine: data, warm start, GRPO
	$(BIN)/megarl data make arithmetic --out $(DATA)
	$(BIN)/megarl train recipes/quickstart_sft.yaml
	$(BIN)/megarl train recipes/quickstart.yaml

# Without root and sudo the packages stay missing; pytest skips the tests that need one and lists them at the end.
packages: ## install the Debian packages that some tests need, as root or with sudo
	@scripts/install_debian_packages.sh || true

# Exit code 1: some tests failed. They run once more, alone; tests/unsteady.py names those that pass then.
test: setup packages ## all tests that need no GPU and no patience
	$(BIN)/python -m pytest -n $(WORKERS) --durations=10 || { [ $$? = 1 ] && \
		$(BIN)/python -m pytest -p tests.unsteady --last-failed --last-failed-no-failures none; }

test-quick: setup ## the quick tests, for while you work: no engines, no Ray, no Megatron ranks, no browser
	$(BIN)/python -m pytest -n $(WORKERS) --durations=10 -m 'not slow and not gpu and not heavy and not patient'

test-slow: setup packages ## the tests that take minutes each
	$(BIN)/python -m pytest -m slow

faults: setup packages ## every fault on purpose, and the table of what became of them in docs/faults.md
	$(BIN)/python -m pytest -m fault --fault-table=docs/faults.md

soak: setup ## 200 steps with a random accident about every five; prints its seed
	$(BIN)/python -m tests.faults.soak

SECONDS ?= 60
simulate: setup ## histories of a simulated world for SECONDS=60 on all cores; prints the seeds that fail
	$(BIN)/python -m tests.simulation --seconds $(SECONDS) --first $(or $(SEED),$(shell date +%s))000

test-gpu: ## the tests that need a CUDA device, in an environment of your own that has one
	$(PYTHON) -m pytest -m gpu -rs

bench-gpu: ## all figures of docs/performance.md on this machine's GPU, in an environment of your own that has one
	$(PYTHON) -m bench gpu --out bench-gpu.jsonl

docs-site: setup ## build the documentation site into build/site, strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: setup docs-site ## lint, format, types, layers, links of the documentation
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup ## fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: setup ## write what is generated: option tables of libraries, recipe schema, metrics, dashboards, alerts, a picture
	$(BIN)/python -m scripts.megatron_fields
	$(BIN)/python -m scripts.sglang_fields
	$(BIN)/python -m scripts.draw_plan
	$(BIN)/megarl schema > recipes/schema.json
	$(BIN)/megarl schema --docs > docs/recipe.md
	$(BIN)/megarl metrics list --docs > docs/metrics.md
	$(BIN)/python -m scripts.docs_pages
	$(BIN)/python -m scripts.dashboards.monitoring

clean: ## remove the environment and caches; keeps runs/ and data/
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find megarl tests -name __pycache__ -type d -prune -exec rm -rf {} +
