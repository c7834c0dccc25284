"""Every NSA_* environment variable: its type, default and meaning, read here and nowhere else.

Precedence of a value: argument (`Flags(...)` passed to a function) > environment >
configs/base.yaml `runtime` (the entry of this device first; a wheel has a copy) > default.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import reprlib
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_warned: set[str] = set()  # of unknown names
CONFIG_PATH = Path(__file__).with_name("base.yaml")  # in a checkout a link to that of configs/
SECTIONS = ("model", "nsa", "runtime")  # of such a file; the first two are NSAConfig.from_yaml's

# Of the report runner and the benches; not settings of the library.
RUNNER_VARIABLES = ("NSA_RESULT_FD", "NSA_OUT_DIR", "NSA_COMMIT", "NSA_PROBE_SEED")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("one of 1/true/yes/on or 0/false/no/off")


def _parse_count(text: str) -> int:
    if not re.fullmatch(r"\s*\d{1,18}\s*", text, re.ASCII):
        raise ValueError("an integer of 0 or more, of at most 18 digits")
    return int(text)


def _or_none(parse: Any, *words: str) -> Any:
    """A parser to which these words mean None; its errors name them."""
    named = " or ".join(filter(None, words))  # an empty value is as good as no variable

    def either(text: str) -> Any:
        if text.strip().lower() in words:
            return None
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(f"{named}, or {error}") from None

    return either


def _parse_tile(text: str) -> int:
    value = _parse_count(text)
    if value < 16 or value & (value - 1):
        raise ValueError("a power of two of at least 16")
    return value


_TILE = _or_none(_parse_tile, "", "auto", "none")
_SWITCH = _or_none(_parse_bool, "auto", "none")
_PARSERS = {bool: _parse_bool, int: _parse_count}  # by the type of the default


def _flag(default: Any, doc: str, parse: Any = None, *, alias: str | None = None) -> Any:
    parse = parse or _PARSERS[type(default)]
    return field(default=default, metadata={"parse": parse, "doc": doc, "alias": alias})


@dataclass(frozen=True)
class Flags:
    """One immutable set of settings; a field is its variable in lower case without NSA_.

    `Flags()` holds the defaults, `Flags.from_env()` what this process was started with.
    Raises TypeError or ValueError that names the field for a value of the wrong kind.
    """

    use_triton_sel: bool | None = _flag(
        None, "kernels (Triton, Gluon, CUDA C++): auto or 1, wherever they serve; 0, nowhere",
        _SWITCH,
    )  # fmt: skip
    triton_sel_force: bool = _flag(False, "override the SM 8.9 policy; experiments only")
    sel_triton_allow_grad: bool | None = _flag(
        None, "the kernels' backward: auto or 1, as the forward; 0, calls that need a gradient "
        "take PyTorch", _SWITCH,
    )  # fmt: skip
    sel_triton_min_L: int | None = _flag(
        None, "least selected length of a row for Triton instead of packed SDPA, where "
        "selection_attention is called alone; auto: 64, on SM 8.9 4096",
        _or_none(_parse_count, "auto", "none"),
    )  # fmt: skip
    sel_triton_group: bool = _flag(
        False, "group-centric kernels: one program serves all heads of a KV group"
    )
    sel_triton_block_d: int | None = _flag(None, "tile over Dk, or auto", _TILE)
    sel_triton_block_l: int | None = _flag(None, "tile over keys, or auto", _TILE)
    sel_triton_block_dv: int | None = _flag(None, "tile over Dv, or auto", _TILE)
    use_gluon: bool = _flag(
        True, "Gluon kernels where SM and Triton are ones that they were run with, else Triton's"
    )
    use_cluster: bool = _flag(
        True, "decode steps by thread block clusters where SM and sizes allow, else Triton's"
    )
    use_sel_pack: bool = _flag(True, "packed SDPA is the selection fallback")
    force_parity: bool = _flag(False, "reference path only: no Triton, no FA-2, no SDPA")
    use_fa2: bool = _flag(False, "FA-2 for the sliding and compressed branches")
    fa2_min_len_win: int = _flag(16, "shorter sliding key lengths do not use FA-2")
    fa2_min_len_cmp: int = _flag(16, "shorter compressed key lengths do not use FA-2")
    fa2_force_varlen: bool = _flag(False, "always the varlen FA-2 path (debug)")
    fa2_force_dense: bool = _flag(False, "always the dense FA-2 path (debug)")
    debug_timing: bool = _flag(False, "log bucket and packing times and path decisions")
    debug_shapes: bool = _flag(False, "log shapes and strides")
    debug_compare: bool = _flag(False, "log the error against the reference (slow)")
    debug_log: bool = _flag(
        False,
        "log device, fallbacks with their reason and reads: sel.triton.*, fa2.* and the like",
        alias="NSA_DEBUG_TRITON",
    )
    log_limit: int | None = _flag(
        None, "cap on repeats of a log tag, or none", _or_none(_parse_count, "", "none")
    )
    test_triton_sel: bool = _flag(False, "Triton GPU tests must run: a skip is a failure")
    test_fa2: bool = _flag(False, "FA-2 GPU tests must run: a skip is a failure")
    test_train: bool = _flag(False, "training GPU tests must run: a skip is a failure")
    # Field -> (value, where from_env() found it).
    sources: Mapping[str, tuple[Any, str]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for f in flag_fields():
            value = getattr(self, f.name)
            try:
                parsed = f.metadata["parse"](_as_text(value))
            except ValueError as e:
                raise ValueError(f"Flags.{f.name} must be {e}, got {_short(value)}") from None
            if type(parsed) is not type(value):
                kind = "None (auto)" if parsed is None else type(parsed).__name__
                raise TypeError(f"Flags.{f.name} must be {kind}, got {value!r}")
        if self.fa2_force_varlen and self.fa2_force_dense:
            raise ValueError("NSA_FA2_FORCE_VARLEN and NSA_FA2_FORCE_DENSE exclude each other")

    def __hash__(self) -> int:
        # Kept: a key in every call, and of some twenty fields 2 us a time.
        kept = vars(self).get("_hash")
        if kept is None:
            kept = hash(tuple(getattr(self, f.name) for f in flag_fields()))
            object.__setattr__(self, "_hash", kept)
        return kept

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash, which is another one in another process."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @classmethod
    def from_env(
        cls,
        mapping: Mapping[str, str] | None = None,
        *,
        config_path: str | Path | None = None,
        device_name: str | None = None,
    ) -> Flags:
        """Read settings from `mapping` (default os.environ) over the YAML file's `runtime`.

        device_name selects the entry of `runtime.devices`; an absent file means no entries.
        Raises ValueError that names the variable or key for a malformed or contradictory value, for
        an unknown key or section, and where config_path is a directory.
        Warns once per unknown NSA_* name, with the nearest known one.
        """
        env = os.environ if mapping is None else mapping
        for name, near in unknown_names(env):
            if name not in _warned:
                _warned.add(name)
                hint = f"; did you mean {near}?" if near else ""
                warnings.warn(f"unknown environment variable {name}{hint}", stacklevel=3)
        path = CONFIG_PATH if config_path is None else Path(config_path)
        values, sources = _runtime_values(path, device_name)
        for f in flag_fields():
            seen: dict[str, Any] = {}
            for name in variables(f):
                try:
                    if name in env:
                        seen[name] = f.metadata["parse"](env[name])
                except ValueError as e:
                    raise ValueError(f"{name} must be {e}, got {_short(env[name])}") from None
            if seen:  # a flag and its alias: either one suffices
                values[f.name] = any(seen.values()) if len(seen) > 1 else next(iter(seen.values()))
                sources[f.name] = (values[f.name], "env " + "+".join(seen))
        return cls(**values, sources=sources)

    def source(self, name: str) -> str:
        """Where field `name` has its value from: "env <variable>", "<file> runtime", "default" or
        "argument", also after dataclasses.replace()."""
        value = getattr(self, name)
        if name in self.sources:
            found, where = self.sources[name]
            return where if found == value else "argument"
        return "default" if value == type(self).__dataclass_fields__[name].default else "argument"

    def effective(self) -> list[dict[str, Any]]:
        """One {name, value, source} per variable, aliases included, for the report."""
        rows = []
        for f in flag_fields():
            value, source = getattr(self, f.name), self.source(f.name)
            shown = "auto" if value is None and f.name != "log_limit" else value
            rows += [{"name": name, "value": shown, "source": source} for name in variables(f)]
        return rows


def flag_fields() -> tuple[dataclasses.Field, ...]:
    """The dataclass fields that are flags; field.metadata holds parse, doc and alias."""
    return tuple(f for f in dataclasses.fields(Flags) if f.metadata)


def variables(f: dataclasses.Field) -> tuple[str, ...]:
    """Names of a flag in the environment: its own, and its alias if it has one."""
    own, alias = f"NSA_{f.name.upper()}", f.metadata["alias"]
    return (own, alias) if alias else (own,)


def known_names() -> tuple[str, ...]:
    """Every NSA_* name that means something, the runner's internal ones included."""
    return (*(name for f in flag_fields() for name in variables(f)), *RUNNER_VARIABLES)


def unknown_names(mapping: Mapping[str, str] | None = None) -> list[tuple[str, str | None]]:
    """(unknown NSA_* variable, nearest known name or None) for each one set in `mapping`."""
    known = known_names()
    return [
        (name, next(iter(difflib.get_close_matches(name, known, n=1)), None))
        for name in sorted(os.environ if mapping is None else mapping)
        if name.startswith("NSA_") and name not in known
    ]


def _as_text(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 1000:  # str() may refuse it
        return _short(value)
    return "none" if value is None else str(value)


def _short(value: Any) -> str:
    """What an error message says that it got: one line, also for a value of a million digits."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)


def _mapping(value: Any, where: str) -> Mapping:
    """A section of the file, {} where it is empty. Raises ValueError for anything but a mapping."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a mapping, got {_short(value)}")
    return value


def _runtime_values(
    path: Path, device_name: str | None
) -> tuple[dict[str, Any], dict[str, tuple[Any, str]]]:
    """Values and sources from the file's `runtime` section: common keys, then the device's."""
    if path.is_dir():
        raise ValueError(f"config_path must be a file, got the directory {path}")
    if not path.is_file():
        return {}, {}
    import yaml  # only here: importing nsa needs the standard library alone

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise ValueError(f"{path.name} is not valid YAML: {str(e)[:200]}") from None
    document = _mapping(document, path.name)
    for section in document:
        if section not in SECTIONS:
            allowed = " or ".join(SECTIONS)
            raise ValueError(f"{path.name}: a section must be {allowed}, got {_short(section)}")
    runtime = _mapping(document.get("runtime"), f"{path.name}: runtime")
    where = f"{path.name}: runtime.devices"
    devices = _mapping(runtime.get("devices"), where)
    of_device = {name: _mapping(entry, f"{where}.{name}") for name, entry in devices.items()}
    fields = {f.name.lower(): f for f in flag_fields()}
    values: dict[str, Any] = {}
    sources: dict[str, tuple[Any, str]] = {}
    common = {k: v for k, v in runtime.items() if k != "devices"}
    sections: list[tuple[str, Mapping]] = [("runtime", common)]
    if device_name in of_device:
        sections.append((f"runtime.devices.{device_name}", of_device[device_name]))
    for where, section in sections:
        for key, raw in section.items():
            f = fields.get(str(key).lower())
            if f is None:
                near = difflib.get_close_matches(str(key).lower(), fields, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"{path.name}: {where}.{key} is not a setting{hint}")
            try:
                values[f.name] = f.metadata["parse"](_as_text(raw))
            except ValueError as e:
                raise ValueError(
                    f"{path.name}: {where}.{key} must be {e}, got {_short(raw)}"
                ) from None
            sources[f.name] = (values[f.name], f"{path.name} {where}")
    return values, sources


_cache: dict[str | None, Flags] = {}
_lock = threading.Lock()


def get_flags(device_name: str | None = None) -> Flags:
    """The flags of this process, read once per device name (see clear_flags_cache).

    What torch.compile compiled keeps those that it was compiled with, until torch.compiler.reset().
    """
    with _lock:
        if device_name not in _cache:
            _cache[device_name] = Flags.from_env(device_name=device_name)
        return _cache[device_name]


# torch.compile calls it once and takes the answer for a constant, as all calls do that follow.
get_flags._dynamo_marked_constant = True  # type: ignore[attr-defined]


def clear_flags_cache() -> None:
    """Forget cached flags, so that the next get_flags() reads the environment again."""
    with _lock:
        _cache.clear()
