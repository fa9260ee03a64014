"""A Hugging Face folder loaded as lm-eval's model: on one device, or shared out to several
processes by transformers.
"""

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers.utils.logging
from safetensors import SafetensorError
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.distributed.configuration_utils import DistributedConfig

from cluster.files import other_owner
from kit.convert.hugging_face import export_hugging_face, export_run
from kit.convert.hugging_face_config import Precision
from kit.data.tokenizer import Tokenizer
from kit.data.wheels import file_sha256, user_cache
from kit.engines.process_group import start_process_group
from kit.errors import ConfigError, DataError
from kit.evaluate.benchmarks import DeviceLayout, Options
from kit.evaluate.packed import PackedLM
from kit.evaluate.tasks import quiet
from kit.model import Decoder
from kit.parallel.groups import final_barrier
from kit.run import Run

EXPORTED: dict[str, Precision] = {"fp32": "float32", "bf16": "bfloat16"}
"""What transformers calls the precisions."""
WHOLE = "free_full_weight"
FSDP_PLANS = {"gpt2": {"transformer.h.*": WHOLE, "transformer.wte": WHOLE}}
"""Which modules' weights are gathered while they compute, of models for which transformers has no
plan."""


@contextlib.contextmanager
def joined(layout: DeviceLayout) -> Iterator[torch.device]:
    """Within the context, the processes of a layout are one group; gives this one's device."""
    if layout.num_devices == 1:
        yield torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return
    inside = dist.is_initialized()
    yield torch.device("cpu") if inside else start_process_group()
    final_barrier()
    if not inside:
        dist.destroy_process_group()


def is_first() -> bool:
    """Returns whether this process is the only one, or the first of several."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextlib.contextmanager
def first_alone() -> Iterator[None]:
    """Lets the first of several processes go through the block before all others."""
    if not is_first():
        dist.barrier()
    yield
    if dist.is_initialized() and is_first():
        dist.barrier()


@contextlib.contextmanager
def checkpoint_folder(run: Run, step: int, precision: str = "fp32") -> Iterator[Path]:
    """Within the context, a checkpoint is a Hugging Face folder, of which it gives the path.

    It lies in the run's `eval/`, or this user's cache if the run is somebody else's, named by the
    checkpoint's manifest and the precision. One that was there before, such as of an evaluation
    that was killed, is used and kept.

    Raises:
        ConfigError: transformers has no such model.
        CheckpointError: there is no complete checkpoint of that step, or it is damaged.
    """
    digest = file_sha256(run.checkpoints.path(step) / "manifest.json")[:16]
    home = user_cache("exported") if other_owner(run.directory) else run.directory / "eval"
    folder = home / f"exported_{digest}_{precision}"
    with first_alone():
        is_new = not folder.exists()
        if is_new:
            export_run(run, step, folder, precision=EXPORTED[precision])
    try:
        yield folder
    finally:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)


def load_model(folder: str | Path, precision: str = "fp32", **split: Any) -> tuple[Any, Any]:
    """Returns the causal model of a folder, to evaluate, and its tokenizer; nothing is fetched,
    and no code of the folder runs.

    Raises:
        DataError: a weight is missing or of another shape, or there is no tokenizer.
    """
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        # Longer texts are cut by who asks for them.
        tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=2**30, **options)
        with patch.object(transformers.utils.logging, "_tqdm_active", False):
            model, found = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
                folder,
                dtype=EXPORTED[precision],
                use_safetensors=True,
                output_loading_info=True,
                **options,
                **split,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{folder}: transformers cannot load it: {error}") from error
    if lacking := sorted([*found["missing_keys"], *found["mismatched_keys"]]):
        raise DataError(
            f"{folder}: has no weight {lacking[0]!r} of the model's shape. Copy it again."
        )
    return model.eval(), tokenizer


def load_lm(
    folder: str | Path, length: int, options: Options, layout: DeviceLayout, device: torch.device
) -> PackedLM:
    """Returns lm-eval's model of a folder, for inputs of up to `length` tokens.

    Of several processes, all must call it, within `joined`.

    Raises:
        DataError: as `load_model`.
    """
    split, replicas = {}, None
    if layout.num_devices > 1:
        shape, names = (layout.replicas, layout.shards), ("replica", "shard")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        replicas = mesh["replica"].get_group()
    if layout.shards > 1:
        key = "tp_size" if layout.is_tensor else "fsdp_size"
        plan = FSDP_PLANS.get(AutoConfig.from_pretrained(folder).model_type)
        shares: Any = {key: layout.shards, "fsdp_plan": plan, "dp_replicate_size": layout.replicas}
        split = {"distributed_config": DistributedConfig(**shares)}
    model, tokenizer = load_model(folder, options.precision, **split)
    if not split:
        model.to(device)
    with torch.no_grad():  # FSDP takes what is called first for its root
        model(torch.zeros(1, 1, dtype=torch.long, device=device))
    with quiet():
        return PackedLM(
            model,
            tokenizer,
            max_length=length,
            batch_tokens=options.batch_tokens,
            replicas=replicas,
        )


def decoder_lm(
    decoder: Decoder, tokenizer: Tokenizer, length: int, options: Options, device: str
) -> PackedLM:
    """Returns lm-eval's model of a decoder in memory, by way of a folder that does not stay.

    Raises:
        ConfigError: tokenizer or length do not fit the model, or transformers has no such model.
    """
    spec, dtype = decoder.spec, next(decoder.parameters()).dtype
    if spec.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"tokenizer: it has {tokenizer.vocab_size:,} tokens but the model has"
            f" {spec.vocab_size:,} logits. Use the tokenizer that the model was trained with."
        )
    if not 1 <= length <= spec.sequence_length:
        raise ConfigError(
            f"sequence_length: the model cannot run {length} tokens. Give at most"
            f" {spec.sequence_length}, the length that it was built for."
        )
    options = dataclasses.replace(options, precision="bf16" if dtype == torch.bfloat16 else "fp32")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / spec.name
        export_hugging_face(
            decoder, folder, tokenizer=tokenizer, precision=EXPORTED[options.precision]
        )
        return load_lm(folder, length, options, DeviceLayout(), torch.device(device))
