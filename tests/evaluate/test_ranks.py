"""Several ranks give the scores and texts of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from torch.distributed.checkpoint import state_dict_saver

from cluster.site import Site
from kit.convert import load_model
from kit.errors import CheckpointError, ConfigError
from kit.evaluate.adapter import DecoderLM
from kit.evaluate.ranks import load_on_ranks
from kit.model import build_decoder
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.run.checkpoint import Manifest
from kit.spec import ModelSpec
from tests.workers import run_ranks

SPECS = {
    "llama": ModelSpec.llama(
        name="tiny", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_hidden_size=64, vocab_size=402,
        sequence_length=64, init_std=0.3,
    ),
    "gpt": ModelSpec.gpt(
        name="tiny", num_layers=2, hidden_size=32, num_heads=4, vocab_size=402, sequence_length=64, init_std=0.3
    ),
}  # fmt: skip


def run_of(spec: ModelSpec, directory: Path) -> Run:
    """Returns a run with one complete checkpoint, of step 3."""
    plan, recipe = Plan(), Recipe(data="none", num_steps=3)
    run = Run.create(directory, spec=spec, plan=plan, recipe=recipe, site=Site.load("laptop"))
    folder = run.checkpoints.path(3)
    weights = {f"model.{name}": p.detach() for name, p in build_decoder(spec).named_parameters()}
    state_dict_saver.save(weights, checkpoint_id=folder, no_dist=True)
    files = {file.name: file.stat().st_size for file in folder.iterdir()}
    manifest = Manifest(
        step=3, attempt=1, samples=1, tokens=64, seed=0, time=0.0, spec=spec, plan=plan, files=files
    )  # fmt: skip
    manifest.write(folder / "manifest.json")
    return run


def results(lm: DecoderLM) -> dict[str, Any]:
    """Returns everything that the interface gives, for some texts."""

    def requests(kind: Any, arguments: list[tuple]) -> list[Instance]:
        return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]

    contexts = [f"Question {i}: why is number {i % 7} odd?\nAnswer:" for i in range(6)]
    pairs = [(context, f" because of {word}") for context in contexts for word in ("it", "the module", "seven")]
    greedy = {"until": ["e"], "max_gen_toks": 6}
    sampled = {**greedy, "do_sample": True, "temperature": 0.9}
    scored = lm.loglikelihood(requests("loglikelihood", pairs))
    return {
        "scores": [value for value, _ in scored],
        "greedy choices": [choice for _, choice in scored],
        "rolling": lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(text * 9,) for text in contexts[:2]])),
        "texts": lm.generate_until(requests("generate_until", [(text, greedy) for text in contexts])),
        "samples": lm.generate_until(requests("generate_until", [(contexts[0], sampled)] * 4)),
    }


def on_rank(run: Run, tokenizer: Any, tensor_parallel: int) -> tuple[dict[str, Any], int]:
    decoder, group = load_on_ranks(run, tensor_parallel=tensor_parallel)
    calls, hidden = [], decoder.hidden
    decoder.hidden = lambda *inputs: calls.append(1) or hidden(*inputs)  # type: ignore[method-assign]
    return results(DecoderLM(decoder, tokenizer, sequence_length=64, batch_tokens=256, group=group)), len(calls)


@pytest.mark.filterwarnings("ignore:torch.distributed is")  # saving without a process group is meant
@pytest.mark.parametrize(("family", "ranks", "tensor_parallel"), [("llama", 2, 1), ("llama", 2, 2), ("gpt", 4, 2)])
def test_ranks_equal_one_process(family: str, ranks: int, tensor_parallel: int, tokenizer, tmp_path: Path) -> None:
    run = run_of(SPECS[family], tmp_path / "run")
    alone = DecoderLM(load_model(run), tokenizer, sequence_length=64, batch_tokens=256)
    expected = results(alone)
    found = run_ranks(ranks, on_rank, run, tokenizer, tensor_parallel)
    for answer, calls in found:
        assert answer["scores"] == pytest.approx(expected["scores"], abs=1e-4)
        assert answer["rolling"] == pytest.approx(expected["rolling"], rel=1e-6)
        for exact in ("greedy choices", "texts", "samples"):
            assert answer[exact] == expected[exact]
        assert calls > 0
    if tensor_parallel == 1:
        assert [answer for answer, _ in found][0] == [answer for answer, _ in found][-1]
    assert len(set(expected["texts"])) > 2 and len(set(expected["samples"])) > 2


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    run = run_of(SPECS["llama"], tmp_path / "run")
    assert run_ranks(3, refusal, run, 2) == ["plan: tensor 2 x pipeline 1 x data 1 = 2 processes, but 3"] * 3
    assert run_ranks(3, refusal, run, 3)[0].startswith("spec.num_heads: 4 is not divisible by tensor_parallel = 3")
    empty = Run.create(tmp_path / "new", spec=run.spec, plan=run.plan, recipe=run.recipe, site=run.site)
    with pytest.raises(CheckpointError, match="no complete checkpoint yet"):
        load_on_ranks(empty)


def refusal(run: Run, tensor_parallel: int) -> str:
    with pytest.raises(ConfigError) as error:
        load_on_ranks(run, tensor_parallel=tensor_parallel)
    return str(error.value).split(" were ")[0]


def test_torch_is_seeded_by_nothing_here() -> None:
    """Sampling must not touch the global generator, which belongs to whoever trains in this process."""
    before = torch.get_rng_state()
    from kit.evaluate.generation import Generation, choose, prompt_random

    choose(torch.randn(2, 5, generator=torch.Generator()), Generation(stops=(), max_new_tokens=1, temperature=1.0),
           [prompt_random(0, (1,), i) for i in range(2)])  # fmt: skip
    assert torch.equal(before, torch.get_rng_state())
