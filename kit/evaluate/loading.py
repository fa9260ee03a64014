"""Loads a Hugging Face folder as lm-eval's model, on one device or divided between several
processes by transformers.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers.utils.logging
from lm_eval.models.utils import resolve_max_length
from safetensors import SafetensorError
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)

from cluster.files import read_small
from kit.data.tokenizer import Tokenizer
from kit.data.wheels import file_sha256, user_cache
from kit.engines.process_group import start_process_group
from kit.errors import ConfigError, DataError
from kit.evaluate.benchmarks import DTYPES, Options
from kit.evaluate.devices import DeviceLayout
from kit.evaluate.packed import PackedLM
from kit.evaluate.tasks import quiet_harness
from kit.interop.weights.hugging_face import export_hugging_face, export_run
from kit.interop.weights.hugging_face_config import Precision
from kit.interop.weights.other_trainers import check_safetensors, missing_weight_advice
from kit.model import Decoder
from kit.parallel.groups import final_barrier
from kit.run import Run

EXPORTED: dict[str, Precision] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Dict from the kit's name of a precision to its name in transformers."""
OFFLINE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Options of transformers' loaders. Nothing is downloaded, and no code of a folder is executed."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""Names of tokenizer files. If a folder has none of them, the error says that the tokenizer is
missing."""
WHOLE = "free_full_weight"
FSDP_PLANS = {"gpt2": {"transformer.h.*": WHOLE, "transformer.wte": WHOLE}}
"""FSDP plans for model types without a plan in transformers, by model type. A plan names the
modules whose full weights are gathered while the module computes."""


@contextlib.contextmanager
def join_process_group(layout: DeviceLayout, device: str | None = None) -> Iterator[torch.device]:
    """Joins the processes of a layout in one process group within the context, and yields the
    device of this process.

    `device` is torch's name of the device that the user chose. If None, a GPU is used if there is
    one.

    Raises:
        ConfigError: This machine has no such device, or a device is given although several
            processes score, each on a different device.
    """
    if layout.num_devices == 1:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        yield named_device(device)
        return
    if device is not None:
        raise ConfigError(
            f"device: {device!r} is one device, but {layout.num_devices} processes score this"
            " model, each on its own. Leave it out."
        )
    if dist.is_initialized():
        yield torch.device("cpu")
        final_barrier()
        return
    yield start_process_group()
    final_barrier()
    dist.destroy_process_group()


def named_device(name: str) -> torch.device:
    """Returns the device of this machine whose name in torch is `name`, such as cuda:1.

    Raises:
        ConfigError: The name is unknown, or this machine has no such device.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        there = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        raise ConfigError(
            f"device: {name!r} cannot be used on this machine. Allowed: {', '.join(there)}."
        ) from error
    if device.type == "meta":
        raise ConfigError("device: 'meta' holds no weights. Give cpu, cuda or mps.")
    return device


def is_first() -> bool:
    """Returns whether this process is the only one, or the first of several."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextlib.contextmanager
def first_alone() -> Iterator[None]:
    """Runs the block in the first of several processes, and then in all other processes."""
    if not is_first():
        dist.barrier()
    yield
    if dist.is_initialized() and is_first():
        dist.barrier()


@contextlib.contextmanager
def checkpoint_folder(run: Run, step: int, precision: str = "fp32") -> Iterator[Path]:
    """Exports a checkpoint as a Hugging Face folder within the context, and yields the path of the
    folder.

    The folder is in the run's `eval/`, or in this user's cache if the run belongs to another user.
    Its name contains the hash of the checkpoint's manifest and the precision. If the folder exists
    already, for example because an evaluation was killed, it is used and not deleted.

    Raises:
        ConfigError: transformers has no such model.
        CheckpointError: There is no complete checkpoint of that step, or it is damaged.
    """
    digest = file_sha256(run.checkpoints.path(step) / "manifest.json")[:16]
    home = run.directory / "eval" if run.is_writable else user_cache("exported")
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


def load_config(folder: str | Path) -> Any:
    """Returns the configuration of a folder's decoder, as transformers reads it.

    Raises:
        ConfigError: The model needs its own Python code, or transformers has no decoder of that
            type.
        DataError: The configuration is damaged.
    """
    file = Path(folder) / "config.json"
    try:
        table = json.loads(read_small(file, follows=True))
        kind = table.get("model_type")
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise DataError(f"{file}: damaged: it is no JSON table. Copy it again.") from error
    if str(kind) not in CONFIG_MAPPING:
        if table.get("auto_map"):
            raise ConfigError(
                f"{file}: model_type {kind!r} is not in transformers {transformers.__version__} and"
                f" brings Python code of its own ({_own_code(table)}), which the kit never runs."
                " Score it with lm-eval itself, if you trust that code: lm-eval run --model hf"
                f" --model_args pretrained={folder},trust_remote_code=True."
            )
        raise ConfigError(
            f"{file}: model_type {kind!r} is not in transformers {transformers.__version__}."
            " Install a version of transformers that has it, or correct the entry."
        )
    try:
        config = AutoConfig.from_pretrained(folder, **OFFLINE)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{file}: transformers cannot read it: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{file}: model_type {kind!r} is no decoder: transformers has no AutoModelForCausalLM"
            " for it, and the kit scores decoders only."
        )
    masked = _class_names(MODEL_FOR_MASKED_LM_MAPPING, config)
    masked -= _class_names(MODEL_FOR_CAUSAL_LM_MAPPING, config)
    if encoders := sorted(masked & {*(config.architectures or ())}):
        raise ConfigError(
            f"{file}: architectures: {encoders[0]!r} is an encoder, which predicts masked tokens."
            " The kit scores decoders only."
        )
    return config


def _class_names(mapping: Any, config: Any) -> set[str]:
    """Returns the names of the classes that transformers has for a configuration."""
    found = mapping.get(type(config), ())
    classes = found if isinstance(found, tuple | list) else (found,)
    return {each.__name__ for each in classes}


def _own_code(table: dict[str, Any]) -> str:
    """Returns the names of all classes in `auto_map`, including tokenizer classes."""
    names = (str(value) for value in dict(table["auto_map"]).values())
    return ", ".join(dict.fromkeys(names))


def load_folder_tokenizer(folder: str | Path) -> Any:
    """Returns the tokenizer of a folder as transformers loads it.

    Raises:
        ConfigError: The tokenizer needs its own Python code.
        DataError: The tokenizer is missing or damaged.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, **OFFLINE)
    except (OSError, ValueError, ImportError, TypeError, KeyError, AttributeError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{folder}: its tokenizer brings Python code of its own (auto_map in"
                " tokenizer_config.json), which the kit never runs. Save it as tokenizer.json."
            ) from error
        found = [name for name in TOKENIZER_FILES if (Path(folder) / name).is_file()]
        if not found:
            raise DataError(
                f"{folder}: has no tokenizer ({', '.join(TOKENIZER_FILES)}). Copy the tokenizer's"
                " files of the same model into it."
            ) from error
        raise DataError(f"{folder}: transformers cannot load its tokenizer: {error}") from error


def load_causal_model(folder: str | Path, precision: str = "fp32", **split: Any) -> tuple[Any, Any]:
    """Returns (causal model in evaluation mode, tokenizer) of a folder. Nothing is downloaded, and
    no code of the folder is executed. `split` has options of `from_pretrained` that divide the
    model between processes.

    Raises:
        ConfigError: The model needs its own Python code, or transformers has no decoder of its
            type.
        DataError: The configuration is damaged, a weight is missing or has another shape, the
            format of the weights is unsupported, or there is no tokenizer.
    """
    load_config(folder)
    check_safetensors(Path(folder))
    tokenizer = load_folder_tokenizer(folder)
    tokenizer.model_max_length = (
        2**30
    )  # No limit here: the callers truncate or refuse longer texts.
    try:
        with _quiet_transformers():
            model, found = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
                folder,
                dtype=EXPORTED[precision],
                use_safetensors=True,
                output_loading_info=True,
                **OFFLINE,
                **split,
            )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise DataError(f"{folder}: transformers cannot load it: {error}") from error
    if lacking := sorted([*found["missing_keys"], *found["mismatched_keys"]]):
        advice = missing_weight_advice(Path(folder))
        raise DataError(f"{folder}: has no weight {lacking[0]!r} of the model's shape. {advice}")
    return model.eval(), tokenizer


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silences the progress bars of transformers and its table of missing weights within the
    context.
    """
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    had_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()


def tokenizer_sha256(folder: Path, tokenizer: Any) -> str:
    """Returns the SHA-256 of a folder's tokenizer file. If there is no such file, it is the hash of
    the tokenizer that transformers loaded.
    """
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file():
            return file_sha256(folder / name)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = json.dumps(tokenizer.get_vocab()) if backend is None else backend.to_str()
    return hashlib.sha256(text.encode()).hexdigest()


def sequence_length(config: Any, tokenizer: Any) -> int:
    """Returns the longest input of a model in tokens, by the rule of lm-eval's class `HFLM`: the
    length in its configuration, or else the tokenizer's `model_max_length`, or else 2,048.
    """
    return resolve_max_length(config, tokenizer)


def config_length(config: Any) -> int | None:
    """Returns the longest sequence in tokens that a configuration states, or None if it states no
    length, as for Mamba and Bloom.
    """
    config = config.get_text_config()
    for name in ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len"):
        length = getattr(config, name, None)
        if length:
            return int(length)
    return None


def precision_of(folder: str | Path) -> str:
    """Returns the precision in which the weights of a folder were saved, by its config.json. It is
    fp32 if config.json states none of the known dtypes.
    """
    dtype = str(getattr(load_config(folder), "dtype", None)).removeprefix("torch.")
    return DTYPES.get(dtype, "fp32")


def load_lm(
    folder: str | Path,
    length: int | None,
    options: Options,
    layout: DeviceLayout,
    device: torch.device,
) -> PackedLM:
    """Loads the model of a Hugging Face folder and returns it as a model object of lm-eval.

    Inputs have up to `length` tokens. If `length` is None, it is the longest input of the model.

    If several processes score, all must call this function, inside the context manager
    `join_process_group`.

    Raises:
        ConfigError: The model is no decoder of transformers, or the batch size is `auto` although
            several processes score.
        DataError: The configuration is damaged, a weight is missing or has another shape, or there
            is no tokenizer.
    """
    split = {}
    replicas = None
    if layout.num_devices > 1:
        if str(options.batch_size).startswith("auto"):
            raise ConfigError(
                f"batch_size: {options.batch_size!r} may differ between the {layout.num_devices}"
                " processes that score this model. Give a number."
            )
        shape = (layout.replicas, layout.shards)
        names = ("replica", "shard")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        replicas = mesh["replica"].get_group()
    if layout.shards > 1:
        degrees: Any = {
            "fsdp_plan": FSDP_PLANS.get(AutoConfig.from_pretrained(folder).model_type),
            "dp_replicate_size": layout.replicas,
        }
        if layout.is_tensor:
            degrees["tp_size"] = layout.shards
        else:
            degrees["fsdp_size"] = layout.shards
        split = {"distributed_config": DistributedConfig(**degrees)}
    model, tokenizer = load_causal_model(folder, options.precision, **split)
    if length is None:
        length = sequence_length(model.config, load_folder_tokenizer(folder))
    if split:
        with torch.no_grad():  # FSDP's root is the module that is called first.
            model(torch.zeros(1, 1, dtype=torch.long, device=device))
    else:
        model.to(device)
    with quiet_harness():
        return PackedLM(
            model,
            tokenizer,
            max_length=length,
            batch_tokens=options.batch_tokens,
            batch_size=options.batch_size,
            replicas=replicas,
        )


def decoder_lm(
    decoder: Decoder, tokenizer: Tokenizer, length: int, options: Options, device: str
) -> PackedLM:
    """Returns a decoder in memory as a model object of lm-eval. The decoder is exported to a
    temporary folder, which is then loaded.

    Raises:
        ConfigError: Tokenizer or length do not fit the model, or transformers has no such model.
    """
    spec = decoder.spec
    dtype = next(decoder.parameters()).dtype
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
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    options = dataclasses.replace(options, precision=precision)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / spec.name
        export_hugging_face(
            decoder, folder, tokenizer=tokenizer, precision=EXPORTED[options.precision]
        )
        return load_lm(folder, length, options, DeviceLayout(), torch.device(device))
