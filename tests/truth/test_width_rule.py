"""muP by the coordinate check of Tensor Programs V (arXiv 2203.03466, figure 5 and appendix D.1):
after a few steps, the change of the logits does not depend on the width. With the standard rule it
grows with the width.
"""

import torch

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.native import NativeEngine
from tests.support.workers import run_ranks

BASE, WIDE = 32, 512
PLAN = Plan(global_batch_size=4, micro_batch_size=4)
RECIPE = Recipe(data="none", num_steps=4, weight_decay=0.0, gradient_clip=None)
RATE = 1e-2


def model(width: int) -> ModelSpec:
    """Returns a model whose heads have an equal size at all widths."""
    return ModelSpec.llama(
        name="tiny",
        num_layers=2,
        hidden_size=width,
        num_heads=width // 16,
        ffn_hidden_size=2 * width,
        vocab_size=128,
        sequence_length=16,
    )


def test_change_of_logits_is_independent_of_width_with_mup() -> None:
    assert 0.5 < change_ratio(RECIPE.replace(mup_base_width=BASE)) < 2
    assert change_ratio(RECIPE) > 4


def change_ratio(recipe: Recipe) -> float:
    """Returns the change of the wide model's logits over three steps, divided by the change of the
    base model's logits.
    """
    changes = [run_ranks(1, change_of_logits, model(width), recipe)[0] for width in (BASE, WIDE)]
    return changes[1] / changes[0]


def change_of_logits(spec: ModelSpec, recipe: Recipe) -> float:
    """Returns the root mean square of the change of the logits after three steps."""
    engine = NativeEngine(spec, PLAN, recipe, torch.device("cpu"))
    samples = torch.randint(
        spec.vocab_size,
        (4, spec.sequence_length + 1),
        generator=torch.Generator().manual_seed(0),
    )
    (decoder,) = engine.decoders
    with torch.no_grad():
        before = decoder(samples[:, :-1])
        for _ in range(3):
            with torch.enable_grad():
                engine.train_step(samples, RATE)
        return float((decoder(samples[:, :-1]) - before).square().mean().sqrt())
