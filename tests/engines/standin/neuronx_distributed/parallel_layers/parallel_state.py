"""Groups of ranks of the stand-in: tensor ranks are neighbours, then replicas, then pipeline stages, as in NxD."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.engines.signatures import recorded

NAME = "neuronx_distributed.parallel_layers.parallel_state"
STATE: dict = {}


def initialise(tensor: int, pipeline: int) -> None:
    shape = (pipeline, dist.get_world_size() // (tensor * pipeline), tensor)
    STATE["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("pipeline", "data", "tensor"))


def mesh() -> DeviceMesh:
    return STATE["mesh"]


def kv_group(copies: int):
    """Returns the ranks that hold the same key/value heads: on Trn1, every (tensor / copies)-th."""
    if copies not in STATE:
        for ranks in mesh().mesh.flatten(0, 1).tolist():
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


def tensor_group():
    return mesh()["tensor"].get_group()
