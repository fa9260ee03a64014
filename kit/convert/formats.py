"""Tells what a folder of weights is by the files in it, so that a reader of another format can
say so.
"""

from pathlib import Path

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
    ("config.json", "a Hugging Face folder", "needs no import: `kit eval` reads it"),
    ("*.gguf", "a GGUF file of llama.cpp", "is not supported"),
)
"""A pattern of a file that only this format has, what the format is, and what to do with it; the
first one counts."""


def named(folder: Path, wanted: str) -> str:
    """Returns a sentence that names the format of a folder, with a space behind it.

    It is empty where that is not known, or is what was `wanted`.
    Looks into Megatron's `iter_NNNNNNN` and DeepSpeed's `global_stepN` too, which hold each save.
    """
    for place in (folder, *sorted(folder.glob("iter_*")), *sorted(folder.glob("global_step*"))):
        for pattern, what, then in FORMATS:
            if next(place.glob(pattern), None) is not None:
                if wanted in what:
                    return ""
                return (
                    f"It holds {what}{'' if place == folder else f' in {place.name}'}, which"
                    f" {then}. "
                )
    return ""
