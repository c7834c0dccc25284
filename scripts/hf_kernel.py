"""Write this package as a kernel of Hugging Face's Kernel Hub, which `kernels` loads by path.

    python scripts/hf_kernel.py OUT
    python -c "import kernels, pathlib; nsa = kernels.get_local_kernel(pathlib.Path('OUT'))"

OUT/build/torch-cuda and torch-cpu, the two variants of a package without compiled code: nsa without
its tests, metadata.json with the digest of each file, and the folder `nsa` that older releases of
`kernels` look for. Several versions may be loaded in one process, so imports become relative and
PyTorch's operators get names of their own. Files are of the checkout as it is.

Exit code: 0 written, 2 usage (OUT is no folder that can be written, or has a build already).
"""

import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

from bench.records import doc_parser, folder_target

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = {"tests", "data", "__pycache__"}
IMPORT = re.compile(r"^(\s*)from nsa(\.[\w.]+)? import ", re.MULTILINE)
OLDER = """import sys

_whole = sys.modules[__name__.rpartition(".")[0]]
globals().update({name: getattr(_whole, name) for name in _whole.__all__})
"""


def contents() -> dict[str, bytes]:
    """The files of the package by their paths in it, with relative imports."""
    found = {}
    for path in sorted((ROOT / "nsa").rglob("*")):
        name = path.relative_to(ROOT / "nsa")
        if path.is_dir() or LEFT_OUT & set(name.parts):
            continue
        data = path.read_bytes()
        if path.suffix == ".py":
            dots = "." * len(name.parts)
            to = rf"\1from {dots}\2 import "
            text = IMPORT.sub(to, data.decode()).replace(f"from {dots}.", f"from {dots}")
            data = text.encode()
        found[name.as_posix()] = data
    return found


def digest(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def write(out: Path) -> str:
    """Write both variants below `out`. Returns the name under which the module is loaded."""
    files = contents()
    whole = hashlib.sha1(b"".join(name.encode() + data for name, data in files.items()))
    module = f"_nsa_{whole.hexdigest()[:10]}"
    files = {name: data.replace(b'"nsa::', f'"{module}::'.encode()) for name, data in files.items()}
    files["nsa/__init__.py"] = OLDER.encode()
    for backend in "cuda", "cpu":
        folder = out / "build" / f"torch-{backend}"
        for name, data in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        digests = {name: digest(data) for name, data in files.items()}
        metadata = {
            "name": "nsa", "id": module, "version": 0, "license": "MIT", "python-depends": [],
            "backend": {"type": backend}, "digest": {"algorithm": "sha256", "files": digests},
        }  # fmt: skip
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    return module


def main(argv: list[str] | None = None) -> int:
    parser = doc_parser(__doc__)
    parser.add_argument("out", type=folder_target, metavar="OUT")
    args = parser.parse_args(argv)
    if (args.out / "build").exists():
        parser.error(f"OUT must have no folder build, got {args.out}")
    print(f"{args.out / 'build'}: {write(args.out)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
