"""How random an order is, in numbers that can be compared with NumPy's permutation."""

import numpy as np


def quality(order: np.ndarray, count: int) -> dict[str, float]:
    """Returns statistics of the beginning of an order of `count` positions. Each statistic has the
    same spread for all true permutations.

    correlation: of each position with the next one. chi_square: of the counts in each hundredth of
    all positions, divided by its degrees of freedom, so about 1. coverage: share of all 1,000ths
    that the first 1,000 positions meet. steps: share of neighbours within a thousandth of each
    other. early: mean position of the first tenth, 0 to 1.
    """
    hundredths = np.bincount(order * 100 // count, minlength=100)
    return {
        "correlation": float(np.corrcoef(order[:-1], order[1:])[0, 1]),
        "chi_square": float(((hundredths - order.size / 100) ** 2).sum() / (order.size / 100) / 99),
        "coverage": float(np.unique(order[:1000] * 1000 // count).size / 1000),
        "steps": float((np.abs(np.diff(order)) <= count // 1000).mean()),
        "early": float(order[: order.size // 10].mean() / count),
    }
