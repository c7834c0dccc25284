"""The first screen: is this box good, are the kernels right, how fast are they, what to set, what
failed; and the remarks, sorted by where they belong.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.recorded import key_of
from bench.records import card_faults
from nsa.flags import Flags
from nsa.routes import least_selected
from scripts.oneshot.box import cards
from scripts.oneshot.record.judge import is_cut
from scripts.oneshot.record.markdown import cell, code, fence, num, pct, us
from scripts.oneshot.record.model import StageResult
from scripts.oneshot.record.rows import NUMBERED, grouped, is_number, whys
from scripts.oneshot.report import committed, evidence
from scripts.oneshot.report.about import flags_of
from scripts.oneshot.report.blocks import Answer, Bars, Code, Fold, View
from scripts.oneshot.report.evidence import ASSUMED_FLOOR
from scripts.oneshot.report.failures import NAMED, command_block, failing
from scripts.oneshot.report.thresholds import recommendation

OTHERS_MIB = 500  # below, the driver's own; as bench/health.py judges
BARS = 16  # pairs of bars; the tables below have every row
LOUD = 8  # remarks on the first screen; the rest is folded
GPU_ONLY = "A CPU says nothing about a GPU"
SHARES = (  # words, measured, unit, its share of the nominal value, the nominal value
    ("device copy", "copy_gbs", "GB/s", "copy_frac", "copy_nominal_gbs"),
    ("bf16 matmul", "gemm_bf16_tflops", "TFLOP/s", "gemm_frac", "gemm_nominal_tflops"),
)
ENDS = {  # of a run in which no stage went wrong
    "BROKEN": "The run did not end by itself.",
    "STOPPED": "The run was stopped.",
    "INVALID": "No timed case is VALID.",
    "FAIL": "Something private could not be redacted.",
}


def _count(items: Sequence[Any], word: str) -> str:
    return f"{len(items)} {word}{'' if len(items) == 1 else 's'}"


def answers(view: View) -> list[Answer]:
    return [make(view) for make in (box, kernels, speed, to_set, failed)]


def box(view: View) -> Answer:
    """Copy and matmul in per cent of what a card of this name can do, and what holds it back."""
    question, data = "Is this box good?", view.data
    if data["scope"] == "cpu":
        return Answer(question, f"Not asked. {GPU_ONLY}.", "quiet")
    health, facts = data["health"] or {}, list(_of_the_box(view))
    blocked = any(check["level"] == "BLOCK" for check in data["doctor"])
    no_use = blocked or data["device"].get("name") is None or card_faults(data["health"])
    colour = ("bad" if no_use else "doubt") if facts else "good"
    measured = False
    for words, key, unit, share, nominal in SHARES:
        if is_number(health.get(key)) and is_number(health.get(share)):
            measured, of = True, f"of this card's nominal {num(health.get(nominal, 'speed'))}"
            facts.append(f"{words} {num(health[key])} {unit}: **{pct(health[share])}** {of}")
    if is_number(kept := health.get("memory_test_mib")) and not card_faults(health):
        facts.append(
            f"{num(kept)} MiB of its memory kept {num(health.get('memory_test_patterns'))} "
            f"patterns, and {num(health.get('bf16_product_repeats'))} matmuls were right and alike"
        )
    if measured and not health.get("throttled"):
        known = health.get("throttled") is False
        lead = "it did not throttle" if known else "nothing tells whether it throttled"
        facts.append(f"{lead} while this was measured")
    others = health.get("memory_used_by_others_mib")
    if is_number(others) and not data["device"].get("shared"):
        alone = others < OTHERS_MIB
        facts.append("nobody else was on it" if alone else f"others use {num(others)} MiB of it")
    if table := cards.section(data, view.rows["parity"]):
        fine = sum(row["verdict"] == cards.GOOD for row in table)
        facts.append(f"{fine} of {len(table)} GPUs are good")
    if colour == "good" and not measured:
        return Answer(question, "Not measured.", "quiet", [facts])
    return Answer(question, "Yes." if colour == "good" else "No.", colour, [facts])


def kernels(view: View) -> Answer:
    """How many results were held against what, and what was not proven."""
    question, parity = "Are the kernels right?", view.rows["parity"]
    outcomes = Counter(row["outcome"] for row in view.rows["test"])
    right, passed = [r for r in parity if r["status"] == "PASS"], outcomes["passed"]
    failed_tests = outcomes["failed"] + outcomes["error"]
    on_cpu = " in Triton's interpreter on the CPU" if view.data["scope"] == "cpu" else ""
    facts, wrong = [], []
    if parity:
        of = "an fp64 computation that shares no code with the kernels"
        held = f"**{len(right)} of {len(parity)}** results{on_cpu}"
        facts.append(f"{held} are within their limits of {of}")
    if launched := sum(bool(r.get("launches")) for r in right):
        facts.append(f"for {launched} of them the launches of the named kernels were counted")
    if outcomes:
        skipped = f", {outcomes['skipped']} skipped" if outcomes["skipped"] else ""
        facts.append(f"{passed} of {passed + failed_tests} tests passed{skipped}")
    worst = evidence.worst_of(parity)
    if worst and is_number(worst.get("margin")):
        near = f"{code(worst['case'], 120)}, {pct(worst['margin'])} of it"
        facts.append(f"nearest to its limit: {near}")
    short = [s for s in view.data["stages"] if s["status"] != "PASS" and s.get("required", True)]
    of_kernels = [s for s in short if s.get("group") == "parity"]
    unproven = [f"{code(s['id'], 60)} {s['status']}" for s in of_kernels]
    short_of = unproven or view.data.get("partial")
    if unproven:
        facts.append(f"not proven: {', '.join(unproven)}")
    for status, words in (("FAIL", "wrong"), ("INVALID", "not proven")):
        if n := sum(row["status"] == status for row in parity):
            wrong.append(f"{n} of {len(parity)} results are {words}")
    if failed_tests:
        wrong.append(f"{failed_tests} of {passed + failed_tests} tests failed")
    answer, colour = ("As far as they ran.", "doubt") if short_of else ("Yes.", "good")
    if not parity and not passed:
        answer, colour = "Not proven: nothing ran.", "quiet"
    if wrong:
        answer, colour = f"**No**: {' and '.join(wrong)}.", "bad"
    return Answer(question, answer, colour, [facts])


def speed(view: View) -> Answer:
    """NSA beside dense attention at real sizes, and beside what the same card did before."""
    question, data = "How fast are they?", view.data
    if data["scope"] == "cpu":
        return Answer(question, f"Not asked. {GPU_ONLY}, so its times are folded below.", "quiet")
    rows = evidence.headline(view)[:BARS]
    if not rows:
        toys = " Toy sizes are folded below." if view.rows["bench"] else ""
        return Answer(question, f"No real sizes were timed in this run.{toys}", "quiet")
    device = str(data["device"].get("name"))
    before, bars, said = committed.times(device), [], []
    for row in rows:
        found = before.get(key_of(str(row.get("bench")), row) or ())
        more = f"{us(found[0])} ({cell(found[1], 20)})" if found else ""
        bars.append(evidence.bar(row, view.floor, more))
    ratios = [r for r in rows if is_number(r.get("speedup"))]
    apart = [r for r in ratios if not evidence.speedup_text(r, view.floor)[0]]
    for name, way in (("prefill", "fwd"), ("its backward", "bwd"), ("decode", None)):
        if shown := [r["speedup"] for r in apart if r.get("direction") == way]:
            ends = dict.fromkeys((f"{min(shown):.2f}x", f"{max(shown):.2f}x"))
            said.append(f"{name} {' to '.join(ends)}")
    answers = [f"{'; '.join(said)} as fast as dense attention"] if said else []
    if alike := len(ratios) - len(apart):
        answers.append(f"{evidence.NO_DIFFERENCE} in {alike} of {len(rows)} cases")
    answer = f"{'; '.join(answers) or 'no ratio was measured'}."
    unstable = any(r["status"] == "UNSTABLE" for r in rows)
    text = "NSA and the fastest dense attention of torch took turns in this run; [95 % interval]."
    text += " \\* is UNSTABLE." if unstable else ""
    if any(bar.more for bar in bars):
        text += " Before: by commit, the committed rows of a card of this name."
    alike = evidence.problems([{**r, "dim": None} for r in rows])  # an attention has no width
    notes = [*(f"Sizes: {sizes}." for sizes in alike), text]
    prefill = next((r for r in rows if r.get("bench") == "prefill"), None)
    if prefill is not None and (pairs := committed.pairs(device, prefill)):
        notes.append(_beside(pairs, {r["S"] for r in rows if r.get("bench") == "prefill"}))
    heads = ("", "NSA", "dense", "times as fast", "the same card before")
    blocks = [_score(view), Bars(heads, bars), *notes]
    return Answer(question, answer, "doubt" if unstable else "good", blocks)


def _score(view: View) -> str:
    """The score with what it is made of, or what it lacks."""
    found = view.data["score"]
    if found["percent"] is None:
        lacks = grouped(found["missing"], lambda case: cell(found["missing"][case], 200))
        told = "; ".join(f"{', '.join(cases)}: {why}" for why, cases in lacks.items())
        return f"No score: {told}."
    star = lambda unstable: "\\*" if unstable else ""
    parts = [
        f"{case} {pct(one['roofline_us'] / one['us'])}{star(case in found['unstable'])}"
        for case, one in found["cases"].items()
    ]
    return (
        f"Score **{found['percent']:.1f} %**{star(found['unstable'])}: the geometric mean of "
        f"roofline time over measured time, of {', '.join(parts)}. The roofline is this card's own "
        "copy and matmul."
    )


def _beside(pairs: Mapping[tuple[str, str, int], float], here: set[int]) -> str:
    """What other implementations took on this kind of card, at the lengths that this run timed or,
    without one of them, at all."""
    words = {"fwd": "forward", "fwd+bwd": "forward and backward"}
    groups = grouped([key for key in pairs if key[2] in here] or pairs, lambda key: key[:2])
    said = []
    for (other, way), keys in groups.items():
        sizes = ", ".join(f"{pairs[key]:.2f} at {evidence.tokens(key[2])}" for key in keys)
        said.append(f"{cell(other, 40)}, {words.get(way, cell(way, 20))}, {sizes} tokens")
    lead = "Times as long as NSA took, in pairs on a card of this name (committed rows)"
    return f"{lead}: {'; '.join(said)}."


def to_set(view: View) -> Answer:
    """One line to paste, or that there is nothing to set."""
    question, data = "What should be set?", view.data
    if data["scope"] == "cpu":
        return Answer(question, f"Nothing. {GPU_ONLY}'s settings.", "quiet")
    flags, proposal = flags_of(view.folder), data["recommend"] or {}
    value, source = flags.get("NSA_SEL_TRITON_MIN_L", ("auto", "default"))
    switch, _ = flags.get("NSA_USE_TRITON_SEL", ("auto", "default"))
    sm = tuple(int(n) for n in str(data["device"].get("sm")).split(".") if n.isdecimal())
    in_force = value if type(value) is int else least_selected(Flags(), sm)
    found, best = recommendation(data, view.rows["bench"]), proposal.get("sel_triton_min_L")
    if type(best) is not int or found["doubt"]:
        why = found["doubt"] or found["text"]
        return Answer(question, "Nothing: this run speaks for no other setting.", "quiet", [why])
    line, why = [], []
    if best < in_force or any(in_force <= e["L"] < best for e in found["evidence"]):
        line.append(f"NSA_SEL_TRITON_MIN_L={best}")
        why.append(
            f"`selection_attention` called alone takes Triton from {in_force} selected keys on; "
            f"here every cell from {best} on was faster with it, by both clocks."
        )
    lengths = [proposal.get(f"fa2_min_len_{branch}") for branch in ("win", "cmp")]
    if (switch is False or (switch == "auto" and sm == (8, 9))) and all(
        type(n) is int for n in lengths
    ):
        line.append("NSA_USE_FA2=1 NSA_FA2_MIN_LEN_WIN={} NSA_FA2_MIN_LEN_CMP={}".format(*lengths))
        why.append("Triton is off here, and FA-2 was faster than SDPA from these lengths on.")
    if line:
        paste = Code(fence(f"export {' '.join(line)}", "bash"))
        return Answer(question, "This line.", "doubt", [paste, *why])
    right = "what is set is right" if source == "environment" else "the defaults are right"
    return Answer(question, f"Nothing: {right}.", "good")


def failed(view: View) -> Answer:
    """Each stage that went wrong with its reason and its whole command; then what was cut."""
    question, data = "What failed?", view.data
    wrong = failing(view)
    left = [s for s in data["stages"] if s not in wrong]
    cut = [s for s in left if is_cut(StageResult.from_json(s))]
    blocks: list[Any] = []
    for stage in wrong[:NAMED]:
        reason = cell(stage.get("reason") or "some of its results are wrong", 300)
        blocks.append(f"{code(stage['id'], 60)} **{stage['status']}**: {reason}.")
        blocks += command_block(view, stage)
    if len(wrong) > NAMED:
        blocks.append(f"and {len(wrong) - NAMED} more, under Failures")
    named = lambda stages: ", ".join(code(s["id"], 60) for s in stages)
    if cut:
        short = f"Time or memory did not reach for {named(cut)}."
        again = Code(fence(_again(data), "bash"))
        blocks += [f"{short} This runs them and keeps what passed:", again]
    absent = lambda s: s["status"] in ("NOT_RUN", "SKIPPED") and s.get("required", True)
    lost = [s for s in left if absent(s) and s not in cut]
    reasons = grouped(lost, lambda s: cell(s.get("reason"), 300))
    blocks += [f"Did not run: {named(stages)}: {why}." for why, stages in reasons.items()]
    status = data["verdict"]["status"]
    if wrong:
        return Answer(question, f"**{_count(wrong, 'stage')}.**", "bad", blocks)
    if reasons or status not in ("PASS", "INCOMPLETE"):
        default = "Not everything ran." if reasons else "Nothing was proven."
        return Answer(question, ENDS.get(status, default), "bad", blocks)
    if cut:
        return Answer(question, "Nothing, but not everything ran.", "doubt", blocks)
    return Answer(question, "Nothing.", "good")


def _again(data: Mapping[str, Any]) -> str:
    """The command that takes up a run where it was cut: in its folder, on its cards."""
    argv, options = [str(part) for part in data["argv"]], {"PROFILE": str(data["profile"])}
    if argv and not argv[0].startswith("-"):
        options["OUT"] = argv[0].removeprefix("<repo>/")
    if "--gpus" in argv[:-1]:
        options["GPUS"] = argv[argv.index("--gpus") + 1]
    quoted = (f"{name}={shlex.quote(value)}" for name, value in options.items())
    return f"make gpu-report {' '.join(quoted)} RESUME=1".replace("'~/", "~/'")


def _of_the_box(view: View) -> Iterator[str]:
    """What holds the box back, or slices it."""
    data, t = view.data, view.shape.text
    device, health = data["device"], data["health"] or {}
    if device.get("name") is None and data["scope"] == "gpu":
        yield f"No GPU answered: {cell(device.get('reason') or 'not known why', t)}"
    cap, full = device.get("power_limit_w"), device.get("power_default_w")
    if is_number(cap) and is_number(full) and cap < full:
        yield f"The card is capped to {cap:g} of {full:g} W: times are those of a capped card"
    if device.get("shared"):
        yield "SHARED GPU: others used its memory or time; times may be too long"
    if device.get("mig"):
        yield "MIG: the times are those of a slice of the card"
    if health.get("throttled"):
        yield "The card throttled while its health was measured"
    if str(health.get("status")) not in ("OK", "PASS", "None"):
        yield f"{cell(health['status'], 20)}: {cell('; '.join(whys(health)), t)}"
    yield from cards.warnings(data)
    yield from _doctor(view, ("BLOCK",))


def _doctor(view: View, levels: tuple[str, ...]) -> Iterator[str]:
    t = view.shape.text
    for check in view.data["doctor"]:
        if check["level"] in levels:
            fix = f" Fix: {cell(check['fix'], t)}" if check.get("fix") else ""
            name = cell(check.get("name"), 60)
            yield f"doctor {check['level']} {name}: {cell(check.get('text'), t)}.{fix}"


def _of_the_run(view: View) -> Iterator[str]:
    """What changes how its numbers are read."""
    data, t = view.data, view.shape.text
    git, ended, gate = data["git"], data["ended_by"], data["redaction"].get("gate")
    if gate == "failed":
        yield "**Redaction FAILED**: something private could not be removed; do not post this"
    elif gate != "clean":
        text = "the run ended before its last redaction gate; only its journal and logs were"
        yield f"**Not looked over for private data**: {text} cleaned as they were written"
    if ended == "crash":
        yield "**The run did not end by itself**: what came before its end is shown"
    elif ended not in ("normal", "budget"):
        yield f"The run was cut short: {cell(ended.upper(), 20)}"
    if data.get("partial"):
        yield f"Partial run: {cell(data['partial'], t)}; the other stages were not asked for"
    if git.get("dirty"):
        by_git = git.get("diff_sha256")  # without git there is that of all sources
        of, digest = ("diff", by_git) if by_git else ("sources", git.get("source_sha256"))
        yield (
            f"DIRTY tree: this is not commit {code(git.get('short'), 40)} alone but "
            f"{cell(git.get('diffstat') or 'changed files', t)}, {num(git.get('untracked') or 0)} "
            f"untracked source files, sha256 of the {of} {code(digest, 80)}"
        )
    elif not git.get("commit"):
        yield "The sources are not a git checkout that could be read: the commit is unknown"
    for text in view.extra:
        yield cell(text, t)
    half = "ran out of GPU memory; what it shows was measured at half its sizes"
    for stage in data["stages"]:
        if stage.get("flaky"):
            yield f"FLAKY: {code(stage['id'], 60)} passed only at the second attempt"
        if stage.get("half_size"):
            yield f"HALF SIZE: {code(stage['id'], 60)} {half}"
    for row in view.rows["bench"]:
        reads = [row.get("reads_actual"), row.get("reads_expected")]
        if row["status"] in NUMBERED and all(map(is_number, reads)) and reads[0] != reads[1]:
            got, want = map(num, reads)
            yield f"{code(row['case'], t)} read {got} keys where {want} were expected"
    for run, ids in data["resumed"].items():
        are = "stage is" if len(ids) == 1 else "stages are"
        yield f"{len(ids)} {are} from run {cell(run, 60)}: {cell(', '.join(map(str, ids)), t)}"
    yield from _notes(view, loud=True)


def _notes(view: View, loud: bool) -> Iterator[str]:
    """Notes of stages that warn, and notes of the run."""
    for note in view.data["notes"]:
        warns, stage = note.get("level") == "warn", note.get("stage")
        if warns is loud and (warns or not stage):
            of = f"{code(stage, 60)}: " if stage else ""
            yield of + cell(note.get("text"), view.shape.text)


def _of_less_weight(view: View) -> Iterator[str]:
    data, t, bench = view.data, view.shape.text, view.rows["bench"]
    git = data["git"]
    if git.get("dirty") is None and git.get("commit"):
        source = cell(git.get("source") or "given", 60)
        clean = "nothing tells whether the sources are clean"
        yield f"The commit {code(git.get('short'), 40)} is {source}; {clean}"
    if kept := data["redaction"].get("kept"):
        yield f"Not redacted, as asked: {cell(', '.join(map(str, kept)), 60)}"
    timed = data["scope"] == "gpu" and any(r["status"] in NUMBERED for r in bench)
    if timed and view.floor is None:
        yield f"The noise floor was not measured; {pct(ASSUMED_FLOOR)} counts as no difference"
    yield from _doctor(view, ("WARN",))
    named = lambda r: f"{code(r['case'], 120)} ({cell('; '.join(r['why']), t // 3)})"
    for status in ("INVALID", "FAILED", "UNSTABLE", "SKIPPED"):
        if cases := [named(r) for r in bench if r["status"] == status]:
            more = f"; and {len(cases) - NAMED} more" if len(cases) > NAMED else ""
            yield f"{_count(cases, 'bench case')} {status}: {'; '.join(cases[:NAMED])}{more}"
    skipped = [row for row in view.rows["test"] if row["outcome"] == "skipped"]
    reasons = grouped(skipped, lambda row: cell(row.get("reason"), t))
    for reason, rows in sorted(reasons.items(), key=lambda one: -len(one[1])):
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        yield f"{_count(rows, 'test')} skipped: {reason}: {code(rows[0]['nodeid'], 120)}{more}"
    yield from _notes(view, loud=False)


def remark_blocks(view: View) -> list[Any]:
    """What stands under the cards: the remarks on the run, then the rest behind a fold."""
    loud = list(dict.fromkeys(_of_the_run(view)))
    rest = list(dict.fromkeys([*loud[LOUD:], *_of_less_weight(view)]))
    most = 40 + view.shape.rows
    if len(rest) > most:
        rest[most:] = [f"and {len(rest) - most} more, in bundle.json"]
    lead = ["Before you read the numbers:", loud[:LOUD]] if loud else []
    return lead + ([Fold(f"{_count(rest, 'remark')} of less weight", [rest])] if rest else [])
