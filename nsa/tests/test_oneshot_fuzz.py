"""Whatever the readers are given, they answer rightly or refuse in one sentence.

Journals, bundles, archives, CSVs and configurations come from strangers, cut disks and typing
hands. Random bytes, random JSON and real files with a random wound go in.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("hypothesis", reason="fuzzing needs hypothesis")
pytest.importorskip("jinja2", reason="the report needs jinja2")

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from bench.records import csv_text, read_csv
from nsa.config import NSAConfig
from nsa.flags import Flags, flag_fields, variables
from nsa.tests.oneshot_samples import SAMPLES, write_sample
from nsa.tests.test_oneshot_report import inert
from scripts.oneshot.compare import comparison, verify
from scripts.oneshot.record import bundle as bundles
from scripts.oneshot.record.journal import dumps, read_events
from scripts.oneshot.record.model import RunRecord
from scripts.oneshot.record.reading import BundleError, opened, rebuild
from scripts.oneshot.record.rows import RowError, parse_row
from scripts.oneshot.report import render as report
from scripts.oneshot.report.blocks import Shape

CODES = {0, 1, 2, 3, 4, 5, 6, 75, 130, 143}
WORDS = (
    "ev kind stage row run_start facts stage_start stage_end run_end note redaction xid plan id"
    " status PASS FAIL result argv env counts git device doctor level text summary gate m t seq"
    " test parity bench health recommend nodeid outcome passed case why reason schema verdict"
    " nsa.gpu-report/1 exit_code stages tests files path sha256 python torch"
).split()
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(WORDS),
    st.text(max_size=8), st.sampled_from(["1e999", "</script>", "\0", "\ud800", "a" * 300]),
)  # fmt: skip
keys = st.sampled_from(WORDS) | st.text(max_size=5)
branches = lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5)
values = st.recursive(scalars, branches, max_leaves=12)


def quick(n):
    return settings(max_examples=n, deadline=None, derandomize=True, database=None,
                    phases=(Phase.explicit, Phase.generate),
                    suppress_health_check=list(HealthCheck))  # fmt: skip


@st.composite
def wounded(draw, data: bytes) -> bytes:
    """`data` with a piece lost, doubled, replaced, or cut off."""
    a, b = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
    b = min(b, a + draw(st.sampled_from([0, 1, 3, 40, 5000])))
    twice, zeros = data[a:b] * 2, b"\0" * (b - a)
    new = draw(st.sampled_from([b"", twice, zeros, b"\xff\xfe", b'"', b"{", b"9"]))
    return data[:a] if draw(st.booleans()) and draw(st.booleans()) else data[:a] + new + data[b:]


@contextmanager
def written(name, content):
    """A file of these bytes, or of this text, alone in a folder that goes away again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        raw = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
        path.write_bytes(raw)
        yield path


def refused(call, *errors):
    """What `call` gives; None where it refuses in a sentence."""
    try:
        return call()
    except errors as error:
        assert str(error)
        return None


def replaced(draw, value, inside):
    """A JSON value with one of its parts replaced by a random value."""
    if not isinstance(value, (dict, list)) or not value or not inside:
        return draw(values)
    at = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
    changed = value.copy()
    changed[at] = replaced(draw, value[at], draw(st.booleans()))
    return changed


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample") / "8ac3f21"
    write_sample(folder, "gpu_fail")
    return folder


def told(folder, render=False):
    """The run in `folder` as every reader sees it, or None if one refuses it in a sentence."""
    problems = list(verify.check(folder))
    assert all(isinstance(p, str) and p for p in problems)
    run = refused(lambda: rebuild(folder), BundleError)
    if run is None:
        assert problems
        return None
    data, _ = run
    assert data["verdict"]["exit_code"] in CODES or not (folder / "events.jsonl").exists()
    comparison.compare(data, data)
    if render:
        assert report.render_text(data, folder, Shape())
        inert(report.render_page(data, folder))
    return data


# ---- the journal ---------------------------------------------------------------------------------


@quick(120)
@given(st.data())
def test_journal_of_anything(sample, data):
    wound = wounded((sample / "events.jsonl").read_bytes())
    lines = st.lists(values.map(json.dumps), max_size=6).map("\n".join)
    with written("events.jsonl", data.draw(st.binary(max_size=300) | lines | wound)) as path:
        bundle = RunRecord.replay(read_events(path)).to_bundle()
        dumps(bundle)
        assert bundle["verdict"]["exit_code"] != 0, "nothing was proven"


@pytest.mark.parametrize("name", ["events.jsonl", "bundle.json"])
def test_one_wrong_value(sample, name):
    events = read_events(sample / "events.jsonl")
    whole = events if name == "events.jsonl" else json.loads((sample / name).read_text())

    @quick(20)
    @given(st.data())
    def spoil(data):
        keys = range(len(whole)) if whole is events else sorted(whole)
        spoilt, at = whole.copy(), data.draw(st.sampled_from(keys))
        spoilt[at] = replaced(data.draw, whole[at], whole is events or data.draw(st.booleans()))
        text = "\n".join(map(json.dumps, spoilt)) if whole is events else json.dumps(spoilt)
        with written(name, text) as path:
            told(path.parent, render=data.draw(st.booleans()))

    spoil()


@quick(100)
@given(st.one_of(values, st.binary(max_size=200)))
def test_row_of_anything(value):
    line = value if isinstance(value, bytes) else json.dumps(value).encode("utf-8", "surrogatepass")
    row = refused(lambda: parse_row(line), RowError)
    json.dumps(row, allow_nan=False)
    assert row is None or row.get("status") not in ("PASS", "VALID", "UNSTABLE")


# ---- bundle.json ---------------------------------------------------------------------------------


@quick(60)
@given(st.data())
def test_bundle_of_anything(sample, data):
    whole = json.loads((sample / "bundle.json").read_text())
    odd = values.map(lambda v: json.dumps({"schema": whole["schema"], "x": v}).encode())
    raw = data.draw(st.binary(max_size=100) | wounded(dumps(whole).encode()) | odd)
    with written("bundle.json", raw) as path:
        told(path.parent)


@pytest.mark.parametrize("raw", [
    b"[" * 100_000, b'{"a":' * 50_000, b"NaN", b'{"schema": 1e999}', b"", b"\xef\xbb\xbf{}",
    b'{"schema": "nsa.gpu-report/1", "stages": ' + b"[" * 300 + b"]" * 300 + b"}",
])  # fmt: skip
def test_json_that_breaks_parsers(tmp_path, raw):
    (tmp_path / "bundle.json").write_bytes(raw)
    (tmp_path / "events.jsonl").write_bytes(raw + b"\n" + raw)
    assert told(tmp_path) is None


# ---- archives ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(sample):
    bundles.write_sums(sample)
    return bundles.pack(sample)[0].read_bytes()


def unpacked(path, check):
    """`check` the folder that is in this archive, if it is not refused."""
    with opened(path) as inside:
        assert inside.is_dir()
        check(inside)


@quick(120)
@given(st.data())
def test_archive_of_anything(packed, data):
    raw = data.draw(st.one_of(st.binary(max_size=600), wounded(packed)))
    with written("x.tgz", raw) as path:
        refused(lambda: unpacked(path, lambda _: None), BundleError)


@quick(60)
@given(st.lists(st.tuples(st.text(max_size=12), st.sampled_from(b"0125gxLK")), max_size=4),
       st.sampled_from(["", "/", "../", "a/../../", "a\\", "a/"]))  # fmt: skip
def test_members_stay_inside(names, prefix):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, type_ in names:
            info = tarfile.TarInfo((prefix + name).encode("utf-8", "replace").decode())
            info.type, info.linkname = bytes([type_]), "../../etc/passwd"
            info.size = 3 if type_ == 48 else 0
            tar.addfile(info, io.BytesIO(b"abc"))

    def stays_inside(folder):
        assert not [p for p in folder.rglob("*") if p.is_symlink()]
        assert prefix in ("", "a/")

    with written("x.tgz", buffer.getvalue()) as path:
        refused(lambda: unpacked(path, stays_inside), BundleError)
        assert [p.name for p in path.parent.iterdir()] == ["x.tgz"]


# ---- tables and configurations -------------------------------------------------------------------


@quick(150)
@given(st.one_of(st.binary(max_size=200), st.text(alphabet='a,"\n\r\0é;', max_size=60)))
def test_csv_of_anything(content):
    with written("x.csv", content) as path:
        try:
            rows = read_csv(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert all(len(row) == len(rows[0]) for row in rows)
            assert all(isinstance(v, str) for row in rows for v in row.values())


cells = scalars | st.text(alphabet='a,"\n\r\0;', max_size=6)


@quick(120)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), cells), max_size=4))
def test_csv_comes_back(rows):
    text = csv_text(rows, list("abc"))
    with written("x.csv", text.encode("utf-8", "replace")) as path:
        got = read_csv(path)
        assert len(got) == len(rows)
        assert all(list(row) == list("abc") for row in got)


MODEL = st.fixed_dictionaries({n: scalars for n in ("dim", "heads", "groups", "d_k", "d_v", "l")})
yamls = st.one_of(
    st.text(max_size=40), st.binary(max_size=40),
    st.sampled_from([
        "a: &a [*a]", "? [1]: 2", "!!python/object:os.system {}", "x: 2001-99-99",
        "model: {dim: 1e999}", "- " * 500, "model: .nan", "runtime: {devices: 3}", "runtime: []",
        "runtime: {use_triton_sel: maybe}", "runtime: {sel_triton_min_L: -1}",
    ]),
    (values | MODEL).map(lambda v: json.dumps({"model": v, "nsa": {}})),
    values.map(lambda v: json.dumps({"runtime": v})),
)  # fmt: skip


@quick(80)
@given(yamls)
@example("[" * 600)
def test_configuration_of_anything(content):
    with written("x.yaml", content) as path:
        config = refused(lambda: NSAConfig.from_yaml(path), ValueError, TypeError)
        assert config is None or config.heads % config.groups == 0
        read = lambda: Flags.from_env({}, config_path=path)
        flags = refused(read, ValueError, TypeError)
        assert flags is None or flags.use_triton_sel in (None, False, True)


names = [variables(f)[0] for f in flag_fields()]


@quick(150)
@given(st.dictionaries(
    st.sampled_from(names) | st.text(max_size=4).map("NSA_".__add__),
    st.sampled_from(["1", "0", "", "yes", "auto", "-1", "1e3", "٣", "64", "1" * 5000]) | st.text(),
    max_size=4,
))  # fmt: skip
def test_flags_of_anything(environ):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            flags = Flags.from_env(environ, config_path="/nonexistent.yaml")
        except ValueError as error:
            assert any(name in str(error) for name in environ)
        else:
            assert flags.sel_triton_min_L is None or flags.sel_triton_min_L >= 0


@pytest.mark.parametrize("name", SAMPLES)
def test_whole_samples_are_no_problem(tmp_path, name):
    write_sample(tmp_path, name)
    assert told(tmp_path)["run_id"]
