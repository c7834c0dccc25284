#!/usr/bin/env bash
# Prove and time the kernels on this machine: `bash scripts/runner_oneshot.sh [out_dir] [options]`.
# The report lands in artifacts/runner/<commit>/ or out_dir/<commit>/. For the options and the exit
# codes see `python -m scripts.oneshot run --help` and `python -m scripts.oneshot --help`.
set -euo pipefail
unset CDPATH # cd would look there first, and might run another clone
unset PYTHONINSPECT # a Python would not end with its exit code

# A relative out_dir is meant from where the caller stands.
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ] && [ "${1#/}" = "$1" ]; then
  out_dir="$PWD/$1"
  shift
  set -- "$out_dir" "$@"
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { # to stderr, if it can be written
  if ! echo "$1" >&2; then return 0; fi
}
starter=python3
if ! command -v python3 >/dev/null; then
  starter="${PYTHON:-python}"
fi
if ! command -v "$starter" >/dev/null; then
  say "no python3 on PATH; install Python 3.10 or later"
  exit 3
fi
if ! why="$("$starter" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>&1)"; then
  fatal="$(sed -n '/^Fatal Python error/{p;q;}' <<<"$why")"
  why="${fatal:-${why##*$'\n'}}"
  if [[ -n "$why" ]]; then why="cannot start: $why"; else why="is older than Python 3.8"; fi
  say "$(command -v "$starter") $why"
  say "put a Python 3.10 or later first on PATH"
  exit 2
fi
# exec: signals must reach the supervisor, and its exit code is ours.
exec "$starter" scripts/setup_env.py --run "$@"
