"""AdamW as a recipe asks for it: the same in every engine."""

from collections.abc import Iterable
from typing import Any

import torch

from kit.recipe import Recipe


def adamw(parameters: Iterable[Any], recipe: Recipe) -> torch.optim.AdamW:
    """Returns torch's fused AdamW over parameters, or over groups of them as torch takes them."""
    return torch.optim.AdamW(
        parameters,
        lr=recipe.learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.eps,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
