"""Scoring of any task of the evaluation harness, with data from a user's folder or the hub's cache.
Also tests bits per byte of the right answers.

The data of BLiMP is real: items 1 and 501 of each of its 67 parts (CC-BY 4.0, Warstadt et al. 2020,
arXiv 1912.00582, github.com/alexwarstadt/blimp at 3e56b06). The items of SciQ are made for this
test and have the columns of the hub.
"""

import json
import math
import socket
from pathlib import Path
from typing import Any

import datasets
import datasets.config
import huggingface_hub.constants
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from kit.errors import ConfigError, DataError
from kit.evaluate import Options, evaluate_folder
from kit.evaluate.report import ANSWER_BITS
from kit.evaluate.scoring import check_request
from kit.evaluate.task_data import read_folder
from kit.evaluate.tasks import load_task, task_manager
from kit.interop.weights.hugging_face import export_hugging_face
from kit.model import build_decoder
from tests.evaluate.conftest import SPEC, write_parquet

BLIMP = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "blimp.jsonl").read_text().splitlines()
]
SCIQ = [
    {
        "question": f"What warms planet {i}?",
        "support": f"Planet {i} has a sun.",
        "correct_answer": "the sün" if i % 2 else "sun",
        **{"distractor1": "moon", "distractor2": "a cat", "distractor3": "rain"},
    }
    for i in range(8)
]


CARD = "---\nconfigs:\n- config_name: default\n  data_files:"


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the Hugging Face hub and its caches unavailable to the kit and to the harness, which
    otherwise queries the hub first.
    """
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    for module in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)


@pytest.fixture
def model(tmp_path: Path, tokenizer) -> Path:
    # large weights give different texts different scores
    decoder = build_decoder(SPEC.replace(sequence_length=256, init_std=0.3))
    return export_hugging_face(decoder, tmp_path / "models" / "tiny", tokenizer=tokenizer)


@pytest.fixture
def task_data(tmp_path: Path) -> Path:
    """Returns a folder with local copies of Hugging Face dataset repositories: one folder per
    configuration, a dataset card, and Parquet files.
    """
    folder = tmp_path / "task data"
    card = ["---", "configs:"]
    for name in dict.fromkeys(row["UID"] for row in BLIMP):
        write_jsonl(folder / "nyu-mll" / "blimp" / name / "train-00000-of-00001.jsonl", blimp(name))
        place = f"    path: {name}/train-*"
        card += [f"- config_name: {name}", "  data_files:", "  - split: train", place]
    (folder / "nyu-mll" / "blimp" / "README.md").write_text("\n".join([*card, "---", ""]))
    for split, rows in (("train", SCIQ[:2]), ("validation", SCIQ[2:3]), ("test", SCIQ[3:])):
        name = f"{split}-00000-of-00001.parquet"
        write_parquet(folder / "allenai" / "sciq" / "data" / name, rows)
    return folder


def blimp(name: str) -> list[dict]:
    return [row for row in BLIMP if row["UID"] == name]


def assert_refused(name: str, folder: Path, message: str, kind: type[Exception] = DataError):
    with pytest.raises(kind, match=message):
        load_task(name, task_data=folder)


def write_jsonl(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("name", "metrics", "items", "repository"),
    [
        ("sciq", ["acc", "acc_norm"], 5, "allenai/sciq/data/"),
        # BLiMP's 67 parts take longest to read, so this case runs only in thorough tests.
        # test_suites.py scores another group.
        pytest.param("blimp", ["acc"], 134, "nyu-mll/blimp/", marks=pytest.mark.thorough),
    ],
)
def test_task_and_group_scores_equal_the_harness(
    name, metrics, items, repository, model, task_data, tmp_path, monkeypatch, no_network
):
    from lm_eval.evaluator import simple_evaluate

    report = evaluate_folder(model, (name,), task_data=task_data, out=tmp_path / "ours.json")
    # The library `datasets` takes a folder in the working directory for the repository if it has
    # the repository's name.
    monkeypatch.chdir(task_data)
    theirs: Any = simple_evaluate(
        model="hf",
        model_args=f"pretrained={model},dtype=float32,max_length=256",
        tasks=[name],
        device="cpu",
        bootstrap_iters=0,
        task_manager=task_manager(all_tasks=True),
        verbosity="ERROR",
    )
    effective = sum(samples["effective"] for samples in theirs["n-samples"].values())
    assert effective == report[name].num_items == items
    for metric in metrics:
        expected = pytest.approx(theirs["results"][name][f"{metric},none"])
        assert report[name].metric(metric).value == expected
    bits = plain_bits(model, theirs["samples"], name)
    found = report[name].metric(ANSWER_BITS).value
    assert found == pytest.approx(sum(bits) / len(bits), rel=1e-5)
    assert {source.origin for source in report[name].data} == {"folder"}
    assert all(source.path.startswith(repository) for source in report[name].data)
    assert len(report[name].data) == 67 or name == "sciq"


def plain_bits(model: Path, samples: dict, name: str) -> list[float]:
    """Returns -log2 p(right answer) per byte of each item, computed with the model of
    transformers.
    """
    tokenizer, llama = AutoTokenizer.from_pretrained(model), LlamaForCausalLM.from_pretrained(model)
    found = []
    for sample in [each for task in samples if task.startswith(name) for each in samples[task]]:
        prompt, answer = sample["arguments"][sample["target"]]
        context = tokenizer.encode(prompt) or [tokenizer.eos_token_id]
        whole = tokenizer.encode(prompt + answer) if prompt else context + tokenizer.encode(answer)
        num = len(tokenizer.encode(prompt + answer)) - len(tokenizer.encode(prompt))
        with torch.no_grad():
            logits = llama(torch.tensor([whole[:-1]])).logits[0].log_softmax(-1)
        nats = -sum(float(logits[i - 1, whole[i]]) for i in range(len(whole) - num, len(whole)))
        found.append(nats / math.log(2) / len(answer.removeprefix(" ").encode()))
    return found


def test_task_files_may_be_in_configuration_folders(tmp_path):
    own = tmp_path / "own"
    causative, sciq = own / "nyu-mll" / "blimp" / "causative", own / "allenai" / "sciq"
    write_jsonl(causative / "train.jsonl", blimp("causative"))
    write_jsonl(sciq / "test.jsonl", SCIQ)
    for name, path, items in (
        ("blimp_causative", "nyu-mll/blimp/causative/train.jsonl", 2),
        ("sciq", "allenai/sciq/test.jsonl", 8),
    ):
        loaded = load_task(name, task_data=own)
        assert [(source.origin, source.path) for source in loaded.data] == [("folder", path)]
        assert len(loaded.task.eval_docs) == items
    (sciq / "test.jsonl").rename(sciq / "valid.jsonl")
    splits = r"sciq: allenai/sciq \(splits test, validation, train\)"
    assert_refused("sciq", own, f"{splits}: 'test' is scored, but")
    (causative.parent / "README.md").write_text("of an older kind, with a script\n")
    (causative.parent / "blimp.py").write_text("raise SystemExit\n")
    assert len(load_task("blimp_causative", task_data=own).task.eval_docs) == 2
    (causative / "train.jsonl").write_text('{"sentence_good": "a"\n')
    assert_refused("blimp_causative", own, "train.jsonl.* is damaged")


@pytest.mark.parametrize(
    "place", ["http://127.0.0.1:{port}/x.jsonl", "{outside}", "../../../out/x.jsonl", "link.jsonl"]
)
def test_dataset_card_cannot_point_outside_its_folder(tmp_path, place):
    write_jsonl(tmp_path / "out" / "x.jsonl", SCIQ)
    copy = tmp_path / "own" / "allenai" / "sciq"
    copy.mkdir(parents=True)
    (copy / "link.jsonl").symlink_to(tmp_path / "out" / "x.jsonl")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        path = place.format(port=server.getsockname()[1], outside=tmp_path / "out" / "x.jsonl")
        (copy / "README.md").write_text(f"{CARD}\n  - split: test\n    path: {path}\n---\n")
        assert_refused("sciq", tmp_path / "own", "sciq: asks for .*; only what is below .* is read")
        with pytest.raises(BlockingIOError):
            server.accept()  # raises an error, because nobody has connected


@pytest.mark.parametrize(
    "card", [f"\n{CARD}", CARD.replace("configs:", "license: mit\n---x: 1\nconfigs:")]
)
def test_dataset_card_with_unusual_header_is_checked(tmp_path, card, no_network):
    """The library `datasets` also reads the header of a card that starts with an empty line, or has
    `---` at the start of a longer line.
    """
    copy = tmp_path / "allenai" / "sciq"
    copy.mkdir(parents=True)
    address = "http://127.0.0.1:1/x.jsonl"
    (copy / "README.md").write_text(f"{card}\n  - split: test\n    path: {address}\n---\n")
    assert_refused("sciq", tmp_path, f"sciq: asks for {address}; only what is below")


def test_task_definition_cannot_point_outside_its_folder(tmp_path, no_network):
    copy = tmp_path / "allenai" / "sciq"
    write_jsonl(copy / "test.jsonl", SCIQ)
    (copy / "README.md").write_text("# SciQ\n")
    rows, _ = read_folder(tmp_path, "allenai/sciq", None, {"data_files": {"test": "test.jsonl"}})
    assert len(rows["test"]) == len(SCIQ)
    for files in ("http://127.0.0.1:1/x.jsonl", {"test": ["zip://x.jsonl::http://127.0.0.1:1/a"]}):
        with pytest.raises(DataError, match="sciq: asks for .*; only what is below"):
            read_folder(tmp_path, "allenai/sciq", None, {"data_files": files})


def test_dataset_card_with_image_column_is_refused(tmp_path):
    """An image column holds a path or a URL. The library `datasets` opens it when the row is
    read.
    """
    copy = tmp_path / "allenai" / "sciq"
    write_jsonl(copy / "test.jsonl", [row | {"question": {"path": "/etc/passwd"}} for row in SCIQ])
    facts = ["dataset_info:", "  features:"]
    for name in SCIQ[0]:
        kind = "image" if name == "question" else "string"
        facts += [f"  - name: {name}", f"    dtype: {kind}"]
    (copy / "README.md").write_text("\n".join([f"{CARD} test.jsonl", *facts, "---", ""]))
    assert_refused("sciq", tmp_path, "sciq: holds pictures or sound")


def test_unscorable_task_error_gives_the_reason(tmp_path, monkeypatch, no_network):
    where = r"blimp: nyu-mll/blimp \(config adjunct_island, splits train\): "
    assert_refused("blimp", tmp_path, where + ".* `hf download nyu-mll/blimp --repo-type")
    with pytest.raises(ConfigError, match="task_data: .*nowhere is not a folder"):
        Options.of({"task_data": tmp_path / "nowhere"})
    row = {"text": "add", "code": "", "test_list": ["a", "b", "c"], "task_id": 1}
    write_jsonl(tmp_path / "google-research-datasets" / "mbpp" / "full" / "test.jsonl", [row])
    programs = "mbpp: runs programs that the model wrote.* humaneval only"
    assert_refused("mbpp", tmp_path, programs, ConfigError)
    manager = task_manager(all_tasks=True)
    group = type("G", (), {"has_aggregation": False, "child_names": ["arc_easy", "piqa"]})()
    monkeypatch.setattr(manager, "load", lambda names: {"tasks": {}, "groups": {"pythia": group}})
    alone = "pythia: this group has no score of its own. Give its tasks: arc_easy, piqa"
    assert_refused("pythia", tmp_path, alone, ConfigError)


def test_group_tag_and_task_names_are_resolved():
    # a group and a tag of the harness, and a task of the kit
    asked = check_request(("blimp", "ai2_arc", "piqa"))
    assert [request.task for request in asked] == ["blimp", "arc_challenge", "arc_easy", "piqa"]
    for wrong, right in (("blimpp", "blimp"), ("pique", "piqa")):
        message = rf"tasks: '{wrong}' is unknown\. Did you mean '{right}'\?"
        with pytest.raises(ConfigError, match=message):
            check_request((wrong,))
