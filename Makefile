# Every target that runs something first makes .venv. On a fresh clone: `make test`, `make demo`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

# The tests simulate devices on the CPU; the TPU compiler needs no TPU, but several processes may load it.
export JAX_PLATFORMS ?= cpu
export TPU_SKIP_MDS_QUERY ?= 1
export TPU_WORKER_HOSTNAMES ?= localhost
export TPU_ACCELERATOR_TYPE ?= v3-32
export ALLOW_MULTIPLE_LIBTPU_LOAD ?= 1
export TPU_LOG_DIR ?= disabled
export TF_CPP_MIN_LOG_LEVEL ?= 3

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

.PHONY: help
help:  ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: install
install: $(STAMP)  ## Make .venv with autoshard, its tests' tools and the TPU compiler.

# Written last, so that an interrupted installation starts over. Only pyproject.toml can ask for another one.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "autoshard needs Python 3.11 or later: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"autoshard needs Python 3.11 or later, but $(PYTHON) is {v.major}.{v.minor}: make PYTHON=/path/to/python3.11")'
	rm -rf $(VENV)
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --upgrade pip
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable ".[dev]"
	touch $@

.PHONY: test
test: check $(STAMP)  ## Check style and types, then run the tests, the notebooks among them.
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

.PHONY: check
check: $(STAMP)  ## Check style and types only.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: format
format: $(STAMP)  ## Rewrite the sources in the house style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: coverage
coverage: $(STAMP)  ## Print which rule or treatment each primitive has; write docs/coverage.md.
	XLA_FLAGS=--xla_force_host_platform_device_count=8 $(BIN)/python -m tests.helpers.coverage

.PHONY: demo
demo: $(STAMP)  ## Plan a model and print the plan.
	$(BIN)/python -m autoshard.demo

.PHONY: bench
bench: $(STAMP) published  ## Run the slow tests, and predict the published steps.
	$(BIN)/python -m pytest -m slow

.PHONY: published
published: $(STAMP)  ## Predict train steps that were published; write docs/published.md. ROWS=v5p,lingvo picks some.
	$(BIN)/python -m benchmarks.published --rows "$(ROWS)"

.PHONY: bench-partition
bench-partition: $(STAMP)  ## Compare what our programs send with what XLA's partitioner sends; write docs/partition.md.
	$(BIN)/python -m benchmarks.partition

.PHONY: accuracy
accuracy: $(STAMP)  ## Compare the cost model with the TPU compiler; write docs/accuracy.md. PROGRAMS=mlp,moe picks some.
	$(BIN)/python -m benchmarks.accuracy --programs "$(PROGRAMS)"

.PHONY: calibration
calibration: $(STAMP)  ## Fit chips' figures to the TPU compiler; write docs/calibration.md. TOPOLOGIES=v3:4x4 picks some.
	$(BIN)/python -m benchmarks.calibration --topologies "$(TOPOLOGIES)"

IOPDDL ?= ../shared/data/iopddl
LIMIT ?= 300

.PHONY: bench-iopddl
bench-iopddl: $(STAMP)  ## Solve the contest's instances in IOPDDL=FOLDER, LIMIT seconds each; write docs/iopddl.md.
	$(BIN)/python -m benchmarks.iopddl "$(IOPDDL)" --time-limit $(LIMIT)

N ?= 10000

.PHONY: fuzz
fuzz: $(STAMP)  ## Look for wrong partitioned programs: make fuzz N=10000.
	$(BIN)/python -m tests.fuzz $(N)

.PHONY: clean
clean:  ## Remove .venv and the caches.
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
