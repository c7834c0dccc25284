"""Statistics of timed samples: medians with intervals, paired ratios, and the word for a change."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

MIN_CI_N = 6  # below, no order statistic bounds the median with 95 % confidence
MIN_N = 10  # below, a row is UNSTABLE whatever its samples say
CHANCE = 1.96  # standard deviations, which chance passes once in twenty times
LEAST_FLOOR = 0.01  # differences below 1 % are nobody's, however quiet the box


def quantile(samples: Sequence[float], q: float) -> float:
    """The q-quantile, linear between order statistics."""
    return float(np.quantile(np.asarray(samples, dtype=np.float64), q))


def median_ci(samples: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the median by order statistics; distribution-free, no outlier dropped.

    n = 30 gives the 10th..21st value, n = 100 the 40th..61st. None for fewer than 6 samples.
    """
    ordered = sorted(samples)
    n = len(ordered)
    if n < MIN_CI_N:
        return None
    # Largest k with P(Binomial(n, 1/2) < k) <= 2.5 %: the k-th value from either end.
    k, ways = 0, 1  # to choose k of n
    below = ways
    while 40 * below <= 2**n:
        ways = ways * (n - k) // (k + 1)
        k += 1
        below += ways
    return ordered[k - 1], ordered[n - k]


def bootstrap_ci(ratios: Sequence[float], resamples: int = 2000) -> tuple[float, float]:
    """95 % percentile-bootstrap interval of the median of paired ratios."""
    values = np.asarray(ratios, dtype=np.float64)
    picks = np.random.default_rng(0).integers(0, len(values), (resamples, len(values)))
    medians = np.median(values[picks], axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(high)


def half_width(samples: Sequence[float]) -> float:
    """Half of the median's 95 % interval, relative to the median; infinite without one."""
    low, high = median_ci(samples) or (-math.inf, math.inf)
    return (high - low) / 2 / statistics.median(samples)


def too_few(n: int) -> list[str]:
    """The reason why so few samples are unstable; empty from MIN_N on."""
    return [f"too few samples: {n}, at least {MIN_N} are wanted"] if n < MIN_N else []


def outliers(samples: Sequence[float]) -> int:
    """How many samples lie over 14.826 median absolute deviations away. They stay in."""
    centre = statistics.median(samples)
    mad = statistics.median(abs(x - centre) for x in samples)
    return sum(abs(x - centre) > 14.826 * mad for x in samples) if mad else 0


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Columns of a row that its samples, in microseconds, give."""
    return {
        "n": len(samples), "median_us": statistics.median(samples),
        **{f"p{q}_us": quantile(samples, q / 100) for q in (20, 80, 95)},
        "min_us": min(samples), "ci95_us": median_ci(samples), "outliers": outliers(samples),
    }  # fmt: skip


def instability(samples: Sequence[float], resolution: float) -> list[str]:
    """Why these samples do not settle on a median, if they do not.

    The last third left the first by over 2 %, and they rise or fall by more than chance; or the
    middle half spreads over 3 % and the median's interval is still wider than +-1 %, the least
    noise floor; or it spreads over 15 %. Each only beyond the clock's `resolution` (same unit). The
    3 % alone would call every short kernel unstable: they always spread, and many samples still fix
    the median, which is what is claimed. The 2 % alone would call a third of long ones so, of which
    there are ten samples: clocks under a power cap jump by that much from one to the next.
    """
    why = []
    centre = statistics.median(samples)
    spread = quantile(samples, 0.75) - quantile(samples, 0.25)
    loose = spread > 0.03 * centre and half_width(samples) > LEAST_FLOOR
    if spread > resolution and (loose or spread > 0.15 * centre):
        why.append(
            f"spread: the middle half covers {spread / centre:.1%} of the median, which is known "
            f"to {half_width(samples):.1%}"
        )
    third = len(samples) // 3
    if third >= 3:
        shift = statistics.median(samples[-third:]) - statistics.median(samples[:third])
        if abs(shift) > max(0.02 * centre, resolution) and trend(samples) > CHANCE:
            why.append(f"drift: last third {shift / centre:+.1%} against the first")
    return why


def trend(samples: Sequence[float]) -> float:
    """How far the samples rise or fall in their order, in standard deviations of what chance does
    (the Mann-Kendall test)."""
    n, values = len(samples), np.asarray(samples, dtype=np.float64)
    rises = sum(int(np.sign(values[i + 1 :] - values[i]).sum()) for i in range(n))
    return (abs(rises) - 1) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)


def noise_floor(ratios: Sequence[float]) -> float:
    """What identical code differs by: max(1 %, 95th percentile of |ratio - 1|)."""
    return max(LEAST_FLOOR, quantile([abs(r - 1.0) for r in ratios], 0.95))
