"""Names of `kit` and `cluster` that tests replace by `monkeypatch` exist. After a rename, this test
fails within seconds. Otherwise only the patching test would fail, which may be slow.
"""

import ast
import pkgutil

import pytest

from tests.support.sources import ROOT


def replaced(tree: ast.AST) -> list[tuple[str, str]]:
    """Returns (full name of the patched object, name of the replaced attribute) for each
    `monkeypatch.setattr` in a file that patches our packages.
    """
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="setattr"), args=[target, ast.Constant(value=str(name)), *_]
            ):
                first, *rest = ast.unparse(target).split(".")
                found.append((".".join([imported.get(first, first), *rest]), name))
            case ast.Call(
                func=ast.Attribute(attr="setattr"), args=[ast.Constant(value=str(path)), _]
            ):
                found.append(tuple(path.rsplit(".", 1)))
    return [(target, name) for target, name in found if target.startswith(("kit.", "cluster."))]


FILES = {
    str(file.relative_to(ROOT)): names
    for file in sorted((ROOT / "tests").rglob("*.py"))
    if (names := replaced(ast.parse(file.read_text())))
}


@pytest.mark.parametrize("file", FILES)
def test_monkeypatched_names_exist(file):
    objects = {target: pkgutil.resolve_name(target) for target, _ in FILES[file]}
    missing = [each for each in FILES[file] if not hasattr(objects[each[0]], each[1])]
    assert not missing, "the test replaces what does not exist any more"
