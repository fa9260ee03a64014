"""Groups of weights that a recipe treats differently: their learning rate, their weight decay and,
with muP, their initial values. Imports no torch.

muP's rule for Adam (Tensor Programs V, arXiv 2203.03466, table 3) for a model that is n times as
wide as the base model:

| group | learning rate | standard deviation of initial weights |
|---|---|---|
| matrices | 1/n | 1/sqrt(n) |
| output | 1/n | 1/n |
| embedding, vectors | 1 | 1 |

The rule is one for Adam, so it leaves the learning rate of matrices that Muon trains unchanged.
With the update scale of `kit.engines.muon`, 0.2 sqrt(max(rows, columns)), the spectral norm of
Muon's update grows as sqrt(n). By the spectral condition (arXiv 2310.17813), their learning rate
should then fall as 1/sqrt(n): set `recipe.learning_rate_factors.matrices` to this value. The rule
assumes that all widths grow together (hidden_size and ffn_hidden_size), and that heads keep their
size.
"""

import math
from typing import Literal, get_args

from cluster.record import ConfigError
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec

WeightGroup = Literal["matrices", "embedding", "output", "vectors"]
WEIGHT_GROUPS: tuple[WeightGroup, ...] = get_args(WeightGroup)
"""Names of the groups. `matrices`: the matrices of the transformer blocks. `embedding`: the
embeddings of tokens and of positions. `output`: the output projection, if it is not tied to the
token embedding. `vectors`: all norms and biases."""


def weight_group(name: str, num_dims: int) -> WeightGroup:
    """Returns the group of a weight by its name in the complete model and its number of
    dimensions. A tied output projection has the name of the embedding.
    """
    if num_dims < 2:
        return "vectors"
    if name.startswith("embedding."):
        return "embedding"
    return "output" if name.startswith("output.") else "matrices"


def learning_rate_factor(recipe: Recipe, spec: ModelSpec, group: WeightGroup) -> float:
    """Returns the factor by which the learning rate of the schedule is multiplied for a group."""
    factor = getattr(recipe.learning_rate_factors, group)
    is_muons = recipe.optimizer == "muon" and group == "matrices"
    if group in ("matrices", "output") and not is_muons:
        factor /= _width_ratio(recipe, spec)
    return factor


def initial_factor(recipe: Recipe, spec: ModelSpec, group: WeightGroup) -> float:
    """Returns the factor by which the initial weights of a group are multiplied."""
    if group == "matrices":
        return 1 / math.sqrt(_width_ratio(recipe, spec))
    return 1 / _width_ratio(recipe, spec) if group == "output" else 1.0


def check_width_rule(recipe: Recipe, spec: ModelSpec) -> None:
    """Raises ConfigError if the recipe asks for muP and the model has tied embeddings. One matrix
    cannot follow the rules of both groups.
    """
    if recipe.mup_base_width is not None and spec.tied_embeddings:
        raise ConfigError(
            f"recipe.mup_base_width: {recipe.mup_base_width} is not allowed with"
            " spec.tied_embeddings: muP has different rules for embedding and output. Give null, or"
            " a model without tied embeddings."
        )


def _width_ratio(recipe: Recipe, spec: ModelSpec) -> float:
    """Returns how many times as wide as muP's base model a model is. Returns 1 without muP."""
    return spec.hidden_size / (recipe.mup_base_width or spec.hidden_size)


def weight_decay(recipe: Recipe, group: WeightGroup) -> float:
    """Returns the weight decay of a group of weights."""
    if recipe.weight_decay_on == "matrices" and group == "vectors":
        return 0.0
    return recipe.weight_decay
