"""Does the threshold follow the rule, name the deciding cell, and refuse rows without proof?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from bench.records import csv_text
from bench.threshold_optimizer import main, propose_config
from nsa.flags import Flags
from nsa.tests.helpers import sent

ROOT = Path(__file__).resolve().parents[2]
HERE = dict(device="NVIDIA H200", torch="2.11.0", triton="3.6.0", cuda="13.0", driver="580.1",
            commit="abc1234")  # fmt: skip
DISTS = "few", "many", "mixed"
SIZES = dict(mode="route", N=256, H=8, D=64, Dv=64, streams=1, dtype="bf16", path="triton_dense")


def row(L, dist, low=1.5, **changes):
    times = dict(speedup=low * 1.1, ci_low=low, ci_high=low * 1.2, wall_low=low * 3, mae=1e-4)
    proof = dict(parity="PASS", status="VALID")
    return {**SIZES, "L": L, "dist": dist, **times, **proof, **HERE, **changes}


COLUMNS = (*row(64, "few"), "why")


def grid(lengths=(64, 128, 256, 512), **changes):
    return [row(L, dist, **changes) for L in lengths for dist in DISTS]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the command on rows; (exit code, rows sent, stdout, stderr)."""

    def call(rows, *arguments, fa2=None):
        path = tmp_path / "sel.csv"
        path.write_text(csv_text(rows, COLUMNS))
        argv = [str(path), *arguments]
        if fa2 is not None:
            (tmp_path / "fa2.csv").write_text(csv_text(fa2, list(fa2[0])))
            argv += ["--fa2", str(tmp_path / "fa2.csv")]
        return *sent(monkeypatch, main, argv), *capsys.readouterr()

    return call


def proposed(run, rows, *arguments, fa2=None):
    """What is recommended, by a command that ends well; its stdout and stderr."""
    code, rows, out, err = run(rows, *arguments, fa2=fa2)
    assert code == 0
    (only,) = [r for r in rows if r["kind"] == "recommend"]
    return only, out, err


def least(run, *given):
    return proposed(run, *given)[0]["sel_triton_min_L"]


def test_all_cells_hold(run):
    proposal, out, _ = proposed(run, grid())
    assert proposal["sel_triton_min_L"] == 64 and "sel_triton_min_L = 64" in out
    assert proposal["blocking_case"] is None and proposal["rows"] == 12
    assert proposal["device"] == "NVIDIA H200" and "1.50x" in proposal["confidence"]
    rows = [
        *(r for r in grid(low=2.0) if (r["L"], r["dist"]) != (256, "many")),
        row(256, "many", 1.3),
    ]
    weakest = "smallest lower bound 1.30x (L=256 dist=many"
    assert weakest in proposed(run, rows)[0]["confidence"]
    assert least(run, grid(low=1.2)) == 64
    # Right at 64 and 128, wrong at 256: what holds below a failure does not count.
    rows = [*grid((64, 128, 512), low=2.0), *grid((256,), low=1.1)]
    assert least(run, rows) == 512 and least(run, rows, "--min-speedup", "1.1") == 64


NO_TIME = dict(speedup=None, ci_low=None, ci_high=None)
NOTHING = dict(NO_TIME, parity="", path="")
SHAKY = dict(status="UNSTABLE", why="drift: 4 %")


@pytest.mark.parametrize("bad, expected, says", [
    (row(128, "many", 1.19), 256, "lower bound 1.19x < 1.2x"),
    (row(64, "few", 0.8), 128, "H=8 D=64"),
    (row(512, "mixed", 1.1, N=64), None, "L=512 dist=mixed N=64"),
    (row(256, "few", 2.39, **SHAKY), 512, "UNSTABLE: drift: 4 %"),
    (row(64, "few", 2.4, **SHAKY), 64, ""),  # drift does not turn 2.4 times into less than 1.2
    (row(128, "few", wall_low=1.1), 256, "lower bound 1.1x < 1.2x by wall"),
    (row(64, "few", why="", **NO_TIME), 128, "too short for the clock"),
    *((row(128, "few", status=status, why=why, **NOTHING), 256, f"{status}: {why}")
      for status, why in (("SKIPPED", "out of memory"), ("FAILED", "RuntimeError: address"))),
])  # fmt: skip
def test_one_bad_cell_moves_or_forbids_the_threshold(run, bad, expected, says):
    """One more row that fails, beside a whole grid that holds, and it is named with its line."""
    proposal, out, _ = proposed(run, [*grid(), bad])
    assert proposal["sel_triton_min_L"] == expected
    assert not says or re.search(rf"{says}.*\(sel.csv:14\)", proposal["blocking_case"])
    assert ("no length qualifies, nothing is proposed" in out) == (expected is None)


def test_kernels_on_packed_keys_decide_nothing(run):
    """However slow: a caller pays for packing."""
    kernels = [row(L, "few", 0.5, mode=mode, wall_low=None) for L in (64, 512)
               for mode in ("dense", "varlen", "ranges", "decode")]  # fmt: skip
    proposal, _, _ = proposed(run, [*kernels, *grid()])
    assert proposal["sel_triton_min_L"] == 64 and proposal["rows"] == 12
    code, _, _, err = run(kernels)
    assert code == 3 and "rows of mode route: at least 3 lengths are needed, got none" in err


@pytest.mark.parametrize("rows, expected, blocking", [
    ([r for r in grid() if (r["L"], r["dist"]) != (128, "mixed")], 256,
     "L=128 dist=mixed N=256 H=8 D=64.*: not tested"),
    # What was slow at 64 keys and never tried again does not let the others propose 128.
    ([*grid(), *(row(64, dist, 0.5, D=128) for dist in DISTS)], None,
     "L=512 dist=few N=256 H=8 D=128.*: not tested, and 2 more"),
], ids=["distribution", "head size"])  # fmt: skip
def test_what_is_untested_at_a_length_fails_there(run, rows, expected, blocking):
    proposal, out, _ = proposed(run, rows)
    assert proposal["sel_triton_min_L"] == expected
    assert ("no length qualifies" in out) == (expected is None)
    assert re.fullmatch(blocking, proposal["blocking_case"])


def with_one(**change):
    """A whole grid whose fifth row, in line 6, has this change."""
    rows = grid()
    rows[4].update(change)
    return rows


LOST = {"parity": "FAIL", "status": "FAILED"}


@pytest.mark.parametrize("rows, code, says", [
    ([], 3, "at least 3 lengths are needed, got none; no rows of few, many, mixed"),
    (grid((128, 512)), 3, "at least 3 lengths are needed, got 128, 512"),
    ([r for r in grid() if r["dist"] != "mixed"], 3, "no rows of mixed"),
    *((with_one(**change), 1, says) for change, says in (
        ({**LOST, "why": "mae"}, "parity must be PASS, got 'FAIL'"),
        ({**LOST, **NO_TIME}, "parity must be PASS, got 'FAIL'"),
        ({"parity": ""}, "parity must be PASS, got 'nothing'"), ({"device": " "}, "device is"),
        ({"torch": "2.13.0"}, "torch is '2.13.0', but '2.11.0'"),
        ({"commit": "def"}, "commit is 'def', but 'abc1234'"),
        ({"device": "NVIDIA L4"}, "device is 'NVIDIA L4', but 'NVIDIA H200'"),
        ({"path": "sdpa"}, "path must be triton, got 'sdpa'"),
        ({"path": "tritonish"}, "path must be triton"), ({"driver": "1"}, "driver is '1'"),
        ({"path": ""}, "path must be triton, got 'nothing'"),
        ({"ci_low": "nan"}, "ci_low must be a finite number, got 'nan'"),
        ({"speedup": "inf"}, "speedup must be a finite number, got 'inf'"),
        ({"speedup": "fast"}, "speedup must be a finite number, got 'fast'"),
        ({"ci_low": None}, "must come together"),
        ({"wall_low": None}, "wall_low must come with a speedup"),
        ({"ci_low": 1.9, "ci_high": 1.8}, "ci_low must be in 0..ci_high"),
        ({"speedup": 2.5}, "speedup must lie in its interval, got 2.5 and 1.5..1.8"),
        ({"status": "FAILED", "parity": ""}, "parity must be PASS, got 'nothing'"),
        ({"L": 0}, "L must be a whole number above 0"),
        ({"H": "2.5"}, "H must be a whole number above 0"),
        ({"status": "GREAT"}, "status must be one of"),
        ({"status": "SKIPPED"}, "a SKIPPED row has no speedup"),
    )),
])  # fmt: skip
def test_too_few_rows_and_rows_without_proof_are_refused(run, rows, code, says):
    """These by file and line."""
    got, sent, _, err = run(rows)
    assert got == code and says in err and (code == 3 or "sel.csv:6" in err)
    assert [r["kind"] for r in sent] == ["note"] and says in sent[0]["text"]


@pytest.mark.parametrize("text, says", [
    ("", "no header"), ("L,dist\n64,few\n", "no column mode, N, H"), ("a,b\n1\n", ":2 has not"),
    ("mode,speedup,speedup\nroute,0.9,9\n", "twice the column speedup"),
    (None, "x.csv"),
])  # fmt: skip
def test_files_that_are_no_bench_csv_are_refused(text, says, tmp_path, capsys):
    if text is not None:
        (tmp_path / "x.csv").write_text(text)
    assert main([str(tmp_path / "x.csv")]) == 1 and says in capsys.readouterr().err


# ---- FA-2 ----------------------------------------------------------------------------------------


def fa2_row(branch, S, low, **changes):
    sizes = {"w": 4096, "l": "", "d": ""} if branch == "win" else {"w": "", "l": 32, "d": 16}
    times = dict(speedup=low, ci_low=low, ci_high=low, why="", path="fa2_varlen")
    proof = dict(parity="PASS", status="VALID")
    return {"branch": branch, "S": S, **sizes, **times, **proof, **HERE, **changes}


def test_fa2_lengths_are_the_keys_that_the_flag_counts(run):
    rows = [fa2_row("win", S, 1.3) for S in (512, 1024, 2048, 8192)]
    rows += [fa2_row("cmp", S, low) for S, low in ((512, 1.0), (1024, 1.4), (4096, 1.5))]
    proposal, out, _ = proposed(run, grid(), fa2=rows)
    assert proposal["fa2_min_len_win"] == 512
    assert proposal["fa2_min_len_cmp"] == 63  # (1024 - 32) // 16 + 1
    assert "cmp keys=31 S=512" in out and "fa2_min_len_cmp = 63 keys against sdpa" in out
    assert "cmp keys=31" in proposal["fa2_cmp_why"] and "all 4 cells" in proposal["fa2_win_why"]
    # Whoever is faster; without a name it was SDPA.
    rows = [{**r, "baseline": "" if r["S"] < 4096 else "triton"} for r in rows]
    proposal, _, _ = proposed(run, grid(), fa2=rows)
    assert (proposal["fa2_min_len_win"], proposal["fa2_min_len_win_triton"]) == (512, None)


def test_fa2_has_an_answer_for_triton_off_which_is_written_and_one_for_triton_on(run, config):
    """What loses to Triton's kernel may beat SDPA, and SDPA is what is left with Triton off. With
    Triton on FA-2 is best left off, so what beats Triton's kernel sets no length."""
    of = lambda S, *lows: [fa2_row("win", S, low, baseline=name)
                           for name, low in zip(("sdpa", "triton"), lows, strict=True)]  # fmt: skip
    rows = [*of(64, 2.3, 0.4), *of(256, 2.3, 0.4), *of(512, 2.3, 0.4)]
    rows += [fa2_row("cmp", S, 1.5, baseline="sdpa") for S in (64, 256, 512)]
    proposal, out, err = proposed(run, grid(), "--write", str(config), fa2=rows)
    assert (proposal["fa2_min_len_win"], proposal["fa2_min_len_win_triton"]) == (64, None)
    assert (proposal["fa2_min_len_cmp"], proposal["fa2_min_len_cmp_triton"]) == (3, None)
    assert "all 3 cells" in proposal["fa2_win_why"]
    assert "lower bound 0.4x < 1.2x" in proposal["fa2_win_triton_why"]
    assert "fa2_cmp_triton_why" not in proposal
    assert "fa2_min_len_cmp against triton: no proposal: at least 3 lengths are needed" in err
    assert "fa2_min_len_win = 64 keys against sdpa" in out
    assert "fa2_min_len_win against triton: no length qualifies" in out
    assert (flags(config).fa2_min_len_win, flags(config).fa2_min_len_cmp) == (64, 3)
    assert "fa2_min_len_*: against SDPA" in config.read_text().partition("  devices:\n")[2]
    rows = [*of(64, 1.0, 1.0), *of(256, 1.5, 1.0), *of(512, 1.5, 1.5)]
    proposal, _, _ = proposed(run, grid(), "--write", str(config), fa2=rows)
    assert (proposal["fa2_min_len_win"], proposal["fa2_min_len_win_triton"]) == (256, 512)
    assert flags(config).fa2_min_len_win == 256


def test_fa2_says_what_is_missing_and_refuses_other_environments(run):
    rows = [fa2_row("win", S, 1.3) for S in (4096, 8192, 16384)]  # the window caps all of them
    proposal, _, err = proposed(run, grid(), fa2=rows)
    says = "fa2_min_len_win against sdpa: no proposal: at least 3 lengths are needed, got 4096"
    assert proposal["fa2_min_len_win"] is None and says in err
    code, _, _, err = run(grid(), fa2=[fa2_row("win", 512, 1.3, device="NVIDIA L4")])
    assert code == 1 and "fa2.csv:2: device is 'NVIDIA L4'" in err


# ---- the configuration ---------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
    """The project's own, without the devices measured so far."""
    path = tmp_path / "base.yaml"
    general, _, _ = (ROOT / "configs" / "base.yaml").read_text().partition("  devices:\n")
    path.write_text(general + "  devices: {}\n")
    return path


def flags(path, device="NVIDIA H200"):
    return Flags.from_env({}, config_path=path, device_name=device)


def entry(path):
    return yaml.safe_load(path.read_text())["runtime"]["devices"]["NVIDIA H200"]


def test_write_sets_the_devices_entry_and_nothing_else(run, config):
    before = config.read_text().splitlines()
    run(grid())
    assert config.read_text().splitlines() == before
    code, *_ = run(grid(), "--write", str(config))
    written = config.read_text()
    gone = [line for line in before if line not in written.splitlines()]
    assert code == 0 and gone == ["  devices: {}"] and flags(config).sel_triton_min_L == 64
    assert flags(config, "another").sel_triton_min_L is None  # auto
    assert flags(config).use_triton_sel is None and not list(config.parent.glob(".base*"))
    # Where no length qualifies the file stays as it is; FA-2's lengths are another matter.
    _, out, _ = proposed(run, grid(low=1.0), "--write", str(config))
    assert config.read_text() == written and "nothing to write" in out
    rows = [fa2_row("win", S, 1.5) for S in (64, 256, 512)]
    run(grid(low=1.0), "--write", str(config), fa2=rows)
    assert entry(config) == {"sel_triton_min_L": 64, "fa2_min_len_win": 64}


def test_nothing_else_of_the_entry_is_lost(run, tmp_path):
    path = tmp_path / "c.yaml"
    mine = "      use_triton_sel: true\n      sel_triton_min_L: 256  # measured\n"
    path.write_text(f"runtime:\n  devices:\n    NVIDIA H200:\n{mine}      sel_triton_group: true\n")
    run(grid(), "--write", str(path))  # a threshold leaves the user's own `true` alone
    kept = {"sel_triton_group": True, "sel_triton_min_L": 64}
    assert entry(path) == {"use_triton_sel": True, **kept}
    path.write_text(path.read_text().replace("true", "false", 1))
    run(grid(), "--write", str(path))  # and takes an earlier `false` away
    assert entry(path) == kept


SEVERAL = """# head
runtime:
  use_triton_sel: false
  # about devices
  devices:
    # the old card
    NVIDIA A100:  # bought 2021
      sel_triton_min_L: 256  # measured
      # fa2 too
      fa2_min_len_win: 64
    "odd: #name": {sel_triton_min_L: 8, use_fa2: true}

    NVIDIA L4:
      use_triton_sel: false
    bare:  # nothing yet
# tail
other: 1
"""


def test_comments_and_other_devices_stay():
    text = propose_config(SEVERAL, "NVIDIA A100", {"sel_triton_min_L": 512}, "a\nb")
    assert "      sel_triton_min_L: 512  # a b\n" in text and "measured" not in text
    for kept in ("# head", "# about devices", "# the old card", "# fa2 too", "# tail"):
        assert kept in text
    assert text.index("# the old card") < text.index("512") < text.index("odd")
    text = text.replace("true}", "true}  # odd indeed")
    text = propose_config(text, "odd: #name", {"sel_triton_min_L": 16})
    text = propose_config(text, "bare", {"sel_triton_min_L": 4})
    text = propose_config(text, "new", {"sel_triton_min_L": 32})
    for kept in ("A100:  # bought 2021", "'odd: #name':  # odd indeed", "bare:  # nothing yet"):
        assert f"{kept}\n" in text
    assert yaml.safe_load(text)["runtime"]["devices"] == {
        "NVIDIA A100": {"sel_triton_min_L": 512, "fa2_min_len_win": 64},
        "odd: #name": {"sel_triton_min_L": 16, "use_fa2": True},
        "NVIDIA L4": {"use_triton_sel": False},
        "bare": {"sel_triton_min_L": 4},
        "new": {"sel_triton_min_L": 32},
    }


def test_a_link_its_permissions_and_its_line_ends_stay(run, tmp_path):
    file, link = tmp_path / "there.yaml", tmp_path / "base.yaml"
    file.write_bytes(SEVERAL.replace("\n", "\r\n").encode())
    file.chmod(0o600)
    link.symlink_to(file.name)
    run(grid(), "--write", str(link))
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o600
    text = file.read_bytes().decode()
    assert "sel_triton_min_L: 64" in text and text.count("\n") == text.count("\r\n") > 15


def test_a_file_in_another_layout_is_left_alone(run, tmp_path):
    path = tmp_path / "other.yaml"
    for text in ("runtime: {devices: {}}\n", "runtime:\n    devices: {}\n", "a: 1\n", "[\n"):
        path.write_text(text)
        code, _, _, err = run(grid(), "--write", str(path))
        assert code == 2 and "runtime.devices" in err and path.read_text() == text
    assert run(grid(), "--write", str(tmp_path / "none.yaml"))[0] == 2


def test_a_speedup_below_one_is_no_bar(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["x.csv", "--min-speedup", "0.5"])
    assert "--min-speedup" in capsys.readouterr().err
