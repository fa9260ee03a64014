"""The decoder in plain torch. tests/interop/test_hugging_face.py compares its logits with
transformers.
"""

import pytest
import torch

from kit.config.spec import ModelSpec
from kit.model import Decoder, build_decoder


def test_initial_weights_follow_the_spec():
    spec = ModelSpec.preset("demo")
    weights = dict(build_decoder(spec, seed=7).named_parameters())
    for name, std in (
        ("layers.1.attention.query.weight", 0.02),
        ("layers.1.feed_forward.down.weight", 0.02 / (2 * spec.num_layers) ** 0.5),
    ):
        assert weights[name].std().item() == pytest.approx(std, rel=0.05)
    assert (weights["norm.weight"] == 1).all()
    again = dict(build_decoder(spec, seed=7).named_parameters())
    other = dict(build_decoder(spec, seed=8).named_parameters())
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not torch.equal(weights["output.weight"], other["output.weight"])


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
    pairs = zip(gradients["none"], gradients[recompute], strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    if recompute == "full":
        assert saved["full"] < 0.5 * saved["none"]


def test_decoder_of_1t_builds_on_meta_device():
    spec = ModelSpec.preset("gpt-1t")
    with torch.device("meta"):
        decoder = Decoder(spec)
    assert sum(p.numel() for p in decoder.parameters()) == spec.num_params > 1e12
