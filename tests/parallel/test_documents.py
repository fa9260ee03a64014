"""Attention within documents: a document in a packed row gives the same results as the document
alone, on one process and on several ranks.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.engines import native
from kit.model import Past, build_decoder, past
from kit.model.past import DOCUMENT_ARGUMENTS, document_begins, has_document_kernel
from tests.support.parity import build, make_plan

END = 0


class PlainVarlen:
    """CPU kernel for torch's attention over sequences of variable length (varlen), for which torch
    has no CPU kernel. It computes the scores of each sequence explicitly.
    """

    def __init__(self) -> None:
        self.calls = 0

    def scores(self, query, key, begins_N, is_causal, window):
        """Yields for each sequence (slice of its tokens, attention probabilities of shape [N, T, T]
        with N heads and T tokens).
        """
        assert begins_N.dtype == torch.int32
        assert is_causal or tuple(window) == (-1, 0), "two ways of saying causal, by version"
        for first, last in zip(begins_N.tolist(), begins_N.tolist()[1:], strict=False):
            q, k = (x[first:last].transpose(0, 1) for x in (query, key))
            scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT / q.shape[-1] ** 0.5
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            yield slice(first, last), scores.masked_fill(hidden, -torch.inf).softmax(-1)

    def forward(self, query, key, value, begins_N, _, max_q, max_k, is_causal, *given):
        self.calls += 1
        longest = int(begins_N.diff().max())
        scale, window = given[:2] or (None, None)  # Torch 2.10 does not pass `scale` and `window`.
        assert begins_N[-1] == len(query) and longest <= max_q == max_k and scale is None
        out = torch.empty_like(query)
        for place, p in self.scores(query, key, begins_N, is_causal, window):
            v = value[place].transpose(0, 1).repeat_interleave(query.shape[1] // value.shape[1], 0)
            out[place] = (p @ v).transpose(0, 1)
        logsumexp = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
        return out, logsumexp, torch.zeros(2, dtype=torch.uint64)

    def backward(self, grad, query, key, value, out, logsumexp, begins_N, *given):
        # Order of the arguments: cu_seq_k, max_q, max_k, is_causal, rng_state, and from torch 2.11
        # on scale, window.
        is_causal, window = given[3], given[6] if len(given) > 6 else None
        grads = [torch.empty_like(x) for x in (query, key, value)]
        groups, root = query.shape[1] // key.shape[1], query.shape[-1] ** 0.5
        for place, p in self.scores(query, key, begins_N, is_causal, window):
            dy, q = grad[place].transpose(0, 1), query[place].transpose(0, 1)
            k, v = (x[place].transpose(0, 1).repeat_interleave(groups, 0) for x in (key, value))
            dp = dy @ v.mT
            ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / root
            for x, gradient in zip(grads, (ds @ k, ds.mT @ q, p.mT @ dy), strict=True):
                x[place] = gradient.unflatten(0, (x.shape[1], -1)).sum(1).transpose(0, 1)
        return tuple(grads)


PLAIN = PlainVarlen()
for operator, plain in (
    (varlen._varlen_attn, PLAIN.forward),
    (varlen._varlen_attn_backward, PLAIN.backward),
):
    operator.register_kernel("cpu")(plain)  # type: ignore[attr-defined]


def documents(spec: ModelSpec, lengths: tuple[int, ...]) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, spec.vocab_size, (1, length), generator=random) for length in lengths]
    for text in texts:
        text[0, -1] = END
    return texts


def three_steps(spec: ModelSpec, plan: Plan, masked: bool) -> list[tuple[float, float]]:
    """Trains three steps on random tokens, with or without document masks. Returns (loss, gradient
    norm) of each step.
    """
    engine = build(spec, plan)
    if masked:
        engine.mask_documents(END)
    shape = plan.global_batch_size, spec.sequence_length + 1
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(0, 9, shape, generator=generator)
    share = plan.global_batch_size // plan.data_parallel
    return [engine.train_step(whole[engine.data_rank * share :][:share], 1e-3) for _ in range(3)]


def test_document_masks_agree_between_layouts(llama_spec, run_standing):
    # This test runs first in the file, because a CUDA build of torch cannot fork ranks after a
    # backward pass.
    spec = llama_spec.replace(num_layers=2)
    one, unmasked = (run_standing(1, three_steps, spec, make_plan({}), is_so) for is_so in (1, 0))
    assert abs(one[0][0][0] - unmasked[0][0][0]) > 1e-4
    for changes in (
        {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "selective"},
        {"data_parallel": 2, "zero_stage": 3, "recompute": "full"},
    ):
        for found in run_standing(2, three_steps, spec, make_plan(changes), True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(one[0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kernel", [False, True], ids=["mask", "kernel"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_packed_documents_equal_separate_documents(llama_spec, recompute, kernel):
    """Logits and gradients are equal. Rotary positions are relative, so the position of a document
    in the packed row does not matter.
    """
    spec = llama_spec.replace(tied_embeddings=False)
    if kernel and "enable_gqa" not in DOCUMENT_ARGUMENTS:
        spec = spec.replace(num_kv_heads=spec.num_heads)
    texts = documents(spec, (5, 1, 7, 3))
    decoder = build_decoder(spec, recompute=recompute)
    alone = torch.cat([decoder(text) for text in texts], dim=1)
    alone.square().sum().backward()
    wanted = [parameter.grad.clone() for parameter in decoder.parameters()]
    decoder.zero_grad()
    row = torch.cat(texts, dim=1)
    seen = Past.within_documents(row, END, device=row.device, has_kernel=kernel)
    before = PLAIN.calls
    together = decoder(row, past=seen)
    together.square().sum().backward()
    # Only full recomputation runs the kernel twice. Otherwise the output is saved for backward.
    times = 2 if recompute == "full" else 1
    assert PLAIN.calls - before == (times * spec.num_layers if kernel else 0)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    for parameter, gradient in zip(decoder.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-4)
    unmasked = decoder(row)
    assert (unmasked - alone).abs().max() > 1e-3, "without the mask they see each other"


def test_documents_begin_after_end_token_or_at_row_start():
    rows = torch.tensor([[5, 0, 7, 8], [0, 0, 3, 0], [4, 4, 4, 4]])
    assert document_begins(rows, END).tolist() == [0, 2, 4, 5, 6, 8, 12, 12]
    assert document_begins(torch.ones(1, 6, dtype=torch.long), END).tolist() == [0, 6]
    sizes = {len(document_begins(torch.randint(0, 9, (4, 64)), END)) for _ in range(20)}
    assert len(sizes) <= 2, "few sizes to compile for"


def test_document_begins_are_read_from_host_samples(llama_spec, run_standing):
    """On a GPU, the samples are still in host memory, so no micro-batch waits for the GPU to find
    the beginnings of documents.
    """
    assert run_standing(1, begins_of_a_step, llama_spec.replace(num_layers=2)) == [True]


def begins_of_a_step(spec: ModelSpec) -> bool:
    spec = spec.replace(num_kv_heads=spec.num_heads)
    engine = build(spec, make_plan({"global_batch_size": 4, "micro_batch_size": 2}))
    engine.mask_documents(END)
    samples = torch.randint(0, 3, (4, spec.sequence_length + 1))
    found: list[tuple[bool, list[int]]] = []

    def begins(tokens_BT: Tensor, end: int) -> Tensor:
        is_in_samples = (
            tokens_BT.untyped_storage().data_ptr() == samples.untyped_storage().data_ptr()
        )
        begins_N = document_begins(tokens_BT, end)
        found.append((is_in_samples, begins_N.unique().tolist()))
        return begins_N

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "has_document_kernel", lambda *_, **__: True)
        patch.setattr(past, "document_begins", begins)
        engine.train_step(samples, 1e-3)
    wanted = []
    for part in samples.split(2):  # The expected beginnings are searched token by token.
        tokens = part[:, :-1].flatten().tolist()
        length = spec.sequence_length
        starts = [n for n, _ in enumerate(tokens) if n % length == 0 or tokens[n - 1] == END]
        wanted.append((True, [*starts, len(tokens)]))
    assert found == wanted, (found, wanted)
    return True


def test_document_kernel_is_used_on_nvidia_gpus_only(monkeypatch):
    for device, hip, precision, has in (
        ("cuda", None, "bf16", True),
        ("cuda", None, "fp32", False),
        ("cpu", None, "bf16", False),
        ("cuda", "6.2", "bf16", False),
    ):
        monkeypatch.setattr(torch.version, "hip", hip)
        found = [
            has_document_kernel(torch.device(device), precision, has_grouped_heads=grouped)
            for grouped in (False, True)
        ]
        assert found == [has, has and "enable_gqa" in DOCUMENT_ARGUMENTS]
