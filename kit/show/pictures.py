"""Drawings and figures for notebooks that explain an idea, such as tensor parallelism.

Each function returns a matplotlib figure. Functions that show data return (figure, table of the
data).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cluster.record import counted
from kit.config.spec import FlopBasis, ModelSpec
from kit.show.style import Rows, new_figure, short
from kit.show.theme import BLUE, GREEN, GREY, INK, PURPLE, VERMILION

SPLIT_COLOURS = {"column": BLUE, "row": VERMILION}
"""Colours of matrices, by the kind of their tensor-parallel split. Other weights are grey."""
SHARDED_STATES = {"weights": BLUE, "gradients": VERMILION, "optimizer": GREEN}
"""Colours of the states that ZeRO shards, by name."""
RUN_FILES = {
    "launch and resume": (
        "spec.json",
        "plan.json",
        "recipe.json",
        "site.json",
        "job.json",
        "submit.sh",
        "submit.json",
        "compile.sh",
        "run.sh",
        "hook.py",
        "deepspeed.json",
        "megatron_deepspeed.txt",
        "neuron.json",
    ),
    "ranks and supervisor": (
        "plan.attempt_*.json",
        "site.attempt_*.json",
        "env.json",
        "state.json",
        "history.jsonl",
        "exit.json",
        "metrics.jsonl",
        "alerts.jsonl",
        "node_check.json",
        "checkpoints",
        "logs",
        "ranks",
        "profile",
    ),
    "commands and views": (
        "control",
        "eval",
        "monitor",
        "export.*",
        "figure.png",
        "wandb",
        "tensorboard",
        "import.json",
        "login.json",
        "login_seen.json",
        "notes.txt",
    ),
}
"""Maps each writer of a run directory to patterns of the files and folders that it writes, as in
`docs/run-directory.md`."""


def tensor_split_picture() -> Any:
    """Returns a drawing of tensor parallelism over two devices: a matrix that is split by columns,
    followed by a matrix that is split by rows.
    """
    subscripts = "₁₂"
    with new_figure(height=1.7) as (figure, axis):
        for device, colour in enumerate((BLUE, VERMILION)):
            down = 1 - device
            _box(axis, 3.1 + 1.1 * device, 0, 1.1, 2, colour, f"A{subscripts[device]}")
            _box(axis, 6.6 + 1.1 * device, 0.3, 1.1, 1.4, colour, f"Y{subscripts[device]}")
            _box(axis, 10.1, down, 2, 1, colour, f"B{subscripts[device]}")
            _box(axis, 13.3 + 3 * device, 0.3, 2, 1.4, colour, f"Z{subscripts[device]}")
        _box(axis, 0, 0.3, 2, 1.4, GREY, "X")
        for x, text in ((2.55, "·"), (6.0, "="), (9.45, "·"), (12.7, "="), (15.8, "+")):
            axis.text(x, 1, text, ha="center", va="center", fontsize=13)
        notes = (
            (1, "input,\non both"),
            (4.2, "by columns:\nnothing sent"),
            (7.7, "activation,\nelementwise"),
            (11.1, "by rows"),
            (15.8, "partial sums:\none all-reduce"),
        )
        for x, text in notes:
            axis.text(x, -0.25, text, ha="center", va="top", color=GREY)
        axis.set(xlim=(-0.2, 18.5), ylim=(-1.6, 2.9), aspect="equal")
        axis.set_axis_off()
        axis.text(0, 2.3, "device 1", color=BLUE, weight="bold")
        axis.text(3.1, 2.3, "device 2", color=VERMILION, weight="bold")
    return figure


class RingSend(NamedTuple):
    """One message of a ring all-reduce: a rank sends one chunk of its tensor to the next rank."""

    step: int
    """Number of the step, from 0. All ranks send at the same time."""
    phase: str
    """`reduce-scatter`: the receiver adds the chunk to its own. `all-gather`: the received chunk
    replaces its own."""
    sender: int
    """Number of the rank that sends."""
    receiver: int
    """Number of the rank that receives: the next rank of the ring."""
    chunk: int
    """Number of the chunk that is sent, from 0."""


def ring_all_reduce(num_ranks: int) -> list[RingSend]:
    """Returns all messages of a ring all-reduce over `num_ranks` ranks, in the order of their
    steps. The tensor of each rank is divided into `num_ranks` chunks.

    After `num_ranks` - 1 steps, each rank has one chunk of the sum. As many further steps pass
    these chunks around the ring. So each rank sends 2 (num_ranks - 1) / num_ranks times the bytes
    of the tensor (Patarasuk and Yuan, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002).
    """
    sends = []
    for step in range(2 * (num_ranks - 1)):
        phase = "reduce-scatter" if step < num_ranks - 1 else "all-gather"
        for rank in range(num_ranks):
            # In both phases a rank sends the chunk that it received one step before. At the start
            # of the all-gather, that is the chunk of which it has the sum.
            chunk = (rank - step) % num_ranks
            sends.append(RingSend(step, phase, rank, (rank + 1) % num_ranks, chunk))
    return sends


def ring_all_reduce_picture(num_ranks: int = 4) -> tuple[Any, Rows]:
    """Returns (figure, table) of a ring all-reduce, with one grid for the start and for each step.

    A line of a grid is a rank, a column is a chunk of the tensor. The number in a cell says over
    how many ranks the chunk is summed. A frame marks a chunk that has just arrived. The table has
    one row per message.
    """
    summed = [[{rank} for _ in range(num_ranks)] for rank in range(num_ranks)]
    counts = [list(map(len, chunks)) for chunks in summed]
    grids: list[tuple[str, list[list[int]], list[tuple[int, int]]]] = [("start", counts, [])]
    rows: Rows = []
    sends = ring_all_reduce(num_ranks)
    for step in range(2 * (num_ranks - 1)):
        now = [send for send in sends if send.step == step]
        sent = {send: set(summed[send.sender][send.chunk]) for send in now}
        for send, ranks in sent.items():
            if send.phase == "reduce-scatter":
                ranks = ranks | summed[send.receiver][send.chunk]
            summed[send.receiver][send.chunk] = ranks
            rows.append(send._asdict() | {"ranks summed": len(ranks)})
        arrived = [(send.receiver, send.chunk) for send in now]
        counts = [list(map(len, chunks)) for chunks in summed]
        grids.append((f"step {step + 1}", counts, arrived))
    with new_figure(2, num_ranks, height=2 * (0.21 * num_ranks + 0.5)) as (figure, axes):
        _draw_ring(axes[1, 0], num_ranks)
        for axis, grid in zip([*axes[0], *axes[1, 1:]], grids, strict=True):
            _draw_chunks(axis, num_ranks, *grid)
        axes[0, 0].set_ylabel("rank", color=GREY)
        axes[0, 0].set_yticks(range(num_ranks), map(str, range(num_ranks)))
    return figure, rows


def _draw_chunks(
    axis: Any, num_ranks: int, title: str, counts: list[list[int]], arrived: list[tuple[int, int]]
) -> None:
    """Draws a grid of ranks and chunks. `counts` has for each rank and chunk the number of ranks
    over which the chunk is summed. `arrived` has the (rank, chunk) of the newest messages.
    """
    from matplotlib.patches import Rectangle

    for rank, chunks in enumerate(counts):
        for chunk, count in enumerate(chunks):
            colour = GREEN if count == num_ranks else BLUE
            strength = 0.5 if count == num_ranks else 0.5 * (count - 1) / num_ranks
            corner = (chunk - 0.5, rank - 0.5)
            axis.add_patch(Rectangle(corner, 1, 1, facecolor=(colour, strength), linewidth=0))
            axis.text(chunk, rank, str(count), ha="center", va="center_baseline")
            if (rank, chunk) in arrived:
                corner = (chunk - 0.44, rank - 0.44)
                axis.add_patch(
                    Rectangle(corner, 0.88, 0.88, fill=False, edgecolor=INK, linewidth=1.4)
                )
    axis.set(xlim=(-0.5, num_ranks - 0.5), ylim=(num_ranks - 0.5, -0.5), aspect="equal")
    axis.set(xticks=[], yticks=[])
    axis.set_title(title)
    axis.grid(visible=False)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(True)


def _draw_ring(axis: Any, num_ranks: int) -> None:
    """Draws the ranks on a circle. Arrows lead from each rank to the rank to which it sends."""
    places = [
        (math.sin(2 * math.pi * rank / num_ranks), math.cos(2 * math.pi * rank / num_ranks))
        for rank in range(num_ranks)
    ]
    for send in ring_all_reduce(num_ranks)[:num_ranks]:
        axis.annotate(
            "",
            places[send.receiver],
            places[send.sender],
            arrowprops={
                "arrowstyle": "-|>",
                "color": GREY,
                "shrinkA": 9,
                "shrinkB": 9,
                "connectionstyle": "arc3,rad=-0.25",
            },
        )
    for rank, (x, y) in enumerate(places):
        axis.text(x, y, str(rank), ha="center", va="center", color=BLUE, weight="bold")
    axis.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal")
    axis.set_title("ring of ranks")
    axis.set_axis_off()


def block_picture(
    spec: ModelSpec, shapes: Mapping[str, Sequence[int]], splits: Mapping[str, str]
) -> tuple[Any, Rows]:
    """Returns (figure, table) of a transformer block: its matrices with their stored shapes, and
    the two places at which the block adds to the residual stream. The table has one row per weight.

    Args:
        spec: Model of the block, from which the number of heads and the activation are read.
        shapes: Maps the name of each parameter of a block to its shape, as in
            `Block.named_parameters`. Weights that the block lacks, such as a gate, are not drawn.
        splits: Maps the name of each matrix to the kind of its tensor-parallel split
            (`kit.model.TENSOR_PARALLEL_SPLIT`).
    """
    rows: Rows = []
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        split = splits.get(module, "") if kind == "weight" or splits.get(module) == "column" else ""
        text = " × ".join(map(str, shape))
        rows.append({"weight": name, "shape": text, "number": math.prod(shape), "split by": split})
    heads = f"{spec.num_heads} heads\nof {spec.head_size}"
    if spec.num_kv_heads != spec.num_heads:
        heads += f",\n{spec.num_kv_heads} for K, V"
    has_gate = "feed_forward.gate.weight" in shapes
    activation = spec.activation.replace("_", " ")
    if has_gate:
        gate = "silu" if spec.activation == "swiglu" else "gelu"
        activation = f"{gate}(gate)\n× up"
    parts = {
        "attention": (("query", "key", "value"), f"attention\n{heads}", "output"),
        "feed_forward": (("gate", "up") if has_gate else ("up",), activation, "down"),
    }
    heights = [1.375 * len(before) + 2.2 for before, _, _ in parts.values()]
    with new_figure(2, 1, height=0.37 * sum(heights) + 0.9, height_ratios=heights) as (
        figure,
        axes,
    ):
        ends = ("x", "y = x + attention"), ("y", "y + feed-forward")
        if spec.parallel_residual:
            ends = ("x", "x + attention"), ("x", "x + attention + feed-forward")
        for axis, (part, content), texts in zip(axes, parts.items(), ends, strict=True):
            _draw_part(axis, part, content, rows, texts)
        _split_legend(figure)
    return figure, rows


def _draw_part(
    axis: Any,
    part: str,
    content: tuple[tuple[str, ...], str, str],
    rows: Rows,
    ends: tuple[str, str],
) -> None:
    """Draws attention or feed-forward as a line of boxes above the residual stream.

    `content` has the matrices that read the input, the text of the operation on their results, and
    the matrix whose result is added to the residual stream. `ends` are the texts below the start
    and the end of the residual stream.
    """
    before, core, after = content
    weights = {row["weight"].removesuffix(".weight"): row for row in rows}
    middle = 0.45 + 1.375 * len(before) / 2
    stacks = [
        ((f"{part}_norm",), 1.5),
        (tuple(f"{part}.{name}" for name in before), 3.3),
        (core, 2.1),
        ((f"{part}.{after}",), 3.3),
        ((f"{part}_post_norm",), 1.5),
    ]
    x = 0.9
    for stack, width in stacks:
        if isinstance(stack, str):
            axis.text(x + width / 2, middle, stack, ha="center", va="center")
        elif stack[0] not in weights:
            continue
        else:
            for i, name in enumerate(stack):
                weight = weights[name]
                y = middle + 1.375 * ((len(stack) - 1) / 2 - i) - 0.625
                colour = SPLIT_COLOURS.get(weight["split by"], GREY)
                label = "norm" if "norm" in name else name.rpartition(".")[2]
                _box(axis, x, y, width, 1.25, colour, f"{label}\n{weight['shape']}", size=None)
        x += width + 0.35
    axis.plot([0.4, 0.4, 0.8], [0, middle, middle], color=GREY, linewidth=1)
    axis.plot([x - 0.25, x + 0.15], [middle, middle], color=GREY, linewidth=1)
    _arrow(axis, (x + 0.15, middle), (x + 0.15, 0.05), GREY)
    axis.plot([-0.1, x + 0.15], [0, 0], color=GREY, linewidth=1)
    _arrow(axis, (x + 0.1, 0), (x + 0.9, 0), GREY)
    axis.text(-0.1, -0.5, ends[0], va="center", weight="bold")
    axis.text(x + 0.9, -0.5, ends[1], ha="right", va="center", weight="bold")
    axis.set(xlim=(-0.2, x + 1), ylim=(-1, 2 * middle - 0.3), title=part.replace("_", "-"))
    axis.set_axis_off()


def _split_legend(figure: Any) -> None:
    """Draws the colours of the kinds of tensor-parallel split as the legend of a figure."""
    from matplotlib.patches import Patch

    colours = {f"{kind}-parallel": colour for kind, colour in SPLIT_COLOURS.items()}
    patches = [
        Patch(facecolor=(colour, 0.22), edgecolor=colour, label=text)
        for text, colour in (colours | {"on every rank": GREY}).items()
    ]
    figure.legend(handles=patches, loc="outside lower left", ncols=3)


def zero_stages_picture(
    bytes_per_param: Mapping[int, Mapping[str, float]], num_replicas: int, num_params: float
) -> tuple[Any, Rows]:
    """Returns (figure, table) of the states that each replica holds in each stage of ZeRO.

    A line is one replica. Its colours show the bytes per parameter that it holds, and their place
    shows which shard. The pale line behind shows the bytes without ZeRO. The table has the bytes
    per parameter and the GiB of one replica.

    Args:
        bytes_per_param: Maps each stage, from 0, to the bytes per parameter of `weights`,
            `gradients` and `optimizer` on one replica, as in `StageMemory.bytes_per_param` of the
            planner.
        num_replicas: Number of replicas over which ZeRO shards.
        num_params: Number of parameters of one replica before ZeRO shards them.
    """
    rows: Rows = []
    whole = bytes_per_param[0]
    width = sum(whole.values())
    pitch = num_replicas + 1
    with new_figure(height=0.16 * pitch * len(bytes_per_param) + 1.2) as (figure, axis):
        for place, (stage, held) in enumerate(bytes_per_param.items()):
            start = 0.0
            for name, colour in SHARDED_STATES.items():
                for replica in range(num_replicas):
                    y = place * pitch + replica
                    axis.barh(y, whole[name], left=start, height=0.8, color=colour, alpha=0.15)
                    is_whole = held[name] == whole[name]
                    shard = 0.0 if is_whole else replica * whole[name] / num_replicas
                    label = name if place == replica == 0 else None
                    axis.barh(
                        y, held[name], left=start + shard, height=0.8, color=colour, label=label
                    )
                start += whole[name]
            total = sum(held.values())
            rows.append({"stage": stage, **held, "bytes": total, "GiB": total * num_params / 2**30})
            axis.text(
                1.02 * width,
                place * pitch + (num_replicas - 1) / 2,
                f"{total:.3g} bytes:\n{rows[-1]['GiB']:.0f} GiB",
                va="center",
            )
        middles = [place * pitch + (num_replicas - 1) / 2 for place in range(len(bytes_per_param))]
        axis.set_yticks(middles, [f"stage {stage}" for stage in bytes_per_param])
        axis.set(
            title="States of a replica in each stage of ZeRO",
            xlabel="bytes per parameter (a line is one replica)",
            xlim=(0, 1.25 * width),
            ylim=(pitch * len(bytes_per_param) - 1, -1),
        )
        axis.set_xticks([0, *(sum(list(whole.values())[: i + 1]) for i in range(len(whole)))])
        axis.grid(visible=False)
        axis.tick_params(axis="y", length=0)
        figure.legend(ncols=3, loc="outside lower left")
    return figure, rows


def run_directory_picture(directory: Path) -> tuple[Any, Rows]:
    """Returns (figure, table) of the files and folders of a run directory, by their writer.

    The figure lists what exists in the directory, with the number of lines of a `.jsonl` file and
    the number of files in a folder. Hidden files are left out. Files that the kit does not know are
    listed in the table only, with an empty writer.
    """
    rows: Rows = []
    for path in sorted(directory.iterdir()):
        if path.name.startswith("."):
            continue
        writers = [
            writer
            for writer, patterns in RUN_FILES.items()
            if any(path.match(pattern) for pattern in patterns)
        ]
        count = ""
        if path.is_dir():
            count = counted(sum(each.is_file() for each in path.rglob("*")), "file")
        elif path.suffix == ".jsonl":
            count = counted(len(path.read_bytes().splitlines()), "line")
        name = f"{path.name}/" if path.is_dir() else path.name
        rows.append({"name": name, "written by": "".join(writers), "content": count})
    columns = {writer: [row for row in rows if row["written by"] == writer] for writer in RUN_FILES}
    longest = max(len(files) for files in columns.values())
    with new_figure(height=0.22 * longest + 1.7) as (figure, axis):
        for i, (writer, files) in enumerate(columns.items()):
            colour = (BLUE, VERMILION, PURPLE)[i]
            _box(axis, 10 * i, longest + 1.2, 9.2, 1.6, colour, writer, size=None)
            _box(axis, 10 * i, 0, 9.2, longest + 0.2, colour, "", size=None)
            _arrow(axis, (10 * i + 4.6, longest + 1.2), (10 * i + 4.6, longest + 0.2), colour)
            _arrow(axis, (10 * i + 4.6, 0), (10 * i + 4.6, -1), GREEN)
            for j, row in enumerate(files):
                text = f"{row['name']}  {row['content']}".rstrip()
                axis.text(10 * i + 0.4, longest - 0.4 - j, text, va="center")
        readers = "dashboard, figures, status, evaluation, the next attempt"
        _box(axis, 0, -2.6, 29.2, 1.6, GREEN, f"read by {readers}", size=None)
        axis.set(
            title=f"Files of the run {short(directory.name)}, by their writer",
            xlim=(-0.2, 29.4),
            ylim=(-2.8, longest + 3),
        )
        axis.set_axis_off()
    return figure, rows


def _arrow(axis: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    """Draws a straight arrow from `start` to `end`, in the coordinates of the panel."""
    axis.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour})


def flop_basis_figure(specs: Sequence[ModelSpec]) -> tuple[Any, Rows]:
    """Returns (figure, table) of the FLOPs per token of each model, as counted by every `FlopBasis`
    and divided by the kit's own count (`FlopBasis.MODEL`).
    """
    others = [basis for basis in FlopBasis if basis is not FlopBasis.MODEL]
    rows = [
        {"spec": spec.name, "model": float(spec.flops_per_token())}
        | {basis.value: spec.flops_per_token(basis) / spec.flops_per_token() for basis in others}
        for spec in specs
    ]
    with new_figure(height=0.28 * len(rows) + 1.4) as (figure, axis):
        for basis, marker in zip(others, "osD^", strict=True):
            ratios = [row[basis.value] for row in rows]
            axis.plot(
                ratios, range(len(rows)), marker, label=basis.value.replace("_", " "), markersize=6
            )
        axis.axvline(1, color=GREY, linewidth=1, zorder=1)
        axis.set_yticks(range(len(rows)), [row["spec"] for row in rows])
        axis.set(
            title="FLOPs per token relative to the kit's own count (line at 1)",
            ylim=(len(rows) - 0.5, -0.5),
        )
        figure.legend(ncols=4, loc="outside lower left")
    return figure, rows


def stage_weights_figure(weights: dict[int, tuple[int, int]]) -> tuple[Any, Rows]:
    """Returns (figure, table) of the number of weights on one rank of each pipeline stage.

    `weights` maps the number of each stage to (weights in transformer blocks, all weights). The
    difference is the embedding, the final norm and the output layer.
    """
    rows = [
        {"stage": stage, "blocks": blocks, "embedding and output": whole - blocks}
        for stage, (blocks, whole) in weights.items()
    ]
    with new_figure(height=2.8) as (figure, axis):
        stages = [row["stage"] for row in rows]
        blocks = [row["blocks"] / 1e9 for row in rows]
        axis.bar(stages, blocks, color=BLUE, width=0.8, label="blocks")
        extra = [row["embedding and output"] / 1e9 for row in rows]
        axis.bar(
            stages,
            extra,
            bottom=blocks,
            color=VERMILION,
            width=0.8,
            label="embedding, final norm, output",
        )
        axis.set(
            title="Weights held by one rank of each pipeline stage, billions",
            xlabel="pipeline stage",
            ylim=(None, 1.3 * max(whole for _, whole in weights.values()) / 1e9),
        )
        axis.legend(ncols=2, loc="upper center")
    return figure, rows


def _box(
    axis: Any,
    x: float,
    y: float,
    width: float,
    height: float,
    colour: str,
    text: str,
    size: float | None = 13,
) -> None:
    """Draws a rectangle with a text in its middle. `x` and `y` are the coordinates of its lower
    left corner. `size` is the size of the text in points. If None, it is that of all other texts.
    """
    from matplotlib.patches import Rectangle

    face = (colour, 0.22)
    axis.add_patch(
        Rectangle((x, y), width, height, facecolor=face, edgecolor=colour, linewidth=1.2)
    )
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)
