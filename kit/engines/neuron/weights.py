"""Which part of which weight a tensor rank holds, in NxD's layers.

NxD makes layers without memory and then asks, module by module, for their weights; so every module
is marked with what it holds. The order of heads is Trn1's, which `kit.convert.neuron` reads back.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kit.model import Decoder, initial_weight
from kit.plan import Plan
from kit.spec import ModelSpec


class RankWeights:
    """Marks modules with what this tensor rank holds, and fills them; without a seed they stay
    unset.
    """

    def __init__(self, spec: ModelSpec, plan: Plan, *, tensor_rank: int, seed: int | None) -> None:
        self.spec, self.ranks, self.rank, self.seed = spec, plan.tensor_parallel, tensor_rank, seed
        self.copies = plan.kv_replication(spec)
        with torch.device("meta"):
            self.whole = dict(Decoder(spec).named_parameters())

    def mark_whole(self, module: nn.Module, name: str) -> None:
        """Every rank has all of it."""
        _mark(module, weight=lambda: self._initial(name))

    def mark_column(self, module: nn.Module, *names: str) -> None:
        """Each rank has its rows of each matrix, one matrix below the other."""
        _mark(
            module, weight=lambda: torch.cat([self._cut(self._initial(name), 0) for name in names])
        )

    def mark_row(self, module: nn.Module, name: str) -> None:
        """Each rank has its columns, those of the heads that it has queries of."""
        is_attention = name.endswith("attention.output.weight")
        _mark(
            module,
            weight=lambda: self._cut(
                self._spread(self._initial(name).T).T if is_attention else self._initial(name), 1
            ),
        )

    def mark_grouped(self, module: nn.Module, query: str, key: str, value: str) -> None:
        """Each rank has its query heads and the key/value heads that they look at, of which
        others have copies.
        """
        _mark(
            module,
            weight_q=lambda: self._cut(self._spread(self._initial(query)), 0),
            weight_k=lambda: self._cut(self._initial(key).repeat(self.copies, 1), 0),
            weight_v=lambda: self._cut(self._initial(value).repeat(self.copies, 1), 0),
        )

    def holders(self, name: str) -> int:
        """Returns how many tensor ranks hold the same part of a weight, by NxD's name of it."""
        if name.endswith("norm.weight"):
            return self.ranks
        return self.copies if name.endswith((".weight_k", ".weight_v")) else 1

    def fill(self, module: nn.Module) -> None:
        """Fills a module's own weights, if it has any."""
        for name, value in getattr(module, "kit_weights", {}).items():
            if self.seed is not None:
                getattr(module, name).data.copy_(value())

    def _initial(self, name: str) -> Tensor:
        assert self.seed is not None
        shape = self.whole[name].shape
        return initial_weight(self.spec, name, shape, self.seed, torch.device("cpu"))

    def _cut(self, whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(self.ranks, dim)[self.rank]

    def _spread(self, whole: Tensor) -> Tensor:
        """Returns query heads so ordered that each lies on a rank with its key/value head.

        Ranks hold key/value heads 0..k-1, then copies of them, c in all; slot i k + j gets block j
        c + i of queries.
        """
        return (
            whole.unflatten(0, (self.spec.num_kv_heads, self.copies, -1))
            .transpose(0, 1)
            .flatten(0, 2)
        )


def _mark(module: nn.Module, **weights: Callable[[], Tensor]) -> None:
    module.kit_weights = weights  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
