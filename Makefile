# The only door: people, hooks and CI all come in here. `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
# The device that was installed for, so that `make model` on a GPU node does not bring the CPU's packages.
DEVICE ?= $(shell cat $(VENV)/.tokenline-device 2>/dev/null || echo cpu)
CONFIG ?= serve_app/configs/local-cpu.yaml
bin := $(VENV)/bin
export VENV

.PHONY: help setup model peers run stop tools test check bench bench-channel bench-tracing lint format types imports lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup:  ## make .venv and install the locked packages (DEVICE=cpu or gpu)
	@requirements/install.sh $(DEVICE) dev

model: setup  ## prepare the embedded model in the cache folder
	@$(bin)/tokenline model

run: model  ## serve on 127.0.0.1:8000 and answer a chat (DETACH=1: in the background; CONFIG=…, PORT=…)
	@exec $(bin)/tokenline run $(CONFIG) $(if $(PORT),--port $(PORT)) $(if $(DETACH),--detach)

stop:  ## end what `make run DETACH=1` started, and nothing else
	@$(bin)/tokenline stop

tools:  ## make sure of the programs that tests drive: Chromium and Prometheus
	@requirements/tools.sh

test: model tools check  ## lint, types, import rules, then every test
	@$(bin)/pytest

check: setup lint types imports  ## lint, types and import rules

peers: setup  ## make .venv-peers, with Ray Serve LLM and what draws plots (5 GB of disk)
	@VENV=.venv-peers requirements/install.sh peers

bench: model peers  ## tokens/s, TTFT, TPOT, ITL and CPU beside vLLM's API server and Ray Serve LLM (ARGS="--rounds 1 …")
	@PYTHONPATH=tests $(bin)/python -m bench.peers $(ARGS)

bench-channel: model peers  ## what a token costs each hop, by the number of streams, with and without the token channel
	@PYTHONPATH=tests $(bin)/python -m bench.channel $(ARGS)

bench-tracing: model  ## what tracing costs: tokens/s and CPU with 100 %, 1 % and none of the requests traced
	@PYTHONPATH=tests $(bin)/python -m bench.tracing $(ARGS)

lint: setup
	@$(bin)/ruff check . && $(bin)/ruff format --check .

format: setup  ## let ruff mend what it can
	@$(bin)/ruff check --fix . ; $(bin)/ruff format .

types: setup
	@$(bin)/mypy

imports: setup
	@$(bin)/lint-imports --no-logo 2>/dev/null || $(bin)/lint-imports

lock: setup  ## resolve requirements/*.in into the pinned *.txt
	@requirements/lock.sh

clean:  ## remove .venv, .venv-peers and caches (the model cache stays)
	rm -rf $(VENV) .venv-peers .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
