"""The loss that is computed in chunks of tokens equals the loss of all logits at once. The
gradients are equal too.
"""

import pytest
import torch
from torch.nn import functional as F

from cluster.site import Site
from kit.config.plan import logits_at_once
from kit.estimate.theory.activations import KIT, engine_kernels
from kit.model import build_decoder
from kit.model.cross_entropy import ZLoss, _softmax, chunked_cross_entropy

N, H, V = 50, 16, 300


@pytest.fixture(
    params=[1, 7 * V, N * V, 10**9], ids=["1 row", "7 rows and a rest", "all rows", "more"]
)
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.model.cross_entropy.logits_at_once", lambda _memory: request.param)


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(n, H, generator=generator).to(dtype) for n in (N, V))
    x_NH, weight_VH = (each.requires_grad_() for each in drawn)
    return x_NH, weight_VH, torch.randint(V, (N,), generator=generator)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)]
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("weight", "soft_cap"), [(0.0, None), (0.1, None), (0.1, 3.0)])
def test_chunked_loss_equals_full_cross_entropy(
    dtype, tolerance, compiled, weight, soft_cap, monkeypatch
) -> None:
    """The z-loss is compared with torch's logsumexp."""
    # The function that the kit would compile runs without compilation.
    monkeypatch.setattr("kit.model.cross_entropy._compiled_softmax", lambda: _softmax)
    x_NH, weight_VH, targets_N = inputs(dtype)
    logits_NV = F.linear(x_NH, weight_VH)
    if soft_cap is not None:
        logits_NV = soft_cap * torch.tanh(logits_NV / soft_cap)
        tolerance *= 2  # The slope of the soft cap is rounded, too.
    logits_NV = logits_NV.float()
    expected_z = weight * logits_NV.logsumexp(-1).square().mean()
    expected = F.cross_entropy(logits_NV, targets_N) + expected_z
    gradients = torch.autograd.grad(3 * expected, (x_NH, weight_VH))
    z_loss = ZLoss(weight) if weight else None
    options = {"compiled": compiled, "z_loss": z_loss, "soft_cap": soft_cap}
    found = chunked_cross_entropy(x_NH, weight_VH, targets_N, **options)
    assert found.dtype == torch.float32
    if z_loss is not None:
        torch.testing.assert_close(z_loss.take(), expected_z.detach(), rtol=1e-6, atol=1e-6)
        assert z_loss.take() is None
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    ours = torch.autograd.grad(3 * found, (x_NH, weight_VH))
    for mine, theirs in zip(ours, gradients, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


def test_chunked_loss_allows_one_backward_pass() -> None:
    """The backward pass scales stored gradients in place. A second backward pass must raise an
    error instead of returning wrong gradients.
    """
    x_NH, weight_VH, targets_N = inputs(torch.float32)
    loss = chunked_cross_entropy(x_NH, weight_VH, targets_N)
    loss.backward(retain_graph=True)
    with pytest.raises(TypeError):
        loss.backward()


def test_validation_loss_makes_no_gradients() -> None:
    x_NH, weight_VH, targets_N = inputs(torch.float32)
    with torch.no_grad():
        loss = chunked_cross_entropy(x_NH, weight_VH, targets_N)
    assert loss.grad_fn is None
    expected = F.cross_entropy(x_NH @ weight_VH.T, targets_N).item()
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_tied_matrix_gets_both_gradients(gpt_spec) -> None:
    spec = gpt_spec.replace(tied_embeddings=True)
    decoder, tokens = build_decoder(spec), torch.randint(spec.vocab_size, (2, 9))
    found = torch.autograd.grad(decoder(tokens[:, :-1], tokens[:, 1:]), list(decoder.parameters()))
    logits = decoder(tokens[:, :-1]).flatten(0, 1)
    loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
    expected = torch.autograd.grad(loss, list(decoder.parameters()))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_logit_chunk_is_small_part_of_device_memory() -> None:
    """On a large GPU the chunks are large, so that the output weight is read only a few times. A
    chunk takes at most a sixteenth of the device's memory.
    """
    logs = {None: 25, 2: 25, 16: 26, 40: 27, 64: 28, 80: 28, 288: 28}
    assert {gb: logits_at_once(gb and gb * 1e9).bit_length() - 1 for gb in logs} == logs
    assert all(10 * logits_at_once(gb * 1e9) <= gb * 1e9 / 16 for gb in range(6, 300))
    device = Site.load("dgx-h100").device
    assert engine_kernels("native", device).chunk_logits == logits_at_once(80e9)
    assert engine_kernels("native", Site.load("laptop").device) == engine_kernels("native") == KIT
    assert engine_kernels("deepspeed", device).chunk_logits == 0
