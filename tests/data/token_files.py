"""Token files whose tokens tell where they stood."""

import itertools
from pathlib import Path

import numpy as np

from kit.data.token_file import TokenFile, TokenFileWriter


def numbered(prefix: Path, lengths: list[int], first: int = 0) -> TokenFile:
    """Returns a file of documents whose n-th token is `first` + n."""
    bounds = np.concatenate(([first], first + np.cumsum(lengths)))
    with TokenFileWriter(prefix, int(bounds[-1]) + 1) as writer:
        for begin, end in itertools.pairwise(bounds):
            writer.add(np.arange(begin, end))
    return TokenFile(prefix)
