"""Muon on one process compared with torch's Muon, and with the formulas of Moonlight (arXiv
2502.16982), computed in fp64 from singular value decompositions.
"""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines.muon import orthogonalised
from kit.engines.native import NativeEngine
from kit.model import build_decoder
from tests.support.distinct_models import GPT, LLAMA
from tests.support.workers import run_ranks

STEPS, SEQUENCES, RATE = 6, 4, 1e-2
RECIPE = Recipe(
    data="none",
    num_steps=STEPS,
    learning_rate=RATE,
    min_learning_rate=0,
    gradient_clip=None,
    optimizer="muon",
)
PLAN = Plan(global_batch_size=SEQUENCES, micro_batch_size=SEQUENCES)
CPU = torch.device("cpu")
SPECS = {spec.family: spec.replace(num_layers=2) for spec in (LLAMA, GPT)}


def samples_of(spec: ModelSpec) -> Tensor:
    shape = (STEPS, SEQUENCES, spec.sequence_length + 1)
    return torch.randint(spec.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def is_muons(name: str, parameter: Tensor) -> bool:
    return name.startswith("layers.") and parameter.ndim == 2


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8)])
def test_orthogonalisation_maps_singular_values(shape: tuple[int, int]) -> None:
    """Newton-Schulz applies Keller Jordan's polynomial five times to each singular value, and
    leaves the singular vectors.
    """
    matrix = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()  # The norm of the singular values is the Frobenius norm.
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    assert torch.allclose(orthogonalised(matrix), u @ torch.diag(s) @ v, atol=1e-9)
    assert 0.6 < s.min() and s.max() < 1.3
    assert torch.allclose(orthogonalised(matrix.float()), orthogonalised(matrix).float(), atol=1e-4)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
@pytest.mark.parametrize("family", SPECS)
def test_steps_match_torch_muon(family: str) -> None:
    run_ranks(1, assert_steps_are_those_of_torch, SPECS[family])


def assert_steps_are_those_of_torch(spec: ModelSpec) -> None:
    """Asserts that losses and weights of six steps equal those of torch's Muon and AdamW. Torch
    orthogonalises in bf16, which is replaced by fp32.
    """
    engine = NativeEngine(spec, PLAN, RECIPE, CPU)
    decoder = build_decoder(spec, seed=RECIPE.seed)
    named = dict(decoder.named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in named.items()}
    muon = torch.optim.Muon(
        [p for name, p in named.items() if is_muons(name, p)],
        lr=RATE,
        weight_decay=RECIPE.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [p for name, p in named.items() if not is_muons(name, p)],
        lr=RATE,
        betas=(RECIPE.beta1, RECIPE.beta2),
        eps=RECIPE.eps,
        weight_decay=RECIPE.weight_decay,
    )
    for samples in samples_of(spec):
        decoder.zero_grad()
        loss = decoder(samples[:, :-1], samples[:, 1:])
        loss.backward()
        with patch.object(Tensor, "bfloat16", Tensor.clone):
            muon.step()
        adamw.step()
        assert engine.train_step(samples, RATE)[0] == pytest.approx(loss.item(), rel=1e-5)
    ours = dict(engine.decoders[0].named_parameters())
    for name, parameter in named.items():
        # a key bias adds one number to all scores of a query, so its gradient is 0
        if name.endswith("key.bias"):
            continue
        moved = parameter.detach() - start[name]
        assert (ours[name].detach() - parameter.detach()).norm() < 1e-3 * moved.norm(), name


def test_updates_match_moonlights_formula() -> None:
    run_ranks(1, assert_updates_are_moonlights, SPECS["llama"])


def assert_updates_are_moonlights(spec: ModelSpec) -> None:
    """Asserts that two updates are W - rate x (0.2 O sqrt(max(m, n)) + decay x W), with O the
    orthogonalised sum of gradient and momentum.
    """
    engine = NativeEngine(spec, PLAN, RECIPE, CPU)
    ours = {n: p for n, p in engine.named_parameters().items() if is_muons(n, p)}
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in ours.items()}
    assert len(ours) == 14
    for samples in samples_of(spec)[:2]:
        before = {name: p.detach().double() for name, p in ours.items()}
        engine.train_step(samples, RATE)
        for name, parameter in ours.items():
            assert parameter.grad is not None
            gradient = parameter.grad.double()
            sums[name] = 0.95 * sums[name] + gradient
            u, s, v = torch.linalg.svd(gradient + 0.95 * sums[name], full_matrices=False)
            s = s / s.norm()
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            scale = 0.2 * max(gradient.shape) ** 0.5
            update = scale * (u @ torch.diag(s) @ v) + RECIPE.weight_decay * before[name]
            moved = parameter.detach().double() - before[name]
            assert (moved + RATE * update).norm() < 1e-4 * moved.norm(), name
