"""Modules of the kit that a Trainium job imports need only torch 2.9. The other tests run on newer
torch releases.
"""

import ast
import importlib
import inspect
import sys

import pytest

from tests.engines import signatures
from tests.engines.trainium_torch import ROOT, group_calls, record, refuse_what_it_lacks
from tests.support.hostile import in_a_child

OWN = [
    *(
        f"kit.engines.neuron.{file.stem}"
        for file in sorted((ROOT / "kit" / "engines" / "neuron").glob("[!_]*.py"))
    ),
    "kit.train",
    "kit.interop.weights.neuron",
]


LACKS = "torch 2.9 has no torch."
REFUSED = {
    "import torch.nn.attention.varlen": "ModuleNotFoundError: torch 2.9 has no module torch.nn",
    "from torch.nn.attention import varlen": f"ImportError: {LACKS}nn.attention.varlen",
    "from torch.distributed import shrink_group": f"ImportError: {LACKS}distributed.shrink_group",
    "import torch.distributed as d; d.shrink_group": f"AttributeError: {LACKS}distributed.shrink",
    "import torch; torch.ops.aten._foreach_mm": f"AttributeError: {LACKS}ops.aten._foreach_mm",
    "import torch.cuda": "AssertionError: torch.cuda is not in trainium_torch.json",
}


def import_anew() -> None:
    """Imports the modules of OWN again, with only the names that torch 2.9 has. Runs in a child
    process.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == "kit"]:
        del sys.modules[name]
    refuse_what_it_lacks()
    for name in OWN:
        importlib.import_module(name)


def test_neuron_engine_imports_with_torch_2_9():
    in_a_child(import_anew)


def try_lines() -> list[str]:
    """Runs each line of REFUSED as code of a kit module, and returns the errors."""
    refuse_what_it_lacks()
    said = []
    for line in REFUSED:
        with pytest.raises(Exception) as raised:
            exec(line, {"__name__": "kit"})
        said.append(f"{raised.type.__name__}: {raised.value}")
    return said


def test_names_missing_in_torch_2_9_are_refused():
    for said, expected in zip(in_a_child(try_lines), REFUSED.values(), strict=True):
        assert said.startswith(expected)


def test_distributed_calls_fit_torch_2_9_and_torch_xla():
    refused, calls = [], 0
    for place, name, call in group_calls():
        named = {keyword.arg: ... for keyword in call.keywords if keyword.arg}
        starred = any(isinstance(each, ast.Starred) for each in call.args)
        is_whole = len(named) == len(call.keywords) and not starred
        for of in ("torch", "torch_xla"):
            if name not in record()[of]:
                continue
            calls, signature = calls + 1, signatures.signature(record()[of][name])
            try:
                (signature.bind if is_whole else signature.bind_partial)(*call.args, **named)
            except TypeError as error:
                refused.append(f"{place}: {name} of {of}: {error}")
    assert calls > 50 and not refused, refused


def test_called_distributed_functions_are_recorded():
    import torch.distributed as dist

    called = {name for _, name, _ in group_calls() if inspect.isfunction(getattr(dist, name))}
    assert called <= record()["torch"].keys(), "make the record again: see trainium_torch.py"
