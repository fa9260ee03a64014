"""Muon, an optimizer for matrices (Keller Jordan, kellerjordan.github.io/posts/muon). Its updates
do not depend on the layout, since each matrix is orthogonalised as a whole.
"""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from kit.config.recipe import Recipe
from kit.parallel.gradients import local
from kit.parallel.whole_matrices import WholeMatrices

MOMENTUM = "momentum_buffer"
"""Name of Muon's only state of a matrix, which is also its name in torch's Muon."""
ITERATIONS = 5
"""Number of Newton-Schulz iterations, as in all published uses of Muon."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of the polynomial a s + b s^3 + c s^5, which an iteration applies to each
singular value s (Keller Jordan). Its slope at 0 is as large as possible, so that small singular
values grow fast. The singular values end between about 0.7 and 1.2."""
SMALLEST_NORM = 1e-7
"""Norm by which a matrix of zeros is divided, as in torch's Muon."""
UPDATE_RMS = 0.2
"""Root mean square of an element of the update of a matrix of full rank, in units of the learning
rate. It is that of AdamW, so that one learning rate serves both (Moonlight, arXiv 2502.16982,
section 2.2)."""


def orthogonalised(matrix: Tensor) -> Tensor:
    """Returns approximately U V^T, where U S V^T is the singular value decomposition of the matrix.
    All matrix products are computed in the dtype of the matrix.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix  # The smaller dimension comes first, which saves FLOPs.
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        square = x @ x.T
        polynomial = torch.addmm(square, square, square, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def orthogonalisation_flops(rows: int, columns: int) -> float:
    """Returns the FLOPs of `orthogonalised` for a matrix of this shape: per iteration 4 m^2 n + 2
    m^3, with the smaller dimension m and the larger dimension n.
    """
    small, large = sorted((rows, columns))
    return ITERATIONS * (4.0 * small**2 * large + 2.0 * small**3)


def update_scale(rows: int, columns: int) -> float:
    """Returns the factor of the orthogonalised matrix in an update: 0.2 sqrt(max(rows, columns)),
    as in Moonlight (arXiv 2502.16982, equation 4). An orthogonalised matrix of full rank has
    elements with a root mean square of 1 / sqrt(max(rows, columns)).
    """
    return UPDATE_RMS * math.sqrt(max(rows, columns))


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay, for matrices that may be sharded.

    Momentum is sharded as the weights are, and updated without communication. Each rank then
    orthogonalises the whole matrices that it owns (`WholeMatrices`).

    Args:
        groups: parameter groups in torch's format. All parameters have two dimensions.
        recipe: learning rate, momentum and weight decay.
        mesh: mesh of all ranks.
        group: process group of the ranks with shards or copies of the matrices (`stage_group`).
        dtype: dtype of the orthogonalisation, and of what is sent for it.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        recipe: Recipe,
        *,
        mesh: DeviceMesh,
        group: Any,
        dtype: torch.dtype,
    ) -> None:
        defaults = {
            "lr": recipe.learning_rate,
            "momentum": recipe.muon_momentum,
            "weight_decay": recipe.weight_decay,
        }
        super().__init__(groups, defaults)
        self.dtype = dtype
        matrices = [parameter for group in self.param_groups for parameter in group["params"]]
        self.wholes = WholeMatrices(matrices, mesh, group, cost=orthogonalisation_flops)

    def momentum_of(self, parameter: Parameter) -> Tensor:
        """Returns the momentum of a parameter, sharded as the parameter is. It is zero before the
        first step.
        """
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter, requires_grad=False)
        return state[MOMENTUM]

    def reset(self) -> None:
        """Sets the momentum of all matrices to zero."""
        for group in self.param_groups:
            for parameter in group["params"]:
                local(self.momentum_of(parameter)).zero_()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates all matrices. All ranks of the group must call it."""
        parameters = []
        settings = []
        updates = []
        for group in self.param_groups:
            for parameter in group["params"]:
                parameters.append(parameter)
                settings.append(group)
                updates.append(self._momentum_update(parameter, group["momentum"]))
        for number, update in self.wholes.map(updates, orthogonalised):
            rate = settings[number]["lr"]
            weight = local(parameters[number])
            weight.mul_(1 - rate * settings[number]["weight_decay"])
            weight.add_(update, alpha=-rate * update_scale(*parameters[number].shape))

    def _momentum_update(self, parameter: Parameter, momentum: float) -> Tensor:
        """Adds the gradient to the momentum of a parameter. Returns this rank's shard of the matrix
        that is orthogonalised: the Nesterov momentum.

        Gradients are averaged as in torch's Muon. Keller Jordan's and Moonlight's code adds them
        up, which only multiplies the momentum by 1 / (1 - momentum).
        """
        gradient = local(cast(Tensor, parameter.grad))
        average = local(self.momentum_of(parameter))
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum).to(self.dtype)
