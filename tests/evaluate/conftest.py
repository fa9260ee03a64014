"""A small real tokenizer, a random Llama, and a mirror of hand-made items, shared by the tests
of this folder.
"""

import json
import pydoc_data.topics
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from cluster.site import Site
from kit.data import build_dataset
from kit.data.tokenizer import BytePairTokenizer, train_tokenizer
from kit.data.wheels import file_sha256
from kit.evaluate.benchmarks import BENCHMARKS
from kit.evaluate.task_data import Manifest, MirrorFile
from kit.model import Decoder, build_decoder
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.run.checkpoint import Manifest as CheckpointManifest
from kit.spec import ModelSpec

VOCAB_SIZE = 400
SEQUENCE_LENGTH = 64
SPEC = ModelSpec.llama(
    name="tiny",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    ffn_hidden_size=64,
    vocab_size=512,
    sequence_length=64,
)
SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "vocab_size": 402,
    "sequence_length": 64,
    "init_std": 0.3,
}
OPINIONATED = {
    "llama": ModelSpec.llama(name="llama", num_kv_heads=2, ffn_hidden_size=64, **SHAPE),
    "gpt": ModelSpec.gpt(name="gpt", **SHAPE),
}
"""Whose random weights are large enough to tell texts apart."""
TEXTS = [text for _, text in sorted(pydoc_data.topics.topics.items())][:12]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to open a connection, or to look up a name, fails the test."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail(f"tried to reach the network: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="session")
def tokenizer() -> BytePairTokenizer:
    return train_tokenizer(TEXTS, VOCAB_SIZE)


@pytest.fixture(scope="session")
def write_rows() -> Callable[..., MirrorFile]:
    """Writes rows as the mirror's file of a task, or as another split beside it."""
    return _write_rows


@pytest.fixture(scope="session")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mirror with 30 items each of PIQA, ARC-easy and BoolQ; some prompts are longer than the
    model.
    """
    folder = tmp_path_factory.mktemp("evalsets")
    words = " ".join(TEXTS[0].split()[:60])
    piqa, arc, boolq = [], [], []
    for i in range(30):
        goal = f"Goal {i}: store {i % 7} jars" + (f" {words}" if i % 10 == 3 else "")
        piqa.append(
            {"goal": goal, "sol1": f"Put them on shelf {i}.", "sol2": "Leave them.", "label": i % 2}
        )
        choices = {
            "text": ["the sun", "a cat", f"{i} stones", "none of these"][: 3 + i % 2],
            "label": list("ABCD"),
        }
        choices["label"] = choices["label"][: len(choices["text"])]
        arc.append(
            {
                "id": f"q{i}",
                "question": f"What warms planet {i}?",
                "choices": choices,
                "answerKey": "A",
            }
        )
        passage = f"Rivers -- River {i} is {i * 3} km long."
        boolq.append(
            {"question": f"is river {i} long", "passage": passage, "idx": i, "label": i % 2}
        )
    entries = [
        _write_rows(folder, name, rows)
        for name, rows in (("piqa", piqa), ("arc_easy", arc), ("boolq", boolq))
    ]
    Manifest().with_files(entries).write(folder / "manifest.json")
    return folder


def _write_rows(folder: Path, task: str, rows: list[dict], split: str | None = None) -> MirrorFile:
    file = folder / BENCHMARKS[task].path
    file = file.with_name(f"{split}.parquet") if split else file
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    path = str(file.relative_to(folder))
    return MirrorFile(
        path=path, items=len(rows), sha256=file_sha256(file), source="test", licence="none"
    )


@pytest.fixture(scope="session")
def heldout_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Held-out documents, all longer than the model, plus a one-character and an empty one."""
    file = tmp_path_factory.mktemp("corpus") / "validation.jsonl"
    texts = [*(text[: 200 + 90 * i] for i, text in enumerate(TEXTS)), "é", ""]
    file.write_text("".join(json.dumps({"text": text, "source": "pydoc"}) + "\n" for text in texts))
    return file


@pytest.fixture(scope="session")
def tiny_decoder() -> Decoder:
    return build_decoder(SPEC).eval()


@pytest.fixture
def run(tmp_path: Path, tiny_decoder: Decoder, heldout_file: Path, save_checkpoint) -> Run:
    """A run with one complete checkpoint, of step 3."""
    dataset = build_dataset(
        tmp_path / "data",
        sources=heldout_file,
        vocab_size=400,
        validation_fraction=0.3,
        progress=False,
    )
    assert dataset.vocab_size < SPEC.vocab_size, "the vocabulary may be padded"
    plan, recipe = Plan(global_batch_size=4), Recipe(data=str(dataset.directory), num_steps=3)
    run = Run.create(
        tmp_path / "run", spec=SPEC, plan=plan, recipe=recipe, site=Site.load("laptop")
    )
    save_checkpoint(run, tiny_decoder, 3)
    return run


@pytest.fixture(scope="session")
def save_checkpoint() -> Callable[[Run, Decoder, int], None]:
    """Writes a complete checkpoint of a model, as the trainer does."""

    def save(run: Run, decoder: Decoder, step: int) -> None:
        folder = run.checkpoints.path(step)
        state = {f"model.{name}": p.detach() for name, p in decoder.named_parameters()}
        state_dict_saver.save(state, checkpoint_id=folder, no_dist=True)
        files = {file.name: file.stat().st_size for file in folder.iterdir()}
        manifest = CheckpointManifest(
            step=step,
            attempt=1,
            samples=4 * step,
            tokens=4 * step * 64,
            seed=1234,
            time=0.0,
            spec=SPEC,
            plan=run.plan,
            files=files,
        )
        run.checkpoints.complete(folder, manifest)

    return save
