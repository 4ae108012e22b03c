# The commands of this repository. `make train` and `make test` need Python 3.11+, make and nothing else.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
unexport PYTHONDONTWRITEBYTECODE # tests start many interpreters, and imports take seconds longer without bytecode
QUICK  := -n 2 -m "not slow and not learning" --timeout 20
NUMBERS := $(addprefix tests/,recurrence modules objectives execution sequences collectors)

.PHONY: setup train quick test check instructions practice bench docs wheel matrix tritons clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard src/recurl/recurrence/cpu/src/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps torchrl -c constraints.txt  # pins tensordict 0.14
	touch $(STAMP)

train: setup  ## train a memory policy on masked CartPole and show the result
	$(BIN)/recurl train ppo --env recurl/MaskedCartPole-v1 --cell lstm --run-dir runs/masked-cartpole --stop-return 495 --overwrite

quick: setup  ## the core tests, in two minutes: tests that take 20 s belong to the full suite
	$(BIN)/pytest $(QUICK) tests

test: setup  ## all tests, including doctests
	$(BIN)/pytest -n 2

check: setup  ## everything that CI runs: lint, types, layering, tests (which build the documentation)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright & types=$$!; $(BIN)/pytest -n 2; tests=$$?; wait $$types && exit $$tests

instructions: setup  ## numerical tests as on older processors: ATen, MKL and oneDNN with SSE4, then AVX2
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 $(BIN)/pytest -n 2 $(NUMBERS)
	ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/pytest -n 2 $(NUMBERS)

practice: setup  ## tests with environments of other packages, after installing these
	$(BIN)/pip install --quiet --disable-pip-version-check ale-py minigrid popgym mujoco box2d -c constraints.txt
	$(BIN)/pytest -n 2 tests/practice

bench: setup  ## the benchmark tables of benchmarks/results
	$(BIN)/python benchmarks/bench_rnn_cpu.py
	$(BIN)/python benchmarks/bench_step.py
	$(BIN)/python benchmarks/bench_acting.py
	$(BIN)/python benchmarks/bench_scan.py
	$(BIN)/python benchmarks/bench_gradient_step.py
	$(BIN)/python benchmarks/bench_learning.py
	$(BIN)/python benchmarks/bench_slice_sampling.py
	$(BIN)/python benchmarks/bench_overlap.py
	$(BIN)/python benchmarks/bench_learning_curve.py
	$(BIN)/python benchmarks/plots.py

docs: setup  ## the documentation site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: setup  ## the source archive and both wheels, each tested in a fresh environment
	$(BIN)/python tools/wheels.py

matrix: setup  ## the core tests with every Python, tensordict and set of dependencies; reports skipped ones
	$(BIN)/python tools/matrix.py $(MATRIX) -- $(QUICK)

tritons: setup  ## compile the GPU kernels with Triton 3.6 to 3.9; no GPU needed
	$(BIN)/python tools/tritons.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
