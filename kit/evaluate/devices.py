"""Distribution of the weights of a scored model over the devices of a site.

Imports neither torch nor lm-eval.
"""

import dataclasses

from cluster.site import Site
from kit.config.spec import ModelSpec
from kit.errors import ConfigError
from kit.evaluate.benchmarks import Options
from kit.interop.weights.hugging_face_config import config_of
from kit.interop.weights.model_types import write_model

PRECISIONS = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per weight, by precision."""
HEADROOM = 1.2
"""Memory that scoring needs, as a multiple of the memory of the weights. The additional 20 % hold
activations, logits, keys and values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceLayout:
    """Layout of the processes that score a model, one process per device: `replicas` groups of
    `shards` processes. The processes of a group share the weights.

    The shards of a Llama on one node are tensor-parallel ranks. All other shards use FSDP: each
    process holds its part of the weights, and gathers a layer when it computes the layer. Every
    process of the group does the whole computation.
    """

    shards: int = 1
    replicas: int = 1
    is_tensor: bool = True

    @property
    def num_devices(self) -> int:
        """Number of devices over which the model and its replicas are distributed. Each has one
        process.
        """
        return self.shards * self.replicas

    def __str__(self) -> str:
        kind = "tensor" if self.is_tensor else "FSDP"
        return f"{kind} {self.shards} x replicas {self.replicas}"


def layout(spec: ModelSpec, site: Site, options: Options, ranks: int = 1) -> DeviceLayout:
    """Returns the distribution of a model over devices.

    The weights are split over as few devices as possible. The other devices hold replicas, and the
    items are divided among the replicas. The number of devices is `options.devices`. If None, it is
    the number of `ranks` of the job that scores. Outside a job, it is the smallest number of
    devices that holds the weights.

    Raises:
        ConfigError: transformers has no such model, the devices cannot share or hold the model, or
            the number of devices differs from the number of started processes.
    """
    config_of(spec)
    wanted = options.devices
    if ranks > 1:
        if wanted not in (None, ranks):
            raise ConfigError(
                f"devices: {wanted} were asked for, but {ranks} processes were started. Start as"
                " many."
            )
        wanted = ranks
    node = site.devices_per_node
    if wanted is None:
        whole_nodes = range(2 * node, spec.num_layers * node + 1, node)
        counts = [*range(1, node + 1), *whole_nodes]
    else:
        counts = [wanted]
    for count in counts:
        found = _split(spec, site, options.precision, count)
        if found is not None:
            return found
    weights = (
        f"{PRECISIONS[options.precision] * spec.num_params / 1e9:,.1f} GB of weights in"
        f" {options.precision}"
    )
    degrees = ", ".join(
        str(degree) for degree in range(1, node + 1) if _tensor_ranks_divide(spec, degree)
    )
    memory = site.device.memory_bytes
    size = f"{memory.value / 1e9:,.1f} GB" if memory else "unknown memory"
    raise ConfigError(
        f"devices: {wanted or 'no number of them'} cannot share {spec.name}: {weights}, devices of"
        f" {site.name} with {size}, {node} a node; a Llama's tensor ranks in a node: {degrees};"
        " beyond one node, whole nodes. Give another number, precision bf16, or a run whose site"
        " has more."
    )


def _tensor_ranks_divide(spec: ModelSpec, ranks: int) -> bool:
    """Returns whether tensor-parallel ranks can split the model evenly."""
    sizes = (spec.num_heads, spec.num_kv_heads, spec.ffn_hidden_size, spec.vocab_size)
    return all(size % ranks == 0 for size in sizes)


def _split(spec: ModelSpec, site: Site, precision: str, devices: int) -> DeviceLayout | None:
    """Returns the layout with the most replicas for which the weights fit in the devices' memory.
    Returns None if they fit in no layout of this number of devices.
    """
    node = site.devices_per_node
    is_local = site.scheduler == "local"
    if devices > node and devices % node and not is_local:
        return None
    memory = float("inf")
    if site.device.memory_bytes is not None:
        memory = site.device.memory_bytes.value
    if is_local:
        memory *= node / devices  # All processes of a local site share one machine's memory.
    needed = HEADROOM * PRECISIONS[precision] * spec.num_params
    # Tensor parallelism of transformers was compared with one process for Llamas only.
    is_llama = write_model(spec)["model_type"] == "llama"
    for shards in range(1, devices + 1):
        if devices % shards:
            continue
        if devices > node and node % shards and shards % node:
            continue  # The shards must fill whole nodes, or divide one node evenly.
        is_tensor = is_llama and shards <= node
        if is_tensor and not _tensor_ranks_divide(spec, shards):
            continue
        share = 1 / shards
        if not is_tensor and shards > 1:
            # Besides its part of the weights, an FSDP process holds two whole layers: the layer
            # that computes, and the next layer.
            share += 2 / spec.num_layers
        if needed * share <= memory:
            return DeviceLayout(shards=shards, replicas=devices // shards, is_tensor=is_tensor)
    return None
