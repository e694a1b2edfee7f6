# Two commands, on a machine with Python (with venv), make and a package index:
#
#   make train    set up what is needed and train examples/train_gpt.py
#   make test     set up what is needed and pass the tests, through tox
#
# PYTHON=python3.12 chooses another Python; ARGS="--steps 50" reaches the example or tox.

PYTHON ?= python3
ARGS ?=
PIP = -m pip --disable-pip-version-check
# The plugins of the devices that this machine has: each other one would be reported as not working in every run.
DEVICES = $(if $(wildcard /dev/nvidiactl /dev/kfd /dev/dxg),-e plugins/cuda) $(if $(wildcard /dev/davinci*),-e plugins/npu)

# What is kept between runs stays in this folder: matplotlib's list of fonts would go to the user's.
export MPLCONFIGDIR = $(CURDIR)/.venv/matplotlib

.PHONY: train test clean

# Threads of OpenMP that wait by spinning slow a run many times over where another program wants the cores too.
train: .venv/train.done
	OMP_WAIT_POLICY=passive .venv/bin/python examples/train_gpt.py $(ARGS)

# Two environments at a time: what has one process, as setting up has, leaves a core idle.
test: .venv/test.done
	.venv/bin/python -m tox run-parallel --parallel 2 --parallel-live --parallel-no-spinner $(ARGS)

# A file of its own for each, made last: an interrupted set-up is started again.
.venv/train.done: pyproject.toml constraints.txt $(wildcard plugins/*/pyproject.toml) | .venv/bin/python
	@.venv/bin/python scripts/set_up.py
	@.venv/bin/python -c "import torch" 2>/dev/null || .venv/bin/python $(PIP) install -c constraints.txt torch
	.venv/bin/python $(PIP) install --quiet -c constraints.txt -e ".[examples]" -e plugins/cpu $(DEVICES)
	@touch $@

.venv/test.done: constraints.txt | .venv/bin/python
	.venv/bin/python $(PIP) --quiet install -c constraints.txt tox
	@touch $@

.venv/bin/python:
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv .tox outputs docs/_build build dist
