#!/usr/bin/env bash
# Prove and time the kernels on this machine: `bash scripts/runner_oneshot.sh [out_dir] [options]`.
# The report lands in artifacts/runner/<commit>/ or out_dir/<commit>/. For the options and the exit
# codes see `python -m scripts.oneshot run --help` and `python -m scripts.oneshot --help`.
set -euo pipefail

# A relative out_dir is meant from where the caller stands.
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ] && [ "${1#/}" = "$1" ]; then
  out_dir="$PWD/$1"
  shift
  set -- "$out_dir" "$@"
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

starter=python3
if ! command -v python3 >/dev/null; then
  starter="${PYTHON:-python}"
fi
if ! command -v "$starter" >/dev/null; then
  echo "no python3 on PATH; install Python 3.10 or later" >&2
  exit 3
fi
# exec: signals must reach the supervisor, and its exit code is ours.
exec "$starter" scripts/setup_env.py --run "$@"
