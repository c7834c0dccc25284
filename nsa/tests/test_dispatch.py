"""Does dispatch choose the stated route with the stated reason, and fall back only when allowed?"""

import _thread
import contextlib
import pickle
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import nsa
from nsa import device, dispatch, errors
from nsa.dispatch import Branch, Request, Route, RouteUnavailable, decide, guarded, why_not
from nsa.flags import Flags
from nsa.tests.helpers import make_block_indices, make_layer, make_qkv, randn

ROOT = Path(__file__).resolve().parents[2]
GPU = Request(Branch.SELECTED, "cuda", "bfloat16", 128, 128, 8192, capability=(9, 0), no_fa2=None)
ON = Flags(use_fa2=True)  # Triton is wherever it can serve
FA2 = Flags(use_fa2=True, use_triton_sel=False)
WIN, CMP, BLK, STEP, PREFILL = (
    replace(GPU, branch=getattr(Branch, name))
    for name in ("SLIDING", "COMPRESSED", "BLOCKS", "STEP", "PREFILL")
)
CPU = dict(device="cpu", capability=None)
SM89, FORCED = dict(capability=(8, 9)), Flags(triton_sel_force=True)


# What is asked for, what differs of it, flags, and the reason if the first choice is not taken.
DECISIONS = {
    Route.TRITON: [
        (GPU, {}, ON, None), (GPU, {}, Flags(), None), (GPU, SM89, FORCED, None),
        *((GPU, dict(capability=sm), ON, None) for sm in ((8, 0), (8, 6), (12, 0))),
        (GPU, dict(d_k=256, d_v=256), ON, None), (GPU, dict(key_len=64), ON, None),
        (GPU, dict(key_len=None), Flags(sel_triton_min_L=1 << 40), None),
        (GPU, dict(key_len=1), Flags(use_triton_sel=True, sel_triton_min_L=1), None),
        (GPU, dict(needs_grad=True), Flags(), None), (PREFILL, dict(key_len=1), ON, None),
        (WIN, {}, Flags(use_triton_sel=True), "not_enabled"),
        (WIN, dict(key_len=1), Flags(use_triton_sel=True), "not_enabled"),
        (BLK, {}, ON, None), (BLK, dict(key_len=1), ON, None), (STEP, {}, ON, None),
    ],
    Route.FA2: [
        (WIN, {}, ON, None), (CMP, {}, ON, None),
        (WIN, dict(key_len=15), Flags(use_fa2=True, fa2_min_len_win=15), None),
    ],
    Route.SDPA: [
        (GPU, {}, Flags(use_triton_sel=False), "not_enabled"), (GPU, CPU, ON, "no_cuda"),
        (GPU, dict(CPU, interpret=True), ON, "no_cuda"),
        (GPU, dict(has_triton=False), ON, "no_triton"), (GPU, SM89, ON, "sm89_policy"),
        (GPU, dict(capability=(7, 5)), ON, "capability"), (GPU, dict(dtype="float32"), ON, "dtype"),
        (GPU, dict(d_k=100), ON, "align8"), (GPU, dict(d_v=4), ON, "align8"),
        (GPU, dict(d_k=264), ON, "head_dim"), (GPU, dict(key_len=63), ON, "below_min_L"),
        (GPU, dict(SM89, key_len=4095), FORCED, "below_min_L"),
        (GPU, dict(key_len=255), Flags(sel_triton_min_L=256), "below_min_L"),
        (GPU, dict(needs_grad=True), Flags(sel_triton_allow_grad=False), "needs_grad"),
        (WIN, dict(no_fa2="x"), FA2, "no_fa2"), (WIN, dict(key_len=15), FA2, "below_min_len"),
        (CMP, dict(key_len=15), replace(FA2, fa2_min_len_win=1), "below_min_len"),
        (WIN, dict(d_k=264), ON, "head_dim"), (WIN, dict(dtype="float32"), ON, "dtype"),
    ],
    Route.REFERENCE: [
        *((r, {}, replace(ON, force_parity=True), "force_parity") for r in (GPU, WIN)),
        (BLK, dict(d_v=512), ON, "head_dim"), (STEP, dict(needs_grad=True), ON, "needs_grad"),
        (GPU, {}, Flags(use_triton_sel=False, use_sel_pack=False), "not_enabled"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("route", DECISIONS)
def test_decision_table(route):
    for request, change, flags, reason in DECISIONS[route]:
        decision = decide(replace(request, **change), flags)
        case = request.branch, change, flags
        assert (decision.route, decision.fallback_reason) == (route, reason), case
        assert all(r in dispatch.REASONS for _, r in decision.rejected)
        passed = dispatch.LADDER[request.branch][: len(decision.rejected)]
        assert tuple(c for c, _ in decision.rejected) == tuple(passed), case


@pytest.mark.parametrize("branch", list(Branch))
def test_sm89_policy_is_that_of_every_branch(branch):
    request = replace(GPU, branch=branch, **SM89)
    assert (Route.TRITON, "sm89_policy") in decide(request, Flags()).rejected
    assert decide(request, FORCED).route is Route.TRITON
    assert decide(request, replace(FORCED, use_triton_sel=False)).route is not Route.TRITON


@pytest.mark.parametrize("change, flags, backend, reason, detail", [
    ({}, Flags(force_parity=True), "triton", "force_parity", ""),
    ({"capability": (8, 9)}, Flags(), "triton", "sm89_policy", ""),
    ({"dtype": "float32"}, Flags(), "triton", "dtype", "got float32"),
    ({"d_k": 12, "d_v": 8}, Flags(), "triton", "align8", "got Dk=12 Dv=8"),
    ({"d_v": 264}, Flags(), "triton", "head_dim", "got Dk=128 Dv=264"),
    ({"capability": (7, 5)}, Flags(), "triton", "capability", "got SM (7, 5)"),
    ({"needs_grad": True}, Flags(sel_triton_allow_grad=False), "triton", "needs_grad", ""),
    (CPU, Flags(), "triton", "no_cuda", ""),
    ({"device": "xpu", "capability": None}, Flags(), "triton", "no_cuda", "device xpu"),
    ({}, Flags(), "fa2", "wrong_branch", "fa2 for the selected branch"),
    ({"branch": Branch.BLOCKS}, Flags(), "sdpa", "wrong_branch", ""),
    ({"branch": Branch.SLIDING, "no_fa2": "wheel x"}, Flags(), "fa2", "no_fa2", "wheel x"),
])  # fmt: skip
def test_named_route_is_strict(change, flags, backend, reason, detail):
    with pytest.raises(RouteUnavailable) as caught:
        decide(replace(GPU, **change), flags, backend)
    assert (caught.value.reason, caught.value.route.value) == (reason, backend)
    told = str(caught.value)
    assert reason in told and dispatch.REASONS[reason] in told and told.endswith(detail)


def test_named_route_waives_preferences_only():
    short = replace(GPU, key_len=1)
    taken = dispatch.Decision(Branch.SELECTED, Route.TRITON, requested=Route.TRITON)
    assert decide(short, Flags(), "triton") == taken
    assert decide(replace(WIN, key_len=1), Flags(), "fa2").route is Route.FA2
    interpreted = replace(short, **CPU, interpret=True)
    assert decide(interpreted, Flags(), "triton").route is Route.TRITON
    assert why_not(Route.SDPA, GPU, Flags(use_sel_pack=False), named=True) is None


def rungs(**results):
    """Rungs that give a result or raise it."""
    how = lambda x: "side_effect" if isinstance(x, BaseException) else "return_value"
    return {Route(name): mock.Mock(**{how(result): result}) for name, result in results.items()}


@pytest.mark.parametrize("error, reason, told", [
    (NotImplementedError("no"), "unsupported", "NotImplementedError:_no"),
    (RuntimeError("PTX failed"), "launch_error", "RuntimeError:_PTX_failed"),
    (RouteUnavailable("triton", "head_dim"), "head_dim", "RouteUnavailable:_"),
])  # fmt: skip
def test_error_of_a_rung_falls_to_the_next_and_keeps_the_reason(error, reason, told, capsys):
    """And the rung after it that policy forbids is passed over."""
    flags = replace(ON, use_sel_pack=False, debug_log=True)
    with dispatch.trace() as taken:
        result, decision = guarded(GPU, rungs(triton=error, sdpa="s", reference="r"), flags)
    assert (result, decision.route, taken) == ("r", Route.REFERENCE, [decision])
    assert decision.rejected == ((Route.TRITON, reason), (Route.SDPA, "not_enabled"))
    line = f"NSA-LOG sel.triton.fallback reason={reason} error={told}"
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), KeyboardInterrupt(),
    *map(RuntimeError, ("Triton Error [CUDA]: out of memory", "a_kernel: CUDA_ERROR_ASSERT",
                        "Triton Error [CUDA]: device-side assert triggered")),
])  # fmt: skip
def test_out_of_memory_and_sticky_errors_are_not_fallen_back_from(error):
    with pytest.raises(type(error)):
        guarded(GPU, rungs(triton=error, sdpa="s", reference="r"), ON)


# What cuGetErrorString says of the errors that end a process's use of its device.
FINAL_WORDS = (
    "an illegal memory access was encountered", "the launch timed out and was terminated",
    "context is destroyed", "device-side assert triggered", "hardware stack error",
    "an illegal instruction was encountered", "misaligned address",
    "operation not supported on global/shared address space", "invalid program counter",
    "unspecified launch failure", "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution", "unknown error",
)  # fmt: skip


def test_the_words_of_sticky_errors_are_known():
    for prefix in ("CUDA error: ", "Triton Error [CUDA]: "):
        assert [w for w in FINAL_WORDS if not errors.is_sticky(RuntimeError(prefix + w))] == []
        for words in ("invalid device function", "too many resources requested for launch",
                      "no kernel image is available", "invalid argument"):  # fmt: skip
            assert not errors.must_raise(RuntimeError(prefix + words))


def test_the_drivers_names_of_sticky_errors_are_known():
    driver = pytest.importorskip("cuda.bindings.driver")
    told = lambda code: " ".join((code.__doc__ or "").split())
    ends = "terminated and relaunched", "cannot be used anymore"
    final = {code for code in driver.CUresult if any(words in told(code) for words in ends)}
    if not final:
        pytest.skip("bindings that do not say what ends a process")
    names = ("CONTEXT_IS_DESTROYED", "UNKNOWN", "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE")
    final |= {getattr(driver.CUresult, f"CUDA_ERROR_{name}") for name in names}  # not said of these
    for code in driver.CUresult:
        error = RuntimeError(f"_decode_cluster_kernel: {code.name}")
        assert errors.is_sticky(error) == (code in final), code.name
        out_of_memory = code is driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        assert errors.must_raise(error) == (out_of_memory or code in final), code.name


def test_named_route_and_reference_raise_their_own_error():
    with pytest.raises(RuntimeError, match="boom"):
        guarded(GPU, rungs(triton=RuntimeError("boom"), sdpa="s"), Flags(), "triton")
    with pytest.raises(RouteUnavailable, match="unsupported .*: no 48") as told:
        guarded(GPU, rungs(triton=NotImplementedError("no 48"), sdpa="s"), Flags(), "triton")
    assert isinstance(told.value.__cause__, NotImplementedError)
    with pytest.raises(ZeroDivisionError):
        guarded(GPU, rungs(triton=OSError(), sdpa=OSError(), reference=ZeroDivisionError()), ON)


def test_a_kernel_that_fails_is_a_warning_once():
    def run(error, **change):
        guarded(replace(GPU, **change), rungs(triton=error, sdpa="s"), ON)

    for words, error, change in (
        ("selected on triton failed.*PTX failed", RuntimeError("PTX failed"), {}),
        ("RuntimeError: another", RuntimeError("another"), dict(d_k=64)),
        ("no kernel takes these arguments: l_", NotImplementedError("l_sel must be"), dict(d_k=72)),
    ):
        with pytest.warns(RuntimeWarning, match=words):
            run(error, **change)
        with in_silence():
            run(error, **change)


@pytest.mark.filterwarnings("ignore:nsa. selected on triton failed")
def test_a_kernel_that_fails_is_tried_once_per_kind_of_call(capsys):
    calls = rungs(triton=RuntimeError("ptxas died"), sdpa="s")
    tries = calls[Route.TRITON]

    def tried(request=GPU, flags=ON, backend=None, x=(2, 300), **args):
        before = tries.call_count
        args = dict(args, q=torch.empty(x, device="meta"))
        with contextlib.suppress(RuntimeError):
            result, decision = guarded(request, calls, flags, backend, args)
            assert result == "s" and decision.rejected[0] == (Route.TRITON, "launch_error")
        return tries.call_count - before

    alike = {}, dict(x=(3, 511)), dict(request=replace(GPU, key_len=9000)), {}
    assert [tried(**call) for call in alike] == [1, 0, 0, 0]
    for call in (
        dict(x=(2, 512)), dict(x=(2, 300, 1)), dict(sizes={"l": 32}), dict(sizes={"l": 64}),
        dict(request=replace(GPU, key_len=1 << 14)), dict(request=replace(GPU, dtype="float16")),
        dict(flags=replace(ON, use_gluon=False)),
    ):  # fmt: skip
        assert [tried(**call), tried(**call)] == [1, 0], call
    assert [tried(backend="triton"), tried(backend="triton")] == [1, 1]  # its error is the caller's
    capsys.readouterr()
    assert [tried(flags=replace(ON, debug_log=True)) for _ in range(2)] == [1, 0]
    line = "sel.triton.fallback reason=launch_error error=RuntimeError:_ptxas_died"
    assert capsys.readouterr().err.count(line) == 2  # told all the same


@contextlib.contextmanager
def in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("change, flags, told", [
    ({}, Flags(use_triton_sel=False), r"use_triton_sel \(argument\) turns them off"),
    ({}, Flags.from_env({"NSA_USE_TRITON_SEL": "0"}), "NSA_USE_TRITON_SEL=0 turns them off"),
    ({}, Flags(force_parity=True), "unset it"), (dict(has_triton=False), Flags(), "install"),
    (SM89, Flags(), "NSA_TRITON_SEL_FORCE=1"),
    (dict(dtype="float32"), Flags(), "fp16 and bf16.*float32.*autocast"),
    (dict(d_k=100), Flags(), "multiples of 8.*Dk=100"),
    (dict(d_v=264), Flags(), "up to 256.*Dv=264"), (dict(forward_ad=True), Flags(), "forward mode"),
    (dict(needs_grad=True), Flags(sel_triton_allow_grad=False), "NSA_SEL_TRITON_ALLOW_GRAD=0"),
    # Where PyTorch is right nothing is told: below the threshold it is the faster one, and a step
    # that needs a gradient is composed of kernels.
    (CPU, Flags(), None), (dict(capability=(7, 5)), Flags(), None),
    (dict(key_len=8), Flags(), None), (dict(branch=Branch.STEP, needs_grad=True), Flags(), None),
])  # fmt: skip
def test_a_gpu_that_runs_pytorch_says_so_once_per_cause(change, flags, told):
    run = lambda **more: guarded(
        replace(GPU, **{**more, **change}), rungs(sdpa="s", reference="r"), flags
    )
    if told:
        with pytest.warns(RuntimeWarning, match=f"PyTorch serves instead.*{told}"):
            run()
    with in_silence():
        run()
        if told:
            run(branch=Branch.SLIDING)
        guarded(GPU, rungs(sdpa="s"), Flags(use_triton_sel=False), "sdpa")  # asked for by name


def test_a_hopper_gpu_without_its_kernels_is_told_once(monkeypatch):
    pytest.importorskip("triton")
    from nsa.kernels.prefill import hopper

    tell = lambda index: dispatch.log_device(torch.device("cuda", index), Flags())
    monkeypatch.setattr(device, "capability", lambda index: (9, 0))
    monkeypatch.setattr(device, "device_name", lambda index: "a GPU")
    monkeypatch.setattr(hopper, "why_not", lambda *_: "triton 3.8.0: unproven; use 3.7")
    with pytest.warns(RuntimeWarning, match="kernels for Hopper do not serve: triton 3.8.0"):
        tell(7)
    with in_silence():
        tell(7)
        monkeypatch.setattr(device, "capability", lambda index: (8, 0))
        tell(6)


def test_traces_begin_and_end_while_another_ends():
    """At every instruction of it, as those of other threads do: none is forgotten or left."""
    mine, others, before = dispatch.trace(), [dispatch.trace()], sys.gettrace()

    def another(frame, event, arg):
        frame.f_trace_opcodes = True
        if event == "opcode":
            others.append(dispatch.trace())
            others[-1].__enter__()
            others[-2].__exit__(None, None, None)
        return another

    for one in (others[0], mine):
        one.__enter__()
    sys.settrace(another)
    try:
        mine.__exit__(None, None, None)
    finally:
        sys.settrace(before)
    assert len(others) > 5 and len(dispatch._sinks) == 1
    others[-1].__exit__(None, None, None)
    assert not dispatch._sinks


def test_a_trace_holds_the_decisions_of_its_thread():
    """And of threads that Python did not start, as those in which a GPU's backward recomputes."""
    calls = rungs(triton=None)
    done = threading.Event()
    with dispatch.trace() as taken:
        other = threading.Thread(target=guarded, args=(GPU, calls, ON))
        other.start()
        other.join()
        assert taken == []
        _thread.start_new_thread(lambda: (guarded(GPU, calls, ON), done.set()), ())
        assert done.wait(60)
        guarded(GPU, calls, ON)
    guarded(GPU, calls, ON)
    assert [d.route for d in taken] == [Route.TRITON] * 2


def test_debug_flags_log_why_what_and_how_far_off(capsys):
    """Numbers of a fallback, shapes, and the error against the reference."""
    flags = Flags(sel_triton_min_L=4096, debug_log=True)
    guarded(replace(GPU, key_len=96), rungs(sdpa="s"), flags)
    q, k, v = make_qkv(1, 6, 2, 1, 4, dtype=torch.bfloat16)
    flags = Flags(debug_shapes=True, debug_compare=True)
    nsa.sliding_attention(q, k, v, window=3, flags=flags, backend="reference")
    why, shapes, off = capsys.readouterr().err.splitlines()
    assert why == "NSA-LOG sel.triton.fallback reason=below_min_L L=96 min_L=4096"
    assert shapes == ("NSA-LOG win.reference.shapes q=[1,6,2,4]/[48,8,4,1] "
                      "k=[1,6,1,4]/[24,4,4,1] v=[1,6,1,4]/[24,4,4,1]")  # fmt: skip
    assert 0 < float(off.partition("NSA-LOG win.reference.compare mae=")[2].split()[0]) < 0.01
    flags = Flags(debug_compare=True)
    blocks = make_block_indices("random", 1, 6, 1, 1, 4)
    nsa.compressed_attention(q, k[:, :2], v[:, :2], l=4, d=2, flags=flags)
    nsa.selection_attention(q, k, v, blocks, block_size=4, flags=flags)
    tags = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert tags == ["cmp.sdpa.compare", "sel.sdpa.compare"]


def test_the_device_of_the_kernels_is_logged_once(monkeypatch, capsys):
    monkeypatch.setattr(device, "capability", lambda _: (8, 0))
    monkeypatch.setattr(device, "device_name", lambda _: "NVIDIA A100")
    flags = Flags(debug_log=True)
    for where in ("cuda:0", "cuda:0", "cuda:1", "cpu"):
        dispatch.log_device(torch.device(where), flags)
    line = "NSA-LOG sel.triton.device name=NVIDIA_A100 sm=8.0\n"
    assert capsys.readouterr().err == 2 * line  # two devices
    devices = []
    monkeypatch.setattr(dispatch, "log_device", lambda device, _: devices.append(device.type))
    q, k, v = make_qkv(1, 6, 2, 1, 4)
    for taken in (Route.TRITON, Route.SDPA):
        decision = dispatch.Decision(Branch.SLIDING, taken)
        monkeypatch.setattr(dispatch, "guarded", lambda *_, d=decision: (q, d))
        nsa.sliding_attention(q, k, v, window=3)
    assert devices == ["cpu"]


def layer():
    return make_layer(40, Dv=8), dict(l=8, d=4, l_sel=8, n_sel=3, window=12)


ALL_BY_SDPA = dict(compressed="sdpa", blocks="reference", selected="sdpa", sliding="sdpa")


@pytest.mark.parametrize("flags, routes", [
    (Flags(), ALL_BY_SDPA), (ON, ALL_BY_SDPA),
    (replace(ON, force_parity=True), dict.fromkeys(ALL_BY_SDPA, "reference")),
], ids=["default", "everything_on", "parity"])  # fmt: skip
def test_routes_of_a_cpu(flags, routes):
    args, sizes = layer()
    out, aux = nsa.nsa_attention(*args, **sizes, flags=flags, return_aux=True)
    assert aux["routes"] == routes and out.shape == (1, 40, 4, 8)
    torch.testing.assert_close(out, nsa.nsa_attention(*args, **sizes), atol=1e-5, rtol=1e-5)
    if flags.force_parity:
        with pytest.raises(RouteUnavailable, match="force_parity"):
            nsa.nsa_attention(*args, **sizes, flags=flags, backend="triton")


WITHOUT_TRITON = """
import sys, torch, nsa
from nsa.flags import Flags
c = nsa.NSAConfig(dim=32, heads=4, groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=3, w=12)
on = Flags(use_triton_sel=True, use_fa2=True, sel_triton_min_L=1, sel_triton_allow_grad=True)
m = nsa.NSALanguageModel(c, 16, 1, flags=on)
m(torch.zeros(1, 40, dtype=torch.long)).sum().backward()
logits, caches = m.prefill(torch.zeros(1, 20, dtype=torch.long))
m.step(torch.zeros(1, 1, dtype=torch.long), caches)
from nsa.kernels.triton_sel_kernel import selection_attention_triton
q, k = torch.randn(1, 2, 1, 2, 16), torch.randn(1, 1, 9, 16)
r = torch.tensor([0, 9]).view(1, 1, 1, 1, 2).expand(1, 2, 1, 1, 2)
selection_attention_triton(q, k, k, r, flags=on)
bad = [n for n in sys.modules if n.split('.')[0] in ('triton', 'flash_attn')]
assert not bad, bad
"""


def test_cpu_run_never_imports_triton():
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, check=True, timeout=300)


def test_forward_mode_derivatives_take_no_kernel():
    """A kernel knows no tangents: it would give 0 for them."""
    for route in (Route.TRITON, Route.FA2):
        assert why_not(route, replace(WIN, forward_ad=True), ON) == "needs_grad"
    q, k, v = (randn(1, 9, 2, 8, seed=i) for i in range(3))
    f = lambda q: nsa.sliding_attention(q, k, v, window=4).sum()
    _, tangent = torch.func.jvp(f, (q,), (torch.ones_like(q),))
    torch.testing.assert_close(tangent, torch.func.grad(f)(q).sum())


def test_thresholds_see_the_keys_of_chunks_and_of_the_longest_sequence(monkeypatch):
    """But not those of the branches of a whole attention, which go one by one with FA-2 or a debug
    flag: packing would be what the threshold costs."""
    run = mock.Mock(wraps=dispatch.run)
    monkeypatch.setattr(dispatch, "run", run)
    flags = Flags(use_triton_sel=True, use_fa2=True, sel_triton_min_L=4096)
    args, sizes = layer()
    nsa.nsa_attention(*args, **sizes, flags=flags)
    key_lens = lambda: [(c.args[0], c.kwargs["key_len"]) for c in run.call_args_list]
    assert (Branch.SELECTED, None) in key_lens()
    run.reset_mock()
    blocks = torch.zeros(1, 40, 2, 1, dtype=torch.int32)
    nsa.selection_attention(args[0], *args[3:5], blocks, block_size=8, flags=flags)
    q, k, v = make_qkv(1, 40, 4, 2, 8)
    cmp, cu = dict(l=8, d=4), torch.tensor([0, 6, 40], dtype=torch.int32)
    nsa.compressed_attention(q[:, :1], k[:, :9], v[:, :9], **cmp, q_start=39)
    nsa.sliding_attention(q[:, :1], k, v, window=64)
    nsa.compressed_attention(q[0], k[0, :7], v[0, :7], **cmp, cu_seqlens=cu)
    nsa.sliding_attention(q[0], k[0], v[0], window=64, cu_seqlens=cu)
    assert key_lens() == [
        (Branch.SELECTED, 8), (Branch.COMPRESSED, 9), (Branch.SLIDING, 40),
        (Branch.COMPRESSED, 7), (Branch.SLIDING, 34),
    ]  # fmt: skip


def test_a_gradient_of_any_tensor_counts_for_the_operator_of_all_branches(monkeypatch):
    """Its backward gives all of them: that of the gates alone needs it as well."""
    asked = mock.Mock(wraps=dispatch.why_not)
    monkeypatch.setattr(dispatch, "why_not", asked)
    args, sizes = layer()
    for needed in range(len(args) + 1):
        nsa.nsa_attention(
            *(x.clone().requires_grad_(i == needed) for i, x in enumerate(args)), **sizes
        )
    requests = [call.args[1] for call in asked.call_args_list if call.args[0] is Route.TRITON]
    seen = [r.needs_grad for r in requests if r.branch is Branch.PREFILL]
    assert seen == [True] * 8 + [False]


def test_an_unavailable_route_goes_from_process_to_process():
    error = RouteUnavailable("triton", "align8", "got Dk=7")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.reason, again.route) == (str(error), "align8", error.route)
