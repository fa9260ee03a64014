"""Several processes give the scores and texts of one."""

from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance

from kit.convert.hugging_face import export_hugging_face
from kit.evaluate.benchmarks import Options
from kit.evaluate.jobs import Layout
from kit.evaluate.loading import joined, load_lm
from kit.evaluate.packed import PackedLM
from kit.model import build_decoder
from kit.parallel.gradients import local
from tests.evaluate.conftest import OPINIONATED
from tests.workers import run_ranks


def results(lm: PackedLM) -> dict[str, Any]:
    """Returns everything that the interface gives, for some texts."""

    def requests(kind: Any, arguments: list[tuple]) -> list[Instance]:
        return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]

    contexts = [f"Question {i}: why is number {i % 7} odd?\nAnswer:" for i in range(5)]
    words = ("it", "the module", "seven")
    pairs = [(context, f" because of {word}") for context in contexts for word in words]
    greedy = {"until": ["e"], "max_gen_toks": 6}
    scored = lm.loglikelihood(requests("loglikelihood", pairs))
    rolling = requests("loglikelihood_rolling", [(text * 9,) for text in contexts[:2]])
    prompts = [*contexts, "a" * 200]
    return {
        "scores": [value for value, _ in scored],
        "greedy choices": [choice for _, choice in scored],
        "rolling": lm.loglikelihood_rolling(rolling),
        "texts": lm.generate_until(
            requests("generate_until", [(text, greedy) for text in prompts])
        ),
        "one text": lm.generate_until(requests("generate_until", [(contexts[0], greedy)])),
        "cut": lm.num_truncated,
    }


def on_rank(folder: Path, layout: Layout) -> tuple[dict[str, Any], int]:
    with joined(layout) as device:
        lm = load_lm(folder, 64, Options(batch_tokens=256), layout, device)
        held = sum(local(parameter).nbytes for parameter in lm.model.parameters())
        return results(lm), held


@pytest.mark.parametrize(
    ("family", "shards", "replicas", "is_tensor"),
    [
        ("llama", 1, 2, True),
        ("llama", 2, 1, True),
        ("llama", 2, 2, True),
        ("llama", 2, 1, False),
        ("gpt", 2, 1, False),
        ("gpt", 2, 2, False),
    ],
)
def test_processes_equal_one(family, shards, replicas, is_tensor, tokenizer, tmp_path) -> None:
    decoder = build_decoder(OPINIONATED[family])
    folder = export_hugging_face(decoder, tmp_path / family, tokenizer=tokenizer)
    expected, whole = on_rank(folder, Layout())
    layout = Layout(shards=shards, replicas=replicas, is_tensor=is_tensor)
    for answer, held in run_ranks(layout.num_devices, on_rank, folder, layout):
        assert answer["scores"] == pytest.approx(expected["scores"], abs=1e-4)
        assert answer["rolling"] == pytest.approx(expected["rolling"], rel=1e-6)
        for exact in ("greedy choices", "texts", "one text", "cut"):
            assert answer[exact] == expected[exact]
        # Tensor ranks cut every matrix; FSDP leaves the output projection gathered.
        assert held <= whole * (0.51 if is_tensor and shards > 1 else 0.7 if shards > 1 else 1)
    assert expected["cut"] == 1 and len(set(expected["texts"])) > 2
