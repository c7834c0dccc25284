#!/usr/bin/env bash
# `make test`: an environment from requirements-cpu.txt, then the tests in two processes, because
# TRITON_INTERPRET must be set before Triton is first imported and forbids real compilation.
# Arguments go to pytest. They may match no test in one of the two; in both it is an error (5).
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# With it, each of hundreds of processes would compile its imports again.
unset PYTHONDONTWRITEBYTECODE
# With the one nsa is not found here, with the other no assertion counts.
unset PYTHONSAFEPATH PYTHONOPTIMIZE
python_bin="$(python3 scripts/setup_env.py --cpu-tests)"
export OMP_NUM_THREADS=1
workers="$(getconf _NPROCESSORS_ONLN)"
if [ "$workers" -gt 8 ]; then workers=8; fi

matched=0
run_pytest() {
  local code=0
  "$python_bin" -m pytest -q -n "$workers" --dist worksteal "$@" || code=$?
  case $code in
    0) matched=1 ;;
    5) echo "== no test matched here" ;;
    *) exit "$code" ;;
  esac
}

echo "== style"
"$python_bin" -m ruff check nsa bench scripts examples
"$python_bin" -m ruff format --check --quiet nsa bench scripts examples
echo "== everything but interpreted kernels"
run_pytest -m "not kernel" "$@"
echo "== kernels in Triton's interpreter"
export TRITON_INTERPRET=1
run_pytest -m kernel "$@"
if [ "$matched" = 0 ]; then
  echo "no test matched: $*" >&2
  exit 5
fi
