"""A step of training against transformers' models: the loss, the gradient of every weight, and
what torch's own clipping and AdamW make of it.
"""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kit.convert.hugging_face_config import config_of
from kit.convert.names import from_theirs, to_theirs
from kit.engines import build_engine
from kit.plan import Plan
from kit.recipe import Recipe
from kit.spec import ModelSpec
from tests.convert.models import GPT, LLAMA, randomised
from tests.workers import run_ranks

# One more position than tokens to predict: transformers shifts the labels of all of them itself.
SPECS = {spec.family: spec.replace(sequence_length=33) for spec in (LLAMA, GPT)}
STEPS, SEQUENCES, RATE = 3, 4, 1e-3
RECIPE = Recipe(
    data="none", num_steps=STEPS, learning_rate=RATE, min_learning_rate=0, gradient_clip=0.5
)
Weights = dict[str, torch.Tensor]
Arrays = dict[str, np.ndarray]


def transformers_model(spec: ModelSpec, weights: Weights) -> Any:
    """Returns transformers' model of the same shapes with these weights, by the kit's names."""
    config = {**config_of(spec), "use_cache": False}
    if spec.family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))
    missing, unexpected = model.load_state_dict(to_theirs(spec, weights.items()), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, "but for a tied matrix"
    return model.eval()  # GPT-2 has dropout by default


def samples_of(spec: ModelSpec) -> torch.Tensor:
    """Returns token ids [steps, sequences, T]."""
    shape = (STEPS, SEQUENCES, spec.sequence_length)
    return torch.randint(spec.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def assert_same(found: Weights, theirs: Weights, spec: ModelSpec, tolerance: float) -> None:
    """Fails unless tensors by the kit's names are those by transformers' names, relative to the
    largest of each.
    """
    for name, tensor in found.items():
        expected = from_theirs(spec, name, theirs.__getitem__)
        if name.endswith("key.bias"):  # adds the same to all scores of a query: gradient 0
            continue
        assert expected.abs().max() > 0, name
        worst = (tensor - expected).abs().max() / expected.abs().max()
        assert worst < tolerance, f"{name}: {worst:.1e}"


@pytest.mark.parametrize("family", SPECS)
def test_loss_and_all_gradients_are_those_of_transformers(family: str) -> None:
    spec = SPECS[family]
    decoder, samples = randomised(spec), samples_of(spec)[0]
    model = transformers_model(spec, dict(decoder.state_dict()))
    ours = decoder(samples[:, :-1], samples[:, 1:])
    theirs = model(input_ids=samples, labels=samples).loss
    ours.backward()
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert_same({n: w.grad for n, w in decoder.named_parameters()}, gradients, spec, 1e-4)


def engine_steps(spec: ModelSpec) -> tuple[Arrays, Arrays, list[tuple[float, float]]]:
    """Returns the native engine's weights before and after its steps, each of two micro-batches,
    and the loss and gradient norm of each step.
    """
    plan = Plan(global_batch_size=SEQUENCES, micro_batch_size=SEQUENCES // 2)
    engine = build_engine(spec, plan, RECIPE, torch.device("cpu"))
    weights = engine.named_parameters()
    before = {name: weight.detach().numpy().copy() for name, weight in weights.items()}
    told = [engine.train_step(samples, RATE) for samples in samples_of(spec)]
    return before, {name: weight.detach().numpy() for name, weight in weights.items()}, told


@pytest.mark.parametrize("family", SPECS)
def test_steps_are_those_of_a_plain_loop_over_transformers_model(family: str) -> None:
    """Accumulation, clipping and AdamW: losses, norms, and the way that each weight went."""
    spec = SPECS[family]
    ((before, after, told),) = run_ranks(1, engine_steps, spec)
    model = transformers_model(spec, {n: torch.from_numpy(w) for n, w in before.items()})
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=RATE,
        betas=(RECIPE.beta1, RECIPE.beta2),
        eps=RECIPE.eps,
        weight_decay=RECIPE.weight_decay,
    )
    for samples, (loss, norm) in zip(samples_of(spec), told, strict=True):
        optimizer.zero_grad()
        expected = model(input_ids=samples, labels=samples).loss
        expected.backward()
        clipped = torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE.gradient_clip)
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert norm == pytest.approx(clipped.item(), rel=1e-4) and norm > RECIPE.gradient_clip
    moved = {name: torch.from_numpy(after[name] - before[name]) for name in before}
    theirs = {name: weight.detach() - start[name] for name, weight in model.named_parameters()}
    assert_same(moved, theirs, spec, 0.02)
