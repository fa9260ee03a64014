"""Checkpoint shards of NxD and of Megatron-DeepSpeed are merged into the whole model. The tests
make each shard from the weights that its rank computes with.

The functions that make shards follow the definition of the layers with loops over attention heads.
They share no code with the importers, so they cannot share an error with them.
"""

import argparse
import enum
import itertools
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kit.errors import ConfigError, DataError
from kit.interop.weights.hugging_face import import_hugging_face
from kit.interop.weights.megatron import import_megatron_deepspeed
from kit.interop.weights.neuron import import_nxd
from kit.model import Decoder
from tests.support.distinct_models import GPT, LLAMA, assert_equal, randomised
from tests.support.nxd_files import write_nxd


def llama(num_kv_heads: int, num_layers: int = 2) -> Decoder:
    sizes = {"num_layers": num_layers, "num_heads": 8, "vocab_size": 64}
    return randomised(LLAMA.replace(num_kv_heads=num_kv_heads, **sizes))


# Checkpoints of NxD -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_kv_heads", "tensor", "pipeline", "platform", "fused"),
    [
        *[(*sizes, 1, "trn1", False) for sizes in [(2, 4), (2, 8), (2, 2), (8, 2)]],
        *[(*sizes, "trn1", False) for sizes in [(2, 4, 2), (8, 1, 4), (8, 4, 2)]],
        *[
            (*sizes, 2, *how)
            for sizes in [(2, 8), (4, 8), (1, 4)]
            for how in itertools.product(["trn1", "trn2"], [False, True])
        ],
    ],
)
def test_nxd_shards_are_merged_in_the_order_of_heads(
    num_kv_heads, tensor, pipeline, platform, fused, tmp_path
) -> None:
    decoder = llama(num_kv_heads, max(2, pipeline))
    folder = write_nxd(decoder, tmp_path / "step_10", tensor, pipeline, platform, fused)
    assert_equal(import_nxd(folder, decoder.spec).decoder(), decoder)


def test_kv_copies_with_rounding_drift_are_accepted(tmp_path: Path) -> None:
    """Stochastic rounding makes the copies of a key/value head on several ranks slightly different.
    A copy with the opposite sign is refused.
    """
    decoder = llama(2)
    folder = write_nxd(decoder, tmp_path / "step_10", 4, 1)
    drifted = folder / "model" / "dp_rank_00_tp_rank_02_pp_rank_00.pt"
    state = torch.load(drifted)
    state["model.layers.0.self_attn.qkv_proj.weight_k"] *= 1 + 2**-8
    torch.save(state, drifted)
    assert_equal(import_nxd(folder, decoder.spec).decoder(), decoder)
    state["model.layers.0.self_attn.qkv_proj.weight_k"] *= -1
    torch.save(state, drifted)
    with pytest.raises(DataError, match="neither neighbours nor every 2th are copies"):
        import_nxd(folder, decoder.spec).decoder()


def write_xser(folder: Path) -> None:
    """Rewrites the checkpoint files of a folder in the format of NxD's option use_xser: each tensor
    has its own file.
    """
    for file in sorted((folder / "model").glob("*.pt")):
        tensors = Path(f"{file}.tensors")
        tensors.mkdir()
        state = {}
        for number, (name, tensor) in enumerate(torch.load(file).items()):
            torch.save(tensor, tensors / f"tensor_{number}.pt")
            state[name] = TheirReference(number)
        torch.save(state, file)


class TheirReference:
    def __init__(self, tid: int) -> None:
        self.tid = tid


TheirReference.__module__, TheirReference.__qualname__ = (
    "torch_xla.utils.serialization",
    "TensorReference",
)


@pytest.fixture
def torch_xla_serialization(monkeypatch) -> None:
    """Adds simulated modules with the names of torch_xla's modules, so that references to tensors
    can be pickled.
    """
    for name in ("torch_xla", "torch_xla.utils", "torch_xla.utils.serialization"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["torch_xla.utils.serialization"].TensorReference = TheirReference  # pyright: ignore


def test_nxd_shards_with_one_file_per_tensor_are_read(
    torch_xla_serialization, tmp_path: Path
) -> None:
    decoder = llama(2)
    folder = write_nxd(decoder, tmp_path / "step_10", 4, 2)
    write_xser(folder)
    assert_equal(import_nxd(folder, decoder.spec).decoder(), decoder)
    file = folder / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt"
    (Path(f"{file}.tensors") / "tensor_0.pt").unlink()
    message = "tp_rank_01_pp_rank_00.pt.tensors/tensor_0.pt: cannot be read"
    with pytest.raises(DataError, match=message):
        import_nxd(folder, decoder.spec).decoder()
    torch.save({"model.norm.weight": TheirReference("../../elsewhere")}, file)
    with pytest.raises(DataError, match=r"pp_rank_00.pt: tensor_'../../elsewhere'"):
        import_nxd(folder, decoder.spec).decoder()


def test_nxd_shards_of_the_converter_are_read(tmp_path: Path) -> None:
    """NxD's checkpoint converter stores tensors in the shard files even with --save_xser. Its
    tensors are in memory, which the xser format leaves in the shard file, so the folder of tensor
    files stays empty.
    """
    decoder = llama(2)
    folder = write_nxd(decoder, tmp_path / "step_10", 4, 2)
    for file in sorted((folder / "model").glob("*.pt")):
        Path(f"{file}.tensors").mkdir()
    assert_equal(import_nxd(folder / "model", decoder.spec).decoder(), decoder)


def test_unreadable_nxd_shards_are_refused(tmp_path: Path) -> None:
    spec = llama(2).spec
    folder = write_nxd(llama(2), tmp_path / "step_10", 4, 2)
    for kind, wrong, message in (
        (DataError, {"ffn_hidden_size": 98}, "gate.weight has shape .* does not hold tiny"),
        (DataError, {"num_layers": 3}, "has no weight 'model.layers.2.input_layernorm.weight'"),
        (ConfigError, {"bias": True}, "not a Llama without biases"),
    ):
        with pytest.raises(kind, match=message):
            import_nxd(folder, spec.replace(**wrong)).decoder()
    (folder / "model" / "dp_rank_00_tp_rank_02_pp_rank_01.pt").rename(tmp_path / "away.pt")
    with pytest.raises(DataError, match="shards are missing: tp 2 pp 1"):
        import_nxd(folder, spec).decoder()
    with pytest.raises(DataError, match="has no dp_rank_00_tp_rank"):
        import_nxd(tmp_path, spec).decoder()


# Checkpoints of Megatron-DeepSpeed ----------------------------------------------------------------


def megatron_block(decoder: Decoder, layer: int, rank: int, tensor: int) -> dict[str, Tensor]:
    """Returns the weights of one transformer layer on one of `tensor` tensor-parallel ranks."""
    spec, size = decoder.spec, decoder.spec.head_size
    weights = {
        n.removeprefix(f"layers.{layer}."): w
        for n, w in decoder.state_dict().items()
        if f"layers.{layer}." in n
    }
    group = spec.num_heads // spec.num_kv_heads
    mine: dict[str, Tensor] = {}
    for kind in ("weight", "bias") if spec.bias else ("weight",):
        fused = []
        for head in range(spec.num_kv_heads):
            if head * tensor // spec.num_kv_heads == rank:
                for part, count in (("query", group), ("key", 1), ("value", 1)):
                    rows = slice(head * count * size, (head + 1) * count * size)
                    fused.append(weights[f"attention.{part}.{kind}"][rows])
        mine[f"self_attention.query_key_value.{kind}"] = torch.cat(fused)
        up = weights[f"feed_forward.up.{kind}"].chunk(tensor)[rank]
        gate = [weights[f"feed_forward.gate.{kind}"].chunk(tensor)[rank]] if spec.gated else []
        mine[f"mlp.dense_h_to_4h.{kind}"] = torch.cat([*gate, up])
        for ours, theirs in (
            ("attention.output", "self_attention.dense"),
            ("feed_forward.down", "mlp.dense_4h_to_h"),
        ):
            whole = weights[f"{ours}.{kind}"]
            mine[f"{theirs}.{kind}"] = (
                whole.chunk(tensor, 1)[rank].clone() if kind == "weight" else whole
            )
    norms = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
    for ours, theirs in norms.items():
        for kind in ("weight", "bias"):
            if f"{ours}.{kind}" in weights:
                mine[f"{theirs}.{kind}"] = weights[f"{ours}.{kind}"]
    return {name: weight.clone() for name, weight in mine.items()}


def write_megatron(decoder: Decoder, folder: Path, tensor: int, *, first: int) -> Path:
    """Writes a Megatron-DeepSpeed checkpoint with one file per layer and rank. File numbers start
    as in a run in bf16 (`first` = 1) or in fp32 (0). Layers without weights have no file.
    """
    folder.mkdir(parents=True)
    spec, weights = decoder.spec, decoder.state_dict()
    for rank in range(tensor):
        tokens = weights["embedding.tokens.weight"].chunk(tensor)[rank].clone()
        embedding = {"word_embeddings.weight": tokens}
        if spec.positions == "learned":
            embedding["position_embeddings.weight"] = weights["embedding.positions.weight"]
        layers = {first: embedding}
        for layer in range(spec.num_layers):
            layers[first + 2 + layer] = megatron_block(decoder, layer, rank, tensor)
        last = first + 2 + spec.num_layers + 1
        kinds = (kind for kind in ("weight", "bias") if f"norm.{kind}" in weights)
        layers[last] = {kind: weights[f"norm.{kind}"] for kind in kinds}
        output = {"lm_head.weight": weights["output.weight"].chunk(tensor)[rank].clone()}
        layers[last + 1] = embedding if spec.tied_embeddings else output
        for number, state in layers.items():
            torch.save(state, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    arguments = argparse.Namespace(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        layernorm_epsilon=spec.norm_eps,
        params_dtype=torch.float32,
        position_embedding_type=Position.LEARNED,
        save=Path("elsewhere"),
    )
    write_arguments(folder, args=arguments, checkpoint_version=3.0)
    return folder


class Position(enum.Enum):
    """Simulates an enumeration in Megatron's arguments. Its class does not exist in the process
    that reads the checkpoint.
    """

    LEARNED = 1


def write_arguments(folder: Path, **entries) -> None:
    torch.save({"module": {}, "iteration": 10, **entries}, folder / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize(
    ("family", "first", "tensor"),
    [
        *itertools.product(["gpt"], [0, 1], [1, 2, 4]),
        ("grouped llama", 1, 1),
        ("grouped llama", 1, 2),
    ],
)
def test_megatron_layers_are_merged(family: str, first: int, tensor: int, tmp_path: Path) -> None:
    decoder = randomised(GPT) if family == "gpt" else llama(2)
    folder = write_megatron(decoder, tmp_path / "global_step10", tensor, first=first)
    assert_equal(import_megatron_deepspeed(folder, decoder.spec).decoder(), decoder)


def test_megatron_layers_of_another_model_are_refused(tmp_path: Path) -> None:
    """If a model has half the heads at twice the head size, its shards have equal shapes. Only
    Megatron's saved arguments show the difference.
    """
    folder = write_megatron(randomised(GPT), tmp_path / "global_step10", 2, first=1)
    for wrong, message in (
        ({"num_layers": 4}, "has 3 blocks, but spec.num_layers is 4"),
        ({"vocab_size": 60}, "embedding.tokens.weight has shape"),
        (
            {"num_heads": 2, "num_kv_heads": 2},
            "trained with num_attention_heads 4, but spec.num_heads is 2",
        ),
        ({"norm_eps": 1e-6}, "with layernorm_epsilon 1e-05, but spec.norm_eps is 1e-06"),
    ):
        with pytest.raises(DataError, match=message):
            import_megatron_deepspeed(folder, GPT.replace(**wrong)).decoder()
    (folder / "layer_03-model_00-model_states.pt").unlink()
    with pytest.raises(DataError, match=r"layer 3 has tensor ranks \[1\], expected 0 to 1"):
        import_megatron_deepspeed(folder, GPT).decoder()
    with pytest.raises(DataError, match="has no layer_XX"):
        import_megatron_deepspeed(tmp_path, GPT).decoder()


def test_head_counts_are_checked_with_megatron_arguments(tmp_path: Path) -> None:
    grouped = llama(2)
    folder = write_megatron(grouped, tmp_path / "grouped", 2, first=1)
    fewer = grouped.spec.replace(num_heads=4, num_kv_heads=1)
    with pytest.raises(DataError, match="num_kv_heads 1 cannot be shared out over 2 tensor ranks"):
        import_megatron_deepspeed(folder, fewer).decoder()
    write_arguments(folder, args=argparse.Namespace(), checkpoint_version=1.0)
    with pytest.raises(DataError, match="checkpoint_version 1.0 has another order of heads"):
        import_megatron_deepspeed(folder, grouped.spec).decoder()
    (folder / "mp_rank_00_model_states.pt").unlink()
    with pytest.warns(UserWarning, match="no readable mp_rank_00_.*, so nothing says how many h"):
        import_megatron_deepspeed(folder, grouped.spec).decoder()


def test_inconsistent_tensor_ranks_are_refused(tmp_path: Path) -> None:
    folder = write_megatron(randomised(GPT), tmp_path / "global_step10", 2, first=1)
    file = folder / "layer_03-model_01-model_states.pt"
    whole, up, down = torch.load(file), "mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight"
    norm = "input_layernorm.weight"
    without = {name: weight for name, weight in whole.items() if name != down}
    for held, message in (
        ({**whole, up: whole[up][:-8]}, rf"{up} has the shapes \[128, 64\], \[120, 64\]"),
        ({**whole, norm: whole[norm] + 1}, f"{norm} is not the same on all 2 tensor ranks"),
        (without, f"tensor rank 1 holds no '{down}'"),
    ):
        torch.save(held, file)
        with pytest.raises(DataError, match=message):
            import_megatron_deepspeed(folder, GPT).decoder()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (".metadata __0_0.distcp common.pt", "a distributed .* of megatron-core .torch_dist."),
        (
            "mp_rank_00/model_optim_rng.pt",
            "a checkpoint of Megatron-LM .mp_rank_XX/model_optim_rng.pt.",
        ),
        ("mp_rank_00_000/model_optim_rng.pt", "a checkpoint of Megatron-LM"),
        ("config.json model.safetensors", "a Hugging Face folder"),
        ("iter_0000100/mp_rank_00/model_optim_rng.pt", "in iter_0000100"),
    ],
)
def test_other_checkpoint_formats_are_recognized(file: str, message: str, tmp_path: Path) -> None:
    for each in file.split():
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).touch()
    with pytest.raises(DataError, match=message):
        import_megatron_deepspeed(tmp_path, GPT)
    if "config.json" not in file:
        with pytest.raises(DataError, match=message):
            import_hugging_face(tmp_path).decoder()
