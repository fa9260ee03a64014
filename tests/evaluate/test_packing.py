"""Packed rows give each sequence what it gets alone, with every shared beginning held once."""

import random

import pytest
import torch

from kit.evaluate.packing import Row, batches, pack, tensors
from kit.model import build_decoder

CPU = torch.device("cpu")


def sequences(count: int) -> dict[tuple[int, ...], int]:
    """Sequences of which many begin alike, some are the beginning of others, and the last tokens
    asked for.
    """
    draw = random.Random(0)
    found: dict[tuple[int, ...], int] = {}
    stems = [tuple(draw.choices(range(9), k=draw.randint(1, 8))) for _ in range(5)]
    while len(found) < count:
        sequence = draw.choice(stems) + tuple(draw.choices(range(3), k=draw.randint(0, 6)))
        found[sequence] = draw.randint(1, len(sequence))
    return found


def path(row: Row, node: int) -> list[int]:
    """Returns the tokens that a node may look at, by the definition of a tree in preorder."""
    return [row.tokens[j] for j in range(node + 1) if node < row.ends[j]]


def test_each_sequence_is_a_path_and_no_beginning_is_held_twice() -> None:
    asked = sequences(200)
    rows = pack(asked, longest=10_000)
    assert sum(len(row.places) for row in rows) == len(asked)
    for row in rows:
        for sequence, places in row.places.items():
            assert len(places) == asked[sequence]
            assert tuple(path(row, places[-1])) == sequence
            assert [row.positions[place] for place in places] == list(range(len(sequence)))[
                -len(places) :
            ]
    beginnings = {sequence[:length] for sequence in asked for length in range(1, len(sequence) + 1)}
    held = sum(len(row.tokens) for row in rows)
    assert held < 1.05 * len(beginnings) + 16 * len(rows), "a row repeats at most one path"
    assert len(beginnings) < 0.7 * sum(map(len, asked)), "else there is nothing to share"


@pytest.mark.parametrize("longest", [1, 20])
def test_rows_and_batches_keep_their_length(longest: int) -> None:
    asked = sequences(100)
    rows = pack(asked, longest=longest)
    assert all(len(row.tokens) <= max(longest, len(max(row.places, key=len))) for row in rows)
    found = list(batches(rows, batch_tokens=64))
    assert sorted(id(row) for batch in found for row in batch) == sorted(map(id, rows))
    assert all(len(batch) * max(len(row.tokens) for row in batch) <= 64 for batch in found)


@pytest.mark.parametrize("family", ["llama_spec", "gpt_spec"])
def test_hidden_states_equal_those_of_the_sequence_alone(
    family: str, request: pytest.FixtureRequest
) -> None:
    decoder = build_decoder(request.getfixturevalue(family).replace(init_std=0.2)).eval()
    rows = pack(sequences(60), longest=40)
    tokens_BT, past = tensors(rows, CPU)
    with torch.inference_mode():
        packed = decoder.hidden(tokens_BT, past)
        for number, row in enumerate(rows):
            for sequence, places in row.places.items():
                alone = decoder.hidden(torch.tensor([sequence]))[0, -len(places) :]
                torch.testing.assert_close(packed[number, places], alone, rtol=1e-4, atol=1e-5)


def test_sequences_that_share_nothing_need_no_mask() -> None:
    assert tensors(pack({(1, 2, 3): 1}, longest=3) + pack({(4, 5): 1}, longest=2), CPU)[1] is None
