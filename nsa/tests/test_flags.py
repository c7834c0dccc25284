"""Are NSA_* variables parsed once, alike, with errors that name them, in the stated precedence?"""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from nsa import flags as flags_module
from nsa.flags import Flags, flag_fields, get_flags, known_names, unknown_names, variables

ROOT = Path(__file__).resolve().parents[2]

# requirements: variable -> default of the code (the shipped file may set the same value)
DEFAULTS = {
    "NSA_USE_TRITON_SEL": "auto", "NSA_TRITON_SEL_FORCE": False,
    "NSA_SEL_TRITON_ALLOW_GRAD": "auto", "NSA_SEL_TRITON_MIN_L": "auto",
    "NSA_SEL_TRITON_GROUP": False, "NSA_SEL_TRITON_BLOCK_D": "auto",
    "NSA_SEL_TRITON_BLOCK_L": "auto", "NSA_SEL_TRITON_BLOCK_DV": "auto", "NSA_USE_SEL_PACK": True,
    "NSA_USE_GLUON": True, "NSA_USE_CLUSTER": True,
    "NSA_FORCE_PARITY": False, "NSA_USE_FA2": False, "NSA_FA2_MIN_LEN_WIN": 16,
    "NSA_FA2_MIN_LEN_CMP": 16, "NSA_FA2_FORCE_VARLEN": False, "NSA_FA2_FORCE_DENSE": False,
    "NSA_DEBUG_TIMING": False, "NSA_DEBUG_SHAPES": False, "NSA_DEBUG_COMPARE": False,
    "NSA_DEBUG_LOG": False, "NSA_DEBUG_TRITON": False, "NSA_LOG_LIMIT": None,
    "NSA_TEST_TRITON_SEL": False, "NSA_TEST_FA2": False, "NSA_TEST_TRAIN": False,
}  # fmt: skip
BOOLEANS = [f for f in flag_fields() if isinstance(f.default, bool)]


def no_config(tmp_path, **env):
    return Flags.from_env(env, config_path=tmp_path / "absent.yaml")


def config(tmp_path, text, device=None, **env):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return Flags.from_env(env, config_path=path, device_name=device)


def test_every_documented_variable_has_its_default(tmp_path):
    rows = no_config(tmp_path).effective()
    assert {r["name"]: r["value"] for r in rows} == DEFAULTS
    assert {r["source"] for r in rows} == {"default"}
    assert set(known_names()) == {*DEFAULTS, "NSA_RESULT_FD", "NSA_OUT_DIR", "NSA_COMMIT"}


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


def test_switches_are_auto_or_a_boolean(tmp_path):
    for name in ("NSA_USE_TRITON_SEL", "NSA_SEL_TRITON_ALLOW_GRAD"):
        field = name.removeprefix("NSA_").lower()
        for text, value in (("auto", None), (" AUTO", None), ("1", True), ("off", False)):
            assert getattr(no_config(tmp_path, **{name: text}), field) is value
        with pytest.raises(ValueError, match=f"{name} must be auto, or one of 1/true.*maybe"):
            no_config(tmp_path, **{name: "maybe"})
    with pytest.raises(TypeError, match=r"use_triton_sel must be None \(auto\), got 'auto'"):
        Flags(use_triton_sel="auto")
    # An explicit 1 is over the configuration, as the environment is over all of it.
    text = "runtime: {use_triton_sel: false}"
    assert config(tmp_path, text).use_triton_sel is False
    assert config(tmp_path, text, NSA_USE_TRITON_SEL="1").use_triton_sel is True
    assert config(tmp_path, "runtime: {use_triton_sel: auto}").use_triton_sel is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NSA_SEL_TRITON_MIN_L", "4k"), ("NSA_SEL_TRITON_MIN_L", "-1"),
        ("NSA_SEL_TRITON_MIN_L", ""), ("NSA_SEL_TRITON_MIN_L", "1e3"),
        ("NSA_SEL_TRITON_BLOCK_L", "96"), ("NSA_SEL_TRITON_BLOCK_D", "8"),
        ("NSA_LOG_LIMIT", "many"), ("NSA_FA2_MIN_LEN_WIN", "16.0"), ("NSA_DEBUG_TRITON", "maybe"),
        ("NSA_LOG_LIMIT", "١٢"),
    ],
)  # fmt: skip
def test_malformed_number_names_the_flag(name, text, tmp_path):
    with pytest.raises(ValueError, match=name):
        no_config(tmp_path, **{name: text})


def test_a_number_without_end_is_refused_in_one_line(tmp_path):
    many = "9" * 5000
    for call in (
        lambda: no_config(tmp_path, NSA_LOG_LIMIT=many), lambda: Flags(log_limit=10**5000),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="at most 18 digits, got") as told:
            call()
        assert len(str(told.value)) < 150


def test_numbers_and_auto(tmp_path):
    flags = no_config(
        tmp_path, NSA_SEL_TRITON_MIN_L="1", NSA_SEL_TRITON_BLOCK_L="128",
        NSA_SEL_TRITON_BLOCK_D="auto", NSA_LOG_LIMIT="0",
    )  # fmt: skip
    assert (flags.sel_triton_min_L, flags.sel_triton_block_l) == (1, 128)
    assert (flags.sel_triton_block_d, flags.log_limit) == (None, 0)


def test_precedence_environment_then_device_then_runtime_then_default(tmp_path):
    text = """
runtime:
  sel_triton_min_L: 2048
  fa2_min_len_win: 99
  devices:
    NVIDIA H200: {sel_triton_min_L: 256, use_triton_sel: true}
"""
    here = config(tmp_path, text, "NVIDIA H200")
    assert (here.sel_triton_min_L, here.use_triton_sel, here.fa2_min_len_win) == (256, True, 99)
    other = config(tmp_path, text, "NVIDIA A100")
    assert (other.sel_triton_min_L, other.use_triton_sel) == (2048, None)
    env = config(tmp_path, text, "NVIDIA H200", NSA_SEL_TRITON_MIN_L="64", NSA_USE_TRITON_SEL="0")
    assert (env.sel_triton_min_L, env.use_triton_sel) == (64, False)
    source = {r["name"]: r["source"] for r in env.effective()}
    assert source["NSA_SEL_TRITON_MIN_L"] == "env NSA_SEL_TRITON_MIN_L"
    assert source["NSA_FA2_MIN_LEN_WIN"] == "c.yaml runtime"
    assert source["NSA_FA2_MIN_LEN_CMP"] == "default"
    source = {r["name"]: r["source"] for r in here.effective()}
    assert source["NSA_SEL_TRITON_MIN_L"] == "c.yaml runtime.devices.NVIDIA H200"
    assert {"name": "NSA_USE_FA2", "value": True, "source": "argument"} in Flags(
        use_fa2=True
    ).effective()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("runtime: {use_tritn_sel: 1}", "use_tritn_sel.*did you mean use_triton_sel"),
        ("runtime: {sel_triton_min_L: soon}", "sel_triton_min_L.*soon"),
        ("runtime: {devices: {X: {use_fa2: 7}}}", "runtime.devices.X.use_fa2"),
        ("runtime: [1]", "runtime must be a mapping"),
        ("runtime: []", r"runtime must be a mapping, got \[\]"),
        ("[]", r"c.yaml must be a mapping, got \[\]"),
        ("runtime: {devices: []}", "runtime.devices must be a mapping, got"),
        ("runtime: {devices: {X: 3}}", "runtime.devices.X must be a mapping, got 3"),
        ("runtime: {devices: {Y: 0}}", "runtime.devices.Y must be a mapping, got 0"),
        ("runtime: {a: [}", "not valid YAML"),
    ],
)
def test_bad_config_is_an_error_that_names_the_key(text, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        config(tmp_path, text, "X")


def test_a_replaced_value_is_an_argument(tmp_path):
    flags = config(tmp_path, "runtime: {fa2_min_len_win: 99}", "X", NSA_SEL_TRITON_MIN_L="64")
    changed = replace(flags, sel_triton_min_L=4096, fa2_min_len_win=7, use_fa2=True)
    assert [changed.source(n) for n in ("sel_triton_min_L", "fa2_min_len_win", "use_fa2")] == [
        "argument"
    ] * 3
    same = replace(flags, use_fa2=True)
    assert same.source("sel_triton_min_L") == "env NSA_SEL_TRITON_MIN_L"
    assert same.source("log_limit") == "default"


def test_an_empty_section_says_nothing(tmp_path):
    for text in ("", "runtime:", "runtime: {devices: }", "runtime: {devices: {X: }}"):
        assert config(tmp_path, text, "X") == Flags()


def test_shipped_config_is_valid():
    """It leaves the kernels on, and no device's entry turns them off."""
    for device in (None, "NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        flags = Flags.from_env({}, device_name=device)
        assert flags.use_triton_sel is None and flags.sel_triton_allow_grad is None
        assert (flags.sel_triton_min_L or 1) >= 1


@pytest.mark.parametrize("name", ["NSA_DEBUG_LOG", "NSA_DEBUG_TRITON"])
def test_alias_suffices_alone(name, tmp_path):
    assert no_config(tmp_path, **{name: "1"}).debug_log
    both = {"NSA_DEBUG_LOG": "0", "NSA_DEBUG_TRITON": "0", name: "1"}
    assert no_config(tmp_path, **both).debug_log


def test_unknown_variable_warns_once_with_the_nearest_name(tmp_path, monkeypatch):
    monkeypatch.setattr(flags_module, "_warned", set())
    env = {"NSA_USE_TRITON_SELL": "1", "NSA_RESULT_FD": "5", "OTHER": "x"}
    assert unknown_names(env) == [("NSA_USE_TRITON_SELL", "NSA_USE_TRITON_SEL")]
    with pytest.warns(UserWarning, match="NSA_USE_TRITON_SELL.*did you mean NSA_USE_TRITON_SEL"):
        no_config(tmp_path, **env)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        no_config(tmp_path, **env)


def test_contradiction_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="NSA_FA2_FORCE_VARLEN and NSA_FA2_FORCE_DENSE"):
        no_config(tmp_path, NSA_FA2_FORCE_VARLEN="1", NSA_FA2_FORCE_DENSE="1")


def test_flags_argument_is_checked():
    with pytest.raises(TypeError, match="use_triton_sel"):
        Flags(use_triton_sel=1)
    with pytest.raises(ValueError, match="sel_triton_min_L"):
        Flags(sel_triton_min_L=-3)
    with pytest.raises(ValueError, match="sel_triton_block_l"):
        Flags(sel_triton_block_l=100)


def test_cached_once_per_process_until_cleared(monkeypatch):
    before = get_flags()
    monkeypatch.setenv("NSA_SEL_TRITON_MIN_L", "77")
    assert get_flags() is before
    flags_module.clear_flags_cache()
    assert get_flags().sel_triton_min_L == 77
    row = next(r for r in get_flags().effective() if r["name"] == "NSA_SEL_TRITON_MIN_L")
    assert row == {
        "name": "NSA_SEL_TRITON_MIN_L", "value": 77, "source": "env NSA_SEL_TRITON_MIN_L"
    }  # fmt: skip


def test_no_other_file_of_the_package_reads_the_environment():
    allowed = {"nsa/flags.py"}
    for path in ROOT.glob("nsa/**/*.py"):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("nsa/tests/") or name in allowed:
            continue
        text = path.read_text()
        for line in text.splitlines():
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


def test_each_device_has_an_entry_of_its_own(tmp_path, monkeypatch):
    path = tmp_path / "base.yaml"
    monkeypatch.setattr(flags_module, "CONFIG_PATH", path)
    assert Flags.from_env({}).sel_triton_min_L is None  # there is no such file
    path.write_text("runtime: {sel_triton_min_L: 77, devices: {X: {sel_triton_min_L: 9}}}\n")
    by_device = [get_flags(name).sel_triton_min_L for name in (None, "X", "Y", "X")]
    assert by_device == [77, 9, 77, 9] and get_flags("X") is get_flags("X")
