"""Does the card keep what is written to it, and compute the same twice? Silent data corruption.

check_memory writes patterns over a large part of the memory and reads them back. check_products
repeats a matmul and holds a drawn sample of its rows against fp64 on the host. Both also run on
CPU tensors. bench.records.card_faults says in words what their counts mean.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

BLOCK_WORDS = 2**23  # 64 MiB: the scratch memory of a comparison stays small
ROWS = 32  # of a product, held against fp64
LARGEST = 127  # of the factors, see check_products
Words = Callable[[int, Tensor], "Tensor | int"]  # what a block should hold from word `start` on


def patterns() -> Iterator[tuple[str, Words]]:
    """Name and words of each pattern, the most telling first: each word's own address, then one
    set bit that walks through all 64, each followed by its inverse."""

    def address(start: int, block: Tensor) -> Tensor:
        return torch.arange(start, start + len(block), device=block.device)

    yield "address", address
    yield "inverted address", lambda start, block: ~address(start, block)
    for bit in range(64):
        word = 1 << bit if bit < 63 else -(1 << 63)
        yield f"bit {bit}", lambda start, block, word=word: word
        yield f"all bits but {bit}", lambda start, block, word=word: ~word


def write(words: Words, blocks: Sequence[Tensor]) -> None:
    for i, block in enumerate(blocks):
        block[:] = words(i * len(block), block)


def check_memory(device: str, size: int, limit_s: float, block_words: int = BLOCK_WORDS) -> dict:
    """Facts for the health row after patterns were written over `size` bytes of `device`.

    All is written before any of it is read: so what is read comes from the memory and not from a
    cache, and a word that lands at another address shows. No pattern begins after limit_s.
    """
    count = max(1, size // (8 * block_words))
    blocks = [torch.empty(block_words, dtype=torch.int64, device=device) for _ in range(count)]
    done, wrong = 0, torch.zeros((), dtype=torch.int64, device=device)
    begin = time.perf_counter()
    for _, words in patterns():
        write(words, blocks)
        for i, block in enumerate(blocks):
            wrong += (block != words(i * len(block), block)).sum()
        done += 1
        int(wrong)  # waits for the device
        if time.perf_counter() - begin > limit_s:
            break
    mib = 8 * count * block_words // 2**20
    facts = {"memory_test_mib": mib, "memory_test_patterns": done}
    return {**facts, "memory_wrong_words": int(wrong)}


def check_products(device: str, dtype: torch.dtype, limit_s: float, n: int = 4096) -> dict:
    """Facts for the health row after an n x n matmul in `dtype` (bf16 or fp32) was repeated.

    The factors are drawn whole numbers up to LARGEST: sums of their products stay below 2^24 by
    many standard deviations, so fp32 holds them exactly in whatever order they are added, and
    the only error is the rounding of the result.
    """
    seed = secrets.randbits(32)
    draw = torch.Generator().manual_seed(seed)
    a, b = (
        torch.randint(-LARGEST, LARGEST + 1, (n, n), generator=draw, dtype=torch.int16)
        for _ in range(2)
    )
    rows = torch.randperm(n, generator=draw)[:ROWS]
    exact = a[rows].double() @ b.double()
    a, b = a.to(device, dtype), b.to(device, dtype)
    bits = {2: torch.int16, 4: torch.int32}[a.itemsize]
    settings, repeats, differing = torch.backends.cuda.matmul, 0, 0
    reduced = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False  # no sum is rounded on its way
    try:
        first = torch.mm(a, b)
        begin = time.perf_counter()
        while repeats == 0 or time.perf_counter() - begin < limit_s:
            differing += not torch.equal(torch.mm(a, b).view(bits), first.view(bits))
            repeats += 1
    finally:
        settings.allow_bf16_reduced_precision_reduction = reduced
    error = (first[rows.to(device)].cpu().double() - exact).abs()
    right = error <= torch.finfo(dtype).eps / 2 * exact.abs()  # false for NaN
    name = {2: "bf16", 4: "fp32"}[a.itemsize]
    facts = {"product_repeats": repeats, "product_seed": seed, "products_differing": differing}
    facts["product_values_wrong"] = int((~right).sum())
    return {f"{name}_{fact}": count for fact, count in facts.items()}
