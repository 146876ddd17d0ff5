# Every target makes its environment once, in .venv: `make demo` and `make doctor` a small one, which the others add to.
# To use one that you already have, name its Python:
#   make test PYTHON=/path/to/python
# Another version of torch, with the triton and numpy that pip gives it, has an environment of its own, .venv-2.15.0:
#   make test TORCH=2.15.0
VENV := .venv$(if $(TORCH),-$(TORCH))
ifeq ($(origin PYTHON),undefined)
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo
endif

MINUTES ?= 5

.PHONY: help demo doctor test test-all test-gpu lint bench docs memcheck soak fuzz

help:
	@echo "make demo    train a small GPT with plain PyTorch and with subtensors, side by side"
	@echo "make doctor  what this machine has, what runs on it and how, and a self-test of each type"
	@echo "make test    the suite, examples of docstrings and pages included; TORCH=2.15.0 on that version"
	@echo "make test-all    and the tests that take long"
	@echo "make test-gpu    the tests that run on a GPU (needs a CUDA device)"
	@echo "make lint    ruff check, ruff format --check, mypy --strict"
	@echo "make bench   the optimizers beside their peers (needs a CUDA device)"
	@echo "make docs    the site of docs/, with the API from the docstrings, in out/docs"
	@echo "make soak MINUTES=5    all parts in random order beside plain torch, while memory has to stay flat"
	@echo "make fuzz MINUTES=5    public functions with wrong arguments, whose errors have to say what is wrong"
	@echo "make memcheck    the tests of arenas and replays under compute-sanitizer (needs a CUDA device)"

# torch goes in first and pinned; the package then builds with torch's own setuptools, so a later run needs no network.
$(VENV)/.demo: pyproject.toml setup.py constraints.txt
	@python3 -c 'import sys; sys.version_info >= (3, 11) or sys.exit("python3 is %s, and 3.11 is needed" % sys.version)'
	@echo "Making $(VENV) with torch, and what the demo draws with. A download of some GB, once: 1 to 10 minutes by your network."
	python3 -m venv $(VENV)
	@grep -v -E '^($(if $(TORCH),torch|numpy|setuptools,#))' constraints.txt > $(VENV)/constraints.txt
	@$(if $(TORCH),echo torch==$(TORCH) >> $(VENV)/constraints.txt)
	$(VENV)/bin/python -m pip install --constraint $(VENV)/constraints.txt torch 'setuptools>=77'
	$(VENV)/bin/python -m pip install --constraint $(VENV)/constraints.txt --no-build-isolation --editable '.[plot]'
	@touch $@

$(VENV)/.ready: $(VENV)/.demo
	@echo "Adding what tests, pages and checks need to $(VENV). It takes about a minute."
	$(VENV)/bin/python -m pip install --constraint $(VENV)/constraints.txt --no-build-isolation --editable '.[test,docs,serve]'
	@touch $@

demo: $(DEMO_READY)
	$(PYTHON) -m subtensors demo

doctor: $(DEMO_READY)
	$(PYTHON) -m subtensors doctor

test: $(READY)
	$(if $(TORCH),COMPATIBILITY=1 )$(PYTHON) -m pytest -q -n 2

test-all: $(READY)
	$(PYTHON) -m pytest -q -n 2 -m ""

# Where there is a GPU: all that runs there; what the CPU's runs do anyway is left out.
test-gpu: $(READY)
	COMPATIBILITY=1 $(PYTHON) -m pytest -q -n 8 -k "not cpu and not interpreter"

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	MYPYPATH=tests:tests/support:docs/examples $(PYTHON) -m mypy --package benchmarks --package demo --module grpo_cycle --module load_embeddings --module serve_embeddings --module train_gpt --module user_program

bench: $(READY)
	$(PYTHON) -m subtensors bench optim --out docs/benchmarks

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml
	@echo "The site is in out/docs. With its search: python3 -m http.server --directory out/docs, then http://localhost:8000"

soak: $(READY)
	PYTHONPATH=.:tests/support $(PYTHON) tests/soak/soak.py --minutes $(MINUTES)

fuzz: $(READY)
	PYTHONPATH=. $(PYTHON) tests/fuzz --minutes $(MINUTES)

# Some of these tests run out of memory on purpose, which the API reports: only invalid accesses count. Tests that check
# when memory is freed are left out: the sanitizer keeps the Python frames that first mapped memory or loaded a kernel,
# and the objects in them. The other tests take two and a half minutes on an H200.
memcheck: $(READY)
	compute-sanitizer --tool memcheck --target-processes application-only --report-api-errors no --error-exitcode 9 \
	  $(PYTHON) -m pytest -q -n 0 -m "not slow" -k "not cpu and not thousand and not dropped and not deleted and not may_read and not freed_with_its_last and not threads_allocate and not compile_with_graphs" \
	  tests/static/test_arena.py tests/static/test_arena_release_restore.py tests/static/test_arena_released_ops.py tests/static/test_arena_graphs.py tests/static/test_arena_stateful.py tests/static/test_static_tensor.py \
	  tests/static/test_relocating_ops.py tests/graphs/test_cublas_workspaces.py tests/optim/test_optim_arena.py tests/optim/test_optim_capture_packed.py tests/optim/test_optim_recapture.py
