"""NSAConfig: the sizes of one NSA layer, in the paper's symbols, checked once."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class NSAConfig:
    """Sizes of an NSA layer (arXiv 2502.11089, section 3; the defaults are the paper's).

    dim: model width. heads: query heads HQ. groups: KV groups G, a divisor of heads.
    d_k, d_v: head dimensions of q/k and of v. l, d: compression block length and stride.
    l_sel: selection block length. n_sel: blocks per query, forced ones included. n_init, n_local:
    forced blocks at the start and around the query (its own block and those before it), no more
    than n_sel in all. window: tokens of the sliding window, the paper's w, by which name it may be
    given instead (type checkers know `window` only). rope_base: rotary base. phi: "mlp" or "mean"
    compression. Raises ValueError or TypeError that names the field.
    """

    dim: int
    heads: int
    groups: int
    d_k: int
    d_v: int
    l: int = 32
    d: int = 16
    l_sel: int = 64
    n_sel: int = 16
    n_init: int = 1
    n_local: int = 2
    window: int = 512
    rope_base: float = 10000.0
    phi: str = "mlp"

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "groups", "d_k", "d_v"):
            check_int(name, getattr(self, name), 1)
        check_sizes(**self.sizes())
        if self.heads % self.groups:
            raise ValueError(
                f"groups must divide heads, got heads={self.heads} groups={self.groups}"
            )
        if self.d_k % 2:
            raise ValueError(f"d_k must be even for the rotary embedding, got {self.d_k}")
        if not isinstance(self.rope_base, (int, float)) or not 1 < self.rope_base < 1e300:
            raise ValueError(f"rope_base must be a finite number above 1, got {self.rope_base!r}")
        if self.phi not in ("mlp", "mean"):
            raise ValueError(f"phi must be 'mlp' or 'mean', got {self.phi!r}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of one that was pickled when the window was called w as well."""
        vars(self).update({_NAMES.get(name, name): value for name, value in state.items()})

    @property
    def w(self) -> int:
        """The window, in the paper's symbol."""
        return self.window

    @property
    def heads_per_group(self) -> int:
        """h: query heads that share one KV group."""
        return self.heads // self.groups

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Columns of a layer's queries, and of its keys and values in three branches each."""
        kv = 3 * self.groups
        return self.heads * self.d_k, kv * self.d_k, kv * self.d_v

    def sizes(self) -> dict[str, Any]:
        """The sizes as nsa_attention and the kernels take them by name."""
        return dict(
            l=self.l, d=self.d, l_sel=self.l_sel, n_sel=self.n_sel, n_init=self.n_init,
            n_local=self.n_local, window=self.window,
        )  # fmt: skip

    @classmethod
    def from_yaml(cls, path: str | Path) -> NSAConfig:
        """Read the `model` and `nsa` sections of a YAML file such as configs/base.yaml.

        Raises ValueError that names an unknown key, a missing section, or two keys for one setting.
        """
        import yaml

        try:
            document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is no YAML: {str(error)[:200]}") from None
        if not isinstance(document, dict):
            raise ValueError(f"{path} must hold a mapping with sections model and nsa")
        names = [f.name for f in dataclasses.fields(cls)]
        values: dict[str, Any] = {}
        places: dict[str, str] = {}
        for section in ("model", "nsa"):
            entries = document.get(section)
            if not isinstance(entries, dict):
                raise ValueError(f"{path}: section {section} must be a mapping, got {entries!r}")
            for key, value in entries.items():
                place, key = f"{section}.{key}", _NAMES.get(key, key)
                if key not in names:
                    near = difflib.get_close_matches(str(key), names, n=1)
                    hint = f"; did you mean {near[0]}?" if near else ""
                    raise ValueError(f"{path}: {place} is not a setting{hint}")
                if key in places:
                    raise ValueError(
                        f"{path}: {places[key]} and {place} are one setting, to be given once, got "
                        f"{values[key]!r} and {value!r}"
                    )
                values[key], places[key] = value, place
        missing = [
            f.name for f in dataclasses.fields(cls)
            if f.default is dataclasses.MISSING and f.name not in values
        ]  # fmt: skip
        if missing:
            raise ValueError(f"{path}: missing {', '.join(missing)}")
        return cls(**values)


_NAMES = {"w": "window"}  # the paper's, under which it went before


def _either_name(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: NSAConfig, *args: Any, **sizes: Any) -> None:
        for old, name in _NAMES.items():
            if old in sizes and name in sizes:  # as dataclasses.replace(config, w=...) has them
                raise ValueError(
                    f"{name} and {old} are one setting, to be given once as {name}, got "
                    f"{name}={sizes[name]!r} {old}={sizes[old]!r}"
                )
            if old in sizes:
                sizes[name] = sizes.pop(old)
        init(self, *args, **sizes)

    return __init__


NSAConfig.__init__ = _either_name(NSAConfig.__init__)  # type: ignore[method-assign]


MOST_INT = 2**31 - 1  # sizes and lengths are int32 on the device


def check_int(name: str, value: Any, least: int, *, optional: bool = False) -> None:
    """Raise TypeError or ValueError unless value is an int from `least` on, or None if optional.

    The symbol that stands for a length in a traced call is an int.
    """
    if optional and value is None:
        return
    none = "None or " if optional else ""
    if isinstance(value, bool) or not isinstance(value, int) and not _is_symbol(value):
        raise TypeError(f"{name} must be {none}an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be {none}at least {least}, got {value}")
    if isinstance(value, int) and value > MOST_INT:
        raise ValueError(f"{name} must be {none}at most {MOST_INT}, got {value}")


def _is_symbol(value: Any) -> bool:
    torch = sys.modules.get("torch")  # without which there is none
    return torch is not None and isinstance(value, torch.SymInt)


def check_compression(l: int, d: int) -> None:
    """Raise TypeError or ValueError unless d divides l."""
    check_int("l", l, 1)
    check_int("d", d, 1)
    if l % d:
        raise ValueError(f"d must divide l, got l={l} d={d}")


def check_blocks(l: int, d: int, l_sel: int) -> None:
    """Raise TypeError or ValueError unless d divides l and l_sel (the paper's condition on block
    sizes)."""
    for name, value in (("l", l), ("d", d), ("l_sel", l_sel)):
        check_int(name, value, 1)
    if l % d or l_sel % d:
        raise ValueError(f"d must divide l and l_sel, got l={l} d={d} l_sel={l_sel}")


def check_sizes(**sizes: int) -> dict[str, int]:
    """nsa_attention's sizes, by their names; a TypeError or ValueError names a wrong one."""
    check_blocks(sizes["l"], sizes["d"], sizes["l_sel"])
    check_choice(sizes["n_sel"], sizes["n_init"], sizes["n_local"])
    check_int("window", sizes["window"], 1)
    return sizes


def check_choice(n_sel: int, n_init: int, n_local: int) -> None:
    """Raise TypeError or ValueError unless n_sel blocks hold those that are always chosen."""
    for name, value, least in (("n_sel", n_sel, 1), ("n_init", n_init, 0), ("n_local", n_local, 1)):
        check_int(name, value, least)
    if n_sel < n_init + n_local:
        raise ValueError(
            "n_sel must be at least n_init + n_local, the blocks that are always chosen, got "
            f"n_sel={n_sel} n_init={n_init} n_local={n_local}"
        )
