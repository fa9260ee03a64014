"""The kit's packed model gives the scores and texts of the harness's own model, on one process and
on several processes.
"""

import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, PreTrainedTokenizerFast

from kit.data.tokenizer import END_OF_TEXT
from kit.errors import ConfigError, DataError
from kit.evaluate import packed
from kit.evaluate.benchmarks import Options, TaskRequest
from kit.evaluate.devices import DeviceLayout
from kit.evaluate.harness import score_task
from kit.evaluate.loading import join_process_group, load_lm
from kit.evaluate.tasks import LoadedTask, load_task, quiet_harness
from kit.interop.weights.hugging_face import export_hugging_face
from kit.model import build_decoder
from kit.parallel.gradients import local
from tests.evaluate.conftest import OPINIONATED, asked
from tests.support.workers import run_ranks

LENGTH = 64


@pytest.fixture(scope="module", params=["llama", "gpt"])
def folder(request, tokenizer, tmp_path_factory) -> Path:
    """Returns the folder of a random model. Its weights are large enough to give different texts
    different scores.
    """
    decoder = build_decoder(OPINIONATED[request.param])
    folder = tmp_path_factory.mktemp("models") / request.param
    return export_hugging_face(decoder, folder, tokenizer=tokenizer)


def ours(folder: Path, batch_tokens: int = 300) -> packed.PackedLM:
    options = Options(batch_tokens=batch_tokens)
    return load_lm(folder, LENGTH, options, DeviceLayout(), torch.device("cpu"))


def theirs(folder: Path, batch_size: int = 7) -> Any:
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "batch_size": batch_size}
    with quiet_harness():
        return packed.HFLM(str(folder), max_length=LENGTH, **given)


def responses(lm: Any, name: str, task: Any) -> list[Any]:
    with quiet_harness():
        found: Any = evaluate(lm, {"tasks": {name: task}}, log_samples=True)
    return [response[0] for sample in found["samples"][name] for response in sample["resps"]]


def continued(lm: Any, prompts: list[str], **options: Any) -> list[str]:
    wanted = {"until": ["zz"], "max_gen_toks": 12, **options}
    return lm.generate_until(asked("generate_until", [(text, wanted) for text in prompts]))


def assert_same(found: list, expected: list) -> None:
    values, greedy = zip(*expected, strict=True)
    assert [choice for _, choice in found] == list(greedy)
    assert [value for value, _ in found] == pytest.approx(list(values), abs=1e-4)


def task_of(rows: list[dict], metrics: list[str], **config: Any) -> ConfigurableTask:
    """Returns a task of the harness whose documents are `rows`. The column `q` holds the
    prompts.
    """
    given = {
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "test_split": "test",
        "doc_to_text": "q",
        "num_fewshot": 0,
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in metrics
        ],
        **config,
    }
    return ConfigurableTask(config=given)


def test_item_log_likelihoods_equal_the_harness(folder, benchmarks, dataset, monkeypatch):
    lm, reference, seen = ours(folder), theirs(folder), []
    monkeypatch.setattr(packed, "PART", 17)
    for name in ("piqa", "arc_easy", "boolq"):
        task = load_task(name, task_data=benchmarks).task
        found, lm.num_truncated = responses(lm, name, task), 0
        assert_same(found, responses(reference, name, task))
        assert len(found) >= 60
        seen += found
    assert len({round(value, 3) for value, _ in seen}) > 100, "they must differ to mean anything"
    responses(lm, "piqa", load_task("piqa", task_data=benchmarks).task)
    assert lm.num_truncated == 6  # three items have a long goal, with two choices each
    task = load_task("heldout", heldout=dataset).task
    # log-likelihoods are sums over up to a thousand tokens
    expected = responses(reference, "heldout", task)
    assert responses(lm, "heldout", task) == pytest.approx(expected, abs=1e-3, rel=1e-6)


def test_greedy_texts_equal_the_harness(folder):
    lm, reference = ours(folder), theirs(folder)
    prompts = [f"Item {i}: import the module and" for i in range(6)] + ["a" * 200]
    texts = continued(lm, prompts, until=["e", "zz"])
    assert texts == continued(reference, prompts, until=["e", "zz"]) and len(set(texts)) > 1
    assert lm.num_truncated == 1
    with pytest.raises(DataError, match="generation: a prompt has no token"):
        continued(lm, ["Why", ""])
    with pytest.raises(ConfigError, match="64 new tokens leave no room for a prompt"):
        continued(lm, ["Why"], max_gen_toks=64)


def test_sampled_texts_follow_their_seed(folder):
    lm, drawn = ours(folder), {"do_sample": True, "temperature": 0.9, "top_p": 0.95}
    before, found = torch.get_rng_state(), []
    for seed in (1, 1, 2):
        task = task_of(
            [{"q": "import the"}, {"q": "a module"}],
            metrics=["exact_match"],
            task="samples",
            output_type="generate_until",
            doc_to_target="q",
            repeats=4,
            generation_kwargs={"until": ["zz"], "max_gen_toks": 8, **drawn},
            filter_list=[{"name": "all", "filter": [{"function": "take_first"}]}],
        )
        request, definition = (
            TaskRequest(task="samples"),
            {"tasks": {"samples": task}, "groups": {}},
        )
        loaded = LoadedTask(request=request, definition=definition, num_fewshot=0, data=())
        score_task(lm, loaded, seed=seed)
        found.append([text for instance in task.instances for text in instance.resps])
    assert found[0] == found[1] != found[2] and len(set(found[0])) > 4
    assert torch.equal(before, torch.get_rng_state()), "a process that trains is left alone"


def test_shared_prefix_runs_once_within_batch_budget(folder, tokenizer, monkeypatch):
    lm, shapes = ours(folder, batch_tokens=100), []
    run = lm.model.base_model.forward

    def recorded(tokens_BT, **options):
        shapes.append(tuple(tokens_BT.shape))
        return run(tokens_BT, **options)

    monkeypatch.setattr(lm.model.base_model, "forward", recorded)
    scores = lm._loglikelihood_tokens(
        [(("", ""), [1, 2, 3], [token]) for token in range(tokenizer.vocab_size)]
    )
    assert shapes == [(1, 3)]
    assert math.fsum(math.exp(value) for value, _ in scores) == pytest.approx(1, abs=1e-2)
    assert sum(greedy for _, greedy in scores) <= 1
    shapes.clear()
    lm._loglikelihood_tokens([(("", ""), [i, *range(1, 3 + i)], [5, 6]) for i in range(20)])
    assert all(rows * length <= 100 for rows, length in shapes)
    assert sum(rows * length for rows, length in shapes) >= sum(3 + i + 1 for i in range(20))
    shapes.clear()
    pairs = [(("", ""), list(range(1, 31)), [40 + i, 50 + i, 7]) for i in range(8)]
    found = lm._loglikelihood_tokens(pairs)
    assert sum(rows * length for rows, length in shapes) == 30 + 8 * 2
    monkeypatch.setattr(lm, "batch_tokens", 1)
    assert_same([pair for one in pairs for pair in lm._loglikelihood_tokens([one])], found)


def test_long_continuation_is_scored_in_windows(folder):
    lm, tokens = ours(folder), [(7 * i) % 400 for i in range(151)]
    windows = [(tokens[:1], tokens[1:65]), (tokens[:65], tokens[65:129])]
    windows += [(tokens[:129], tokens[129:])]
    parts = lm._loglikelihood_tokens([(("", ""), *window) for window in windows])
    ((whole, _),) = lm._loglikelihood_tokens([(("", ""), tokens[:1], tokens[1:])])
    assert whole == pytest.approx(sum(value for value, _ in parts), abs=1e-3)
    with pytest.raises(DataError, match="no token of its own: .*'Why'"):
        lm._loglikelihood_tokens([(("Why", ""), [1], [])])


@pytest.mark.parametrize("adds_bos", [True, False])
def test_begin_token_is_added_as_in_the_harness(folder, tokenizer, tmp_path, adds_bos):
    """Llama-2's tokenizer adds a begin token to prompts, to texts whose perplexity is computed, and
    to texts to continue.
    """
    inner, bos = Tokenizer.from_str(tokenizer.data.decode()), "\u0100"
    if adds_bos:
        begin = [(bos, inner.token_to_id(bos))]
        inner.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=begin)
    copy = with_tokenizer(folder, tmp_path, inner, bos_token=bos, eos_token=END_OF_TEXT)
    lm, reference = ours(copy), theirs(copy)
    pairs = [("import os", " def f(x):"), ("", "import os"), ("return ", "x"), ("a" * 200, " b")]
    requests = asked("loglikelihood", pairs)
    assert_same(lm.loglikelihood(requests), reference.loglikelihood(requests))
    requests = asked("loglikelihood_rolling", [("import os",), ("def f(x): return x " * 20,)])
    expected = reference.loglikelihood_rolling(requests)
    assert lm.loglikelihood_rolling(requests) == pytest.approx(expected, abs=1e-3)
    prompts = ["import os", "def f(x):"]
    assert continued(lm, prompts) == continued(reference, prompts)


def test_every_end_token_ends_text_and_is_not_shown(tokenizer, tmp_path):
    """The instruct models of Llama 3 have several end tokens."""
    decoder, turn = build_decoder(OPINIONATED["llama"]), "<|eot_id|>"
    inner = Tokenizer.from_str(tokenizer.data.decode())
    inner.add_special_tokens([turn])
    made_often = inner.token_to_id(turn)
    with torch.no_grad():
        decoder.output.weight[made_often] *= 3  # type: ignore[union-attr]
    plain = export_hugging_face(decoder, tmp_path / "plain", tokenizer=tokenizer)
    folder = with_tokenizer(plain, tmp_path / "chat", inner, eos_token=END_OF_TEXT)
    prompts = [f"Item {i}: import the module and" for i in range(12)]
    texts = []
    for ends in (tokenizer.eos_id, [tokenizer.eos_id, made_often]):
        GenerationConfig(eos_token_id=ends).save_pretrained(folder)
        texts.append(continued(ours(folder), prompts))
        assert texts[-1] == continued(theirs(folder, batch_size=1), prompts)
        assert not any(turn in text for text in texts[-1])
    assert texts[0] != texts[1]


def with_tokenizer(folder: Path, copy: Path, inner: Tokenizer, **tokens: str) -> Path:
    """Returns a copy of a model folder with the tokenizer `inner` and the special tokens
    `tokens`.
    """
    copy.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((folder / name).read_bytes())
    PreTrainedTokenizerFast(tokenizer_object=inner, **tokens).save_pretrained(copy)
    return copy


MERGES = [
    ("def re", ["turn x", "ad(x)", "name"]),
    ("import o", ["s", "perator", "ptuna"]),
    ("x = sel", ["f.x", "ect(x)", "turn of"]),
    ("raise Va", ["lueError", "r", " or not"]),
    ("for i i", ["n range", "s x", " or not"]),
    ("a, b = st", ["r(a)", "ep", " or not"]),
]


def test_token_across_context_end_equals_the_harness(folder, tokenizer):
    """The text of context and continuation can have a token across their border. The harness
    encodes both separately, and the kit must too. Only a task without a delimiter between them
    shows the difference.
    """
    rows = [
        {"q": q, "choices": choices, "gold": 0}
        for q, choices in MERGES
        if all(len(tokenizer.encode(q + c)) > len(tokenizer.encode(q)) for c in choices)
    ]
    pairs = [(row["q"], choice) for row in rows for choice in row["choices"]]
    assert any(
        tokenizer.encode(a + b)[: len(tokenizer.encode(a))] != tokenizer.encode(a) for a, b in pairs
    ), "some merge must cross"
    task = task_of(
        rows,
        metrics=["acc", "acc_norm"],
        task="merges",
        output_type="multiple_choice",
        doc_to_choice="choices",
        doc_to_target="gold",
        target_delimiter="",
    )
    assert_same(*(responses(lm, "merges", task) for lm in (ours(folder), theirs(folder))))


# Scoring on several processes ---------------------------------------------------------------------


def results(lm: packed.PackedLM) -> dict[str, Any]:
    """Returns one result of each kind of request to the model, for a few texts."""
    contexts = [f"Question {i}: why is number {i % 7} odd?\nAnswer:" for i in range(5)]
    words = ("it", "the module", "seven")
    pairs = [(context, f" because of {word}") for context in contexts for word in words]
    scored = lm.loglikelihood(asked("loglikelihood", pairs))
    rolling = asked("loglikelihood_rolling", [(text * 9,) for text in contexts[:2]])
    greedy = {"until": ["e"], "max_gen_toks": 6}
    return {
        "scores": [value for value, _ in scored],
        "greedy choices": [choice for _, choice in scored],
        "rolling": lm.loglikelihood_rolling(rolling),
        "texts": continued(lm, [*contexts, "a" * 200], **greedy),
        "one text": continued(lm, contexts[:1], **greedy),
        "cut": lm.num_truncated,
    }


def on_rank(folder: Path, layout: DeviceLayout) -> tuple[dict[str, Any], int]:
    with join_process_group(layout) as device:
        lm = load_lm(folder, LENGTH, Options(batch_tokens=256), layout, device)
        held = sum(local(parameter).nbytes for parameter in lm.model.parameters())
        return results(lm), held


@pytest.mark.parametrize(
    ("family", "shards", "replicas", "is_tensor"),
    [
        ("llama", 1, 2, True),
        ("llama", 2, 2, True),
        ("llama", 2, 1, False),
        ("gpt", 2, 2, False),
    ],
)
def test_several_processes_give_results_of_one(
    family, shards, replicas, is_tensor, tokenizer, tmp_path
):
    decoder = build_decoder(OPINIONATED[family])
    folder = export_hugging_face(decoder, tmp_path / family, tokenizer=tokenizer)
    expected, whole = on_rank(folder, DeviceLayout())
    layout = DeviceLayout(shards=shards, replicas=replicas, is_tensor=is_tensor)
    for answer, held in run_ranks(layout.num_devices, on_rank, folder, layout):
        assert answer["scores"] == pytest.approx(expected["scores"], abs=1e-4)
        assert answer["rolling"] == pytest.approx(expected["rolling"], rel=1e-6)
        for exact in ("greedy choices", "texts", "one text", "cut"):
            assert answer[exact] == expected[exact]
        # Two tensor-parallel shards hold half of every weight matrix each. With FSDP each process
        # also holds the gathered output projection.
        assert held <= whole * (0.51 if is_tensor and shards > 1 else 0.7 if shards > 1 else 1)
    assert expected["cut"] == 1 and len(set(expected["texts"])) > 2
