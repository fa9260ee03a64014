"""NxD's layers, and which part of which weight a tensor rank holds in each.

NxD makes layers without memory and then asks, module by module, for their weights; so every module
is marked with what it holds. The order of heads is Trn1's, which `kit.interop.weights.neuron` reads
back.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.engines.neuron.adapter import Nxd
from kit.model import Decoder, initial_weight


class RankWeights:
    """Makes layers of matrices by their names, marked with what this tensor rank holds, and fills
    them; without a seed they stay unset.
    """

    def __init__(self, spec: ModelSpec, plan: Plan, nxd: Nxd, *, seed: int | None) -> None:
        self.spec = spec
        self.nxd = nxd
        self.seed = seed
        self.ranks = plan.tensor_parallel
        self.rank = nxd.tensor_rank
        self.copies = plan.kv_replication(spec)
        with torch.device("meta"):
            self.whole = dict(Decoder(spec).named_parameters())

    def whole_on_all(self, module: nn.Module, name: str) -> nn.Module:
        """Returns a module of whose weight every rank has all."""
        return _marked(module, weight=lambda: self._initial(name))

    def embedding(self, name: str) -> nn.Module:
        """Returns an embedding of which each rank has its rows."""
        rows, features = self.whole[name].shape
        layer = self.nxd.embedding(rows=rows, features=features)
        return _marked(layer, weight=lambda: self._cut(self._initial(name), 0))

    def column(self, *names: str, gathered: bool = False) -> nn.Module:
        """Returns a layer of matrices of one shape: each rank has its rows of each, one matrix
        below the other; `gathered` as of `Nxd.column`.
        """
        (outputs, inputs), count = self.whole[names[0]].shape, len(names)
        layer = self.nxd.column(
            inputs=inputs, outputs=count * outputs, fused=count, gathered=gathered
        )
        return _marked(
            layer, weight=lambda: torch.cat([self._cut(self._initial(name), 0) for name in names])
        )

    def row(self, name: str) -> nn.Module:
        """Returns a layer of which each rank has its columns, those of the heads that it has
        queries of.
        """
        outputs, inputs = self.whole[name].shape

        def weight() -> Tensor:
            whole = self._initial(name)
            if name.endswith("attention.output.weight"):
                whole = self._spread(whole.T).T
            return self._cut(whole, 1)

        return _marked(self.nxd.row(inputs=inputs, outputs=outputs), weight=weight)

    def grouped(self, query: str, key: str, value: str) -> nn.Module:
        """Returns a layer of which each rank has its query heads and the key/value heads that they
        look at, of which others have copies.
        """
        rows, inputs = self.whole[query].shape
        layer = self.nxd.query_key_value(
            inputs=inputs, query=rows, key=len(self.whole[key]), copies=self.copies
        )
        return _marked(
            layer,
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


def _marked(module: nn.Module, **weights: Callable[[], Tensor]) -> nn.Module:
    module.kit_weights = weights  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    return module
