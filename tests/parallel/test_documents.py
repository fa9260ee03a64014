"""Attention that ends where a document does: each document as if it were alone, on one process and on several."""

import pytest
import torch
from torch import Tensor

from kit.errors import ConfigError
from kit.model import build_decoder
from kit.plan import Plan
from kit.recipe import Recipe
from kit.spec import ModelSpec
from kit.trainer.guard import check_recipe
from tests.parity import RECIPE, build, make_plan
from tests.workers import run_ranks

END = 0


def documents(spec: ModelSpec, lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, spec.vocab_size, (1, length), generator=generator) for length in lengths]
    for text in texts:
        text[0, -1] = END
    return texts


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_each_document_as_if_alone(llama_spec, recompute):
    """Its logits and its gradients: rotary positions are relative, so where it begins changes nothing."""
    spec = llama_spec.replace(tied_embeddings=False)
    texts = documents(spec, (5, 1, 7, 3))
    decoder = build_decoder(spec, recompute=recompute)
    alone = torch.cat([decoder(text) for text in texts], dim=1)
    alone.square().sum().backward()
    wanted = [parameter.grad.clone() for parameter in decoder.parameters()]
    decoder.zero_grad()
    decoder.document_end = END
    together = decoder(torch.cat(texts, dim=1))
    together.square().sum().backward()
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    for parameter, gradient in zip(decoder.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)
    decoder.document_end = None
    assert (decoder(torch.cat(texts, dim=1)) - alone).abs().max() > 1e-3, "without the mask they see each other"


def three_steps(spec: ModelSpec, plan: Plan, masked: bool) -> list[tuple[float, float]]:
    engine = build(spec, plan)
    if masked:
        engine.mask_documents(END)
    whole = torch.randint(
        0, 9, (plan.global_batch_size, spec.sequence_length + 1), generator=torch.Generator().manual_seed(0)
    )
    share = plan.global_batch_size // plan.data_parallel
    return [engine.train_step(whole[engine.data_rank * share :][:share], 1e-3) for _ in range(3)]


def test_layouts_agree(llama_spec):
    spec = llama_spec.replace(num_layers=2)
    one = run_ranks(1, three_steps, spec, make_plan({}), True)[0]
    assert abs(one[0][0] - run_ranks(1, three_steps, spec, make_plan({}), False)[0][0][0]) > 1e-4
    for changes in ({"tensor_parallel": 2, "sequence_parallel": True, "recompute": "selective"},
                    {"data_parallel": 2, "zero_stage": 3, "recompute": "full"}):  # fmt: skip
        for found in run_ranks(2, three_steps, spec, make_plan(changes), True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(one), rtol=1e-5, atol=0)


@pytest.mark.parametrize("changes", [{"engine": "deepspeed"}, {"pipeline_parallel": 2}])
def test_what_cannot_see_the_ends_is_refused(changes):
    check_recipe(RECIPE, make_plan(changes))
    with pytest.raises(ConfigError, match="recipe.mask_documents: true is not allowed"):
        check_recipe(Recipe(data="none", num_steps=1, mask_documents=True), make_plan(changes))
