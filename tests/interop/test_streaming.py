"""Conversions of checkpoints hold one weight at a time in memory: their peak memory is a fraction
of the model's size.
"""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.process import LIBC
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.errors import CheckpointError
from kit.interop.weights.hugging_face import export_hugging_face, import_hugging_face, run_weights
from kit.interop.weights.megatron import import_megatron_deepspeed
from kit.interop.weights.neuron import import_nxd
from kit.interop.weights.weights import Weights
from kit.model import Decoder, build_decoder
from kit.run import Run
from kit.run.checkpoint_reader import TensorsOnlyReader
from tests.interop.test_shards import write_megatron, write_nxd
from tests.support.distinct_models import assert_equal
from tests.support.hostile import in_a_child
from tests.support.workers import complete_checkpoint, local_run

# This warning is expected: the tests save checkpoints without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

SIZES = {"num_layers": 24, "hidden_size": 256, "num_heads": 8, "ffn_hidden_size": 1024}
SPEC = ModelSpec.llama(name="streamed", vocab_size=2048, sequence_length=16, **SIZES)
MODEL_BYTES = 4 * SPEC.num_params
PEAK_BYTES = MODEL_BYTES / 3
"""Largest allowed peak memory of a conversion in bytes. Measured: 9 to 16 MB, and 7 to 17 MB for a
model of twice the size."""
SHARD_BYTES = 4 * 10**6


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build_decoder(SPEC)


@pytest.fixture(scope="module")
def run(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a run whose checkpoint of step 3 has weights and optimizer moments."""
    recipe = Recipe(data="none", num_steps=3)
    run = local_run(tmp_path_factory.mktemp("runs") / "run", SPEC, Plan(), recipe)
    state: dict[str, torch.Tensor] = {}
    for name, weight in decoder.named_parameters():
        state[f"model.{name}"] = weight.detach()
        for kind in ("exp_avg", "exp_avg_sq"):
            state[f"adamw.{kind}.{name}"] = weight.detach() * 2
    complete_checkpoint(run, state, 3)
    return run


@pytest.fixture(scope="module")
def sources(
    run: Run, decoder: Decoder, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Callable[[], Weights]]:
    """Returns a dict from the name of a format to a function that reads the model from a checkpoint
    in this format.
    """
    folder = tmp_path_factory.mktemp("sources")
    write_nxd(decoder, folder / "nxd", 2, 2)
    write_megatron(decoder, folder / "megatron", 2, first=1)
    export_hugging_face(decoder, folder / "hugging face", max_shard_bytes=SHARD_BYTES)
    theirs = folder / "hugging face"
    return {
        "run": lambda: run_weights(run),
        "nxd": lambda: import_nxd(folder / "nxd", SPEC),
        "megatron": lambda: import_megatron_deepspeed(folder / "megatron", SPEC),
        "hugging face": lambda: import_hugging_face(theirs),
    }


def map_libraries() -> None:
    """Reads all pages of torch's shared libraries into this process. Otherwise the first use of a
    page would count as memory of the measured work.
    """
    populate_read = 22  # MADV_POPULATE_READ in linux/mman.h
    for begin, end in re.findall(
        r"^(\w+)-(\w+) r.*\.so", Path("/proc/self/maps").read_text(), re.MULTILINE
    ):
        begin, end = int(begin, 16), int(end, 16)
        LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), populate_read)


def peak_bytes(work: Callable[[], Any]) -> int:
    """Runs `work` in a forked process. Returns the largest rise of its resident memory in bytes."""

    def measure() -> int:
        map_libraries()
        # Freed memory is returned to the system, so that the work cannot reuse it without being
        # measured.
        LIBC.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak memory
        before = memory("VmRSS")
        work()
        return memory("VmHWM") - before

    def memory(what: str) -> int:
        found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        return 1024 * int(found[1])

    return in_a_child(measure)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["run", "nxd", "megatron", "hugging face"])
def test_conversion_never_holds_the_whole_model(source, sources, decoder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    peak = peak_bytes(
        lambda: export_hugging_face(sources[source](), out, max_shard_bytes=SHARD_BYTES)
    )
    assert len(list(out.glob("*.safetensors"))) >= 8
    assert peak < PEAK_BYTES, f"{peak / 1e6:.1f} MB of {MODEL_BYTES / 1e6:.1f} MB"
    assert_equal(import_hugging_face(out).decoder(), decoder)


def test_interrupted_export_leaves_nothing(run: Run, tmp_path: Path) -> None:
    weights, seen = run_weights(run), []

    def fill(targets: dict[str, torch.Tensor]) -> None:
        seen.append(targets)
        if len(seen) == 3:
            raise KeyboardInterrupt
        weights.fill(targets)

    with pytest.raises(KeyboardInterrupt):
        export_hugging_face(Weights(SPEC, fill), tmp_path / "out", max_shard_bytes=SHARD_BYTES)
    assert not list(tmp_path.iterdir())


def flip(run: Run, name: str) -> Path:
    """Flips one bit in the middle of a tensor of the run's checkpoint. Returns the damaged file."""
    folder = run.checkpoints.path(3)
    reader = TensorsOnlyReader(folder, run.checkpoints.describe(3)[1])
    held = reader.read_metadata().storage_data
    (place,) = (place for index, place in held.items() if index.fqn == name)
    file = folder / place.relative_path
    with file.open("r+b") as stream:
        stream.seek(place.offset + place.length // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 1]))
    return file


def test_export_verifies_only_the_exported_tensors(
    run: Run, decoder: Decoder, tmp_path: Path
) -> None:
    name = "layers.7.feed_forward.up.weight"
    flip(run, f"adamw.exp_avg.{name}")
    fill, target = run_weights(run).fill, torch.empty(1024, 256, dtype=torch.bfloat16)
    try:
        export_hugging_face(run_weights(run), tmp_path / "whole")
        flip(run, f"model.{name}")
        with pytest.raises(CheckpointError, match="__0_0.distcp is damaged: a tensor's checksum"):
            export_hugging_face(run_weights(run), tmp_path / "damaged")
        assert not (tmp_path / "damaged").exists()
    finally:
        flip(run, f"adamw.exp_avg.{name}")
        flip(run, f"model.{name}")
    fill({name: target.T.contiguous().T})
    fill({name: target})
    assert torch.equal(target, decoder.get_parameter(name).bfloat16())
    with pytest.raises(CheckpointError, match="model.nothing"):
        fill({"nothing": target})
    with pytest.raises(CheckpointError, match="cannot be read: .*(?i:size|shape)"):
        fill({"norm.weight": target})
