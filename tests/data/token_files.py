"""Functions that read and write datasets and token files for tests."""

import itertools
from pathlib import Path

import numpy as np

from kit.data.token_file import HEADER, TokenFile, TokenFileWriter

QUIET = {"vocab_size": 330, "validation_fraction": 0.2, "progress": False}
"""Arguments for a build of a small text."""


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of the files in a folder, by name."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def documents(file: TokenFile) -> list[list[int]]:
    """Returns the tokens of each document, by the index's lengths and its first sequences."""
    index = file.prefix.with_name(f"{file.prefix.name}.idx").read_bytes()
    num_sequences = HEADER.unpack_from(index)[3]
    lengths = np.frombuffer(index, "<i4", num_sequences, HEADER.size)
    firsts = np.frombuffer(index, "<i8", offset=HEADER.size + 12 * num_sequences)
    bounds = np.concatenate(([0], np.cumsum(lengths)))[firsts].tolist()
    return [file.tokens[begin:end].tolist() for begin, end in itertools.pairwise(bounds)]


def numbered(prefix: Path, lengths: list[int], first: int = 0) -> TokenFile:
    """Returns a file of documents whose n-th token is `first` + n."""
    bounds = np.concatenate(([first], first + np.cumsum(lengths)))
    with TokenFileWriter(prefix, int(bounds[-1]) + 1) as writer:
        for begin, end in itertools.pairwise(bounds):
            writer.add(np.arange(begin, end))
    return TokenFile(prefix)
