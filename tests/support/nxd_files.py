"""Writes checkpoints with the names and the shards of NeuronX Distributed (NxD)."""

from pathlib import Path

import torch
from torch import Tensor

from kit.interop.weights.weights import to_hugging_face
from kit.model import Decoder


def nxd_rank(
    decoder: Decoder, rank: int, tensor: int, platform: str, fused: bool
) -> dict[str, Tensor]:
    """Returns the weights of one tensor-parallel rank under NxD's names. With `fused`, query, key
    and value are one matrix.
    """
    spec = decoder.spec
    weights, size = to_hugging_face(spec, decoder.state_dict().items()), spec.head_size
    copies = tensor // spec.num_kv_heads
    mine: dict[str, Tensor] = {}

    def cut(weight: Tensor, dim: int = 0) -> Tensor:
        return weight.chunk(tensor, dim)[rank].clone()

    for name, weight in weights.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            mine[name] = cut(weight)
        elif "norm" in name:
            mine[name] = weight.clone()
        elif name.endswith("down_proj.weight"):
            mine[name] = cut(weight, 1)
    for layer in range(spec.num_layers):
        mlp, attention = f"model.layers.{layer}.mlp", f"model.layers.{layer}.self_attn"
        gate_up = [cut(weights[f"{mlp}.{part}_proj.weight"]) for part in ("gate", "up")]
        mine[f"{mlp}.gate_up_proj.weight"] = torch.cat(gate_up)
        q, k, v, o = (weights[f"{attention}.{p}_proj.weight"] for p in "qkvo")
        if spec.num_kv_heads == spec.num_heads:
            mine[f"{attention}.qkv_proj.weight"] = torch.cat([cut(q), cut(k), cut(v)])
            mine[f"{attention}.o_proj.weight"] = cut(o, 1)
            continue
        # The rank computes one key/value head and one block of the query heads that use this
        # key/value head.
        kv_head, block = rank % spec.num_kv_heads, rank // spec.num_kv_heads
        if platform == "trn2":
            kv_head, block = rank // copies, rank % copies
        group = spec.num_heads // spec.num_kv_heads
        first = kv_head * group + block * (group // copies)
        heads = range(first, first + group // copies)
        rows = [row for head in heads for row in range(head * size, (head + 1) * size)]
        parts = q[rows], *(part[kv_head * size : (kv_head + 1) * size].clone() for part in (k, v))
        if fused:
            mine[f"{attention}.qkv_proj.weight_qkv"] = torch.cat(parts)
        else:
            mine |= {
                f"{attention}.qkv_proj.weight_{which}": part
                for which, part in zip("qkv", parts, strict=True)
            }
        mine[f"{attention}.o_proj.weight"] = o[:, rows]
    return mine


def write_nxd(
    decoder: Decoder,
    folder: Path,
    tensor: int,
    pipeline: int,
    platform: str = "trn1",
    fused: bool = False,
) -> Path:
    """Writes the weights of a decoder as NxD writes them: one file per tensor-parallel rank and
    pipeline stage. Returns the folder.
    """
    (folder / "model").mkdir(parents=True)
    share = decoder.spec.num_layers // pipeline
    for rank in range(tensor):
        held = nxd_rank(decoder, rank, tensor, platform, fused)
        for stage in range(pipeline):
            here = [f"model.layers.{i}." for i in range(stage * share, (stage + 1) * share)]
            here += ["model.embed_tokens"] if stage == 0 else []
            here += ["model.norm", "lm_head"] if stage == pipeline - 1 else []
            state = {n: w for n, w in held.items() if n.startswith(tuple(here))}
            file = f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
            torch.save(state, folder / "model" / file)
    return folder
