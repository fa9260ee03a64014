"""The real cutting code, run for one rank of each kind: nothing is allocated, no other process
is needed.
"""

import itertools
from collections import Counter
from typing import NamedTuple

import torch

from kit.parallel.pipeline import stage_indices, stage_layers
from kit.parallel.simulate import view_rank
from kit.plan import Plan
from kit.spec import ModelSpec


class Cut(NamedTuple):
    """What the ranks of a plan hold, by those that differ."""

    num_kinds: int
    """Ranks whose cutting code ran."""
    most_params: int
    """Numbers that the fullest rank stores as weights."""
    num_params: int
    """Of all pipeline stages together, before tensor and sharded data parallelism cut them; tied
    embeddings once."""


def cut(spec: ModelSpec, plan: Plan) -> Cut:
    """Returns what each kind of rank holds: of each kind of pipeline stage the first and last
    tensor and data rank.

    Raises:
        ConfigError: the plan cannot run the model.
    """
    places = range(plan.pipeline_parallel)
    kinds = {place: _kind(spec, plan, place) for place in places}
    first_of = {kind: place for place, kind in reversed(kinds.items())}
    ends = [{0, degree - 1} for degree in (plan.data_parallel, plan.tensor_parallel)]
    views, num_params = [], 0
    for kind, count in Counter(kinds.values()).items():
        for data, tensor in itertools.product(*ends):
            rank = (first_of[kind] * plan.data_parallel + data) * plan.tensor_parallel + tensor
            views.append(view_rank(spec, plan, rank))
        shapes = [torch.Size(parameter.whole_shape) for parameter in views[-1].parameters]
        num_params += count * sum(shape.numel() for shape in shapes)
    if spec.tied_embeddings and plan.pipeline_parallel > 1:  # of which the last stage has a copy
        num_params -= spec.vocab_size * spec.hidden_size
    return Cut(len(views), max(view.num_params for view in views), num_params)


def _kind(spec: ModelSpec, plan: Plan, place: int) -> tuple:
    """Returns what makes a place in the pipeline differ from others: how many layers, and which
    ends.
    """
    layers = [stage_layers(spec, plan, stage) for stage in stage_indices(plan, place)]
    return tuple((len(part), 0 in part, spec.num_layers - 1 in part) for part in layers)
