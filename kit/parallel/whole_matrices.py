"""Computes functions of whole matrices whose shards are spread over ranks, such as the
orthogonalisation of Muon.

A function of a whole matrix is not the function of its shards. Therefore each matrix has an owner
among the ranks that hold its shards or copies. The shards are sent to the owner, which computes the
result, and each rank receives its shard of the result. The owners share the work equally.
"""

import dataclasses
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from kit.parallel.gradients import local
from kit.parallel.groups import split_world

ROUND_ELEMENTS = 2**26
"""Largest number of elements that an owner receives in one round, unless a single matrix has more.
It limits the memory of the buffers to about 1 GiB in fp32: received and sent elements of the
present and of the next round."""

Region = tuple[slice, slice]
"""Rows and columns of a matrix that a rank holds."""


def stage_group(mesh: DeviceMesh) -> Any:
    """Returns the process group of all ranks of this rank's pipeline stages. Each matrix of a stage
    has its shards and copies on ranks of one such group. All ranks must call this function.
    """
    names = mesh.mesh_dim_names or ()
    ranks = mesh.mesh.flatten(1) if "pipeline" in names else mesh.mesh.reshape(1, -1)
    return split_world(ranks.tolist(), "stage")


class WholeMatrices:
    """Assigns an owner to each matrix of this rank's pipeline stages, and records which part of the
    matrix each rank holds. `map` applies a function to each whole matrix on its owner.

    All ranks of `stage_group` must create this object with the same matrices in the same order.

    Args:
        matrices: this rank's shards of the matrices, as DTensors, or as plain tensors if they are
            not sharded.
        mesh: mesh of all ranks.
        group: result of `stage_group`.
        cost: function of (rows, columns) of a matrix that returns the owner's work for it, in any
            unit. The matrices are assigned so that owners have similar work.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        mesh: DeviceMesh,
        group: Any,
        cost: Callable[[int, int], float],
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        grid = _Grid.of(mesh)
        self.layouts = [_Layout.of(matrix, grid) for matrix in matrices]
        for matrix, layout in zip(matrices, self.layouts, strict=True):
            expected = _size(layout.region(self.rank))
            assert tuple(local(matrix).shape) == expected, (tuple(local(matrix).shape), expected)
        costs = [cost(*layout.shape) for layout in self.layouts]
        self.owners, order = _balanced(costs, grid.num_ranks)
        self.rounds = [
            _Round.of(numbers, self.layouts, self.owners, self.rank, grid.num_ranks)
            for numbers in self._split_into_rounds(order)
        ]

    def _split_into_rounds(self, order: list[int]) -> list[list[int]]:
        """Returns the numbers of the matrices of each round, so that no owner receives more than
        ROUND_ELEMENTS elements of several matrices.
        """
        rounds: list[list[int]] = []
        received: dict[int, int] = {}
        for number in order:
            owner = self.owners[number]
            rows, columns = self.layouts[number].shape
            total = received.get(owner, 0) + rows * columns
            if not rounds or (owner in received and total > ROUND_ELEMENTS):
                rounds.append([])
                received = {}
                total = rows * columns
            received[owner] = total
            rounds[-1].append(number)
        return rounds

    def map(
        self, shards: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields (number of a matrix, this rank's shard of the function of the whole matrix) for
        each matrix. All ranks of the group must call it, and use all its results.

        The function is computed once for each matrix, on its owner. While an owner computes, the
        shards of the next round and the results of the previous round are on their way.

        Args:
            shards: this rank's shard of each matrix. All have the same dtype.
            function: function of a whole matrix, whose result has the shape and dtype of its
                argument.
        """
        arriving = None
        leaving = None
        for number, present in enumerate(self.rounds):
            if arriving is None:
                arriving = self._gather(present, shards)
            following = None
            if number + 1 < len(self.rounds):
                following = self._gather(self.rounds[number + 1], shards)
            wholes = self._assemble(present, arriving.wait())
            results = {matrix: function(whole) for matrix, whole in wholes}
            scattered = self._scatter(present, results, shards[0])
            if leaving is not None:
                yield from self._results(*leaving)
            arriving = following
            leaving = present, scattered
        if leaving is not None:
            yield from self._results(*leaving)

    def _gather(self, present: "_Round", shards: Sequence[Tensor]) -> "_Transfer":
        """Starts to send this rank's shards of the matrices of a round to their owners."""
        parts = [shards[number].flatten() for number in present.sent]
        return _Transfer(parts, present.sent_sizes, present.received_sizes, shards[0], self.group)

    def _assemble(self, present: "_Round", arrived: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields (number of the matrix, whole matrix) for each matrix of the round that this rank
        owns. `arrived` has the elements of all received shards, in the order of `present.received`.
        """
        wholes = {number: arrived.new_empty(self.layouts[number].shape) for number in present.owned}
        sizes = [_numel(region) for _, region in present.received]
        for (number, region), part in zip(present.received, arrived.split(sizes), strict=True):
            wholes[number][region] = part.view(_size(region))
        yield from wholes.items()

    def _scatter(
        self, present: "_Round", results: dict[int, Tensor], example: Tensor
    ) -> "_Transfer":
        """Starts to send each rank its shard of the results of a round."""
        parts = [results[number][region].flatten() for number, region in present.returned]
        sizes = present.returned_sizes, present.awaited_sizes
        return _Transfer(parts, *sizes, example, self.group)

    def _results(self, present: "_Round", leaving: "_Transfer") -> Iterator[tuple[int, Tensor]]:
        """Yields (number of the matrix, this rank's shard of the result) for each matrix of a
        round.
        """
        regions = [self.layouts[number].region(self.rank) for number in present.awaited]
        parts = leaving.wait().split([_numel(region) for region in regions])
        for number, region, part in zip(present.awaited, regions, parts, strict=True):
            yield number, part.view(_size(region))


@dataclasses.dataclass(frozen=True)
class _Grid:
    """Sizes of the mesh axes over the ranks of one pipeline stage, in the order of their ranks."""

    replicate: int
    shard: int
    tensor: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "_Grid":
        names = mesh.mesh_dim_names or ()
        axes = ("replicate", "shard", "tensor")
        return cls(*(mesh[name].size() if name in names else 1 for name in axes))

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard * self.tensor

    def indices(self, rank: int) -> tuple[int, int, int]:
        """Returns the indices of a rank on the axes replicate, shard and tensor."""
        rest, tensor = divmod(rank, self.tensor)
        return rest // self.shard, rest % self.shard, tensor


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Distribution of a matrix over the ranks of a grid. Tensor parallelism splits it first.
    fully_shard then splits the rows of each part, as in torch.
    """

    shape: tuple[int, int]
    grid: _Grid
    tensor_dim: int | None
    """Dimension that tensor parallelism splits, or None."""
    is_sharded: bool
    """Whether the axis `shard` splits the rows."""

    @classmethod
    def of(cls, matrix: Tensor, grid: _Grid) -> "_Layout":
        tensor_dim = None
        is_sharded = False
        if isinstance(matrix, DTensor):
            names = matrix.device_mesh.mesh_dim_names or ()
            for name, placement in zip(names, matrix.placements, strict=True):
                if placement.is_replicate():
                    continue
                dim = cast(Shard, placement).dim
                if name == "tensor":
                    tensor_dim = dim
                else:
                    assert name == "shard" and dim == 0, (name, placement)
                    is_sharded = True
        rows, columns = matrix.shape
        return cls((rows, columns), grid, tensor_dim, is_sharded)

    def region(self, rank: int) -> Region:
        """Returns the rows and columns that a rank holds."""
        _, shard, tensor = self.grid.indices(rank)
        spans = [range(size) for size in self.shape]
        if self.tensor_dim is not None:
            spans[self.tensor_dim] = _chunk(spans[self.tensor_dim], tensor, self.grid.tensor)
        if self.is_sharded:
            spans[0] = _chunk(spans[0], shard, self.grid.shard)
        rows, columns = (slice(span.start, span.stop) for span in spans)
        return rows, columns

    def sends_to(self, owner: int, rank: int) -> bool:
        """Returns whether a rank sends its shard to the owner. If several ranks hold the same
        shard, only the one that is on the owner's side of the mesh sends it.
        """
        own = self.grid.indices(rank)
        wanted = self.grid.indices(owner)
        is_split = (False, self.is_sharded, self.tensor_dim is not None)
        return all(split or a == b for split, a, b in zip(is_split, own, wanted, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Round:
    """The transfers of one rank in one round, as matrices by number. Lists are sorted by the other
    rank of a transfer, then by number of the matrix. Sizes are numbers of elements by rank.
    """

    owned: list[int]
    """Matrices of the round that this rank owns."""
    sent: list[int]
    """Matrices of which this rank sends its shard to the owner of the matrix."""
    sent_sizes: list[int]
    received: list[tuple[int, Region]]
    """Matrix and region of each shard that this rank receives as an owner."""
    received_sizes: list[int]
    returned: list[tuple[int, Region]]
    """Matrix and region of each part of a result that this rank sends as an owner."""
    returned_sizes: list[int]
    awaited: list[int]
    """Matrices of which this rank receives its shard of the result: all matrices of the round."""
    awaited_sizes: list[int]

    @classmethod
    def of(
        cls,
        numbers: list[int],
        layouts: Sequence[_Layout],
        owners: Sequence[int],
        rank: int,
        num_ranks: int,
    ) -> "_Round":
        numbers = sorted(numbers, key=lambda number: (owners[number], number))
        owned = [number for number in numbers if owners[number] == rank]
        sent = [n for n in numbers if layouts[n].sends_to(owners[n], rank)]
        sent_sizes = [0] * num_ranks
        awaited_sizes = [0] * num_ranks
        for number in numbers:
            awaited_sizes[owners[number]] += _numel(layouts[number].region(rank))
        for number in sent:
            sent_sizes[owners[number]] += _numel(layouts[number].region(rank))
        received = []
        returned = []
        received_sizes = [0] * num_ranks
        returned_sizes = [0] * num_ranks
        for other in range(num_ranks):
            for number in owned:
                region = layouts[number].region(other)
                returned.append((number, region))
                returned_sizes[other] += _numel(region)
                if layouts[number].sends_to(rank, other):
                    received.append((number, region))
                    received_sizes[other] += _numel(region)
        return cls(
            owned=owned,
            sent=sent,
            sent_sizes=sent_sizes,
            received=received,
            received_sizes=received_sizes,
            returned=returned,
            returned_sizes=returned_sizes,
            awaited=numbers,
            awaited_sizes=awaited_sizes,
        )


class _Transfer:
    """An exchange of elements between all ranks of a group, which starts when the object is made.

    Args:
        parts: elements to send, in the order of the receiving ranks.
        sent_sizes, received_sizes: numbers of elements to send and to receive, by rank.
        example: tensor with the dtype and device of the elements.
        group: process group.
    """

    def __init__(
        self,
        parts: list[Tensor],
        sent_sizes: list[int],
        received_sizes: list[int],
        example: Tensor,
        group: Any,
    ) -> None:
        self.sent = torch.cat(parts) if parts else example.new_empty(0)
        self.work: Any = None
        if len(sent_sizes) == 1:
            self.received = self.sent
            return
        self.received = example.new_empty(sum(received_sizes))
        self.work = dist.all_to_all_single(
            self.received, self.sent, received_sizes, sent_sizes, group=group, async_op=True
        )

    def wait(self) -> Tensor:
        """Returns the received elements, in the order of the sending ranks."""
        if self.work is not None:
            self.work.wait()
        return self.received


def _balanced(costs: list[float], num_ranks: int) -> tuple[list[int], list[int]]:
    """Returns (rank that owns each matrix, indices of the matrices from the most to the least
    costly).

    The most costly matrix that is left goes to the rank with the least work so far. The largest
    work of a rank is then at most 4/3 of the smallest possible (R. L. Graham, "Bounds on
    multiprocessing timing anomalies", 1969).
    """
    order = sorted(range(len(costs)), key=lambda number: (-costs[number], number))
    loads = [(0.0, rank) for rank in range(num_ranks)]
    owners = [0] * len(costs)
    for number in order:
        load, rank = heapq.heappop(loads)
        owners[number] = rank
        heapq.heappush(loads, (load + costs[number], rank))
    return owners, order


def _chunk(span: range, index: int, count: int) -> range:
    """Returns the part of a span that has an index if `torch.chunk` splits it into `count` parts.
    The last parts may be smaller or empty.
    """
    size = -(-len(span) // count)
    return span[index * size : (index + 1) * size]


def _size(region: Region) -> tuple[int, int]:
    rows, columns = region
    return rows.stop - rows.start, columns.stop - columns.start


def _numel(region: Region) -> int:
    rows, columns = _size(region)
    return rows * columns
