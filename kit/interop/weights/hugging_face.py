"""Writes the kit's decoder as a Hugging Face folder in safetensors, as the model type that can
express it, and reads such folders. Writing and reading keep every bit of fp32 weights.

A folder holds `config.json`, `model.safetensors` (or shards with `model.safetensors.index.json`)
and the tokenizer.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cluster.files import read_small
from kit.config.spec import ModelSpec
from kit.data.tokenizer import SentencePieceTokenizer, Tokenizer
from kit.errors import ConfigError, DataError, needed
from kit.interop.weights.hugging_face_config import Precision, config_of, load_spec
from kit.interop.weights.model_types import normalised
from kit.interop.weights.neuron import import_nxd
from kit.interop.weights.other_trainers import named
from kit.interop.weights.sentencepiece import piece_texts, to_tokenizer_json
from kit.interop.weights.weights import (
    SafetensorsFolder,
    Weights,
    average,
    from_hugging_face,
    hugging_face_name,
    parameter_shapes,
    safetensors_library,
    to_hugging_face,
)
from kit.model import Decoder
from kit.run import Run
from kit.run.checkpoint_reader import CheckpointTensors

MAX_SHARD_BYTES = 5 * 10**9
"""Largest size of a weight file, the former default of Hugging Face's `save_pretrained`."""


# Export -------------------------------------------------------------------------------------------


def run_weights(run: Run, step: int | None = None) -> Weights:
    """Returns the weights of a checkpoint of any engine, by default the newest one.

    Raises:
        CheckpointError: There is no complete checkpoint, or none of that step. If the checkpoint is
            damaged, `Weights.fill` raises the error when it reads the weights.
    """
    known = run.checkpoints.describe(run.checkpoints.step_or_newest(step))
    if not known[0].plan.capabilities.portable_checkpoints:
        return import_nxd(run.checkpoints.path(known[0].step), run.spec)
    tensors = CheckpointTensors(run.checkpoints, known, run.spec)
    return Weights(
        run.spec,
        lambda targets: tensors.fill_all({f"model.{name}": targets[name] for name in targets}),
    )


def export_hugging_face(
    model: Decoder | Weights,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    precision: Precision = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes a model as a folder that transformers loads, and returns the folder.

    Args:
        model: Decoder that is not divided between ranks, or `Weights`, of which one weight file at
            a time is held in memory.
        folder: Folder to create. It must be absent or empty. It appears when it is complete.
        tokenizer: Tokenizer that is written beside the weights, as transformers reads it. None: no
            tokenizer.
        precision: Number format of the weights. `float32` keeps every bit of a model of the kit.
        max_shard_bytes: Largest size of a weight file. A single weight may be larger.

    Raises:
        ConfigError: No model type of transformers can express the model, or the folder is not
            empty.
        DataError: transformers gives other token ids than the tokenizer.
        MissingPackageError: safetensors is not installed, or transformers with a tokenizer.
    """
    folder = Path(folder)
    weights = model if isinstance(model, Weights) else Weights.of(model)
    ids = {"bos_token_id": None, "eos_token_id": None if tokenizer is None else tokenizer.eos_id}
    config = config_of(weights.spec, precision=precision) | ids
    with whole_folder(folder) as part:
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if tokenizer is not None:
            write_tokenizer(part, tokenizer, weights.spec.sequence_length)
        _write_shards(part, weights, precision, max_shard_bytes)
    return folder


def _write_shards(
    folder: Path, weights: Weights, precision: Precision, max_shard_bytes: int
) -> None:
    """Writes the weight files with the names and contents that `save_pretrained` gives them, and
    an index if there are several.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    save_file = safetensors_library().torch.save_file
    spec = weights.spec
    ours = parameter_shapes(weights.spec)
    dtype = getattr(torch, precision)
    empty = ((name, torch.empty(shape, dtype=dtype, device="meta")) for name, shape in ours.items())
    theirs = to_hugging_face(spec, empty)
    split = split_torch_state_dict_into_shards(theirs, max_shard_size=max_shard_bytes)
    for file, names in split.filename_to_tensors.items():
        held = {
            name: torch.empty(shape, dtype=dtype)
            for name, shape in ours.items()
            if hugging_face_name(spec, name) in names
        }
        weights.fill(held)
        made = to_hugging_face(spec, held.items())
        del held
        save_file(made, folder / file, metadata={"format": "pt"})
        # safetensors creates files that only their owner may read.
        shutil.copymode(folder / "config.json", folder / file)
        del made  # Frees the memory of this file before the next file is allocated.
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def export_run(
    run: Run,
    step: int | None,
    folder: str | Path,
    *,
    precision: Precision = "float32",
    with_tokenizer: bool = True,
) -> Path:
    """Writes a checkpoint of a run (None: the newest) and the tokenizer of its data set as a folder
    that transformers loads. Returns the folder.

    Raises:
        CheckpointError: There is no complete checkpoint of that step.
        ConfigError: No model type of transformers can express the model, or the folder is not
            empty.
        DataError: transformers gives other token ids than the tokenizer.
        MissingPackageError: safetensors or transformers is not installed.
    """
    tokenizer = run.dataset().tokenizer() if with_tokenizer else None
    return export_hugging_face(
        run_weights(run, step), folder, tokenizer=tokenizer, precision=precision
    )


def export_average(
    run: Run, last: int, folder: str | Path, *, precision: Precision = "float32"
) -> tuple[Path, list[int]]:
    """Writes the mean of the weights of the last checkpoints of a run, and the tokenizer of its
    data set, as a folder that transformers loads. Returns (folder, steps of the checkpoints).

    `last` is the number of checkpoints. HLAT reports the scores of such an average of two
    checkpoints (arXiv 2404.10630, Table IV).

    Raises:
        ConfigError: The run has fewer complete checkpoints, no model type of transformers can
            express the model, or the folder is not empty.
        CheckpointError: A checkpoint is damaged.
        DataError: transformers gives other token ids than the tokenizer.
        MissingPackageError: safetensors or transformers is not installed.
    """
    refuse_occupied(Path(folder))
    there = run.checkpoints.steps()
    if not 2 <= last <= len(there):
        names = ", ".join(map(str, there)) or "none"
        raise ConfigError(
            f"last: {last} is not allowed. Give 2 to the number of complete checkpoints of"
            f" {run.directory}, {len(there)} (steps: {names}). recipe.keep_last and"
            " recipe.keep_every say how many a run keeps."
        )
    steps = there[-last:]
    weights = average([run_weights(run, step) for step in steps])
    tokenizer = run.dataset().tokenizer()
    folder = export_hugging_face(weights, folder, tokenizer=tokenizer, precision=precision)
    return folder, steps


# Tokenizers ---------------------------------------------------------------------------------------

# A wrong token id raises no error: the model just reads another word. So the written tokenizer is
# loaded with transformers. It is compared with the kit's tokenizer on texts for which tokenizers
# are known to differ.
HARD_TEXTS = (
    "¦ ¦  ¦\n¦\n\n¦\t¦\r\n¦\x00¦Hello¦Hello world¦Hello  two   spaces¦ one before¦   three"
    " before¦after ¦after   ¦a\nb¦a\n\n b\n¦tab\tand\r\nlines  ¦x  \n  y¦nul\x00inside¦def f(x):\n "
    "   return x  # 1e-5\n¦\tif a:\n\t\tb\n¦12 345"
    " 6789¦2024-11-22T08:10¦3.14159¦https://a.b/c?d=e&f¦it's \\n¦[INST] hi"
    " [/INST]¦<|im_start|>user\n¦é naïve Straße¦e\u0301 in two parts¦Vie\u0323\u0302t¦ﬁ ½ Ⅷ ™¦Ａ"
    " ｗｉｄｅ¦\u00a0no\u00a0break¦wide\u3000space¦\ufeffmark¦zero\u200bwidth¦日本語のテキスト¦中文"
    " 字符。¦한국어 단어¦ไทย עברית العربية¦Привет, мир¦٣٤¦🙂¦a🙂b¦👩\u200d👩\u200d👧"
    " family¦🇫🇷¦\U0010fffd¦\ufffd¦▁¦a▁b¦<s>¦</s>¦x </s> y¦<unk>¦<0x0A>¦<|endoftext|>"
).split("¦") + [
    f"Title\n{character * length}x" for character in " *-=.a" for length in (17, 40, 61, 79)
]
"""Texts on which tokenizers differ: the empty text, spaces at both ends, tabs, line ends, NUL,
code, digits, combining marks, wide and joined characters, other scripts, emoji, text that spells
special tokens or bytes, and runs of one character."""


def write_tokenizer(folder: Path, tokenizer: Tokenizer, sequence_length: int) -> None:
    """Writes a tokenizer for transformers into a folder that has a `config.json`.

    The tokenizer adds no tokens to a text. Text that spells a special token is read as ordinary
    text, as in training. If a caller of transformers gives `split_special_tokens=False`, such text
    is read as the special token. A SentencePiece model is kept, and also written as
    `tokenizer.json`.

    Raises:
        DataError: transformers gives other token ids for a text of `HARD_TEXTS`, or for the text of
            a SentencePiece piece.
        MissingPackageError: transformers or protobuf is not installed.
    """
    import tokenizers

    texts = HARD_TEXTS
    if isinstance(tokenizer, SentencePieceTokenizer):
        (folder / tokenizer.file_name).write_bytes(tokenizer.data)
        data = to_tokenizer_json(tokenizer.data)
        texts = [*HARD_TEXTS, *piece_texts(tokenizer.data)]
    else:
        data = _bare(tokenizer.data)
    (folder / "tokenizer.json").write_bytes(data)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # This class reads tokenizer.json unchanged.
        "eos_token": tokenizers.Tokenizer.from_str(data.decode()).id_to_token(tokenizer.eos_id),
        "split_special_tokens": True,
        "model_max_length": sequence_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    _compare(folder, tokenizer, texts)


def _bare(data: bytes) -> bytes:
    """Returns a tokenizer.json without the rules that add special tokens, truncate or pad. The kit
    does not apply these rules either.
    """
    table = json.loads(data)
    keys = ("truncation", "padding", "post_processor")
    if all(table.get(key) is None for key in keys):
        return data
    for key in keys:
        if key in table:
            table[key] = None
    return json.dumps(table, ensure_ascii=False).encode()


def _compare(folder: Path, tokenizer: Tokenizer, texts: list[str]) -> None:
    with needed("transformers", "eval", "Comparing an exported tokenizer"):
        from transformers import AutoTokenizer
    # verbose=False, since some of these texts are longer than the model's sequences and would raise
    # warnings.
    theirs: Any = AutoTokenizer.from_pretrained(folder)(texts, verbose=False)["input_ids"]
    results = zip(texts, theirs, tokenizer.encode_batch(texts), strict=True)
    differ = [(text, found, own) for text, found, own in results if found != own]
    if differ:
        text, found, own = differ[0]
        raise DataError(
            f"tokenizer: transformers reads {text[:60]!r} as the token ids {found[:12]}, but the"
            f" model was trained with {own[:12]}. {len(differ)} of {len(texts):,} texts differ."
            " Nothing was written. To export the model without a tokenizer, call"
            " kit.interop.weights.hugging_face.export_run with with_tokenizer=False in Python."
            f" Tokenise texts with {tokenizer.file_name}."
        )


# Import -------------------------------------------------------------------------------------------


def import_hugging_face(folder: str | Path) -> Weights:
    """Returns the weights of a Hugging Face folder.

    Raises:
        ConfigError: The configuration is damaged, or the kit's decoder cannot express the model.
        DataError: The folder has no configuration or no safetensors, a weight is missing, or the
            configuration has more parameters than the files have bytes. Shapes are not checked
            here: `Weights.fill` raises DataError if a weight has another shape than the model's.
        MissingPackageError: safetensors is not installed.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise DataError(
            f"{folder}: has no config.json. {named(folder, 'Hugging Face')}Give a folder of Hugging"
            " Face's."
        )
    spec = load_spec(str(folder.resolve() / "config.json"))
    weights = SafetensorsFolder(folder)
    if (
        spec.num_params > weights.size_bytes
    ):  # A wrong size in config.json would allocate too much memory.
        raise DataError(
            f"{folder}: config.json tells of {spec.num_params:,} parameters, but the weight files"
            f" have {weights.size_bytes:,} bytes. Copy them again."
        )
    kind = json.loads(read_small(folder / "config.json", follows=True))["model_type"]
    for name in parameter_shapes(spec):
        weights.require(hugging_face_name(spec, name, kind))
    return Weights.read_by(
        spec, lambda name: from_hugging_face(spec, name, weights.read, kind), folder
    )


def hugging_face_weights(folder: str | Path, spec: ModelSpec) -> Weights:
    """Returns the weights of a Hugging Face folder for a given spec. The names of the two models
    may differ.

    The sequence length may differ too if the model has rotary positions.

    Raises:
        ConfigError: The folder holds another model.
        DataError: The folder has no configuration or no safetensors, or a weight is missing.
        MissingPackageError: safetensors is not installed.
    """
    found = import_hugging_face(folder)
    free = ("name",) if spec.family == "gpt" else ("name", "sequence_length")
    theirs = found.spec.to_dict()
    differences = []
    for key, value in normalised(spec).to_dict().items():
        if key not in free and value != theirs[key]:
            differences.append(f"{key} {theirs[key]!r} there and {value!r} here")
    if differences:
        raise ConfigError(
            f"{folder} holds another model: {', '.join(differences)}. Leave --model out, or give"
            " its config.json."
        )
    return dataclasses.replace(found, spec=spec)


def refuse_occupied(folder: Path) -> None:
    """Raises ConfigError unless a folder is absent or empty. It is called before the weights are
    read and written, which can take long.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder}: exists and is not empty. Give a new folder (--out), or delete this one."
        )


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Creates a folder atomically.

    The context manager yields a temporary folder to write into, and renames it to `folder` when the
    block ends. The temporary folder is on the file system of `folder`, so the rename is atomic.
    After an exception nothing is left.

    Raises:
        ConfigError: `folder` exists and is not empty.
    """
    refuse_occupied(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        part = Path(scratch) / "folder"
        part.mkdir()
        yield part
        try:
            os.replace(part, folder)  # os.replace also replaces an empty folder.
        except OSError:
            refuse_occupied(folder)  # Another process has created the folder.
            raise
