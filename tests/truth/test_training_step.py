"""A training step compared with transformers: loss, all gradients, torch's own gradient clipping,
and AdamW.
"""

import pytest
import torch
from transformers import Trainer

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.build import build_engine
from kit.interop.weights.weights import from_hugging_face
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
        expected = from_hugging_face(spec, name, theirs.__getitem__)
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
    run_ranks(1, assert_steps_are_those_of_transformers, SPECS[family], RECIPE)


@pytest.mark.parametrize("family", SPECS)
def test_decay_of_matrices_matches_transformers_trainer(family: str) -> None:
    """With `weight_decay_on` "matrices", the weights that transformers' Trainer lets decay do. The
    weight decay is so large that a wrong group would change the weights by half their update.
    """
    recipe = RECIPE.replace(weight_decay_on="matrices", weight_decay=50.0)
    run_ranks(1, assert_steps_are_those_of_transformers, SPECS[family], recipe)


def assert_steps_are_those_of_transformers(spec: ModelSpec, recipe: Recipe) -> None:
    """Asserts that the native engine with two micro-batches per step gives the results of a plain
    loop over transformers' model.
    """
    plan = Plan(global_batch_size=SEQUENCES, micro_batch_size=SEQUENCES // 2)
    engine = build_engine(spec, plan, recipe, torch.device("cpu"))
    (decoder,) = engine.decoders
    model = transformers_model(decoder).eval()
    before, start = copied(decoder), copied(model)
    decaying = set(dict(model.named_parameters()))
    if recipe.weight_decay_on == "matrices":
        trainer = Trainer.__new__(Trainer)  # the method needs none of the trainer's attributes
        decaying = set(trainer.get_decay_parameter_names(model))
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if (name in decaying) == decays],
            "weight_decay": recipe.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=RATE, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps
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


@pytest.mark.parametrize("family", SPECS)
def test_learning_rate_factors_scale_first_update(family: str) -> None:
    """AdamW's first update is proportional to the learning rate. A factor of 0 freezes a group."""
    factors = {"matrices": 0.5, "embedding": 2.0, "output": 3.0, "vectors": 0.0}
    run_ranks(1, assert_factors_scale_updates, SPECS[family], factors)


def assert_factors_scale_updates(spec: ModelSpec, factors: dict[str, float]) -> None:
    plain = first_updates(spec, RECIPE)
    scaled = first_updates(spec, RECIPE.replace(learning_rate_factors=factors))
    for name, update in plain.items():
        group = "matrices" if update.ndim == 2 else "vectors"
        group = {"embedding": "embedding", "output": "output"}.get(name.split(".")[0], group)
        expected = factors[group] * update
        assert torch.allclose(scaled[name], expected, atol=1e-7), name
        # a key bias adds one number to all scores of a query, so its gradient is 0
        assert update.abs().max() > 1e-4 or name.endswith("key.bias"), name


def first_updates(spec: ModelSpec, recipe: Recipe) -> Weights:
    plan = Plan(global_batch_size=SEQUENCES, micro_batch_size=SEQUENCES)
    engine = build_engine(spec, plan, recipe, torch.device("cpu"))
    before = copied(engine.decoders[0])
    engine.train_step(samples_of(spec)[0], RATE)
    return {name: now - before[name] for name, now in copied(engine.decoders[0]).items()}


@pytest.mark.parametrize("family", SPECS)
def test_gradient_norms_by_group_add_up(family: str) -> None:
    """The squared gradient norms of the groups add up to that of all weights, and each equals
    torch's norm of the weights of the group.
    """
    numbers, expected = run_ranks(1, norms_by_group, SPECS[family])[0]
    total = numbers.pop("grad_norm") ** 2
    numbers.pop("loss")
    assert numbers == pytest.approx(expected, rel=1e-5)
    assert sum(norm**2 for norm in numbers.values()) == pytest.approx(total, rel=1e-5)


def norms_by_group(spec: ModelSpec) -> tuple[dict[str, float], dict[str, float]]:
    """Returns (numbers of the first step, gradient norms by group computed from its gradients)."""
    plan = Plan(global_batch_size=SEQUENCES, micro_batch_size=SEQUENCES)
    recipe = RECIPE.replace(gradient_clip=None)
    engine = build_engine(spec, plan, recipe, torch.device("cpu"))
    numbers = engine.begin_step(samples_of(spec)[0], RATE).numbers()
    groups: dict[str, list[torch.Tensor]] = {}
    for name, gradient in gradients(engine.decoders[0]).items():
        group = "matrices" if gradient.ndim == 2 else "vectors"
        group = {"embedding": "embedding", "output": "output"}.get(name.split(".")[0], group)
        groups.setdefault(f"grad_norm/{group}", []).append(gradient.flatten())
    return numbers, {name: torch.cat(parts).norm().item() for name, parts in groups.items()}


def copied(model: torch.nn.Module) -> Weights:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}
