"""The real cutting code, run for one rank of each kind: nothing is allocated, no other process
is needed.
"""

import dataclasses
import itertools
from collections import Counter

import torch

from kit.parallel.pipeline import stage_indices, stage_layers
from kit.parallel.simulate import view_rank
from kit.plan import Plan
from kit.spec import ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """What the ranks of a plan hold, by those that differ."""

    num_kinds: int
    """Ranks whose cutting code ran."""
    most_params: int
    """Numbers that the fullest rank stores as weights."""
    groups: dict[str, int]
    """In which a rank talks to others, and how many they are."""
    num_params: int
    """Of all pipeline stages together, before tensor and sharded data parallelism cut them; tied
    embeddings once."""


def cut(spec: ModelSpec, plan: Plan) -> Cut:
    """Returns what each kind of rank holds: of each kind of pipeline stage the first and last
    tensor and data rank.

    Raises:
        ConfigError: the plan cannot run the model.
    """
    kinds = Counter(_kind(spec, plan, place) for place in range(plan.pipeline_parallel))
    first_of = {
        _kind(spec, plan, place): place for place in reversed(range(plan.pipeline_parallel))
    }
    views, num_params = [], 0
    for kind, count in kinds.items():
        for tensor, data in itertools.product(
            {0, plan.tensor_parallel - 1}, {0, plan.data_parallel - 1}
        ):
            rank = (first_of[kind] * plan.data_parallel + data) * plan.tensor_parallel + tensor
            views.append(view_rank(spec, plan, rank))
        num_params += count * sum(
            torch.Size(parameter.whole_shape).numel() for parameter in views[-1].parameters
        )
    copies = plan.data_parallel // plan.shard_size if plan.shard_size else 1
    data = {"copies of a shard": copies, "data": plan.data_parallel // copies}
    axes = {"pipeline": plan.pipeline_parallel, **data, "tensor": plan.tensor_parallel}
    groups = {"world": plan.num_devices} | {name: size for name, size in axes.items() if size > 1}
    if spec.tied_embeddings and plan.pipeline_parallel > 1:
        groups["tied embeddings"] = 2
        num_params -= spec.vocab_size * spec.hidden_size  # the last stage has a copy
    most = max(view.num_params for view in views)
    return Cut(num_kinds=len(views), most_params=most, groups=groups, num_params=num_params)


def _kind(spec: ModelSpec, plan: Plan, place: int) -> tuple:
    """Returns what makes a place in the pipeline differ from others: how many layers, and which
    ends.
    """
    layers = [stage_layers(spec, plan, stage) for stage in stage_indices(plan, place)]
    return tuple((len(part), 0 in part, spec.num_layers - 1 in part) for part in layers)
