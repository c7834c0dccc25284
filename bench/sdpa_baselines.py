"""Dense attention by each backend of torch's SDPA, as benches compare with: who takes a call, and
why the others do not."""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.formulation import watch, why_another
from nsa import launches
from nsa.errors import is_sticky

BACKENDS = dict(flash=SDPBackend.FLASH_ATTENTION, efficient=SDPBackend.EFFICIENT_ATTENTION,
                cudnn=SDPBackend.CUDNN_ATTENTION, math=SDPBackend.MATH)  # fmt: skip
FORMULATIONS = ("gqa", "mqa_rows")


@dataclass(frozen=True)
class Usable:
    """calls: name -> one call of that baseline. refused: name -> why it cannot run here. expanded:
    names of those that copy the keys to every head."""

    calls: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    expanded: set[str] = field(default_factory=set)

    def label(self, name: str) -> str:
        """The name of a call with what the call does besides."""
        return f"{name} expanded" if name in self.expanded else name

    def why_none(self) -> str:
        """What to say where no call is usable; empty where one is."""
        if self.calls:
            return ""
        return "; ".join(f"{name}: {why}" for name, why in self.refused.items()) or "none was tried"


def usable(calls: Mapping[str, Callable[[], Tensor]]) -> Usable:
    """Which of these calls really run here, each tried once.

    Too little memory for one is a reason as any other. Raises an error after which the device
    cannot be used any more.
    """
    found = Usable()
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")  # a backend that refuses says there why
            try:
                with torch.no_grad():
                    ran = watch(call)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
            except RuntimeError as error:
                if is_sticky(error):
                    raise
                words = [str(error), *(str(w.message) for w in said)]
                found.refused[name] = _first_reason(words)
                continue
        if ran.expanded:
            found.expanded.add(name)
        if why := why_another(promised(name), found.label(name), ran):
            found.refused[name] = why
            continue
        found.calls[name] = call
    return found


def promised(name: str) -> str | None:
    """The backend in a baseline's name: "dense sdpa flash gqa", "sdpa_flash_gqa"; None without."""
    match = re.search(rf"sdpa[_ ]({'|'.join(BACKENDS)})", name)
    return match and match[1]


def _first_reason(words: list[str]) -> str:
    """The most telling line: torch warns why each backend was refused, then raises in general."""
    lines = [w.split(" (Triggered internally")[0].strip() for w in words]
    telling = [x for x in lines[1:] if x and not x.endswith("not used because:")]
    return (telling or lines)[0].splitlines()[0]


def packed_sdpa(Q: Tensor, K: Tensor, V: Tensor, *, backend: str, formulation: str) -> Tensor:
    """One SDPA call, on exactly the named backend, for rows with keys of their own.

    Q [N, H, D], K [N, L, D], V [N, L, Dv] -> [N, H, Dv]. formulation "gqa": H heads share one K
    head (enable_gqa); "mqa_rows": the H heads are query rows of one head. Both are views. backend:
    a name of BACKENDS. Raises RuntimeError when the backend cannot run the call.
    """
    with sdpa_kernel(BACKENDS[backend]):
        if formulation == "mqa_rows":
            out = F.scaled_dot_product_attention(Q[:, None], K[:, None], V[:, None])[:, 0]
        else:
            out = F.scaled_dot_product_attention(
                Q[:, :, None], K[:, None], V[:, None], enable_gqa=True
            )[:, :, 0]
    launches.bump(f"sdpa_{backend}_{formulation}", library=True)
    return out


def packed_baselines(Q: Tensor, K: Tensor, V: Tensor) -> Usable:
    """Every packed_sdpa that runs on Q [N, H, D], K [N, L, D], V [N, L, Dv].

    Names are "sdpa_<backend>_<formulation>".
    """
    calls = {
        f"sdpa_{backend}_{form}": partial(packed_sdpa, Q, K, V, backend=backend, formulation=form)
        for backend in BACKENDS
        for form in FORMULATIONS
    }
    return usable(calls)
