"""A training step compared with transformers: loss, all gradients, torch's own gradient clipping,
and AdamW.
"""

import pytest
import torch

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.build import build_engine
from kit.interop.weights.weights import from_theirs
from tests.bench.contestants import theirs as transformers_model
from tests.support.distinct_models import GPT, LLAMA, randomised
from tests.support.workers import run_ranks

# The sequences have one token more than the model predicts, because transformers shifts the labels
# itself.
SPECS = {spec.family: spec.replace(sequence_length=33) for spec in (LLAMA, GPT)}
STEPS, SEQUENCES, RATE, CLIP = 3, 4, 1e-3, 0.5
RECIPE = Recipe(
    data="none", num_steps=STEPS, learning_rate=RATE, min_learning_rate=0, gradient_clip=CLIP
)
Weights = dict[str, torch.Tensor]


def samples_of(spec: ModelSpec) -> torch.Tensor:
    """Returns random token ids of the shape [steps, sequences, T] (T tokens per sequence)."""
    shape = (STEPS, SEQUENCES, spec.sequence_length)
    return torch.randint(spec.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def assert_same(found: Weights, theirs: Weights, spec: ModelSpec, tolerance: float) -> None:
    """Asserts that the kit's tensors equal those of transformers. The tolerance is relative to the
    largest element of each tensor.
    """
    assert len(found) > 20
    for name, tensor in found.items():
        expected = from_theirs(spec, name, theirs.__getitem__)
        # a key bias adds one number to all scores of a query, so its gradient is 0
        if name.endswith("key.bias"):
            continue
        assert expected.abs().max() > 0, name
        worst = (tensor - expected).abs().max() / expected.abs().max()
        assert worst < tolerance, f"{name}: {worst:.1e}"


@pytest.mark.parametrize("family", SPECS)
def test_loss_and_gradients_match_transformers(family: str) -> None:
    spec = SPECS[family]
    decoder, samples = randomised(spec), samples_of(spec)[0]
    # evaluation mode, because GPT-2 has dropout by default
    model = transformers_model(decoder).eval()
    ours = decoder(samples[:, :-1], samples[:, 1:])
    theirs = model(input_ids=samples, labels=samples).loss
    ours.backward()
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert_same(gradients(decoder), gradients(model), spec, 1e-4)


def gradients(model: torch.nn.Module) -> Weights:
    found = {name: weight.grad for name, weight in model.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize("family", SPECS)
def test_training_steps_match_plain_transformers_loop(family: str) -> None:
    """The test covers gradient accumulation, clipping and AdamW. It compares losses, gradient
    norms, and the change of each weight.
    """
    run_ranks(1, assert_steps_are_those_of_transformers, SPECS[family])


def assert_steps_are_those_of_transformers(spec: ModelSpec) -> None:
    """Asserts that the native engine with two micro-batches per step gives the results of a plain
    loop over transformers' model.
    """
    plan = Plan(global_batch_size=SEQUENCES, micro_batch_size=SEQUENCES // 2)
    engine = build_engine(spec, plan, RECIPE, torch.device("cpu"))
    (decoder,) = engine.decoders
    model = transformers_model(decoder).eval()
    before, start = copied(decoder), copied(model)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=RATE,
        betas=(RECIPE.beta1, RECIPE.beta2),
        eps=RECIPE.eps,
        weight_decay=RECIPE.weight_decay,
    )
    for samples in samples_of(spec):
        optimizer.zero_grad()
        expected = model(input_ids=samples, labels=samples).loss
        expected.backward()
        clipped = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        loss, norm = engine.train_step(samples, RATE)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert norm == pytest.approx(clipped.item(), rel=1e-4) and norm > CLIP
    moved = {name: now - before[name] for name, now in copied(decoder).items()}
    theirs = {name: now - start[name] for name, now in copied(model).items()}
    assert_same(moved, theirs, spec, 0.02)


def copied(model: torch.nn.Module) -> Weights:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}
