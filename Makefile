# make demo | test | lab | gallery | bench | check     Each sets up .venv by itself; nothing outside this folder changes.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
export OMP_NUM_THREADS ?= 1

SLURM := slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2

.PHONY: demo test system pytest check lab gallery bench clean

demo: .venv/demo-installed  ## train, resume and score a small model: executed notebook, figure and run directory in build/
	$(BIN)/python -m kit.demo

test: system check pytest  ## everything that CI runs

# The launch tests run a real Slurm. Where it cannot be installed they are skipped and say why.
system:  ## Slurm from Debian's packages, where this is Debian, the user is root and it is missing
	@if command -v slurmctld >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $(SLURM); \
	else echo "no Slurm here, and it cannot be installed without apt-get and root: the launch tests will be skipped"; fi

pytest: .venv/dev-installed
	$(BIN)/python -m pytest -q --durations=15

check: .venv/dev-installed  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

lab: .venv/demo-installed  ## the notebooks in a browser
	$(BIN)/jupyter lab notebooks

gallery: .venv/demo-installed  ## run all notebooks and keep their pictures in notebooks/gallery
	$(BIN)/python -m kit.gallery

bench: .venv/dev-installed  ## measure side by side on this machine; refreshes the tables of the README
	$(BIN)/python -m kit.bench

clean:
	rm -rf .venv build results runs data

# On a machine that offers a CPU build of torch (PIP_FIND_LINKS, or an index of its own) pip takes it; else the CUDA one.
.venv/demo-installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e ".[eval]"
	touch $@

.venv/dev-installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e ".[cluster,deepspeed,eval,plan,tensorboard,wandb,dev]"
	touch $@ .venv/demo-installed
