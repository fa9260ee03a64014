"""Statistics of the randomness of a data order. They are compared with NumPy's random
permutation.
"""

import numpy as np


def quality(order: np.ndarray, count: int) -> dict[str, float]:
    """Returns statistics of the beginning of an order of `count` positions. For random permutations
    each statistic has the same distribution, so two orders can be compared.

    The keys are: correlation, between each position and the next position. chi_square, of the
    number of positions in each hundredth of the range, divided by its degrees of freedom (about 1).
    coverage, share of all thousandths of the range that the first 1,000 positions reach. steps,
    share of neighbours whose distance is at most a thousandth of the range. early, mean position of
    the first tenth of the order, 0 to 1.
    """
    hundredths = np.bincount(order * 100 // count, minlength=100)
    return {
        "correlation": float(np.corrcoef(order[:-1], order[1:])[0, 1]),
        "chi_square": float(((hundredths - order.size / 100) ** 2).sum() / (order.size / 100) / 99),
        "coverage": float(np.unique(order[:1000] * 1000 // count).size / 1000),
        "steps": float((np.abs(np.diff(order)) <= count // 1000).mean()),
        "early": float(order[: order.size // 10].mean() / count),
    }
