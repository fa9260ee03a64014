"""pass@k of programs that a model wrote, run in a sandbox: stands in for the hub's `code_eval`
in HumanEval's task.
"""

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from unittest.mock import patch

from kit.evaluate.sandbox import Outcome, Sandbox

REPORTED_K = (1, 10, 100)


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Returns the probability that at least one of k programs, drawn from these without
    replacement, passes.

    1 - C(n - c, k) / C(n, k): the unbiased estimator of Chen et al., "Evaluating Large Language
    Models Trained on Code", arXiv 2107.03374, equation 1.

    Raises:
        ValueError: k is not in 1..n, or c not in 0..n.
    """
    if not (1 <= k <= num_samples and 0 <= num_passed <= num_samples):
        raise ValueError(f"pass@{k} of {num_passed} in {num_samples} programs is not defined.")
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


class CodeScorer:
    """Runs each program with its test, and reports pass@1, and pass@10 and pass@100 where there are
    as many programs.

    `isolated` raises, as `Sandbox`, unless nothing outside is within a program's reach; `limits`
    takes what there is.
    """

    def __init__(
        self,
        isolation: Literal["isolated", "limits"] = "isolated",
        *,
        sandbox: Sandbox | None = None,
        idle: bool = False,
    ) -> None:
        """Of several processes that make the same calls, all but one are `idle`: they run
        nothing and report zeros.
        """
        self._sandbox = None if idle else sandbox or Sandbox(require=isolation == "isolated")
        self.isolation = "" if self._sandbox is None else self._sandbox.isolation

    def compute(
        self, *, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Any = None
    ) -> tuple[dict[str, float], list[list[Outcome]]]:
        """Returns pass@k averaged over the problems, and how each program ended.

        `references` are the tests of the problems, `predictions` the programs for each. Which k are
        reported follows from the number of programs, not from what the harness asks for.
        """
        if self._sandbox is None:
            return {f"pass@{k}": 0.0 for k in REPORTED_K if k <= min(map(len, predictions))}, []
        outcomes = [
            self._run_all(self._sandbox, programs, test)
            for programs, test in zip(predictions, references, strict=True)
        ]
        count = min(map(len, outcomes))
        return {
            f"pass@{k}": (
                sum(pass_at_k(len(found), sum(o.passed for o in found), k) for found in outcomes)
                / len(outcomes)
            )
            for k in REPORTED_K
            if k <= count
        }, outcomes

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the context, the harness's HumanEval task is scored by this object."""
        with patch.object(sys.modules["lm_eval.tasks.humaneval.utils"], "compute_", self):
            yield

    def _run_all(self, sandbox: Sandbox, programs: Sequence[str], test: str) -> list[Outcome]:
        # A small model often writes the same program again.
        distinct = list(dict.fromkeys(programs))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = dict(
                zip(
                    distinct,
                    pool.map(lambda program: sandbox.run(program, test), distinct),
                    strict=True,
                )
            )
        return [found[program] for program in programs]
