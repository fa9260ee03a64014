"""Makes NxD's layers, and computes the part of each weight that a tensor rank holds.

NxD makes layers without memory and later asks for the weights of one module after another.
Therefore each module stores functions that return its weights on this rank. The order of key/value
heads over the ranks is that of Trn1. `kit.interop.weights.neuron` reads checkpoints in this order.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.engines.neuron.adapter import Nxd
from kit.model import Decoder, initial_weight


class RankWeights:
    """Makes NxD's layers from the names of their weights in the kit's decoder, and fills them with
    this tensor rank's part of the initial weights. Without a seed, the weights stay unset.
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

    def unsplit(self, module: nn.Module, name: str) -> nn.Module:
        """Returns `module`, a layer whose weight tensor parallelism does not split. Attaches a
        function to it that returns the initial weight named `name`, which is whole on each tensor
        rank.
        """
        return _marked(module, weight=lambda: self._initial(name))

    def embedding(self, name: str) -> nn.Module:
        """Returns an embedding layer. Each rank holds the rows of its part of the vocabulary."""
        rows, features = self.whole[name].shape
        layer = self.nxd.embedding(rows=rows, features=features)
        return _marked(layer, weight=lambda: self._cut(self._initial(name), 0))

    def column(self, *names: str, gathered: bool = False) -> nn.Module:
        """Returns a linear layer, split over its output features, that contains matrices of equal
        shape. Each rank holds its rows of each matrix, one matrix below the other. `gathered` is
        passed to `Nxd.column`: whether the input is already the whole sequence.
        """
        (outputs, inputs), count = self.whole[names[0]].shape, len(names)
        layer = self.nxd.column(
            inputs=inputs, outputs=count * outputs, fused=count, gathered=gathered
        )
        return _marked(
            layer, weight=lambda: torch.cat([self._cut(self._initial(name), 0) for name in names])
        )

    def row(self, name: str) -> nn.Module:
        """Returns a linear layer that is split over its input features. Each rank holds a part of
        the matrix's columns. In the output projection of attention, they are the columns of the
        rank's query heads.
        """
        outputs, inputs = self.whole[name].shape

        def weight() -> Tensor:
            whole = self._initial(name)
            if name.endswith("attention.output.weight"):
                whole = self._spread(whole.T).T
            return self._cut(whole, 1)

        return _marked(self.nxd.row(inputs=inputs, outputs=outputs), weight=weight)

    def grouped(self, query: str, key: str, value: str) -> nn.Module:
        """Returns a layer for query, key and value with grouped heads. Each rank holds its query
        heads and the key/value heads to which they attend. Other ranks may hold copies of these
        key/value heads.
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
        """Returns the number of tensor ranks that hold an equal part of a weight. `name` is NxD's
        name of the weight.
        """
        if name.endswith("norm.weight"):
            return self.ranks
        return self.copies if name.endswith((".weight_k", ".weight_v")) else 1

    def fill(self, module: nn.Module) -> None:
        """Sets the initial weights of a module that this class has made. Does nothing for other
        modules, or without a seed.
        """
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
        """Returns the query heads in an order in which each query head is on a rank with its
        key/value head.

        With k key/value heads and c copies of each head, the ranks hold key/value heads 0..k-1,
        then heads 0..k-1 again, c times in all. The query heads are divided into k c blocks.
        Position i k + j of the result is on the rank with copy i of key/value head j, so it has
        block j c + i of the query heads.
        """
        return (
            whole.unflatten(0, (self.spec.num_kv_heads, self.copies, -1))
            .transpose(0, 1)
            .flatten(0, 2)
        )


def _marked(module: nn.Module, **weights: Callable[[], Tensor]) -> nn.Module:
    module.kit_weights = weights  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    return module
