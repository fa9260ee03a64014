"""Small models in which no two weights are equal, and an assertion that two models are equal."""

import torch

from kit.config.spec import ModelSpec
from kit.model import Decoder, build_decoder

SHAPE = {"num_layers": 3, "hidden_size": 64, "num_heads": 4, "sequence_length": 32}
LLAMA = ModelSpec.llama(
    name="tiny",
    num_kv_heads=2,
    ffn_hidden_size=96,
    vocab_size=300,
    rope_theta=50_000.0,
    norm_eps=1e-6,
    init_std=0.1,
    **SHAPE,
)
GPT = ModelSpec.gpt(name="tiny", vocab_size=300, init_std=0.1, **SHAPE)


def randomised(spec: ModelSpec) -> Decoder:
    """Returns a model with random norm weights and biases. The usual values are all ones or zeros,
    so a test would not detect that two tensors were swapped.
    """
    decoder, generator = build_decoder(spec).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return decoder


def assert_equal(found: Decoder, expected: Decoder) -> None:
    """Fails unless two models have equal weights and equal specs. Name and initial standard
    deviation may differ.
    """
    unnamed = {"name": "", "init_std": 0.02}
    assert found.spec.replace(**unnamed) == expected.spec.replace(**unnamed)
    theirs = dict(expected.named_parameters())
    assert {name for name, _ in found.named_parameters()} == set(theirs)
    assert not [name for name, p in found.named_parameters() if not torch.equal(p, theirs[name])]
