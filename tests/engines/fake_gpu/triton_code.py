"""A backend of torch.compile for tests. It generates Inductor's code, records which kernels the
code calls, and runs the graph without this code.
"""

import collections
import copy
import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    fake_tensor_prop,
    partition_fn,
    view_to_reshape,
)
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx import GraphModule

Direction = Literal["forward", "backward"]


@dataclasses.dataclass(frozen=True)
class Graph:
    """Kernels that the generated code of one graph calls."""

    direction: Direction
    triton: int
    """Number of generated Triton kernels."""
    library: dict[str, int]
    """Number of calls of each library function, by name: matrix products, attention and
    collectives.
    """


GRAPHS: list[Graph] = []
"""All graphs that this process has compiled, in order."""


def generate(direction: Direction, module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Generates the code of a graph and appends its kernels to `GRAPHS`. Returns the graph itself
    as function to run.
    """
    as_it_is = copy.deepcopy(module)
    view_to_reshape(module)
    with torch.no_grad():
        fake_mode = fake_tensor_prop(module, inputs)
    with V.set_fake_mode(fake_mode), V.set_debug_handler(DebugContext()):
        _recursive_post_grad_passes(module, is_inference=False)
        graph = GraphLowering(
            module,
            example_inputs=inputs,
            is_backward=direction == "backward",
            shape_env=fake_mode.shape_env,
        )
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
            graph.run(*inputs)
            code = graph.codegen()[0].value
    calls = code[code.index("def call") :]
    library = re.findall(r"(?:extern_kernels|torch\.ops\.\w+)\.(\w+)[\w.]*\(", calls)
    num_triton = len(re.findall(r"triton_\w+\.run\(", calls))
    GRAPHS.append(Graph(direction, num_triton, dict(collections.Counter(library))))

    def run(arguments: list[Any]) -> Any:
        given = list(arguments)
        arguments.clear()
        return as_it_is(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


backend = aot_autograd(
    fw_compiler=partial(generate, "forward"),
    bw_compiler=partial(generate, "backward"),
    decompositions=select_decomp_table,
    partition_fn=partition_fn,
)
