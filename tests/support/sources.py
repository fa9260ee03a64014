"""The files of both packages, read once for all tests that look at them."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def nodes() -> dict[Path, list[ast.AST]]:
    """Returns for each file all that its syntax tree holds, the whole tree first."""
    files = [file for package in ("kit", "cluster") for file in (ROOT / package).rglob("*.py")]
    return {file: [*ast.walk(ast.parse(file.read_text()))] for file in sorted(files)}
