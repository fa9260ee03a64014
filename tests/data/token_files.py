"""Functions that read and write datasets and token files for tests."""

import itertools
from pathlib import Path

import numpy as np

from kit.data.token_file import HEADER, TokenFile, TokenFileWriter

QUIET = {"vocab_size": 330, "validation_fraction": 0.2, "progress": False}
"""Keyword arguments for `build_dataset` with a small text."""


def contents(folder: Path) -> dict[str, bytes]:
    """Returns a dict from the name of each file in a folder to its bytes."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def documents(file: TokenFile) -> list[list[int]]:
    """Returns the tokens of each document. Uses the sequence lengths in the index and the first
    sequence of each document.
    """
    index = file.prefix.with_name(f"{file.prefix.name}.idx").read_bytes()
    num_sequences = HEADER.unpack_from(index)[3]
    lengths = np.frombuffer(index, "<i4", num_sequences, HEADER.size)
    firsts = np.frombuffer(index, "<i8", offset=HEADER.size + 12 * num_sequences)
    bounds = np.concatenate(([0], np.cumsum(lengths)))[firsts].tolist()
    return [file.tokens[begin:end].tolist() for begin, end in itertools.pairwise(bounds)]


def numbered(prefix: Path, lengths: list[int], first: int = 0) -> TokenFile:
    """Writes a token file with documents of the given lengths and returns it. The n-th token of the
    file is `first` + n.
    """
    bounds = np.concatenate(([first], first + np.cumsum(lengths)))
    with TokenFileWriter(prefix, int(bounds[-1]) + 1) as writer:
        for begin, end in itertools.pairwise(bounds):
            writer.add(np.arange(begin, end))
    return TokenFile(prefix)
