# make demo: train ResNet20 on the embedded digits, in fixed point and in float32
# make test: the fast tests   make test-all: all tests, as in CI
# make test-oldest: some tests with the oldest versions that pyproject.toml allows
# make lint: format, lint and types
# make docs: the site, in build/site    make bench: all CPU benchmarks, in build/bench
VENV ?= .venv
PYTHON ?= python3
# where torch comes from: its CPU build, which brings no CUDA, unless this machine has a GPU;
# make demo TORCH_INDEX= takes the one pip would take
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)
PIP = $(VENV)/bin/python -m pip install --quiet -c constraints.txt
PIP_OLDEST = $(VENV)-oldest/bin/python -m pip install --quiet -c constraints-oldest.txt
# a file goes to one process: its kernels are compiled, and its fixtures made, once; in the order of names, for the
# slowest file has few tests
SPREAD = -n auto --dist loadfile --no-loadscope-reorder

.PHONY: bench demo docs lint test test-all test-oldest

demo: $(VENV)/installed
	$(VENV)/bin/python -m train.demo

test: $(VENV)/installed-dev $(VENV)-qonnx/installed
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(SPREAD) -m "not slow"

test-all: $(VENV)/installed-dev $(VENV)-qonnx/installed
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest $(SPREAD)

test-oldest: $(VENV)-oldest/installed
	OMP_NUM_THREADS=1 $(VENV)-oldest/bin/python -m pytest -m "not slow" tests/test_torch_private.py \
	  tests/fixedpoint_kernels/test_rounding.py tests/fixedpoint_kernels/test_norms.py tests/marvin/test_tensorboard.py \
	  tests/marvin/test_files.py tests/marvin/test_saved_file.py tests/marvin/test_muppet.py \
	  tests/train/test_plot.py tests/marvin/test_carried_formats.py \
	  tests/marvin/test_fusion.py::test_frozen_models_are_compiled_whole tests/marvin/test_integer.py::test_compiled \
	  tests/marvin/test_mixed_precision.py::test_other_calls_in_compiled_code_are_done_outside_of_it

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright

bench: $(VENV)/installed-dev
	for op in $$(ls benchmarks/ops | sed -n '/^_/!s/\.py$$//p'); do \
	  $(VENV)/bin/python -m benchmarks.run --op $$op --json build/bench/$$op.json || exit 1; \
	done

docs: $(VENV)/installed-dev
	$(VENV)/bin/mkdocs build

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(PIP) --no-deps --retries 1 --index-url $(TORCH_INDEX) torch || true)
	$(PIP) -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) -e ".[accelerate,dev,docs,hls4ml,lightning,onnx,qtorch,transformers]"
	touch $@

$(VENV)-oldest/installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(VENV)-oldest
	$(if $(TORCH_INDEX),$(PIP_OLDEST) --no-deps --retries 1 --index-url $(TORCH_INDEX) torch || true)
	$(PIP_OLDEST) -e . hypothesis pytest scipy triton
	touch $@

# qonnx needs an older onnx; its tests run it in this environment, which has no torch
$(VENV)-qonnx/installed:
	$(PYTHON) -m venv $(VENV)-qonnx
	$(VENV)-qonnx/bin/python -m pip install --quiet qonnx==1.0.0 onnx==1.22.0 onnxruntime==1.31.1
	touch $@

# HGQ2, to compare with: make .venv-hgq/installed
$(VENV)-hgq/installed:
	$(PYTHON) -m venv $(VENV)-hgq
	$(VENV)-hgq/bin/python -m pip install --quiet hgq2==0.2.0 keras==3.15.1 jax==0.10.2
	touch $@

# OpenVINO, to measure QDQ files: make .venv-openvino/installed
$(VENV)-openvino/installed:
	$(PYTHON) -m venv $(VENV)-openvino
	$(VENV)-openvino/bin/python -m pip install --quiet openvino==2026.4.1 numpy
	touch $@
