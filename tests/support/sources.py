"""Syntax trees of the source files of `kit` and `cluster`, parsed once for all tests."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def nodes() -> dict[Path, list[ast.AST]]:
    """Returns a dict from each source file to all nodes of its syntax tree. The root node comes
    first.
    """
    files = [file for package in ("kit", "cluster") for file in (ROOT / package).rglob("*.py")]
    return {file: [*ast.walk(ast.parse(file.read_text()))] for file in sorted(files)}
