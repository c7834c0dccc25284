# Every target is one line that a person could type. `make help` lists them.
SHELL := /bin/bash
# An OUT that happens to be in the environment means nothing here.
OUT_DIR := $(if $(filter command line,$(origin OUT)),$(OUT))
.DEFAULT_GOAL := help
.PHONY: help gpu-report test lint clean

PROFILE ?=
BUDGET ?=
PRICE ?=
ONLY ?=
SKIP ?=
RESUME ?=

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo
	@echo "gpu-report takes PROFILE=cpu|quick|standard|full BUDGET=15m PRICE=0.40 ONLY=a,b SKIP=a,b RESUME=1 OUT=dir"

gpu-report: ## Prove and time the kernels on this machine; the report lands in artifacts/runner/<commit>/
	@bash scripts/runner_oneshot.sh $(OUT_DIR) $(if $(PROFILE),--profile $(PROFILE)) $(if $(BUDGET),--budget $(BUDGET)) $(if $(PRICE),--price $(PRICE)) $(if $(ONLY),--only $(ONLY)) $(if $(SKIP),--skip $(SKIP)) $(if $(RESUME),--resume)

test: ## Set up .venv and run every test that needs no GPU (kernels in Triton's interpreter)
	@bash scripts/run_tests.sh

lint: ## Set up .venv and check style with ruff
	@python="$$(python3 scripts/setup_env.py --cpu-tests)" && "$$python" -m ruff check nsa bench scripts

clean: ## Remove caches and the environments that the two commands made; reports stay
	rm -rf .venv .venv-gpu .deps .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
