"""Are the GPUs of a run still there and healthy: telemetry, Xid errors, what failed stages left."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.oneshot.box import cards
from scripts.oneshot.box import env as box
from scripts.oneshot.box.xid import LOST, Telemetry, Xid, XidListener
from scripts.oneshot.record.judge import Status
from scripts.oneshot.record.model import Stage, StageResult

VRAM_WAIT_S = 15.0
# A line of `nvidia-smi nvlink -e`; generations have other counters. FEC counts what was corrected,
# by the billion on a sound link; packets, bytes and rates are no errors.
_LINK = re.compile(r"\s*(Link \d+): (?!FEC)([^:]*(?:errors|recovery)[^:]*): (\d+)", re.I)


def links(text: str) -> dict[str, int]:
    """Return {"GPU 0 Link 3 CRC Errors": count} of the text of `nvidia-smi nvlink -e`."""
    out, gpu = {}, ""
    for line in text.splitlines():
        if head := re.match(r"GPU \d+", line):
            gpu = head[0]
        elif found := _LINK.match(line):
            out[f"{gpu} {found[1]} {found[2]}"] = int(found[3])
    return out


def _silent(text: str) -> tuple[str, str]:
    """Return `text`, about a card that gives no answer, and its kind."""
    return text, "GPU_LOST" if re.search(r"is lost|fallen off the bus", text) else "NO_GPU"


class Watch:
    """The cards of one run. gone: why no stage may use a card any more, in words and as a result's
    kind, by its number in a run on several, by None of the only one.

    several: the cards of a run on more than one, else empty. smi: what nvidia-smi said, or why
    there is nothing to watch.
    """

    def __init__(
        self, several: list[cards.Card], smi: list[dict[str, Any]] | str,
        event: Callable[..., None], note: Callable[..., None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.several, self._smi = several, smi
        self._event, self._note, self._say = event, note, say
        self.telemetry: Telemetry | None = None
        broken = {card.index: _silent(card.problem) for card in several if card.problem}
        self.gone: dict[int | None, tuple[str, str]] = broken
        self._listeners: list[tuple[int | None, XidListener]] = []
        self._deaf: set[int | None] = set()  # the cards whose listener said that it hears nothing
        self._reported: list[tuple[int | None, Xid]] = []  # of the running stage
        self._links: dict[str, int] = {}  # when the run began, of a run on several cards

    def start(self, csv: Path, started: float) -> None:
        """Begin telemetry of the first card, into `csv`, and listen for the errors of all."""
        if isinstance(self._smi, str):
            return
        watched = [(c.index, c.uuid) for c in cards.good(self.several)]
        watched = watched or [(None, box.visible_gpu(self._smi, os.environ).get("uuid"))]
        self.telemetry = Telemetry(csv, watched[0][1], started)
        self.telemetry.start()
        self._listeners = [(index, XidListener(uuid)) for index, uuid in watched]
        for _, listener in self._listeners:
            listener.start()
        self._links = self._read_links() if self.several else {}

    def _read_links(self) -> dict[str, int]:
        """Return the errors that each NVLink counts; none on a box without NVLink."""
        try:
            return links(box.command(["nvidia-smi", "nvlink", "-e"], 3.0))
        except box.ProbeFailed as error:
            self._note(f"NVLink errors are not known ({error})", "info")
            return {}

    def stop(self) -> None:
        if self.telemetry:
            self.telemetry.stop()
        for _, listener in self._listeners:
            listener.stop()
        self.hear(None)
        before, after = self._links, self._read_links() if self._links else {}
        more = {link: n - before.get(link, n) for link, n in after.items()}
        if grown := [f"{link} +{n}" for link, n in more.items() if n > 0]:
            self._note(f"NVLink counted errors during the run: {', '.join(grown)}")
        elif after:
            self._note(f"NVLink: none of {len(after)} error counters grew", "info")

    def why_not(self, stage: Stage) -> tuple[Status, str, str | None] | None:
        """Return why `stage` cannot have its card as (status, reason, kind), or None."""
        if stage.gpu and None in self.gone:
            return Status.NOT_RUN, *self.gone[None]
        if lost := [g for g in stage.gpus if g in self.gone]:
            why, kind = self.gone[lost[0]]
            mine = len(stage.gpus) == 1 and stage.id.startswith("health")
            return (Status.INFRA if mine else Status.NOT_RUN), f"GPU {lost[0]}: {why}", kind
        return None

    def before_stage(self) -> None:
        self.hear(None)  # of the time between two stages
        self._reported = []

    def hear(self, stage: str | None) -> None:
        """Put what the driver reported into the journal, with the stage that was running."""
        for index, listener in self._listeners:
            for xid in listener.take():
                self._reported.append((index, xid))
                text = xid.text if index is None else f"GPU {index}: {xid.text}"
                fields = {"xid": xid.number, "critical": xid.critical, "text": text}
                self._event("xid", stage=stage, **fields)
                self._say(f"{'WARN ' if xid.critical else 'INFO '} {text}")
                if index is not None and xid.number == LOST:
                    self.gone.setdefault(index, (text, "GPU_LOST"))
            if listener.problem and index not in self._deaf:
                self._deaf.add(index)
                card = "" if index is None else f"GPU {index}: "
                self._note(f"{card}Xid errors are not heard ({listener.problem})", "info")

    def beside_faults(self, result: StageResult) -> StageResult:
        """Judge `result` anew by what the driver reported: a faulty card proves nothing."""
        self.hear(result.id)
        mine = {None, *result.gpus}  # a fault of another card says nothing about this stage
        faults = [xid for index, xid in self._reported if xid.critical and index in mine]
        if not faults:
            return result
        said = [*dict.fromkeys(xid.text for xid in faults), *filter(None, [result.reason])]
        status = Status.INFRA if result.status is Status.PASS else result.status
        kind = "GPU_LOST" if Xid(LOST) in faults else "XID"
        return replace(result, status=status, kind=kind, reason="; ".join(said))

    def after_failure(self, result: StageResult) -> None:
        """Look whether the cards of the stage are still there and their memory is free again."""
        if isinstance(self._smi, str):
            return
        mine = result.gpus or (None,)
        for index in mine:
            it = "the GPU" if index is None else "it"
            if result.kind == "GPU_LOST" and len(mine) == 1:
                self._lose(index, f"{it} was lost in {result.id}", "GPU_LOST")
            elif result.status in (Status.CRASH, Status.TIMEOUT) or result.kind == "GPU_LOST":
                try:
                    box.smi_query(index=index)
                except box.ProbeFailed as error:
                    self._lose(index, *_silent(f"{it} does not answer after {result.id}: {error}"))
        watched = next((card.index for card in cards.good(self.several)), None)
        looked_at = self.telemetry and watched in mine and watched not in self.gone
        if looked_at and not self.telemetry.wait_for_memory(VRAM_WAIT_S):
            self._lose(watched, f"GPU_BUSY: memory of {result.id} is still held", "GPU_BUSY")

    def _lose(self, index: int | None, text: str, kind: str) -> None:
        if index not in self.gone:
            self.gone[index] = text, kind
            self._note(text if index is None else f"GPU {index}: {text}")
