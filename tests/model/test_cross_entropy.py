"""The loss in chunks equals the loss of all logits at once, and so do its gradients."""

import pytest
import torch
from torch.nn import functional as F

from kit.model import build_decoder
from kit.model.cross_entropy import chunked_cross_entropy

N, H, V = 50, 16, 300


@pytest.fixture(params=[1, 7 * V, N * V, 10**9], ids=["1 row", "7 rows and a rest", "all rows", "more"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.model.cross_entropy.LOGITS_AT_ONCE", request.param)


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_NH, weight_VH = (torch.randn(n, H, generator=generator).to(dtype).requires_grad_() for n in (N, V))
    return x_NH, weight_VH, torch.randint(V, (N,), generator=generator)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_equals_all_logits_at_once(dtype: torch.dtype, tolerance: float) -> None:
    x_NH, weight_VH, targets_N = inputs(dtype)
    expected = F.cross_entropy(F.linear(x_NH, weight_VH).float(), targets_N)
    gradients = torch.autograd.grad(3 * expected, (x_NH, weight_VH))
    found = chunked_cross_entropy(x_NH, weight_VH, targets_N)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(torch.autograd.grad(3 * found, (x_NH, weight_VH)), gradients, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


def test_only_one_backward_pass() -> None:
    """Its gradients are scaled in place, so a second pass must not return something else in silence."""
    x_NH, weight_VH, targets_N = inputs(torch.float32)
    loss = chunked_cross_entropy(x_NH, weight_VH, targets_N)
    loss.backward(retain_graph=True)
    with pytest.raises(TypeError):
        loss.backward()


def test_no_gradients_are_made_for_validation() -> None:
    x_NH, weight_VH, targets_N = inputs(torch.float32)
    with torch.no_grad():
        loss = chunked_cross_entropy(x_NH, weight_VH, targets_N)
    assert loss.grad_fn is None
    assert loss.item() == pytest.approx(F.cross_entropy(x_NH @ weight_VH.T, targets_N).item(), rel=1e-6)


def test_a_tied_matrix_gets_both_gradients(gpt_spec) -> None:
    spec = gpt_spec.replace(tied_embeddings=True)
    decoder, tokens = build_decoder(spec), torch.randint(spec.vocab_size, (2, 9))
    found = torch.autograd.grad(decoder(tokens[:, :-1], tokens[:, 1:]), list(decoder.parameters()))
    logits = decoder(tokens[:, :-1]).flatten(0, 1)
    expected = torch.autograd.grad(F.cross_entropy(logits, tokens[:, 1:].flatten()), list(decoder.parameters()))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
