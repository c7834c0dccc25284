#!/usr/bin/env bash
# `make test`: an environment from requirements-cpu.txt, then the tests in two processes, because
# TRITON_INTERPRET must be set before Triton is first imported and forbids real compilation.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python_bin="$(python3 scripts/setup_env.py --cpu-tests)"
export OMP_NUM_THREADS=1
workers="$(getconf _NPROCESSORS_ONLN)"
if [ "$workers" -gt 8 ]; then workers=8; fi

echo "== style"
"$python_bin" -m ruff check nsa bench scripts
echo "== everything but interpreted kernels"
"$python_bin" -m pytest -m "not kernel" -q -n "$workers" --dist worksteal "$@"
echo "== kernels in Triton's interpreter"
TRITON_INTERPRET=1 "$python_bin" -m pytest -m kernel -q -n "$workers" --dist worksteal "$@"
