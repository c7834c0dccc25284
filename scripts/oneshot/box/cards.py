"""Several GPUs in one report: which ones, the stages of each, what the report says of each.

Every stage for the GPU runs on the first good card, as with one card. The other cards run the
stages of PER_CARD, each alone (CUDA_VISIBLE_DEVICES), so that a broken card shows by its number and
takes nothing from the others. Then NCCL and context parallelism run on all good cards together.
Cards are numbered as nvidia-smi does (CUDA_DEVICE_ORDER=PCI_BUS_ID).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from scripts.oneshot.box import env as box
from scripts.oneshot.record.markdown import cell, num, pct
from scripts.oneshot.record.model import Stage, bench
from scripts.oneshot.record.rows import is_number, whys

PER_CARD = ("health", "sanity", "prefill_parity", "decode_parity", "more_parity")
MOST = 16
GOOD = "good"


@dataclass(frozen=True)
class Card:
    """One GPU by its number in nvidia-smi; `problem` says why it cannot be used."""

    index: int
    uuid: str | None
    problem: str | None = None


def query_each() -> list[dict[str, Any]]:
    """Ask nvidia-smi about every card, one by one: one that is lost spoils the answer for all.
    A card that does not answer is {"problem": why}. Raises ProbeFailed when none does."""
    out: list[dict[str, Any]] = []
    for index in range(MOST):
        try:
            out += box.smi_query(index=index)[:1]
        except box.ProbeFailed as error:
            if "No devices were found" in str(error) or "not installed" in str(error):
                break
            out.append({"problem": str(error)})
    known = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    while len(out) > known and "problem" in out[-1]:  # a number beyond the last card
        out.pop()
    if all("problem" in gpu for gpu in out):
        raise box.ProbeFailed("no GPU answers nvidia-smi")
    return out


def select(text: str, gpus: Sequence[Mapping[str, Any]], environ: Mapping[str, str]) -> list[Card]:
    """Return the cards of --gpus: "all" (of CUDA_VISIBLE_DEVICES where it is set) or numbers.

    gpus: one dict per card from nvidia-smi. Raises ValueError for a card that is not there.
    """
    known: list[Card] = []
    for index, gpu in enumerate(gpus):
        problem = gpu.get("problem")
        bad = next((v for v in gpu.values() if isinstance(v, str) and "is lost" in v), None)
        if problem is None and (bad or str(gpu.get("name") or "[").startswith("[")):
            problem = f"nvidia-smi says {bad or gpu.get('name')}"
        known.append(Card(index, gpu.get("uuid"), problem))
    names = text.strip()
    if names == "all":
        names = environ.get("CUDA_VISIBLE_DEVICES", "").strip()
        if not names:
            return known
    out: list[Card] = []
    for name in map(str.strip, names.split(",")):
        match = [known[i] for i in box.gpus_named(name, gpus)]
        if len(match) != 1 or match[0] in out:
            what = f"all or numbers of nvidia-smi from 0 to {len(known) - 1}, each once"
            raise ValueError(f"--gpus must be {what}, got {name!r}")
        out += match
    return out


def visible(cards: Sequence[Card]) -> dict[str, str]:
    """Return the variables under which a process sees exactly these cards."""
    numbers = ",".join(str(card.index) for card in cards)
    return {"CUDA_VISIBLE_DEVICES": numbers, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def good(cards: Sequence[Card]) -> list[Card]:
    return [c for c in cards if c.problem is None]


def _on(stage: Stage, cards: Sequence[Card], **changes: Any) -> Stage:
    env = {**stage.env, **visible(cards)}
    return replace(stage, env=env, gpus=tuple(c.index for c in cards), **changes)


def _own(stage: Stage, card: Card) -> Stage:
    """Return the stage on another card, under another name and log."""
    log = PurePath(stage.log_path)
    more = ("--gpu", str(card.index)) if stage.id == "health" else ()
    return _on(
        stage, [card], id=f"{stage.id}_gpu{card.index}", title=f"GPU {card.index}: {stage.title}",
        log=str(log.with_name(f"{log.stem}_gpu{card.index}{log.suffix}")),
        argv=(*stage.argv, *more), outputs=(),  # health.json is the first card's
        estimate_s=max(1.0, stage.estimate_s / 2),  # the kernels are compiled by now
    )  # fmt: skip


def _together(cards: Sequence[Card], profile: str) -> list[Stage]:
    """Return the stages of NCCL over all cards and of context parallelism over two and all."""
    count, env = len(cards), {"NCCL_NVLS_ENABLE": "0"}
    on_triton = {**env, "NSA_USE_TRITON_SEL": "1"}
    lengths = {"quick": (32768,), "standard": (65536,)}.get(profile, (65536, 262144))
    limit = 900 if len(lengths) > 1 else 300
    title = f"NCCL bandwidth between {count} GPUs"
    found = [(count, bench("nccl", title, "nccl", "", 180, estimate_s=25, env=env))]
    for n in sorted({2, count}):
        sizes = "--S_list " + ",".join(str(s // (32 * n) * 32 * n) for s in lengths)
        what = (f"context_parallel_{n}", f"Context parallelism: one sequence over {n} GPUs")
        how: dict[str, Any] = dict(estimate_s=60, env=on_triton)
        found.append((n, bench(*what, "bench_context_parallel", sizes, limit, **how)))
    ranks = ("{python}", "-m", "scripts.oneshot.run.ranks", "-n")
    return [_on(one, cards[:n], argv=(*ranks, str(n), *one.argv[1:])) for n, one in found]


def expand(stages: Sequence[Stage], cards: Sequence[Card], profile: str) -> list[Stage]:
    """Return the stages of a run on these cards; unchanged with fewer than two of them."""
    if len(cards) < 2:
        return list(stages)
    usable = good(cards) or list(cards)
    out = [_on(s, usable[:1]) if s.gpu else s for s in stages]
    own = [s for s in stages if s.gpu and s.id in PER_CARD]
    own.sort(key=lambda s: PER_CARD.index(s.id))
    copies = [_own(s, card) for card in cards if card is not usable[0] for s in own]
    at = max((i for i, s in enumerate(stages) if s in own), default=-1) + 1
    late = next((i for i, s in enumerate(out) if i >= at and s.group == "train"), len(out))
    both = _together(usable, profile) if len(usable) > 1 else []
    return [*out[:at], *copies, *out[at:late], *both, *out[late:]]


def names(indices: Sequence[int]) -> str:
    """Return "GPU 2", or "GPUs 0, 1"."""
    return f"GPU{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def section(data: Mapping[str, Any], parity: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return one row per card; none for a run on one card."""
    mine: dict[int, list[Mapping[str, Any]]] = {}
    for stage in data["stages"]:
        indices = stage.get("gpus") or ()
        base = re.sub(r"_gpu\d+$", "", str(stage["id"]))
        if len(indices) == 1 and base in PER_CARD:
            mine.setdefault(indices[0], []).append(stage)
    if len(mine) < 2:
        return []
    own, first = data["health"] or {}, next(iter(mine))  # the run's own health is the first card's
    others = own.get("gpus") if isinstance(own.get("gpus"), dict) else {}
    out = []
    for index, stages in sorted(mine.items()):
        row = others.get(str(index), own if index == first else None)
        health = row if isinstance(row, dict) else {}
        ids = {s["id"] for s in stages}
        rows = [r for r in parity if r["stage"] in ids]
        bad = [f"{s['id']} {s['status']}: {s['reason']}" for s in stages if s["status"] != "PASS"]
        bad += [f"health: {text}" for text in whys(health)]
        shown = {"gpu": str(index), "name": cell(health.get("device") or "-", 60)}
        for name, rate, share in (("bandwidth", "copy_gbs", "copy_frac"),
                                  ("matmul", "gemm_bf16_tflops", "gemm_frac")):  # fmt: skip
            of_peak = f" ({pct(health[share])})" if is_number(health.get(share)) else ""
            shown[name] = num(health.get(rate)) + of_peak
        shown["parity"] = f"{sum(r['status'] == 'PASS' for r in rows)}/{len(rows)}"
        out.append({**shown, "verdict": cell("; ".join(bad), 400) if bad else GOOD})
    return out


def warnings(data: Mapping[str, Any]) -> list[str]:
    """Return what stands against single cards, for the top of the report."""
    bad = [row for row in section(data, []) if row["verdict"] != GOOD]
    return [f"GPU {row['gpu']} is not good: {row['verdict']}" for row in bad]
