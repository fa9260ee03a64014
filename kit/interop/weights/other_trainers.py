"""Recognises folders of weights of other trainers by the files in them. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from cluster.files import open_for_reading, read_small
from cluster.record import counted
from kit.data.detect import POINTER, POINTER_BYTES
from kit.errors import DataError, RunError

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
"""Names of the files in which transformers looks for the weights of a folder."""
LARGEST_INDEX_BYTES = 64 << 20
"""Largest size of model.safetensors.index.json in bytes. The index of DeepSeek-V3 has 8.9 MB."""
LARGEST_HEADER = 100_000_000
"""Largest size of the header of a safetensors file in bytes, a limit of the format."""
PICKLED = (
    "is not read, since unpickling can run code: if you trust its source, write it anew with"
    " transformers' from_pretrained(FOLDER"
)
"""First words of the advice for pickled weights, which are never unpickled."""
RENAME = (
    "must be named model.safetensors, or in model.safetensors.index.json: load and save them with"
    " transformers' save_pretrained"
)
"""Advice for safetensors files with names that transformers does not look for."""
CONVERT = "is not supported: write it as a Hugging Face folder with that trainer's own tools first"
FORMATS = (
    (
        "manifest.json",
        "a checkpoint of this kit",
        "leaves by `kit export RUN --format hf --step N`",
    ),
    ("*.distcp", "a distributed checkpoint of megatron-core (torch_dist) or torch", CONVERT),
    (
        "mp_rank_*/model_optim_rng.pt",
        "a checkpoint of Megatron-LM (mp_rank_XX/model_optim_rng.pt)",
        CONVERT,
    ),
    (
        "layer_*-model_*-model_states.pt",
        "a Megatron-DeepSpeed checkpoint",
        "is of format `megatron-deepspeed`",
    ),
    (
        "zero/*/fp32.pt",
        "a universal checkpoint of DeepSpeed",
        CONVERT,
    ),
    (
        "*zero_pp_rank_*",
        "a ZeRO checkpoint of DeepSpeed",
        CONVERT,
    ),
    ("dp_rank_*_tp_rank_*", "an NxD checkpoint", "is of format `nxd`"),
    (
        "adapter_config.json",
        "an adapter of PEFT without its model",
        "is not supported: merge it into its model first",
    ),
    ("model.safetensors", "a Hugging Face folder", "needs no import: `kit eval` reads it"),
    (
        "model.safetensors.index.json",
        "a Hugging Face folder",
        "needs no import: `kit eval` reads it",
    ),
    (
        "model-*-of-*.safetensors",
        "shards of a Hugging Face model without model.safetensors.index.json",
        "cannot be read without that file: copy it too",
    ),
    (
        "model.*.safetensors",
        "only a variant of the weights of a Hugging Face model, such as model.fp16.safetensors",
        "is not looked for: load it with transformers' from_pretrained(..., variant=NAME) and save"
        " it with save_pretrained",
    ),
    (
        "pytorch_model*.bin",
        "pickled weights of a Hugging Face model (pytorch_model.bin)",
        f"{PICKLED}, use_safetensors=False) and save_pretrained",
    ),
    (
        "consolidated.*.pth",
        "a checkpoint of Meta's Llama code (consolidated.NN.pth)",
        "is not supported: write it as a Hugging Face folder with"
        " transformers/models/llama/convert_llama_weights_to_hf.py first",
    ),
    ("ckpt.pt", "a checkpoint of nanoGPT (ckpt.pt)", CONVERT),
    ("meta_*.json", "a checkpoint of nanochat (meta_NNNNNN.json)", CONVERT),
    ("lit_model.pth", "a checkpoint of LitGPT (lit_model.pth)", CONVERT),
    ("*.gguf", "a GGUF file of llama.cpp", "is not supported"),
    ("*.safetensors", "safetensors files by names that transformers does not look for", RENAME),
    ("*.bin", "pickled weights (.bin)", f"{PICKLED}, use_safetensors=False) and save_pretrained"),
    ("*.pt", "pickled weights (.pt)", CONVERT),
    ("*.pth", "pickled weights (.pth)", CONVERT),
    ("*.ckpt", "a checkpoint of Lightning (.ckpt)", CONVERT),
    ("config.json", "a Hugging Face configuration without weights", "needs model.safetensors too"),
)
"""Formats of folders with weights, each as (pattern of a file in the folder, description of the
format, advice). The first format whose pattern finds a file is used."""
WRAPPERS = {
    "_orig_mod.": ("torch.compile", "model._orig_mod"),
    "module.": ("DistributedDataParallel", "model.module"),
}
"""Dict from the prefix that a wrapper adds to the names of weights to (name of the wrapper,
expression for the wrapped model)."""


def folder_format(folder: Path) -> tuple[str, str] | None:
    """Returns (description, advice) of the format of a folder with weights, or None if the format
    is unknown.

    Also looks into the folders of single checkpoints: Megatron's `iter_NNNNNNN` and DeepSpeed's
    `global_stepN`.
    """
    for place in (folder, *sorted(folder.glob("iter_*")), *sorted(folder.glob("global_step*"))):
        for pattern, what, then in FORMATS:
            if next(place.glob(pattern), None) is not None:
                return what + ("" if place == folder else f" in {place.name}"), then
    return None


def named(folder: Path, wanted: str) -> str:
    """Returns a sentence for error messages on the format of a folder, followed by a space. Returns
    "" if the format is unknown, or if its description contains `wanted`.
    """
    found = folder_format(folder)
    if found is None or wanted and wanted in found[0]:
        return ""
    what, then = found
    return f"It holds {what}, which {then}. "


def not_a_model(path: Path) -> RunError:
    """Returns the error for a path that is neither a run directory nor a Hugging Face folder. The
    message names the format that was found instead.
    """
    if not path.is_dir():
        return RunError(f"{path}: no such folder. Give a run directory or a Hugging Face folder.")
    inner = sorted(file.parent for file in path.glob("*/config.json"))
    if any((path / name).is_file() for name in SAFETENSORS):
        sentence = "It holds weights: copy config.json and the tokenizer of their model into it."
    elif inner:
        sentence = f"It holds {counted(len(inner), 'Hugging Face folder')}: give {inner[-1]}."
    else:
        sentence = named(path, "") or "Give one of them."
    return RunError(
        f"{path}: neither a run directory (no spec.json) nor a Hugging Face folder (no"
        f" config.json). {sentence}".rstrip()
    )


def check_safetensors(folder: Path) -> None:
    """Raises DataError if a Hugging Face folder has no safetensors weights, or if a file in it is a
    pointer of Git LFS.
    """
    if not any((folder / name).is_file() for name in SAFETENSORS):
        advice = named(folder, "") or "Save the model with transformers' save_pretrained."
        raise DataError(f"{folder}: has no {' and no '.join(SAFETENSORS)}. {advice}".rstrip())
    for pattern in ("*.safetensors", "tokenizer.json", "tokenizer.model"):
        for file in sorted(folder.glob(pattern)):
            try:
                with open_for_reading(file, follows=True) as stream:
                    head = stream.read(POINTER_BYTES)
            except OSError as error:
                raise DataError(f"{file}: {error.strerror}. Copy the folder again.") from error
            if POINTER.match(head):
                raise DataError(
                    f"{file}: a pointer of Git LFS, not the file itself. Fetch it with"
                    " `git lfs pull`."
                )


def missing_weight_advice(folder: Path) -> str:
    """Returns advice for a Hugging Face folder in which a weight is missing. The advice is derived
    from the names of the other weights, and from the class that was saved.
    """
    names = _weight_names(folder)
    for prefix, (wrapper, model) in WRAPPERS.items():
        if any(name.startswith(prefix) or f".{prefix}" in name for name in names):
            return (
                f"The names of its weights contain {prefix!r}, as of a model that {wrapper}"
                f" wraps. Save the model inside: {model}.save_pretrained(FOLDER)."
            )
    kind = _saved_class(folder)
    if kind and not any(word in kind for word in ("CausalLM", "LMHead", "ConditionalGeneration")):
        return (
            f"It was saved as {kind}, without the output projection of a language model. Save the"
            " complete model: AutoModelForCausalLM's save_pretrained(FOLDER)."
        )
    return "Copy it again."


def read_index(file: Path) -> Any:
    """Returns the content of model.safetensors.index.json, which may be a symbolic link.

    Raises:
        OSError: The file cannot be read, or is larger than LARGEST_INDEX_BYTES.
        ValueError, RecursionError: The file is not JSON.
    """
    return json.loads(read_small(file, limit_bytes=LARGEST_INDEX_BYTES, follows=True))


def _saved_class(folder: Path) -> str:
    """Returns the class of transformers that a folder was saved from, or "" if it is unknown."""
    try:
        config = json.loads(read_small(folder / "config.json", follows=True))
        return str(config["architectures"][0])
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return ""


def _weight_names(folder: Path) -> list[str]:
    """Returns the names of the weights in a Hugging Face folder, or [] if they cannot be read."""
    file, index = (folder / name for name in SAFETENSORS)
    try:
        if index.is_file():
            return list(read_index(index)["weight_map"])
        with open_for_reading(file, follows=True) as stream:
            size = int.from_bytes(stream.read(8), "little")
            return list(json.loads(stream.read(min(size, LARGEST_HEADER))))
    except (OSError, ValueError, RecursionError, TypeError, LookupError):
        return []
