# Every target but gpu-check sets up .venv by itself, once: the packages in requirements/, then
# this one; packages for tests and for checks when they are first asked for.
# PYTHON       interpreter that makes .venv (3.11 to 3.13)
# TEST_WORKERS processes of the test run; each uses one thread when there are several
# TESTS        what to run, e.g. TESTS=tests/demo

PYTHON ?= python3
TEST_WORKERS ?= 2
TESTS ?= tests

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
PIP := $(VENV_PYTHON) -m pip --disable-pip-version-check
PINS := requirements/pins.txt
TOOLS_STAMP := $(VENV)/.tools-installed
PACKAGE_STAMP := $(VENV)/.package-installed
TEST_STAMP := $(VENV)/.test-packages-installed
LINT_STAMP := $(VENV)/.lint-packages-installed
BUILD_INPUTS := pyproject.toml $(wildcard setup.py CMakeLists.txt) $(shell find csrc -type f 2>/dev/null)

# The package's build finds cmake and ninja here, wherever the system keeps its own.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.NOTPARALLEL:  # one pip at a time in .venv
.PHONY: demo test test-all test-models test-clients test-libraries test-upstream cuda-lint other-cpus lint \
	format typecheck benchmark performance-page gpu-check setup wheel test-wheel clean clean-venv

demo: $(PACKAGE_STAMP)
	$(VENV_PYTHON) examples/demo.py $(DEMO_ARGS)

# Tests make their own models; no test may reach for the network.
test: export HF_HUB_OFFLINE := 1
# Tests start hundreds of processes; each would compile the package again.
test: export PYTHONDONTWRITEBYTECODE :=
ifeq ($(TEST_WORKERS),1)
test: $(TEST_STAMP)
	$(VENV_PYTHON) -m pytest $(SELECTION) $(TESTS) $(PYTEST_ARGS)
else
test: export OMP_NUM_THREADS := 1
test: $(TEST_STAMP)
	$(VENV_PYTHON) -m pytest $(SELECTION) -n $(TEST_WORKERS) $(TESTS) $(PYTEST_ARGS)
endif

# With the grids and soaks that are left to the night; one small case of each is in `make test`.
test-all: SELECTION := -m ""
test-all: test

# Real clients against a real server; they get a virtual environment of their own from the registry.
test-clients: export TEST_CLIENTS := 1
test-clients: export OMP_NUM_THREADS := 1
test-clients: $(TEST_STAMP)
	$(VENV_PYTHON) -m pytest tests/integration $(PYTEST_ARGS)
	$(VENV_PYTHON) -m tests.integration.soak_server --family llama
	$(VENV_PYTHON) -m tests.integration.soak_server --family qwen3_5

# What optional libraries are called with, against the signatures in their newest wheels, which
# are neither installed nor imported.
test-libraries: export LIBRARY_WHEELS := $(CURDIR)/.cache/libraries
test-libraries: $(TEST_STAMP)
	rm -rf $(LIBRARY_WHEELS)
	$(PIP) download --quiet --no-deps --dest $(LIBRARY_WHEELS) flashinfer-python fla-core
	$(VENV_PYTHON) -m pytest tests/kernels/test_library_signatures.py $(PYTEST_ARGS)

# Upstream's own tests, from a source tree that the user has: make test-upstream UPSTREAM=FOLDER
test-upstream: export OMP_NUM_THREADS := 1
test-upstream: $(TEST_STAMP)
	@test -n "$(UPSTREAM)" || { echo "name upstream's source tree: make test-upstream UPSTREAM=FOLDER" >&2; exit 1; }
	$(VENV_PYTHON) -m tests.integration.upstream "$(UPSTREAM)" $(PYTEST_ARGS)

# Every causal model that transformers has, tiny, on this engine's pool; every family with a class
# of its own in 14 kinds of run, and with all fields of a row in 10. It prints tables. MODEL_TYPES
# and FAMILIES: some of them.
test-models: export HF_HUB_OFFLINE := 1
test-models: export OMP_NUM_THREADS := 1
test-models: $(TEST_STAMP)
	$(VENV_PYTHON) -m tests.models.every_family $(MODEL_TYPES)
	$(if $(MODEL_TYPES),,$(VENV_PYTHON) -m tests.models.multimodal)
	$(VENV_PYTHON) -m tests.models.kinds_of_run $(FAMILIES)
	$(VENV_PYTHON) -m tests.models.kinds_of_fields $(FAMILIES)
	$(VENV_PYTHON) -m tests.models.ranks_of_families $(FAMILIES)

lint: $(LINT_STAMP)
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .

format: $(LINT_STAMP)
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

typecheck: $(LINT_STAMP)
	$(VENV_PYTHON) -m mypy vllm
	MYPYPATH=examples $(VENV_PYTHON) -m mypy examples/*.py
	$(VENV_PYTHON) -m mypy -p benchmarks

benchmark: $(PACKAGE_STAMP)
	$(VENV_PYTHON) benchmarks/extraction.py $(BENCHMARK_ARGS)

# docs/performance.md and the table in README.md, from the files in benchmarks/results.
performance-page: | $(VENV_PYTHON)
	$(VENV_PYTHON) benchmarks/report.py

# Every kernel for NVIDIA GPUs in every form, compiled for three generations, and what keeps tiles
# for smaller cards too, by each of these releases of Triton; no card is needed. FORMS=few takes the
# forms of one model: make cuda-lint FORMS=few TRITON_VERSIONS=3.6 ARCHITECTURES="90 80"
TRITON_VERSIONS ?= 3.6 3.7
ARCHITECTURES ?= 90 80 100 89 120
FORMS ?= all
TRITON_RELEASES := .cache/triton
KERNEL_FORMS := tests/kernels/test_triton_compiles.py
GRID = $(if $(filter all-89 all-120,$(FORMS)-$(architecture)),tiles,$(FORMS))-$(architecture)

cuda-lint: $(TRITON_VERSIONS:%=cuda-lint-%)

LINT_BY = TRITON_VERSION=$* PYTHONPATH=$(CURDIR)/$(TRITON_RELEASES)/$* $(VENV_PYTHON) -m pytest -m ""
cuda-lint-%: $(TRITON_RELEASES)/%/.installed
	$(LINT_BY) $(KERNEL_FORMS) -k "not test_kernels_compile" $(PYTEST_ARGS)
	$(LINT_BY) $(foreach architecture,$(ARCHITECTURES),"$(KERNEL_FORMS)::test_kernels_compile[$(GRID)]") \
		$(PYTEST_ARGS)

# A release that .venv does not have, beside it: 640 MB.
.PRECIOUS: $(TRITON_RELEASES)/%/.installed
$(TRITON_RELEASES)/%/.installed: | $(TEST_STAMP)
	rm -rf $(@D)
	mkdir -p $(@D)
	@$(PIP) freeze | grep -q "^triton==$*\." || \
		$(PIP) install --quiet --no-deps --target $(@D) "triton==$*.*" || { \
		echo "No wheel of Triton $* for this Python could be had, so nothing is compiled by it:" \
			"TRITON_VERSIONS=... names other releases." >&2; exit 1; }
	@touch $@

# The CPU kernels for aarch64, compiled, and products of them run; needs g++-aarch64-linux-gnu and
# qemu-user, and skips what they would do where they are not installed.
other-cpus: $(TEST_STAMP)
	$(VENV_PYTHON) -m pytest -m "" -rs tests/kernels/test_other_cpus.py $(PYTEST_ARGS)

# On a machine with a GPU, with the Python that is there; gpu-report.txt is what to send back.
# PART=tests or PART=bench does one of both,
# CHECK_ARGS="--only 9b decode --json figures.json" goes to the benchmark, and
# CHECK_ARGS="--peer-python FILE" measures the vLLM that this interpreter has as well.
PART ?= all
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py $(PART) $(CHECK_ARGS)

setup: $(TEST_STAMP) $(LINT_STAMP)

# dist/vllm-*.whl, for any Python, built with the tools in .venv: nothing else is downloaded.
wheel: $(TOOLS_STAMP)
	rm -rf dist
	$(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

# The wheel in a new environment of each Python that is there, where the demo runs by it.
WHEEL_PYTHONS ?= python3.11 python3.12 python3.13
test-wheel: wheel
	@num_ran=0; for python in $(WHEEL_PYTHONS); do \
		new=$(CURDIR)/.cache/wheel/$$python; echo "$$python"; rm -rf $$new; \
		$$python --version || { echo "$$python does not run here: left out"; continue; }; \
		$$python -m venv $$new && $$new/bin/pip install --quiet -c $(PINS) dist/*.whl && \
		cd examples && $$new/bin/vllm --version && $$new/bin/python demo.py && cd .. && \
		rm -rf $$new || exit 1; \
		num_ran=$$((num_ran + 1)); \
	done; \
	test $$num_ran -gt 0 || { echo "test-wheel: none of $(WHEEL_PYTHONS) runs here" >&2; exit 1; }

$(VENV_PYTHON):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo "$(PYTHON) is not Python 3.11, 3.12 or 3.13; name one: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(TOOLS_STAMP): $(PINS) requirements/build.txt | $(VENV_PYTHON)
	$(PIP) install --quiet -c $(PINS) -r requirements/build.txt
	@touch $@

$(PACKAGE_STAMP): $(TOOLS_STAMP) $(BUILD_INPUTS)
	$(PIP) install --quiet -c $(PINS) --no-build-isolation -e .
	@touch $@

# The packages of an extra, without this one, which pip would build again.
PRINT_EXTRA := import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["optional-dependencies"][sys.argv[1]], sep="\n")

$(TEST_STAMP) $(LINT_STAMP): $(VENV)/.%-packages-installed: $(PACKAGE_STAMP)
	$(VENV_PYTHON) -c '$(PRINT_EXTRA)' $* > $(VENV)/$*-packages.txt
	$(PIP) install --quiet -c $(PINS) -r $(VENV)/$*-packages.txt
	@touch $@

clean:
	rm -rf build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .schemathesis
	find vllm tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv:
	rm -rf $(VENV)
