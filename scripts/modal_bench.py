"""Run the GPU report on a rented Modal GPU, bring the bundle home and propose `sel_triton_min_L`.

The remote machine runs the same `scripts/runner_oneshot.sh` as any box; nothing here measures.

    python scripts/modal_bench.py --gpu H100 --profile standard --out artifacts/modal
    python scripts/modal_bench.py --local --profile quick        # the same function on this machine
    python scripts/modal_bench.py --body-from artifacts/runner/<commit> --config configs/base.yaml

Needs `pip install modal` and a Modal token for the first form only. Writes `<out>/<name>.tgz`, the
unpacked bundle, `pr_body.md` (its issue.md under what it proposes) and, with --config, what
bench/threshold_optimizer.py --write makes of the bundle's CSVs (a threshold, if one qualifies, and
FA-2's minimum lengths). Exit code: the runner's own (0 all required stages passed), 2 for a usage
error or a file that cannot be edited, 4 when no bundle came back.
"""

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

from bench import threshold_optimizer
from bench.records import doc_parser
from scripts.oneshot.run.stages import plan

ROOT = Path(__file__).resolve().parent.parent
REDACTION_FAILED = 6  # the runner's exit code for a bundle that must not leave its machine
REMOTE_ROOT = "/repo"
RUNNER = ("bash", "scripts/runner_oneshot.sh")
NOT_COPIED = [".venv*", ".deps", "artifacts/*/**", "**/__pycache__", ".pytest_cache", ".ruff_cache"]


def run_report(root: Path, profile: str) -> dict[str, Any]:
    """Run the runner in `root` and return {"exit_code", "name", "archive"}.

    archive is the bundle folder as a .tgz (bytes), or None with "name" None when the runner left no
    bundle.json behind or could not redact it; the runner's own exit code is kept either way.
    """
    with tempfile.TemporaryDirectory() as out:
        code = subprocess.run([*RUNNER, out, "--profile", profile], cwd=root).returncode
        bundles = [p for p in Path(out).rglob("bundle.json") if "prev" not in p.parts]
        if not bundles or code == REDACTION_FAILED:
            return {"exit_code": code, "name": None, "archive": None}
        folder = max(bundles, key=lambda p: p.stat().st_mtime).parent
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            tar.add(folder, arcname=folder.name)
        return {"exit_code": code, "name": folder.name, "archive": buffer.getvalue()}


def run_on_modal(gpu: str, profile: str, timeout_s: int) -> dict[str, Any]:
    """`run_report` on a Modal machine with the given GPU ("A100-80GB", "H100", "L4", ...)."""
    try:
        import modal
    except ImportError as e:
        raise SystemExit(f"modal is not installed ({e}): pip install modal, or use --local") from e
    app, remote = build_app(modal, gpu, timeout_s)
    with modal.enable_output(), app.run():
        return remote.remote(profile)


def build_app(modal: Any, gpu: str, timeout_s: int) -> tuple[Any, Any]:
    """The Modal app and its one function; needs the package but no account."""
    image = (
        modal.Image.debian_slim()
        .apt_install("git", "make", "gcc", "libc6-dev")  # Triton compiles its launcher with gcc
        .pip_install_from_requirements(str(ROOT / "requirements.txt"))
        .add_local_dir(ROOT, REMOTE_ROOT, ignore=NOT_COPIED)
    )
    app = modal.App("nsa-gpu-benchmark")

    # serialized: the function travels by value, so it does not matter how this file was started.
    @app.function(gpu=gpu, image=image, timeout=timeout_s, serialized=True)
    def remote(profile: str) -> dict[str, Any]:
        import sys
        from pathlib import Path

        # remote.local() runs it here, where there is no copy of the repository.
        root = Path(REMOTE_ROOT)
        if not (root / "scripts" / "modal_bench.py").is_file():
            root = ROOT
        sys.path.insert(0, str(root))
        from scripts.modal_bench import run_report

        return run_report(root, profile)

    return app, remote


def _fa2_lengths(recommend: dict[str, Any]) -> str:
    """FA-2's minimum lengths, where some are proposed."""
    found = {name: recommend.get(name) for name in ("fa2_min_len_win", "fa2_min_len_cmp")}
    return ", ".join(f"`{name}` = {n}" for name, n in found.items() if n is not None)


def propose(folder: Path, bundle: dict[str, Any], config: Path) -> int:
    """Write what the bundle recommends into `config`, from the CSVs that its own profile decides
    by; the optimizer's exit code."""
    recommend = bundle.get("recommend") or {}
    stages = plan(bundle.get("profile") or "standard")
    needs = next(stage.needs for stage in stages if stage.id == "threshold")
    argv = [str(folder / name) for name in needs]
    if _fa2_lengths(recommend):
        argv += ["--fa2", str(folder / "fa2.csv")]
    return threshold_optimizer.main([*argv, "--write", str(config)])


def pr_body(folder: Path, bundle: dict[str, Any]) -> str:
    """The pull-request text for one bundle: what it proposes, then its own report for issues."""
    recommend = bundle.get("recommend") or {}
    min_l = recommend.get("sel_triton_min_L")
    head = "No `sel_triton_min_L` qualifies"
    if min_l is not None:
        head = f"Set `sel_triton_min_L` = {min_l}"
    text = f"## {head} on {bundle['device']['name']}\n\n"
    if fa2 := _fa2_lengths(recommend):
        text += f"FlashAttention-2 with Triton off, by the same rule: {fa2}.\n\n"
    issue = folder / "issue.md"
    return text + (issue.read_text() if issue.is_file() else bundle["verdict"]["one_line"] + "\n")


def build_parser() -> argparse.ArgumentParser:
    parser = doc_parser(__doc__)
    parser.add_argument("--gpu", default="H100", help="Modal GPU name (default H100)")
    parser.add_argument("--profile", default="standard", choices=["quick", "standard", "full"])
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for the remote run")
    parser.add_argument("--out", type=Path, default=ROOT / "artifacts" / "modal")
    parser.add_argument("--local", action="store_true", help="run here instead of on Modal")
    parser.add_argument("--body-from", type=Path, help="only write pr_body.md from this bundle")
    parser.add_argument("--config", type=Path, help="set the proposed threshold in this YAML")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.body_from:
        folder, code = args.body_from, 0
    else:
        result = (run_report(ROOT, args.profile) if args.local
                  else run_on_modal(args.gpu, args.profile, args.timeout))  # fmt: skip
        code = result["exit_code"]
        if result["archive"] is None:
            print(f"the runner left no bundle to share (its exit code: {code})", file=sys.stderr)
            return 4
        (args.out / f"{result['name']}.tgz").write_bytes(result["archive"])
        with tarfile.open(fileobj=io.BytesIO(result["archive"])) as tar:
            tar.extractall(args.out, filter="data")
        folder = args.out / result["name"]
    try:
        bundle = json.loads((folder / "bundle.json").read_text())
    except (OSError, ValueError) as e:
        raise SystemExit(f"no readable bundle.json in {folder}: {e}") from e
    (args.out / "pr_body.md").write_text(pr_body(folder, bundle))
    print(args.out / "pr_body.md")
    if args.config and bundle.get("recommend") and propose(folder, bundle, args.config):
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
