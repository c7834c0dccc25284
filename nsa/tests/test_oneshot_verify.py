"""Verifying a bundle: a sound one passes, and every way to spoil it is found."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import statistics
import tarfile

import pytest
import torch

from bench import stats
from bench.records import BenchRow, read_csv, write_csv
from nsa.tests.oneshot_samples import bench_row, edit, test_row, write_sample
from nsa.tests.test_bench_decode import sent
from scripts.oneshot.compare import verify
from scripts.oneshot.record import bundle, reading
from scripts.oneshot.record.journal import dumps, read_events
from scripts.oneshot.record.model import RunRecord
from scripts.oneshot.report import render as report
from scripts.oneshot.report.blocks import Shape

TOKEN = "ghp_" + "a1B2" * 9
NO_RESULT = bench_row("b", 5.0, 1.1, why=["x"])


def seal(folder, change=None):
    """What the runner does at the end: bundle.json from the journal, files, sums."""
    data = RunRecord.replay(read_events(folder / "events.jsonl")).to_bundle()
    if change:
        change(data)
    data["files"] = bundle.inventory(folder)
    (folder / "bundle.json").write_text(json.dumps(data))  # may hold a NaN that a test planted
    bundle.write_sums(folder)
    return folder


def write_reports(folder):
    """As `render` does, without its plots."""
    data = reading.rebuild(folder)[0]
    (folder / "report.md").write_text(report.render_text(data, folder, Shape()))
    (folder / "issue.md").write_text(report.issue_text(data, folder))
    (folder / "report.html").write_text(report.render_page(data, folder))


@pytest.fixture(autouse=True)
def sources(monkeypatch):
    """What git says of the sources that verify: not those of the run."""
    told = {}
    monkeypatch.setattr(verify, "git_facts", lambda _: told)
    return told


@pytest.fixture
def nothing_private(monkeypatch):
    """Private data is not looked for, which takes longest."""
    monkeypatch.setattr(verify, "check_secrets", lambda *_: ())


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """The folder of a run with its reports, which take long to make."""
    pytest.importorskip("jinja2", reason="the report needs jinja2")
    made = tmp_path_factory.mktemp("run") / "8ac3f21"
    write_sample(made, "gpu_fail")
    write_reports(made)
    return seal(made)


@pytest.fixture
def folder(rendered, tmp_path):
    """A copy, to be spoilt."""
    return shutil.copytree(rendered, tmp_path / rendered.name)


def problems(path, capsys, code=1):
    assert verify.main([str(path)]) == code
    return capsys.readouterr().out


def found(folder):
    return "\n".join(verify.check(folder))


def assert_says(lines, words):
    """The lines of a check have these words, or there are none."""
    said = "; ".join(lines)
    assert words in said if words else not said


def test_a_sound_bundle_passes_as_folder_and_as_archive(folder, capsys):
    out = problems(folder, capsys, 0)
    assert out.startswith("OK ") and "FAIL - 9/10 tests" in out
    assert "not checked: who made it" in out
    assert "OK " in problems(bundle.pack(folder)[0], capsys, 0)
    (folder / "env.txt").unlink()
    assert "FAIL env.txt is in SHA256SUMS and not in the bundle\n" in problems(folder, capsys)
    assert verify.main([str(folder / "absent")]) == 2


@pytest.mark.parametrize(("name", "text", "words"), [
    ("report.md", "all right\n", "report.md was changed"),
    ("extra.txt", "x", "extra.txt is not in SHA256SUMS"),
    ("SHA256SUMS", None, "no SHA256SUMS"), ("SHA256SUMS", "what\n", "SHA256SUMS:1 is no check sum"),
    ("SHA256SUMS", "0" * 64 + "  ../../etc/passwd\n", "SHA256SUMS:1 names a file outside"),
    ("bundle.json", None, "no bundle.json"), ("bundle.json", "{", "bundle.json is not valid JSON"),
    ("bundle.json", '{"schema": "x/9"}', "schema of bundle.json"),
    ("events.jsonl", None, "no events.jsonl"),
])  # fmt: skip
def test_files_that_were_touched(name, text, words, folder):
    (folder / name).unlink(missing_ok=True)
    if text:
        (folder / name).write_text(text)
    os.symlink("/etc/hostname", folder / "link")
    said = found(folder)
    assert words in said and ("link is a link" in said) == (name != "bundle.json")


def test_a_pipe_is_no_bundle(tmp_path):
    os.mkfifo(tmp_path / "bundle.json")
    with pytest.raises(reading.BundleError, match="bundle.json is no regular file"):
        reading.read_bundle(tmp_path)


def first(data, key, **where):
    return next(r for r in data[key] if all(r.get(k) == v for k, v in where.items()))


def put(key, where, **changes):
    """A change of the first row of this kind that is such."""
    name, value = where
    return lambda data: next(r for r in data[key] if r.get(name) == value).update(changes)


@pytest.mark.parametrize(("change", "words"), [
    (put("bench", ("status", "VALID"), parity=None), "says VALID but is INVALID"),
    (put("bench", ("status", "INVALID"), median_us=4.0), "still has numbers"),
    (put("bench", ("status", "UNSTABLE"), why=[]), "gives no reason"),
    (put("parity", ("status", "FAIL"), status="PASS"), "says PASS but is FAIL"),
    (put("stages", ("status", "SKIPPED"), reason=""), "gives no reason"),
    (put("stages", ("status", "FAIL"), status="FINE"), "unknown status"),
    (put("stages", ("id", "triton_bwd"), status="PASS"),
     "stage triton_bwd is PASS with 2 failed or invalid rows"),
    (lambda d: d["verdict"].update(status="PASS"), "the verdict is PASS with exit code 1"),
    (lambda d: d["redaction"].update(gate="pending"), "gate is 'pending'"),
    (lambda d: d.update(started="2999-01-01T00:00:00.000Z"), "started: 2999-01-01T00:00:00"),
    (lambda d: d.update(ended="2001-01-01T00:00:00.000Z"), "s before it began"),
    (lambda d: d.pop("parity"), "has not the shape of its schema"),
])  # fmt: skip
def test_a_bundle_that_breaks_its_own_rules(change, words, folder, nothing_private):
    assert words in found(seal(folder, change))


def test_a_row_edited_in_the_journal_too_is_found(folder):
    """And everything made anew of it: its time is not of its own interval."""
    valid = lambda e: e["ev"] == "row" and e["row"].get("status") == "VALID"
    edit(folder, lambda events: next(e["row"] for e in events if valid(e)).update(median_us=90.0))
    write_reports(folder)
    said = found(seal(folder))
    assert "median_us 90 lies outside of its own interval" in said
    assert {line.split()[0] for line in said.splitlines()} == {"bench"}


US = [7.0 + 0.01 * (i * 7 % 12) for i in range(12)]
LONG = [US[i % 12] + 1e-4 * i for i in range(500)]
DRIFTING = [7.0 * (1 + 0.03 * i) for i in range(12)]
KEPT = {"us": LONG[::3], "every": 3}
WRONG = {
    "n": 13, "median_us": 7.06, "min_us": 6.99, "p20_us": 7.03, "p80_us": 7.1, "p95_us": 7.2,
    "ci95_us": [7.02, 7.07], "base_median_us": 8.9, "base_ci95_us": [8.7, 8.9], "speedup": 1.27,
}  # fmt: skip


def base_of(us):
    return [1.25 * x + 0.003 * (i % 5) for i, x in enumerate(us)]


def of_raw(us=US, **changes):
    """A row as a bench makes it of these times, then changed."""
    base = base_of(us)
    of_base = {"base_median_us": statistics.median(base), "base_ci95_us": stats.median_ci(base)}
    speedup = statistics.median(b / a for a, b in zip(us, base, strict=True))
    numbers = {**stats.summary(us), **of_base, "speedup": speedup, **changes}
    return {**bench_row("c", 7.0, 1.1), **json.loads(dumps(numbers))}


def beside(folder, row, us=US, base=None, every=1):
    """What verify says of a row beside these raw times, and half a line more."""
    line = {k: row[k] for k in ("bench", "case", "candidate", "cache")}
    base = base_of(us) if base is None else base
    text = dumps({**line, "us": us, "us_every": every, "base_us": base, "base_us_every": every})
    (folder / "bench").mkdir(exist_ok=True)
    (folder / "bench" / "samples.jsonl").write_text(f"{text}\n{text[:40]}")
    return verify.check_samples({"bench": [row], "notes": []}, folder)


@pytest.mark.parametrize(("us", "changes", "raw", "says"), [
    (US, {}, {}, None), (US, {}, {"us": [x + 4e-4 for x in US]}, None),  # they are rounded
    *((US, {name: value}, {}, name) for name, value in WRONG.items()),
    (US, {}, {"every": 2}, "every 2. of them would not leave 12"),
    (US, {}, {"every": 2}, "every 2. of the times of median_us is said to be kept, of 12"),
    (US, {}, {"every": "one"}, "no numbers"),
    (US, {}, {"us": ["x"], "base": US}, "no numbers"),
    (US, {}, {"us": [10**400], "base": US}, "no numbers"),
    (US, {}, {"us": [], "base": US}, "median_us 7.055 has no raw times"),
    (US, {}, {"base": []}, "base_median_us 8.8"),
    (US, {"stop": None}, {}, "why its timing ended"),
    (LONG, {}, KEPT, None),  # of a long series every kth was kept
    (LONG, {"median_us": 4.0}, KEPT, "median_us 4 is not among"),
    (LONG, {"n": 900}, KEPT, "n is 900"),
    (DRIFTING, {}, {}, "VALID, and its raw times are not: spread"),
    (DRIFTING, {"status": "UNSTABLE"}, {}, None), (US[:7], {}, {}, "too few samples: 7"),
])  # fmt: skip
def test_a_row_is_held_against_its_raw_times(us, changes, raw, says, tmp_path):
    assert_says(beside(tmp_path, of_raw(us, **changes), **{"us": us, **raw}), says)


def test_times_have_raw_times(tmp_path):
    row = of_raw()
    beside(tmp_path, row)
    rows = [row, {**row, "case": "d"}]
    told = lambda *notes: list(verify.check_samples({"bench": rows, "notes": notes}, tmp_path))
    assert told() == ["bench d: no raw times in bench/samples.jsonl"]
    (tmp_path / "bench" / "samples.jsonl").unlink()
    assert told() == ["no bench/samples.jsonl: 2 rows have times and no raw times support them"]
    assert not told({"text": "the disk is full: bench/samples.jsonl was given up"})


WIDE = {"speedup": 1.5, "speedup_ci95": [1.0, 2.0]}
PROOF = dict(status="PASS", mae=1e-4, limit_mae=1e-3, max_abs=1e-3, limit_max_abs=4e-3, margin=0.1)


@pytest.mark.parametrize("change, words", [
    ({}, None), ({"base_ci95_us": [90.0, 91.0]}, "base_median_us"),
    ({"ci95_us": [90.0, 91.0]}, "lies outside of its own interval [90, 91]"),
    ({"min_us": 90.0}, "min_us 90 is over"), ({"p20_us": 90.0}, "p20_us 90 is over median_us"),
    ({"p80_us": 1.0}, "is over p80_us 1"), ({"tflops": 700.0}, "tflops 700 is 142.857 by"),
    ({"gbs": 5e3}, "gbs 5000 is 1198.37 by the row's other numbers"),
    ({"speedup": 3.0}, "speedup 3 is not that of 7.7 over 7 us"),
    ({"speedup": 1.2, "speedup_ci95": [1.05, 1.15]}, "speedup 1.2 lies outside of its own"),
    (WIDE, "speedup 1.5 is not that of"), ({"parity": PROOF}, "margin 0.1 is 0.25 by"),
    # On a busy CPU: pairs with a median ratio of 0.0112, and medians with one of 0.0088.
    ({**WIDE, "status": "UNSTABLE", "why": ["x"]}, None),
])  # fmt: skip
def test_what_other_numbers_of_a_row_give(change, words):
    assert_says(verify.check_row("bench", {**bench_row("c", 7.0, 1.1), **change}), words)


def test_reports_rendered_by_these_sources_are_compared(folder, capsys, sources):
    assert "reports, which other sources made" in problems(folder, capsys, 0)
    sources.update(json.loads((folder / "bundle.json").read_text())["git"])
    out = problems(folder, capsys, 0)
    assert "not checked: who made it, whether the times were taken at all, its plots" in out
    report.render(folder)  # with plots, and with SHA256SUMS among the files
    assert not found(folder) and "issue.md" in (folder / "SHA256SUMS").read_text()


PROMOTED = ("FAIL - 9/10", "PASS - 10/10")


@pytest.mark.parametrize(("name", "old", "new"), [
    ("report.md", r"\b(\d)\.(\d\d)x", r"9.\2x"), ("issue.md", r".*INVALID.*\n", ""),
    ("report.html", r"\Z", "\nAll benches are VALID.\n"),
    *((name, *PROMOTED) for name in ("report.md", "issue.md", "report.html")),
])  # fmt: skip
def test_a_report_that_was_edited(name, old, new, folder, sources, nothing_private):
    """Only these sources can tell what its tables would be; its verdict is known without them."""
    text = (folder / name).read_text()
    edited = re.sub(old, new, text, count=1)
    assert edited != text
    (folder / name).write_text(edited)
    verdict = f"{name} does not begin with the verdict of bundle.json"
    assert found(seal(folder)) == (verdict if old in PROMOTED else "")
    sources.update(json.loads((folder / "bundle.json").read_text())["git"])
    assert f"{name} is not what events.jsonl gives" in found(folder)


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    """The rows and the CSV of a decode bench, and of one row with a CSV of its own."""
    out, threads = tmp_path_factory.mktemp("benched"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        how = ("--S_list", "20,41", "--branch_force_mode", "sel", "--csv", str(out / "decode.csv"))
        _, rows = sent(patch, *how)
    torch.set_num_threads(threads)
    proof, columns = {"status": "PASS", "mae": 1e-4}, {"L": 64, "dist": "few"}
    how = dict(parity=proof, median_us=1000 / 3, path_taken="triton", columns=columns)
    sel = BenchRow("sel", "sel/c", "VALID", **how)
    write_csv(str(out / "sel.csv"), [{**sel.csv(), "tri_ms": sel.csv()["ms"], "pack_ms": 2.0}],
              ("L", "dist", "tri_ms", "mae", "pack_ms", "status"))  # fmt: skip
    rows = [{**row, "stage": "decode_bench"} for row in rows if "case" in row]
    rows.append({**sel.record(), "stage": "sel_bench"})
    stage = lambda name: {"id": f"{name}_bench", "status": "PASS",
                          "argv": ["{python}", "b.py", "--csv", f"{{out}}/{name}.csv"]}  # fmt: skip
    return {"bench": json.loads(dumps(rows)), "stages": [stage("decode"), stage("sel")]}, out


COLUMNS = {
    "decode": "ms_total ms_sel speedup speedup_low base_ms wall_ms ms_module_eager status baseline"
    " gbs reads_win",
    "sel": "tri_ms mae L",
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_csv_is_what_its_rows_give(name, benched, tmp_path):
    data, made = benched
    out = shutil.copytree(made, tmp_path / "out")
    assert not list(verify.check_csvs(data, out))
    path = out / f"{name}.csv"
    right = read_csv(path)

    def wrong(rows):
        write_csv(str(path), rows, list(right[0]))
        return list(verify.check_csvs(data, out))

    for column in COLUMNS[name].split():
        found = wrong([*right[:-1], {**right[-1], column: "9.25"}])
        says = f"{name}.csv:{len(right) + 1}: {column} is '9.25', and "
        assert any(text.startswith(says) for text in found), column
    assert wrong(right[:-1]) == [f"{name}.csv lacks the lines of 1 rows"]
    assert wrong([*right, right[-1]])


def test_health_is_its_row(tmp_path):
    (tmp_path / "health.json").write_text('{"copy_gbs": 900.0, "device": "x", "ok": true}')
    assert not list(verify.check_health({"health": {"copy_gbs": 900.0}}, tmp_path))
    found = list(verify.check_health({"health": {"copy_gbs": 800.0}}, tmp_path))
    assert found == ["health.json: copy_gbs is 900, and 800.0 by its row"]


WRONG_ROWS = "1 failed or invalid rows"


@pytest.mark.parametrize(("kind", "rows", "words"), [
    ("bench", [{**NO_RESULT, "status": "INVALID"}], WRONG_ROWS),
    ("bench", [{**NO_RESULT, "status": "FAILED"}], WRONG_ROWS),
    ("tests", [test_row("t", "error", "x"), test_row("s")], WRONG_ROWS),
    ("tests", [test_row("t", "skipped", "x")], "no test or parity case ran in it"),
    ("tests", [test_row("t", "skipped", "")], "skipped without a reason"),
    ("tests", [test_row("s")], None),
])  # fmt: skip
def test_a_stage_is_no_pass_with_rows_that_are_none(kind, rows, words):
    """Nothing of it is left to the runner that wrote the bundle."""
    rows = {"tests": [], "parity": [], "bench": [], kind: [{**r, "stage": "s"} for r in rows]}
    stage = {"id": "s", "status": "PASS", "group": "other" if kind == "bench" else "parity"}
    data = {**rows, "stages": [stage], "redaction": {"gate": "clean"},
            "verdict": {"status": "PASS", "exit_code": 0}}  # fmt: skip
    assert_says(verify.check_rules(data), words)


def test_nothing_in_bundle_json_is_the_bundles_own_invention(folder):
    data = json.loads((folder / "bundle.json").read_text())
    for key in data:
        said = "; ".join(verify.check_journal({**data, key: []}, folder))
        changed = data[key] != [] and key != "files"
        assert (f"{key} in bundle.json is not what events.jsonl gives" in said) == changed, key
    data["files"][0]["sha256"] = "0" * 64
    data["files"].append({"path": "gone.csv", "bytes": 1, "sha256": "0" * 64})
    said = "; ".join(verify.check_journal(data, folder))
    assert "is not the file that bundle.json lists" in said and "gone.csv is listed" in said


PRIVATE = TOKEN, "203.0.113.7", "alice@"


@pytest.mark.parametrize("name, text, rule", [
    ("a.log", f"token {TOKEN}\n", "token x1"), ("a.log", "connected to 203.0.113.7\n", "ip x1"),
    ("a.log", "mail alice@example.com\n", "email x1"), (f"{TOKEN}.log", "x\n", "token x1"),
    ("a.log", "-----BEGIN RSA PRIVATE KEY-----\nabc\n", "pem x1"),
    ("a.bin", "\0\1", "neither text nor a picture"),
])  # fmt: skip
def test_what_looks_private_is_named_by_rule_and_never_shown(name, text, rule, tmp_path):
    (tmp_path / name).write_text(text)
    out = "\n".join(verify.check_secrets(tmp_path))
    assert rule in out and not [secret for secret in PRIVATE if secret in out]


def test_an_address_kept_on_request_is_no_finding(folder):
    (folder / "logs" / "a.log").write_text("connected to 203.0.113.7\n")
    edit(folder, lambda events: events[-1]["summary"].update(kept=["ip"]))
    assert not found(seal(folder))


def archive(path, *members):
    """A .tgz of (name, what): bytes for a file, a tar type with a link target otherwise."""
    with tarfile.open(path, "w:gz") as tar:
        for name, what in members:
            info = tarfile.TarInfo(name)
            if isinstance(what, bytes):
                info.size = len(what)
                tar.addfile(info, io.BytesIO(what))
            else:
                info.type, info.linkname = what
                tar.addfile(info)
    return path


TWO = [("a/x", b"12"), ("a/y", b"12")]
LINK, FIFO, FOLDER = (tarfile.SYMTYPE, "/etc/passwd"), (tarfile.FIFOTYPE, ""), (tarfile.DIRTYPE, "")


@pytest.mark.parametrize("members, words", [
    ([("a/x", LINK)], "is a link or a special file"), ([], "must hold one folder"),
    ([("a/x", FIFO)], "is a link or a special file"), ([("x", b"1")], "must hold one folder"),
    ([("a/x", b"1"), ("b/x", b"1")], "must hold one folder"),
    ([("/tmp/nsa-evil", b"1")], "would leave the folder"),
    ([("..", FOLDER)], "would leave the folder"),
    ([("a/../../nsa-evil", b"1")], "would leave the folder"), ([TWO[0], TWO[0]], "twice"),
    ([("a/" + "b/" * 30 + "x", b"1")], "no usable file name"),
    ([("a/x", b"1"), ("a/x/y", b"1")], "cannot be unpacked"),
    ("MAX_UNPACKED_BYTES", "unpacks to over"), ("MAX_MEMBERS", "over 1 members"),
    ("MAX_ARCHIVE_BYTES", "is over"),
])  # fmt: skip
def test_unsafe_archives_are_refused(members, words, tmp_path, capsys, monkeypatch):
    """Too large ones as well: those over a limit."""
    if isinstance(members, str):
        monkeypatch.setattr(reading, members, 1)
        members = TWO
    made = archive(tmp_path / "x.tgz", *members)
    assert words in problems(made, capsys)
    assert not os.path.exists("/tmp/nsa-evil") and os.listdir(tmp_path) == ["x.tgz"]


def test_a_cut_archive_is_refused_and_leaves_nothing(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(reading.tempfile, "tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    made = bundle.pack(folder)[0]
    made.write_bytes(made.read_bytes()[:-400])
    assert "cannot be unpacked" in problems(made, capsys)
    assert os.listdir(tmp_path / "t") == []
