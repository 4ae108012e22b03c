# The commands of this repository. `make train` and `make test` need Python 3.11+, make and nothing else.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
unexport PYTHONDONTWRITEBYTECODE # tests start many interpreters, and imports take seconds longer without bytecode
QUICK  := -n 2 -m "not slow and not learning and not full and not jax" --timeout 20
TEST   := -n 2 -m "not kernels and not full and not jax"
ALL    := -n 2 -m "not kernels and not jax"
JAX    := -m jax tests src/recurl
NUMBERS := $(TEST) $(addprefix tests/,recurrence modules objectives execution sequences collectors)

.PHONY: setup train quick test full check kernels instructions sanitize arm practice bench docs wheel matrix tritons clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt setup.py $(shell find src/recurl/native/src -type f)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile torch -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -e '.[dev]' -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps torchrl gymnax xminigrid chex toolz rsl-rl-lib gitpython gitdb smmap skrl stable-baselines3 sb3-contrib vmas gym pettingzoo -c constraints.txt  # the first two pin tensordict 0.14, gymnasium 1.3; xminigrid wants 30 MB of ffmpeg, rsl_rl loggers, of which GitPython is enough, vmas an old pyglet for display
	touch $(STAMP)

train: setup  ## train a memory policy on masked CartPole and show the result
	$(BIN)/recurl train ppo --env recurl/MaskedCartPole-v1 --cell lstm --run-dir runs/masked-cartpole --stop-return 495 --overwrite

quick: setup  ## the core tests, in two minutes: tests that take a second belong to `make test`
	$(BIN)/pytest $(QUICK) tests

test: setup  ## the tests, including doctests; of those of GPU kernels and of whole programs, the core
	$(BIN)/pytest $(TEST)
	$(BIN)/pytest $(JAX)

full: setup  ## all tests but those of GPU kernels
	$(BIN)/pytest $(ALL)
	$(BIN)/pytest $(JAX)

check: setup  ## everything that CI runs: lint, types, layering, all tests, and those of GPU kernels if these have changed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright & types=$$!; $(BIN)/pytest $(ALL); tests=$$?; wait $$types && exit $$tests
	$(BIN)/pytest $(JAX)
	$(BIN)/python tools/kernels.py

kernels: setup  ## the tests of GPU kernels, interpreted, emulated and compiled; no GPU needed; records what passed
	$(BIN)/python tools/kernels.py --record

# Inductor's cache ignores ATEN_CPU_CAPABILITY, so every run has its own.
INDUCTOR := TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/build/inductor
instructions: setup  ## numerical tests as on older processors, with SSE4, AVX and AVX2, with one and two threads
	$(INDUCTOR)-sse ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=1 \
		$(BIN)/pytest $(NUMBERS)
	$(INDUCTOR)-avx ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=AVX MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX \
		OMP_NUM_THREADS=2 $(BIN)/pytest $(NUMBERS)
	$(INDUCTOR)-avx2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
		OMP_NUM_THREADS=2 $(BIN)/pytest $(NUMBERS)

practice: setup  ## tests with environments of other packages, after installing these
	$(BIN)/pip install --quiet --disable-pip-version-check ale-py minigrid popgym mujoco box2d mpe2 -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps xminigrid brax mujoco-mjx ml-collections jaxopt trimesh chex toolz -c constraints.txt
	$(BIN)/pytest -n 2 -m "not jax" tests/practice
	$(BIN)/pytest -m jax tests/practice

# Python leaks by design. libasan finds C++ exceptions only if libstdc++ is loaded when it starts, and doesn't throw when
# memory is exhausted.
SANITIZED := tests/native tests/recurrence/test_cpu.py tests/recurrence/test_cpu_step.py tests/recurrence/linear/test_cpu.py \
	tests/execution/compiled tests/objectives/test_compiled_ppo.py tests/trainers/optim/test_adam_forms.py \
	tests/envs/tasks/popgym/test_hunt_and_kill.py
sanitize: setup  ## tests of the C++ library, built with AddressSanitizer and UBSan, which end at the first error
	rm -rf build/sanitize
	CXXFLAGS="-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all" LDFLAGS=-fsanitize=address,undefined \
		$(BIN)/python setup.py -q build_ext --build-lib build/sanitize --build-temp build/sanitize/objects
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		RECURL_NATIVE_LIBRARY=$(CURDIR)/build/sanitize/recurl/native/librecurl_native.so \
		$(BIN)/pytest -n 2 --capture=sys $(SANITIZED) -m "not kernels and not slow" -k "not triton" \
		--deselect tests/native/test_library.py::test_out_of_memory_is_an_error

arm: setup  ## the C++ library for aarch64, tested under QEMU
	$(BIN)/python tools/arm.py

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
