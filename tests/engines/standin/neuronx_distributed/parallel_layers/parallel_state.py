"""Process groups of the simulated NxD. Tensor ranks are consecutive, then come data-parallel
replicas, then pipeline stages, as in the real NxD on Trn1.

As in the real NxD, four tensor ranks are not consecutive but spread over their node. The groups of
copied key/value heads ignore this spreading.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.engines.signatures import recorded

NAME = "neuronx_distributed.parallel_layers.parallel_state"
STATE: dict = {}


def initialise(tensor: int, pipeline: int) -> None:
    world = dist.get_world_size()
    ranks, data = torch.arange(world), world // (tensor * pipeline)
    if tensor == 4:
        groups_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world)) // tensor
        ranks = ranks.reshape(pipeline, data // groups_per_node, tensor, groups_per_node).transpose(
            -1, -2
        )
    names = ("pipeline", "data", "tensor")
    STATE["mesh"] = DeviceMesh("cpu", ranks.reshape(pipeline, data, tensor), mesh_dim_names=names)
    STATE["alone"], _ = dist.new_subgroups(group_size=1)


def mesh() -> DeviceMesh:
    return STATE["mesh"]


def kv_group(copies: int):
    """Returns the ranks that hold copies of the same key/value heads, under the assumption that
    tensor ranks are consecutive.
    """
    if copies not in STATE:
        for ranks in (
            torch.arange(dist.get_world_size()).unflatten(0, (-1, tensor_group().size())).tolist()
        ):
            for first in range(len(ranks) // copies):
                group = dist.new_group(ranks[first :: len(ranks) // copies])
                if dist.get_rank() in ranks[first :: len(ranks) // copies]:
                    STATE[copies] = group
    return STATE[copies]


@recorded(NAME)
def get_data_parallel_rank():
    return mesh()["data"].get_local_rank()


@recorded(NAME)
def get_tensor_model_parallel_rank():
    return mesh()["tensor"].get_local_rank()


@recorded(NAME)
def get_data_parallel_group(as_list=False):
    return mesh()["data"].get_group()


@recorded(NAME)
def get_tensor_model_parallel_group(as_list=False):
    return tensor_group()


@recorded(NAME)
def get_pipeline_model_parallel_group(as_list=False):
    """Returns a group of only this rank. Each rank runs the whole model, so there is nothing to sum
    over the pipeline.
    """
    return STATE["alone"]


def tensor_group():
    return mesh()["tensor"].get_group()
