# Every target is one line that a person could type. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help gpu-report test test-all lock lint docs clean

# Given on the command line or not at all: one that happens to be in the environment means nothing.
# The recipe takes their `value`: make would expand a $ in it.
PROFILE := $(if $(filter command line,$(origin PROFILE)),$(PROFILE))
BUDGET := $(if $(filter command line,$(origin BUDGET)),$(BUDGET))
PRICE := $(if $(filter command line,$(origin PRICE)),$(PRICE))
ONLY := $(if $(filter command line,$(origin ONLY)),$(ONLY))
SKIP := $(if $(filter command line,$(origin SKIP)),$(SKIP))
RESUME := $(if $(filter command line,$(origin RESUME)),$(RESUME))
GPUS := $(if $(filter command line,$(origin GPUS)),$(GPUS))
OUT := $(if $(filter command line,$(origin OUT)),$(OUT))
quoted = '$(subst ','\'',$(1))'
option = $(if $(2),$(1) $(call quoted,$(2)))

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@sed -n 's/^#: \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

#:
#: make gpu-report takes
#:   PROFILE=cpu|quick|standard|full   default standard with NVIDIA hardware, else cpu
#:   BUDGET=15m       stop starting work after this time; the report says what was cut
#:   ONLY=a,b SKIP=c  stages to run or to leave out; RESUME=1 takes over what passed before
#:   GPUS=all         several GPUs: health and parity of each, NCCL, context parallelism
#:   PRICE=0.40       dollars per hour, to show the running cost
#:   OUT=dir          folder to use instead of artifacts/runner
#: More as options of the script: `bash scripts/runner_oneshot.sh --dry-run` lists the stages,
#: --detach goes on in the background, --wait 10m waits for a lock, --verbose shows all output.
#:
#: It leaves report.md, report.html, issue.md and bundle.json in <OUT>/<commit>/ and <OUT>/<commit>.tgz:
#:   python -m scripts.oneshot doctor          what this box lacks, with a fix for each
#:   python -m scripts.oneshot attach          follow a running or detached run
#:   python -m scripts.oneshot render FOLDER   the reports again, from the journal alone
#:   python -m scripts.oneshot compare A B     two bundles: faster, slower, broken?
#:   python -m scripts.oneshot verify BUNDLE   is a bundle whole, consistent, free of secrets?
#:   python -m scripts.oneshot trend DIR       score and times of many runs, by date and card
#:
#: Its last line is the true exit code (make itself turns any failure into 2): 0 passed, 1 wrong,
#: 2 usage, 3 a required stage could not run (no GPU, unfit box, no time left), 4 infrastructure,
#: 5 invalid or unstable, 6 not redacted, 75 locked, 130 and 143 stopped by a signal.

gpu-report: ## Prove and time the kernels on this machine; the report lands in artifacts/runner/<commit>/
	@bash scripts/runner_oneshot.sh $(if $(value OUT),$(call quoted,$(value OUT))) $(call option,--profile,$(value PROFILE)) $(call option,--budget,$(value BUDGET)) $(call option,--price,$(value PRICE)) $(call option,--only,$(value ONLY)) $(call option,--skip,$(value SKIP)) $(if $(filter-out 0 no off false,$(value RESUME)),--resume) $(call option,--gpus,$(value GPUS))

test: ## Set up .venv and run every test that needs no GPU (kernels in Triton's interpreter)
	@bash scripts/run_tests.sh

test-all: ## The same, with the longest tests and every kernel configuration, also those that did not change
	@TEST_ALL=1 bash scripts/run_tests.sh

lock: ## Compile kernel configurations that changed, and write down what became of them
	@python="$$(python3 scripts/setup_env.py --cpu-tests)" && "$$python" scripts/lock.py

lint: ## Set up .venv and check style and form with ruff, types with mypy
	@python="$$(python3 scripts/setup_env.py --cpu-tests)" && "$$python" -m ruff check nsa bench scripts examples && "$$python" -m ruff format --check nsa bench scripts examples && "$$python" -m mypy

docs: ## Make the API reference from docstrings into artifacts/docs/ (needs pdoc)
	@python="$$(python3 scripts/setup_env.py --cpu-tests)" && "$$python" -m pdoc -o artifacts/docs nsa $(addprefix nsa.,compress generate layouts parallel integrations.transformers)

clean: ## Remove caches and the environments that the two commands made; reports stay
	rm -rf .venv .venv-gpu .deps .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
