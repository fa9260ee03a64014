"""Extension of mkdocstrings: descriptions of the fields of records.

The fields of a record have no docstrings. Their descriptions are the first argument of
`field_doc(...)` (`cluster/record.py`), from which this extension takes them.
"""

import ast
from typing import Any

import griffe


class FieldDocs(griffe.Extension):
    """Makes the first argument of `field_doc` the docstring of an attribute."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **_: Any) -> None:
        """Called by griffe for each attribute of a class or module."""
        call = getattr(node, "value", None)
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "field_doc":
            return
        attr.docstring = griffe.Docstring(str(ast.literal_eval(call.args[0])), parent=attr)
        default = [each.value for each in call.keywords if each.arg == "default"]
        attr.value = ast.unparse(default[0]) if default else None
