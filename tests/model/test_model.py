"""The decoder in plain torch; its logits are held to transformers' own in
`tests/convert/test_hugging_face.py`.
"""

import pytest
import torch

from kit.model import Decoder, build_decoder, rotate
from kit.spec import ModelSpec


def test_initial_weights_follow_the_spec():
    spec = ModelSpec.preset("demo")
    weights = dict(build_decoder(spec, seed=7).named_parameters())
    plain, scaled = (
        weights["layers.1.attention.query.weight"],
        weights["layers.1.feed_forward.down.weight"],
    )
    assert plain.std().item() == pytest.approx(0.02, rel=0.05)
    assert scaled.std().item() == pytest.approx(0.02 / (2 * spec.num_layers) ** 0.5, rel=0.05)
    assert (weights["norm.weight"] == 1).all()
    again = dict(build_decoder(spec, seed=7).named_parameters())
    other = dict(build_decoder(spec, seed=8).named_parameters())
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not torch.equal(weights["output.weight"], other["output.weight"])


def test_causal_attention_sees_no_future(llama_spec):
    decoder = build_decoder(llama_spec).eval()
    tokens = torch.randint(0, llama_spec.vocab_size, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % llama_spec.vocab_size
    with torch.no_grad():
        before, after = decoder(tokens), decoder(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_rotation_keeps_length_and_depends_on_distance_only(llama_spec):
    table = Decoder(llama_spec).rotary(16, torch.device("cpu"))
    assert table is not None
    q = torch.randn(1, 1, 1, llama_spec.head_size).expand(1, 1, 16, -1)
    turned = rotate(q, table)
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1))
    products = turned[0, 0] @ turned[0, 0].T
    torch.testing.assert_close(
        products.diagonal(3), products.diagonal(3)[:1].expand(13), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_memory_not_gradients(recompute, llama_spec):
    tokens = torch.randint(0, llama_spec.vocab_size, (2, 16))
    gradients, saved = {}, {}
    for kind in ("none", recompute):
        decoder, sizes = build_decoder(llama_spec, recompute=kind), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            loss = decoder(tokens).square().mean()
        loss.backward()
        gradients[kind] = [parameter.grad for parameter in decoder.parameters()]
        saved[kind] = sum(sizes)
    assert all(
        torch.equal(a, b) for a, b in zip(gradients["none"], gradients[recompute], strict=True)
    )
    if recompute == "full":
        assert saved["full"] < 0.5 * saved["none"]


def test_one_trillion_parameters_on_the_meta_device():
    spec = ModelSpec.preset("gpt-1t")
    with torch.device("meta"):
        decoder = Decoder(spec)
    assert sum(p.numel() for p in decoder.parameters()) == spec.num_params > 1e12


def test_parts_of_a_model_name_weights_alike(llama_spec):
    whole = set(dict(Decoder(llama_spec).named_parameters()))
    parts = [
        set(dict(Decoder(llama_spec, layers=layers).named_parameters()))
        for layers in (range(0, 2), range(2, 4))
    ]
    assert parts[0] | parts[1] == whole
    assert not parts[0] & parts[1]
