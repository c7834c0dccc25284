"""Are NSA_* variables parsed once, alike, with errors that name them, in the stated precedence?"""

import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from nsa import flags as flags_module
from nsa.flags import Flags, flag_fields, get_flags, known_names, unknown_names, variables
from nsa.tests.helpers import assert_raises

ROOT = Path(__file__).resolve().parents[2]

BOOLEANS = [f for f in flag_fields() if isinstance(f.default, bool)]


def no_config(tmp_path, **env):
    return Flags.from_env(env, config_path=tmp_path / "absent.yaml")


def config(tmp_path, text, device=None, **env):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return Flags.from_env(env, config_path=path, device_name=device)


def test_every_variable_has_its_default_where_none_is_set(tmp_path):
    """Which one README.md says, as test_readme.py sees."""
    flags, names = no_config(tmp_path), {name for f in flag_fields() for name in variables(f)}
    rows = flags.effective()
    assert flags == Flags() and {r["source"] for r in rows} == {"default"}
    assert {r["name"] for r in rows} == names and len(rows) == len(names)
    values = {r["name"]: r["value"] for r in rows}
    assert values["NSA_USE_TRITON_SEL"] == "auto" and values["NSA_FA2_MIN_LEN_WIN"] == 16
    others = {"NSA_RESULT_FD", "NSA_OUT_DIR", "NSA_COMMIT", "NSA_PROBE_SEED"}
    assert set(known_names()) == names | others


@pytest.mark.parametrize("f", BOOLEANS, ids=lambda f: f.name)
def test_booleans_parse_alike(f, tmp_path):
    name = variables(f)[0]
    for text in ("1", "true", "YES", " on "):
        assert getattr(no_config(tmp_path, **{name: text}), f.name) is True
    for text in ("0", "False", "no", "OFF", ""):
        assert getattr(no_config(tmp_path, **{name: text}), f.name) is False
    for text in ("2", "tru", "enable", "-1", "١"):
        with pytest.raises(ValueError, match=rf"{name} .*{text}"):
            no_config(tmp_path, **{name: text})


SWITCHES = "NSA_USE_TRITON_SEL", "NSA_SEL_TRITON_ALLOW_GRAD"
ALIASES = dict(NSA_DEBUG_LOG="0", NSA_DEBUG_TRITON="0")


def test_switches_and_numbers_may_be_auto_and_an_alias_suffices(tmp_path):
    for name, text, value in (
        *((name, text, value) for name in SWITCHES
          for text, value in (("auto", "auto"), (" AUTO", "auto"), ("1", True), ("off", False))),
        ("NSA_SEL_TRITON_MIN_L", "1", 1), ("NSA_SEL_TRITON_BLOCK_L", "128", 128),
        ("NSA_SEL_TRITON_BLOCK_D", "auto", "auto"), ("NSA_LOG_LIMIT", "0", 0),
    ):  # fmt: skip
        rows = no_config(tmp_path, **{name: text}).effective()
        assert {r["name"]: r["value"] for r in rows}[name] is value, (name, text)
    for name in ALIASES:
        assert no_config(tmp_path, **{name: "1"}).debug_log
        assert no_config(tmp_path, **{**ALIASES, name: "1"}).debug_log


MALFORMED = {
    "NSA_SEL_TRITON_MIN_L": ["4k", "-1", "", "1e3"], "NSA_SEL_TRITON_BLOCK_L": ["96"],
    "NSA_SEL_TRITON_BLOCK_D": ["8"], "NSA_LOG_LIMIT": ["many", "١٢"],
    "NSA_FA2_MIN_LEN_WIN": ["16.0"], "NSA_DEBUG_TRITON": ["maybe"],
}  # fmt: skip


WORDS = {  # that are no number
    **dict.fromkeys(SWITCHES, "auto or none, or one of 1/true"),
    "NSA_SEL_TRITON_MIN_L": "auto or none, or an integer of 0 or more",
    "NSA_SEL_TRITON_BLOCK_DV": "auto or none, or",
    "NSA_LOG_LIMIT": "none, or an integer of 0 or more",
}


def test_what_is_malformed_is_refused_in_one_line_that_names_it(tmp_path):
    given = lambda **env: lambda: no_config(tmp_path, **env)
    assert_raises(
        *((ValueError, name, given(**{name: text})) for name in MALFORMED
          for text in MALFORMED[name]),
        *((ValueError, f"{name} must be {allowed}.*, got 'maybe'", given(**{name: "maybe"}))
          for name, allowed in WORDS.items()),
        (ValueError, "NSA_FA2_FORCE_VARLEN and NSA_FA2_FORCE_DENSE",
         given(NSA_FA2_FORCE_VARLEN="1", NSA_FA2_FORCE_DENSE="1")),
        (TypeError, r"use_triton_sel must be None \(auto\), got 'auto'",
         lambda: Flags(use_triton_sel="auto")),
        (TypeError, "use_triton_sel", lambda: Flags(use_triton_sel=1)),
        (ValueError, "sel_triton_min_L", lambda: Flags(sel_triton_min_L=-3)),
        (ValueError, "sel_triton_block_l", lambda: Flags(sel_triton_block_l=100)),
        (ValueError, "^.{0,99}at most 18 digits, got.{0,50}$", given(NSA_LOG_LIMIT="9" * 5000)),
        (ValueError, "^.{0,99}at most 18 digits, got.{0,50}$", lambda: Flags(log_limit=10**5000)),
    )  # fmt: skip


def test_precedence_environment_then_device_then_runtime_then_default(tmp_path):
    text = """
runtime:
  sel_triton_min_L: 2048
  use_triton_sel: false
  fa2_min_len_win: 99
  devices:
    NVIDIA H200: {sel_triton_min_L: 256, use_triton_sel: true}
"""
    numbers = lambda f: (f.sel_triton_min_L, f.use_triton_sel, f.fa2_min_len_win)
    source = lambda f: {r["name"]: r["source"] for r in f.effective()}
    here = config(tmp_path, text, "NVIDIA H200")
    assert numbers(here) == (256, True, 99)
    assert numbers(config(tmp_path, text, "NVIDIA A100")) == (2048, False, 99)
    env = config(tmp_path, text, "NVIDIA H200", NSA_SEL_TRITON_MIN_L="64", NSA_USE_TRITON_SEL="0")
    assert numbers(env) == (64, False, 99)
    assert config(tmp_path, text, "NVIDIA A100", NSA_USE_TRITON_SEL="1").use_triton_sel is True
    assert config(tmp_path, "runtime: {use_triton_sel: auto}").use_triton_sel is None
    assert source(env)["NSA_SEL_TRITON_MIN_L"] == "env NSA_SEL_TRITON_MIN_L"
    assert source(env)["NSA_FA2_MIN_LEN_WIN"] == "c.yaml runtime"
    assert source(env)["NSA_FA2_MIN_LEN_CMP"] == "default"
    assert source(here)["NSA_SEL_TRITON_MIN_L"] == "c.yaml runtime.devices.NVIDIA H200"
    # What replace() changes is an argument; what it leaves stays what it was.
    changed = replace(env, sel_triton_min_L=4096, fa2_min_len_win=7, use_fa2=True)
    names = "NSA_SEL_TRITON_MIN_L", "NSA_FA2_MIN_LEN_WIN", "NSA_USE_FA2"
    assert source(changed) == source(env) | dict.fromkeys(names, "argument")
    assert {"name": "NSA_USE_FA2", "value": True, "source": "argument"} in changed.effective()


BAD_CONFIG = {
    "runtime: {use_tritn_sel: 1}": "use_tritn_sel.*did you mean use_triton_sel",
    "runtime: {sel_triton_min_L: soon}": "sel_triton_min_L.*soon",
    "runtime: {devices: {X: {use_fa2: 7}}}": "runtime.devices.X.use_fa2",
    "runtime: [1]": "runtime must be a mapping",
    "runtime: []": r"runtime must be a mapping, got \[\]",
    "[]": r"c.yaml must be a mapping, got \[\]",
    "runtime: {devices: []}": "runtime.devices must be a mapping, got",
    "runtime: {devices: {X: 3}}": "runtime.devices.X must be a mapping, got 3",
    "runtime: {devices: {Y: 0}}": "runtime.devices.Y must be a mapping, got 0",
    "runtime: {a: [}": "not valid YAML",
    "Runtime: {use_fa2: 1}": "a section must be model or nsa or runtime, got 'Runtime'",
    "{model: {}, 1: {}}": "a section must be model or nsa or runtime, got 1",
}


def test_bad_config_is_an_error_that_names_the_key_and_an_empty_section_is_none(tmp_path):
    given = lambda text: lambda: config(tmp_path, text, "X")
    assert_raises(*((ValueError, match, given(text)) for text, match in BAD_CONFIG.items()))
    with pytest.raises(ValueError, match=f"config_path must be a file, got .*{tmp_path}"):
        Flags.from_env({}, config_path=tmp_path)
    for text in ("", "runtime:", "runtime: {devices: }", "runtime: {devices: {X: }}", "model: {}"):
        assert config(tmp_path, text, "X") == Flags()


def test_shipped_config_leaves_the_kernels_on():
    """And no device's entry turns them off."""
    for device in (None, "NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        flags = Flags.from_env({}, device_name=device)
        assert flags.use_triton_sel is None and flags.sel_triton_allow_grad is None
        assert (flags.sel_triton_min_L or 1) >= 1


def test_unknown_variable_warns_once_with_the_nearest_name(tmp_path, monkeypatch):
    monkeypatch.setattr(flags_module, "_warned", set())
    env = {"NSA_USE_TRITON_SELL": "1", "NSA_RESULT_FD": "5", "OTHER": "x"}
    assert unknown_names(env) == [("NSA_USE_TRITON_SELL", "NSA_USE_TRITON_SEL")]
    with pytest.warns(UserWarning, match="NSA_USE_TRITON_SELL.*did you mean NSA_USE_TRITON_SEL"):
        no_config(tmp_path, **env)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        no_config(tmp_path, **env)


def test_no_other_file_of_the_package_reads_the_environment():
    files = {path.relative_to(ROOT).as_posix(): path for path in ROOT.glob("nsa/**/*.py")}
    for name in [name for name in files if not name.startswith(("nsa/tests/", "nsa/flags.py"))]:
        for line in files[name].read_text().splitlines():
            if "os.environ" in line or "getenv" in line:
                assert "TRITON_INTERPRET" in line, f"{name}: {line.strip()}"


def test_import_nsa_loads_neither_torch_nor_triton_nor_yaml():
    code = (
        "import sys, nsa, nsa.flags, nsa.log, nsa.config, nsa.launches\n"
        "bad = {'torch', 'triton', 'yaml'} & set(sys.modules); assert not bad, bad\n"
        "assert nsa.Flags is nsa.flags.Flags and 'nsa_attention' in dir(nsa)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_equal_flags_are_one_key_in_every_process():
    flags = Flags(use_triton_sel=True, sel_triton_min_L=7)
    same = Flags(use_triton_sel=True, sel_triton_min_L=7, sources={"sel_triton_min_L": (7, "x")})
    other = replace(flags, sel_triton_min_L=8)
    assert hash(flags) == hash(same) and {flags: 1}[same] == 1 and {flags: 1}.get(other) is None
    there = pickle.loads(pickle.dumps(flags))
    assert there == flags and "_hash" in vars(flags) and "_hash" not in vars(there)


def test_each_device_has_an_entry_of_its_own_until_the_cache_is_cleared(tmp_path, monkeypatch):
    path = tmp_path / "base.yaml"
    monkeypatch.setattr(flags_module, "CONFIG_PATH", path)
    assert Flags.from_env({}).sel_triton_min_L is None  # there is no such file
    path.write_text("runtime: {sel_triton_min_L: 77, devices: {X: {sel_triton_min_L: 9}}}\n")
    by_device = [get_flags(name).sel_triton_min_L for name in (None, "X", "Y", "X")]
    assert by_device == [77, 9, 77, 9] and get_flags("X") is get_flags("X")
    monkeypatch.setenv("NSA_SEL_TRITON_MIN_L", "5")
    assert get_flags().sel_triton_min_L == 77
    flags_module.clear_flags_cache()
    assert get_flags().sel_triton_min_L == get_flags("X").sel_triton_min_L == 5
