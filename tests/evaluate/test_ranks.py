"""Several ranks give the scores and texts of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from torch.distributed.checkpoint import state_dict_saver

from cluster.site import Site
from kit.convert import load_model, run_weights
from kit.convert.weights import Weights
from kit.errors import CheckpointError
from kit.evaluate.adapter import DecoderLM
from kit.evaluate.ranks import load_on_ranks
from kit.model import build_decoder
from kit.parallel.gradients import local
from kit.plan import Plan
from kit.recipe import Recipe
from kit.run import Run
from kit.run.checkpoint import Manifest
from kit.spec import ModelSpec
from tests.workers import run_ranks

SPECS = {
    "llama": ModelSpec.llama(
        name="tiny",
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=64,
        vocab_size=402,
        sequence_length=64,
        init_std=0.3,
    ),
    "gpt": ModelSpec.gpt(
        name="tiny",
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        vocab_size=402,
        sequence_length=64,
        init_std=0.3,
    ),
}


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
    )
    run.checkpoints.complete(folder, manifest)
    return run


def results(lm: DecoderLM) -> dict[str, Any]:
    """Returns everything that the interface gives, for some texts."""

    def requests(kind: Any, arguments: list[tuple]) -> list[Instance]:
        return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]

    contexts = [f"Question {i}: why is number {i % 7} odd?\nAnswer:" for i in range(6)]
    pairs = [
        (context, f" because of {word}")
        for context in contexts
        for word in ("it", "the module", "seven")
    ]
    greedy = {"until": ["e"], "max_gen_toks": 6}
    sampled = {**greedy, "do_sample": True, "temperature": 0.9}
    scored = lm.loglikelihood(requests("loglikelihood", pairs))
    return {
        "scores": [value for value, _ in scored],
        "greedy choices": [choice for _, choice in scored],
        "rolling": lm.loglikelihood_rolling(
            requests("loglikelihood_rolling", [(text * 9,) for text in contexts[:2]])
        ),
        "texts": lm.generate_until(
            requests("generate_until", [(text, greedy) for text in contexts])
        ),
        "samples": lm.generate_until(requests("generate_until", [(contexts[0], sampled)] * 4)),
    }


def on_rank(run: Run, tokenizer: Any, plan: Plan) -> tuple[dict[str, Any], int]:
    share = load_on_ranks(run_weights(run), plan, torch.device("cpu"))
    calls, hidden = [], share.model.hidden
    share.model.hidden = lambda *inputs: calls.append(1) or hidden(*inputs)  # type: ignore[method-assign]
    lm = DecoderLM(
        share.model, tokenizer, sequence_length=64, batch_tokens=256, group=share.replicas
    )
    return results(lm), len(calls)


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is"
)  # saving without a process group is meant
@pytest.mark.parametrize(
    ("family", "tensor", "stages", "replicas"),
    [
        ("llama", 1, 1, 2),
        ("llama", 2, 1, 1),
        ("gpt", 2, 1, 2),
        ("llama", 1, 2, 1),
        ("gpt", 1, 2, 1),
        ("llama", 2, 2, 1),
    ],
)
def test_ranks_equal_one_process(
    family: str, tensor: int, stages: int, replicas: int, tokenizer, tmp_path: Path
) -> None:
    run = run_of(SPECS[family], tmp_path / "run")
    alone = DecoderLM(load_model(run), tokenizer, sequence_length=64, batch_tokens=256)
    expected = results(alone)
    plan = Plan(
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        data_parallel=replicas,
        global_batch_size=replicas,
    )
    found = run_ranks(plan.num_devices, on_rank, run, tokenizer, plan)
    for answer, calls in found:
        assert answer["scores"] == pytest.approx(expected["scores"], abs=1e-4)
        assert answer["rolling"] == pytest.approx(expected["rolling"], rel=1e-6)
        for exact in ("greedy choices", "texts", "samples"):
            assert answer[exact] == expected[exact]
        assert calls > 0
    if tensor == stages == 1:
        assert [answer for answer, _ in found][0] == [answer for answer, _ in found][-1]
    assert len(set(expected["texts"])) > 2 and len(set(expected["samples"])) > 2


def held(run: Run, plan: Plan) -> tuple[set[torch.dtype], int, list[str]]:
    """Returns dtypes and bytes of this rank's weights, and which weights it has read."""
    weights, read = run_weights(run), []

    def fill(targets: dict[str, torch.Tensor]) -> None:
        read.extend(targets)
        weights.fill(targets)

    share = load_on_ranks(Weights(run.spec, fill), plan, torch.device("cpu"))
    parameters = [local(parameter) for parameter in share.model.parameters()]
    return {p.dtype for p in parameters}, sum(p.nbytes for p in parameters), read


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_rank_reads_and_holds_its_share_only_in_the_precision_asked_for(tmp_path: Path) -> None:
    spec = SPECS["gpt"]
    run = run_of(spec, tmp_path / "run")
    plan = Plan(tensor_parallel=2, pipeline_parallel=2, precision="bf16")
    found = run_ranks(4, held, run, plan)
    assert all(dtypes == {torch.bfloat16} for dtypes, _, _ in found)
    assert all(
        size < 0.4 * 2 * spec.num_params for _, size, _ in found
    )  # a tied embedding is on both stages
    assert {name[:8] for name in found[0][2]} == {"embeddin", "layers.0"}
    assert {name[:8] for name in found[3][2]} == {"layers.1", "norm.wei", "norm.bia", "embeddin"}


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_damage_that_one_rank_sees_is_told_by_all(tmp_path: Path) -> None:
    run = run_of(SPECS["llama"], tmp_path / "run")
    damaged = "layers.1.feed_forward.up.weight"
    found = run_ranks(2, refusal, run, Plan(pipeline_parallel=2), damaged)
    assert found == [f"{damaged} is damaged"] * 2


def refusal(run: Run, plan: Plan, damaged: str) -> str:
    weights = run_weights(run)

    def fill(targets: dict[str, torch.Tensor]) -> None:
        if damaged in targets:
            raise CheckpointError(f"{damaged} is damaged")
        weights.fill(targets)

    with pytest.raises(CheckpointError) as error:
        load_on_ranks(Weights(run.spec, fill), plan, torch.device("cpu"))
    return str(error.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    plan, recipe = Plan(), Recipe(data="none", num_steps=3)
    empty = Run.create(
        tmp_path / "new", spec=SPECS["gpt"], plan=plan, recipe=recipe, site=Site.load("laptop")
    )
    with pytest.raises(CheckpointError, match="no complete checkpoint yet"):
        run_weights(empty)


def test_torch_is_seeded_by_nothing_here() -> None:
    """Sampling must not touch the global generator, which belongs to whoever trains in this
    process.
    """
    before = torch.get_rng_state()
    from kit.evaluate.generation import Generation, choose, prompt_random

    choose(
        torch.randn(2, 5, generator=torch.Generator()),
        Generation(stops=(), max_new_tokens=1, temperature=1.0),
        [prompt_random(0, (1,), i) for i in range(2)],
    )
    assert torch.equal(before, torch.get_rng_state())
