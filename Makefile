# shoal: few verbs. `make train` and `make test` work on a fresh clone with Python 3.11 and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup train test evidence bench bench-quick lint type kernels docs clean

setup: $(STAMP)

# Made anew when what is to be installed changes; returns at once otherwise. torch comes first and alone, pinned to a
# version whose CPU build serves machines without a GPU.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "setuptools>=69" torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[atari,mujoco,dev]"
	touch $(STAMP)

train: setup
	$(BIN)/shoal train impala CartPole-v1 --until-return 475

# Most tests run in three processes, as many of them wait for others; those marked `alone` (see tests/conftest.py) run after them,
# one at a time.
test: setup lint
	$(MAKE) --jobs 2 type kernels
	$(BIN)/python -m pytest -q -n 3 --dist worksteal -m "not slow and not stress and not alone"
	$(BIN)/python -m pytest -q -m "alone and not slow and not stress"

evidence: setup
	$(BIN)/python -m evidence

# SUITE is throughput, learning, scaling, faults, replay or ray; ARGS are options of `shoal bench`.
bench: setup
	$(BIN)/shoal bench $(or $(SUITE),throughput) $(ARGS)

# The quick table of docs/benchmark.md.
bench-quick: setup
	$(BIN)/shoal bench throughput --suite quick --again --out docs/results/throughput-quick
	$(BIN)/python -m benchmarks.quick_table

lint: setup
	$(BIN)/ruff check .

type: setup
	$(BIN)/mypy

# Compile what Numba keeps on disk, once: tests that begin at the same time would each do it.
kernels: setup
	$(BIN)/python -c "from shoal.replay.service.server import warm_up; warm_up()"

docs: setup
	$(BIN)/python -m benchmarks.metrics_page

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
