"""A decode step in one launch on Hopper: cluster.cu, compiled at run time, and who may take it.

Blocks of a thread block cluster write into each other's shared memory and wait for what arrives
there, which Triton does not offer. With it the phases of a step follow each other in one kernel,
which also keeps the memory busy while blocks are chosen. H200, 64 heads in 4 groups, by graph,
us: one sequence of 8k tokens 17.5 -> 13.7, of 64k 24.5 -> 17.7, 16 of them 78.6 -> 57.6, 64 of 32k
148 -> 122.

Several new tokens are that many steps side by side, each with its own length, whose keys come from
the L2 after the first. (A thread block that attended for several tokens was slower: docs/lab.md.)

Caches of float8_e4m3fn are half the bytes: twice as many stages keep as many under way.

NVRTC, which comes with PyTorch, compiles the kernel for its sizes when it is first asked for; the
result is kept beside what Triton keeps. Whatever is not served goes to the kernels of step.py.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa import launches
from nsa.errors import must_raise
from nsa.flags import get_flags
from nsa.kernels.launch import is_planned, pass_over
from nsa.kernels.tiles import arch_of, cdiv, pow2, sm_count
from nsa.log import warn_once

NAME = "_decode_cluster_kernel"
SOURCE = Path(__file__).with_suffix(".cu")
UNIT = 16  # keys that a warp takes at a time
HEADS = 16  # rows of a product
HEAD_SIZES = (64, 64), (128, 64), (128, 128), (192, 128)  # of keys and values
MOST_TOKENS = 8
MOST_SELECTED = 32
SHARED_MOST = {1: 227 << 10, 2: 113 << 10}  # bytes of a block, of so many on a multiprocessor
SMS = 132  # of an H100 or H200 (SXM), for which the following is
# For up to so many programs (sequences * groups * new tokens, a cluster each): blocks of a cluster,
# warps of a block, and how many blocks a multiprocessor takes, which the rest have as well. Large
# clusters do not fit beside each other as often as their blocks would: H200, 16 of 8 blocks take
# turns.
SHAPES = ((4, 16, 8, 1), (8, 8, 8, 1), (16, 4, 8, 1), (32, 4, 4, 2), (66, 2, 8, 1), (132, 2, 4, 2))
REST = (1, 4, 2)
MOST_BLOCKS = 16  # of a cluster
TOLD = 4  # units of each block up to which every block is told all block sums
# Programs up to which the window comes before the choice, in contexts where every block is told
# all. Blocks of few units have four warps then, whose outputs are sooner summed.
EARLY_PROGRAMS, EARLY_UNITS, EARLY_WARPS = 4, 2, 4
MOST_SEQUENCES = 65535  # times new tokens: the second extent of a grid
MODES = {None: 0, "cmp": 1, "sel": 2, "win": 3}
GATES = {torch.float32: "float", torch.bfloat16: "u16", torch.float16: "u16"}
_PARAMS = struct.Struct("12Q6if4x")
_DESCALES = struct.Struct("2Q")  # behind those, with FP8


class StepProblem(NamedTuple):
    """All that the kernels of a decode step depend on: `tokens` new ones of each sequence, head
    sizes dim of keys and dv of values, caches in pages of `page` tokens (0: not in pages), the
    window in a ring, compressed keys in pages of cmp_page rows."""

    device: torch.device
    batch: int
    tokens: int
    hq: int
    groups: int
    dim: int
    dv: int
    dtype: torch.dtype
    gate_dtype: torch.dtype
    l: int
    d: int
    l_sel: int
    n_sel: int
    n_init: int
    n_local: int
    window: int
    max_len: int
    page: int = 0
    ring: bool = False
    cmp_page: int = 0
    fp8: bool = False


class Unavailable(RuntimeError):
    """NVRTC or the driver's interface is not here, or refuses."""


@dataclass(frozen=True)
class ClusterPlan:
    """cluster: blocks of one; units: of compressed keys that a block may get; early: EARLY of
    cluster.cu."""

    problem: StepProblem = field(compare=False)
    cluster: int
    warps: int
    occupancy: int
    units: int
    early: bool

    @property
    def stages(self) -> int:
        return 4 if self.problem.fp8 else 2

    @property
    def told(self) -> int:
        return min(TOLD, self.units) if self.cluster > 1 else 0

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the rings of keys, then `Shared` of cluster.cu."""
        p = self.problem
        free = p.n_sel - p.n_init - p.n_local
        rings = self.warps * self.stages * UNIT * (p.dim + p.dv) * (1 if p.fp8 else 2)
        parts = HEADS * (p.dim * 2 + p.dv * 8 * (self.cluster > 1))
        normalisers = 3 * HEADS * 8 * (self.cluster + self.warps) + HEADS * 8
        kept = max(self.units, self.cluster * self.told)
        keys = 4 * (4 * kept + 2 * self.cluster * free + 2 * free + p.n_sel)
        keys += 8 * 4 * self.units
        parts += HEADS * 4 * p.fp8  # scales of the queries
        return rings + parts + normalisers + keys + kept * HEADS * (4 + 2 + 8) + 128

    @property
    def macros(self) -> dict[str, Any]:
        """What cluster.cu is compiled with for this."""
        p = self.problem
        return dict(
            BF16=int(p.dtype == torch.bfloat16), GATE=GATES[p.gate_dtype], TOKENS=p.tokens,
            HEADS=p.hq // p.groups, L=p.l, STRIDE=p.d, L_SEL=p.l_sel, N_SEL=p.n_sel,
            N_INIT=p.n_init, N_LOCAL=p.n_local, WINDOW=p.window, OVERLAP=int(p.l > p.d),
            PAGE=p.page, RING=int(p.ring), CMP_PAGE=p.cmp_page, D=p.dim, DV=p.dv, FP8=int(p.fp8),
            CLUSTER=self.cluster, WARPS=self.warps, STAGES=self.stages, OCCUPANCY=self.occupancy,
            UNITS=self.units, TOLD=self.told, EARLY=int(self.early), SHARED=self.shared, SMS=SMS,
        )  # fmt: skip


def why_not(p: StepProblem) -> str | None:
    """Why this step has no cluster kernel, None when it has."""
    heads = p.hq // p.groups
    if p.gate_dtype not in (torch.float32, p.dtype):
        return f"gates are fp32 or as the keys, got {p.gate_dtype}"
    if not 1 <= p.tokens <= MOST_TOKENS or not 1 <= heads <= HEADS:
        return f"{MOST_TOKENS} tokens of up to {HEADS} heads a group, got {p.tokens} of {heads}"
    if p.dtype not in (torch.float16, torch.bfloat16) or (p.dim, p.dv) not in HEAD_SIZES:
        return f"fp16 or bf16 heads of {HEAD_SIZES}, got {p.dtype} of {p.dim} and {p.dv}"
    if p.l_sel != 4 * p.d or p.l not in (p.d, 2 * p.d) or p.l_sel % UNIT:
        return f"l_sel = 4 d, l = d or 2 d, got l={p.l}, d={p.d}, l_sel={p.l_sel}"
    if not 1 <= p.n_local < p.n_sel - p.n_init or p.n_sel > MOST_SELECTED:
        return f"local and chosen blocks among up to {MOST_SELECTED}, got n_sel={p.n_sel}"
    if p.page % UNIT or p.window < UNIT:
        kinds = f"pages of multiples of {UNIT} tokens, windows of {UNIT}"
        return f"{kinds}, got {p.page} and {p.window}"
    return None


def plan(p: StepProblem, sms: int = SMS) -> ClusterPlan | None:
    """None where block sums do not fit."""
    filled = p.batch * p.tokens * p.groups * SMS / sms
    least, warps, occupancy = next((x for most, *x in SHAPES if filled <= most), REST)
    all_units = cdiv(cdiv(p.max_len, p.l_sel), 4)
    while occupancy:
        cluster = least
        while cluster <= MOST_BLOCKS:
            units = pow2(cdiv(all_units, cluster))
            early = cluster > 1 and filled <= EARLY_PROGRAMS and units <= TOLD
            if early and units <= EARLY_UNITS:
                warps = EARLY_WARPS
            found = ClusterPlan(p, cluster, warps, occupancy, units, early)
            if found.shared <= SHARED_MOST[occupancy]:
                return found
            cluster *= 2
        occupancy, warps = occupancy - 1, 2 * warps  # wide keys: one block instead of two
    return None


def compile_cluster(macros: Iterable[tuple[str, Any]], arch: int) -> bytes:
    """cluster.cu as a cubin for sm_`arch`. Raises Unavailable, with the compiler's words."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise Unavailable(f"cuda.bindings cannot be imported: {error}") from error
    options = [f"--gpu-architecture=sm_{arch}", "--std=c++17"]
    options = [x.encode() for x in (*options, *(f"-D{name}={x}" for name, x in macros))]
    source = SOURCE.read_bytes()
    program = _check(*nvrtc.nvrtcCreateProgram(source, b"cluster.cu", 0, [], []))
    try:
        code, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if code:
            size = _check(*nvrtc.nvrtcGetProgramLogSize(program))
            log = bytes(size)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise Unavailable(f"{code.name}: {log.decode(errors='replace').strip()}")
        cubin = bytes(_check(*nvrtc.nvrtcGetCUBINSize(program)))
        _check(*nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _check(code: Any, *values: Any) -> Any:
    if code:
        raise Unavailable(f"{type(code).__name__}: {code.name}")
    return values[0] if values else None


def _cubin(macros: tuple[tuple[str, Any], ...], arch: int) -> bytes:
    """compile_cluster() through Triton's cache of compiled kernels."""
    from cuda.bindings import nvrtc
    from triton.runtime.cache import get_cache_manager

    version = nvrtc.nvrtcVersion()
    known = repr((SOURCE.read_bytes(), macros, arch, version))
    cache = get_cache_manager(hashlib.sha256(known.encode()).hexdigest())
    kept = cache.get_file("cluster.cubin")
    if kept:
        return Path(kept).read_bytes()
    cubin = compile_cluster(macros, arch)
    cache.put(cubin, "cluster.cubin", binary=True)
    return cubin


@dataclass(frozen=True)
class ClusterKernel:
    """A loaded kernel and how it is launched."""

    function: Any
    launch: Any  # cuLaunchKernel
    grid: tuple[int, int]
    threads: int
    shared: int

    def __call__(
        self, tensors: tuple[Tensor, ...], numbers: tuple[int, ...], scale_log2: float,
        descales: tuple[Tensor, ...] = (),
    ) -> bool:  # fmt: skip
        """Launch; False where a tensor does not begin at 16 bytes, and nothing is launched.

        tensors and numbers in the order of `Params` of cluster.cu; descales with FP8.
        """
        addresses = [x.data_ptr() for x in tensors]
        if any([at % 16 for at in addresses[:7]]):  # queries, keys and values
            return False
        if is_planned(NAME):
            return True
        params = _PARAMS.pack(*addresses, *numbers, scale_log2)
        if descales:
            params += _DESCALES.pack(*[x.data_ptr() for x in descales])
        packed = ctypes.create_string_buffer(params, len(params))
        pointer = ctypes.c_void_p(ctypes.addressof(packed))
        stream = torch._C._cuda_getCurrentRawStream(tensors[0].device.index)
        code, *_ = self.launch(
            self.function, *self.grid, 1, self.threads, 1, 1, self.shared, stream,
            ctypes.addressof(pointer), 0,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"{NAME}: {code.name}")
        launches.bump(NAME, library=True)  # Triton's hook does not see it
        return True


def cluster_kernel(use_cluster: bool | None, problem: StepProblem) -> ClusterKernel | None:
    """The kernel for such steps, None where step.py's serve.

    use_cluster: Flags.use_cluster, None for this process's. The first call of a size compiles.
    """
    device = problem.device
    if use_cluster is False or arch_of(device) != 90:
        return None
    if use_cluster is None and not get_flags(torch.cuda.get_device_name(device)).use_cluster:
        return None
    found = _kernel(problem)
    if isinstance(found, str):
        pass_over(NAME, found)
        return None
    return found


@functools.lru_cache(maxsize=256)
def _kernel(p: StepProblem) -> ClusterKernel | str:
    """The kernel, or why it does not serve."""
    reason = why_not(p)
    if reason:
        return reason
    found, sequences = plan(p, sm_count(p.device)), p.batch * p.tokens
    if found is None or sequences > MOST_SEQUENCES:
        return "its block sums do not fit, or there are too many sequences"
    function = _function(p.device, tuple(found.macros.items()))
    if function is None:
        return "NVRTC or cuda.bindings is not there"
    grid = p.groups * found.cluster, sequences
    return ClusterKernel(*function, grid, 32 * found.warps, found.shared)


# Of all lengths that take as many units, and never unloaded, since a graph may hold the function:
# seven shapes and a power of two of units for a layer's sizes.
@functools.cache
def _function(device: torch.device, macros: tuple[tuple[str, Any], ...]) -> tuple[Any, Any] | None:
    """The kernel so compiled and cuLaunchKernel, None where they cannot be had."""
    try:
        return _load(dict(macros))
    except RuntimeError as error:  # Unavailable, and what cuda.bindings raises without a library
        if must_raise(error):
            raise
        warn_once(f"decode steps take several launches, since {NAME} cannot be had: {error}")
        return None


def _load(macros: dict[str, Any]) -> tuple[Any, Any]:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise Unavailable(f"cuda.bindings cannot be imported: {error}") from error
    cubin = _cubin(tuple(macros.items()), 90)
    cluster, threads, shared = macros["CLUSTER"], 32 * macros["WARPS"], macros["SHARED"]
    # A graph may be under capture, and loading is no part of it.
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    mode = _check(*driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        module = _check(*driver.cuModuleLoadData(cubin))
        function = _check(*driver.cuModuleGetFunction(module, NAME.encode()))
        kind = driver.CUfunction_attribute
        for attribute, value in (
            (kind.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
            (kind.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
        ):
            _check(*driver.cuFuncSetAttribute(function, attribute, value))
        if cluster > 1 and not _most_clusters(driver, function, cluster, threads, shared):
            raise Unavailable(f"no cluster of {cluster} blocks fits what is there of the GPU")
    finally:
        driver.cuThreadExchangeStreamCaptureMode(mode)
    return function, driver.cuLaunchKernel


def _most_clusters(driver: Any, function: Any, cluster: int, threads: int, shared: int) -> int:
    """How many run at a time: a part of a GPU (MIG, MPS) may have no room for a large one."""
    config, size = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    size.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size.value.clusterDim.x, size.value.clusterDim.y, size.value.clusterDim.z = cluster, 1, 1
    config.attrs, config.numAttrs = [size], 1
    return _check(*driver.cuOccupancyMaxActiveClusters(function, config))
