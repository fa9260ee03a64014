# make demo | quick | test | lab | gallery | docs | validate | fits | bench | bench-gpu | faults | check     Each sets up .venv by itself; nothing outside this folder changes.
# The first that runs: a name on the PATH may be a shim without an interpreter behind it, `python3` may be of any version.
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3; do \
    $$name -c '$(FITS)' 2>/dev/null && { command -v $$name; break; }; done)
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

SLURM := slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2 openssh-server rsync slurmdbd slurm-wlm-mysql-plugin mariadb-server

.PHONY: demo quick test system check lab gallery docs validate fits bench bench-gpu faults test-nxd nxd-source test-torch clean

demo: .venv/notebooks-installed  ## train, resume and score a small model: executed notebook, figure and run directory in build/
	$(BIN)/python -m kit.demo

# The launch tests run a real Slurm, those of the dashboard a real Chromium. Without them they are skipped and say why.
system:  ## install Slurm, Chromium and faketime, which the tests of clocks need, by apt-get as root, if one of them is missing
	@if command -v slurmctld >/dev/null && command -v slurmdbd >/dev/null && command -v chromium >/dev/null \
	    && command -v faketime >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -q \
	    && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $(SLURM) chromium faketime; \
	else echo "Slurm, Chromium or faketime is missing, and it cannot be installed without root and apt-get: its tests will be skipped"; fi

test: system .venv/dev-installed  ## everything that CI runs: format, lint, types and all tests, in groups of tests/support/groups.py
	$(BIN)/python -m tests.support.groups test

quick: .venv/dev-installed  ## format, lint, and the tests that only compute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tests.support.groups quick

check: .venv/dev-installed  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

lab: .venv/notebooks-installed  ## the notebooks in a browser
	$(BIN)/jupyter lab notebooks

gallery: .venv/notebooks-installed  ## run all notebooks and keep their pictures in notebooks/gallery
	$(BIN)/python -m tests.gallery

docs: .venv/docs-installed  ## the pages of docs/ as a website in build/docs; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/docs/index.html"

validate: .venv/notebooks-installed  ## how far the planner is from what others measured: the whole table, kept in results/
	$(BIN)/python -m tests.bench.exams

fits: .venv/dev-installed  ## fit the planner to the packaged runs again, after a change of runs, sites or equations
	$(BIN)/python -c 'from kit.estimate.fit import store; store.write()'

bench: .venv/dev-installed  ## measure side by side on this machine; refreshes the tables of docs/benchmarks.md
	$(BIN)/python -m tests.bench

# Needs no .venv, since a GPU machine may have no network. Without .venv it takes the first Python that can import torch and NumPy.
bench-gpu:  ## measure one model on this machine's GPU beside other trainers, within 8 minutes: make bench-gpu OUT=DIR [MODEL=llama-1b] [DRY=1]
	@test -n "$(OUT)" || { echo "OUT is missing: the folder that results are written to. Give one: make bench-gpu OUT=DIR"; exit 2; }
	@for python in $(CURDIR)/$(BIN)/python python3 python3.14 python3.13 python3.12 python3.11; do \
	    $$python -c 'import torch, numpy' 2>/dev/null && { \
	    exec $$python -u -m tests.bench.gpu --out "$(OUT)" $(if $(MODEL),--model $(MODEL)) $(if $(DRY),--dry-run); }; done; \
	echo "No python3 here can import torch and numpy. Install both, or name an environment that has them on the PATH."; exit 2

faults: .venv/dev-installed  ## kill, damage, starve and freeze real runs, here and on a real Slurm, and what takes longest; refreshes results/
	$(BIN)/python -m pytest -q --thorough tests/faults tests/cluster/test_faults.py --kills 100 --real-limits \
	    tests/cluster/test_many_nodes.py tests/cluster/test_notebooks_at_cluster_scale.py
	$(BIN)/python -m pytest -q --thorough -m thorough --ignore tests/cluster/test_faults.py \
	    --ignore tests/cluster/test_notebooks_at_cluster_scale.py

# Nobody needs it for the rest: NxD is not on the public index, and its torch is older than the kit's. About 6 GB.
NXD_ENV := build/nxd
test-nxd: nxd-source $(NXD_ENV)/installed  ## the Neuron engine on NxD's real source: make test-nxd NXD=path/to/neuronx-distributed
	HF_HUB_OFFLINE=1 PYTHONPATH=$(CURDIR)/tests/engines/real_nxd/site:$(abspath $(NXD))/src:$(CURDIR) $(NXD_ENV)/bin/python \
	    -m pytest -q -s -W ignore --thorough --timeout 1800 -m neuron tests/engines/real_nxd tests/engines/test_neuron.py

# For any release that pyproject.toml allows, such as make test-torch TORCH=2.12.1. The default is the lowest one.
TORCH ?= 2.10.0
test-torch: .venv/dev-installed  ## the tests that depend on torch, on another release of it
	$(BIN)/python -m tests.other_torch $(TORCH) build/torch-$(TORCH)

nxd-source:
	@test -d "$(NXD)/src/neuronx_distributed" || { echo "NXD='$(NXD)' is no checkout of github.com/aws-neuron/neuronx-distributed" \
	    "(0.17 is its tag v2.28.0). Give one: make test-nxd NXD=path/to/neuronx-distributed"; exit 2; }

$(NXD_ENV)/installed: tests/engines/real_nxd/requirements.txt
	test -x $(NXD_ENV)/bin/python || $(PYTHON) -m venv $(NXD_ENV)
	$(NXD_ENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	$(NXD_ENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

clean:  ## what can be made again; runs and data stay
	rm -rf .venv build results

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python from 3.11 to 3.14 was found. Your system may have one (apt install python3-venv, dnf" \
	    "install python3.12, brew install python@3.12), conda makes one (conda create -n kit python=3.12), or see" \
	    "https://www.python.org/downloads; one elsewhere is named so: make demo PYTHON=/path/to/python3"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/notebooks-installed: EXTRAS := notebooks
.venv/dev-installed: EXTRAS := notebooks,dev
.venv/docs-installed: EXTRAS := notebooks,docs
.venv/notebooks-installed .venv/dev-installed .venv/docs-installed: pyproject.toml constraints.txt | $(BIN)/python
	sh requirements/install.sh $(EXTRAS)
	touch .venv/notebooks-installed $@
