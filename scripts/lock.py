"""What nobody shall change without saying so: nsa/tests/locks, which `make lock` writes anew.

    python scripts/lock.py               # all three; compiles what has changed
    python scripts/lock.py --calls 90    # prints one part of calls.txt
    python scripts/lock.py --kernels 90  # prints one part of kernels.json, and what is wrong in it

api.txt: the public names and their signatures. calls.txt: which kernels calls launch, in order, by
architecture. kernels.json: what kernels compile to, by what they are made from. A configuration
is what a call launches (scripts/compile_as_launched.py). It is known by its content: the code of
its kernel and of all that this calls, without comments, docstrings and places; its types, constants
and options; Triton's release.

`make test` compares all three. It compiles only what kernels.json does not know, and fails where
PTX has changed, so that a commit which changes kernels says so. `make test-all` compiles all.
"""

import contextlib
import gc
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # an eighth of the time

from bench.records import doc_parser, write_atomic
from scripts import aot
from scripts.aot import AotCase

LOCKS = Path(__file__).resolve().parent.parent / "nsa" / "tests" / "locks"
LOCK = LOCKS / "kernels.json"
CALLS_OF = (80, 90, 120)  # one each of three ways to fit kernels


def api() -> list[str]:
    """Return the public names and their signatures."""
    import nsa

    lines = []
    for name in sorted(nsa.__all__):
        found = getattr(nsa, name)
        try:
            lines.append(f"{name}{inspect.signature(found)}")
        except (TypeError, ValueError):
            lines.append(name)
        if inspect.isclass(found):
            for method, value in sorted(vars(found).items()):
                if callable(value) and not method.startswith("_"):
                    lines.append(f"{name}.{method}{inspect.signature(value)}")
    return lines


def calls(arch: int) -> list[str]:
    """Return which kernels calls launch on that architecture. For a process of its own."""
    from scripts import compile_as_launched as launched

    launched.pretend(arch, {})
    lines = []
    for (call, shape), launches in launched.planned(launched.some_calls()):
        says = launches
        if isinstance(launches, list):
            says = " ".join(one.kernel.__name__ for one in launches)
        lines.append(f"sm_{arch} {call.__name__}{shape}: {says}")
    return lines


def apart(*args: object) -> str:
    """Return what this script prints with these arguments in a process of its own: one that takes
    its CPU tensors for a GPU's goes on doing so."""
    command = [sys.executable, __file__, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def read() -> dict:
    """Return {"triton": its release, "kernels": {"sm_90 name": [content, PTX, shared, registers,
    stack, barriers]}}; without kernels where the file is of another release."""
    import triton

    found = json.loads(LOCK.read_text()) if LOCK.exists() else {}
    if found.get("triton") != triton.__version__:
        found = {"triton": triton.__version__, "kernels": {}}
    return found


def known_entry(kernels: dict[str, list], case: AotCase, arch: int) -> list | None:
    """Return the entry of a configuration, if that has not changed since it was written."""
    entry = kernels.get(f"sm_{arch} {case.name}")
    return entry if entry and entry[0] == aot.content(case, arch) else None


def compile_cases(cases: list[AotCase], arch: int, kernels: dict) -> tuple[dict, list[str]]:
    """Compile the cases for whose content `kernels` has no entry. Returns the entries of all, and
    what is wrong with cases that have none."""
    found, bad = {}, []
    for case in cases:
        name, entry = f"sm_{arch} {case.name}", known_entry(kernels, case, arch)
        if entry is None:
            try:
                used, ptx = aot.compile_case(case, arch)
            except Exception as error:
                bad.append(f"{name}: {type(error).__name__}: {str(error)[-300:]}")
                continue
            entry = [aot.content(case, arch), ptx, *used]
        problems = aot.Resources(*entry[2:]).problems(arch, case.max_spill)
        bad += [f"{name}: {problem}" for problem in problems]
        if not problems:
            found[name] = entry
    return found, bad


def lower_with_ones(cases: list[AotCase], names: Collection[str]) -> dict[str, str]:
    """Return why cases of `names` for SM 9.0 cannot be read with int arguments of 1, by name."""
    bad = {}
    for case, ones in aot.ones_of(cases):
        if case.name in names:
            try:
                aot.lower_case(case, 90, ones)
            except Exception as error:
                why = str(error.__cause__ or error)[-200:]
                bad[case.name] = f"{', '.join(ones)} = 1: {type(error).__name__}: {why}"
    return bad


def compiled(arch: int) -> tuple[dict[str, list], list[str]]:
    """Return compile_cases() of all configurations, which for SM 9.0 take ints of 1 too; TEST_ALL
    asks for all, whatever the lock knows. For a process of its own."""
    from scripts import compile_as_launched as launched

    kernels = {} if os.environ.get("TEST_ALL") else read()["kernels"]
    launched.pretend(arch, {})
    # Into an empty cache, since a stale entry would hide a compiler error, and without searches for
    # garbage, which the compiler's many objects would set off one after the other.
    gc.disable()
    with (
        contextlib.ExitStack() as after,
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder),
    ):
        after.callback(gc.enable)
        cases = launched.configurations(arch)
        found, bad = compile_cases(cases, arch, kernels)
        new = {c.name for c in cases if known_entry(kernels, c, arch) is None}
        ones = lower_with_ones(cases, new) if arch == 90 else {}
    bad += [f"sm_90 {name} with {why}" for name, why in ones.items()]
    return found, bad


def main(argv: list[str] | None = None) -> int:
    parser = doc_parser(__doc__)
    add, one = parser.add_argument, dict(type=int, metavar="SM")
    add("--calls", choices=CALLS_OF, help="only print what calls launch on this one", **one)
    add("--kernels", choices=aot.ARCHS, help="only print what kernels compile to for it", **one)
    args = parser.parse_args(argv)
    if args.calls:
        print("\n".join(calls(args.calls)))
        return 0
    if args.kernels:
        print(json.dumps(compiled(args.kernels)))
        return 0
    import triton

    before = read()["kernels"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(lambda arch: json.loads(apart("--kernels", arch)), aot.ARCHS))
    entries = dict(sorted(entry for found, _ in parts for entry in found.items()))
    bad = [problem for _, problems in parts for problem in problems]
    changed = sorted(n for n in before | entries if before.get(n) != entries.get(n))
    other = [n for n in changed if before.get(n, [0, 0])[1] != entries.get(n, [0, 0])[1]]
    print(f"{len(entries)} configurations, {len(changed)} made of other code, "
          f"{len(other)} with other PTX")  # fmt: skip
    LOCKS.mkdir(exist_ok=True)
    write_atomic(LOCKS / "api.txt", "\n".join(api()) + "\n")
    launched = [line for arch in CALLS_OF for line in apart("--calls", arch).splitlines()]
    write_atomic(LOCKS / "calls.txt", "\n".join(launched) + "\n")
    lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(e)}" for n, e in entries.items())
    head = f'"triton": {json.dumps(triton.__version__)}'
    write_atomic(LOCK, f'{{{head}, "kernels": {{\n{lines}\n}}}}\n')
    print("\n".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
