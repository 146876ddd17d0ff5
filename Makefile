# Every target makes its own environment once, in .venv. To use one that you already have, name its Python:
#   make test PYTHON=/path/to/python
ifeq ($(origin PYTHON),undefined)
PYTHON := .venv/bin/python
READY := .venv/.ready
endif

.PHONY: help demo test lint bench docs memcheck

help:
	@echo "make demo    train a small GPT with plain PyTorch and with subtensors, side by side"
	@echo "make test    the whole suite, examples of docstrings and pages included"
	@echo "make lint    ruff check, ruff format --check, mypy --strict"
	@echo "make bench   the optimizers beside their peers (needs a CUDA device)"
	@echo "make docs    docs/ as HTML, in out/docs"
	@echo "make memcheck    the tests of lent memory and replays under compute-sanitizer (needs a CUDA device)"

# torch goes in first and pinned; the package then builds with torch's own setuptools, so a later run needs no network.
.venv/.ready: pyproject.toml constraints.txt
	@python3 -c 'import sys; sys.version_info >= (3, 11) or sys.exit("python3 is %s, and 3.11 is needed" % sys.version)'
	python3 -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt torch setuptools
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[test,docs]'
	@touch $@

demo: $(READY)
	$(PYTHON) -m subtensors demo

test: $(READY)
	$(PYTHON) -m pytest -q -n 2

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

bench: $(READY)
	$(PYTHON) -m subtensors.bench optim --out docs/benchmarks

docs: $(READY)
	$(PYTHON) docs/build.py out/docs

# Some of these tests run out of memory on purpose, which the API then reports: what counts is memory that is misused.
# Those of when memory is free again are left out: the sanitizer keeps the Python frames from which memory was mapped or a
# kernel loaded first, and what these frames hold. The others take two and a half minutes on an H200.
memcheck: $(READY)
	compute-sanitizer --tool memcheck --target-processes application-only --report-api-errors no --error-exitcode 9 \
	  $(PYTHON) -m pytest -q -n 0 -m "not slow" -k "not cpu and not thousand and not dropped and not deleted and not may_read and not goes_with and not threads_carve and not compile_with_graphs" \
	  tests/test_arena.py tests/test_arena_release.py tests/test_arena_asleep.py tests/test_arena_graphs.py tests/test_arena_machine.py tests/test_static_tensor.py \
	  tests/test_static_movers.py tests/test_workspaces.py tests/test_optim_arena.py tests/test_optim_capture_packed.py tests/test_optim_recorded_again.py
