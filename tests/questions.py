"""`python -m tests.questions`: runs the commands of docs/questions-to-the-planner.md and writes the
page, with their outputs as printed.
"""

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from cluster.site import Site
from kit.__main__ import main
from kit.config.plan import Plan
from kit.config.spec import ModelSpec
from kit.estimate.fit.calibrate import published_calibration
from kit.estimate.theory.layouts import Layouts
from tests.support.recorded_runs import made, row
from tests.support.sources import ROOT

PAGE = ROOT / "docs" / "questions-to-the-planner.md"
TERMINAL = {"TERM": "dumb", "NO_COLOR": "1", "FORCE_COLOR": "1", "COLUMNS": "80"}
"""Environment of a terminal without colours, 80 characters wide."""
INTRODUCTION = """\
# Questions to the planner

Each answer is the output of one command, as printed in a terminal of 80 columns.
`python -m tests.questions` runs all commands and writes this page again. A test compares the page
with what the commands print today.

A predicted time has a 90 % interval. Read the warnings before you trust a number. In a notebook,
`kit.estimate.plan_report` and `compare_sites` return the same answers, since the command prints
what they return.
"""
SLOWER = 1.25
"""Measured step time of the example run in `write_files`, divided by the predicted step time."""
GPU_SITE = """\
name = "lab"
description = "two machines with 8 RTX 4090 each"
scheduler = "slurm"
devices_per_node = 8
[device]
name = "NVIDIA GeForce RTX 4090"
memory_bytes = { value = 25757220864, source = "data sheet, 24 GB" }
memory_bytes_per_s = { value = 1.008e12, source = "data sheet" }
[device.peak_flops_per_s]
bf16 = { value = 165.2e12, source = "data sheet, dense, fp32 sums" }
[[links.intra_node]]
num_devices = 8
bytes_per_s = { value = 25e9, source = "PCIe 4.0 x16, measured by nccl-tests" }
[links]
inter_node_bytes_per_s = { value = 12.5e9, source = "100 Gbit/s Ethernet" }
[slurm]
"""


@dataclasses.dataclass(frozen=True)
class Question:
    """A question of a user, the command that answers it, and what its output means."""

    title: str
    command: str
    meaning: str
    shown_files: Sequence[str] = ()
    """Names of files of `write_files` whose content is printed before the command."""


QUESTIONS = (
    Question(
        "How many tokens can a model of 8B train on, with 64 H100 in two weeks?",
        "kit plan llama3-8b --site dgx-h100 --devices 64 --batch 1024 --days 14",
        "The row `14 days` has the tokens. Restarts and failures are not included. `--rehearse`"
        " estimates which share of the time is productive.",
    ),
    Question(
        "Which layout does a model of 7B have on 32 MI300X?",
        "kit plan hlat-7b --site mi300x --devices 32 --batch 512 --seq 4096",
        "The kit has no published run of this machine, so the efficiencies are the average of other"
        " machines and the interval is wide. The warning about compiled blocks has this reason,"
        " too: no run of this machine shows the effect of `torch.compile`. One own run narrows the"
        " interval (question 6).",
    ),
    Question(
        "What is cheaper, 256 H100 or 128 B200?",
        "kit plan llama3-8b --site dgx-h100 --devices 256 --price 2.5 --site hgx-b200 --devices 128"
        " --price 4.5 --batch 1024 --tokens 1e12",
        "The kit has no published run of B200, so this row is marked and its interval is wide. The"
        " intervals overlap, so either site may be cheaper. One own run on B200 narrows its"
        " interval (question 6). Options that differ between the sites are given once for each, in"
        " the order of the sites. The prices are examples, and a site file may state them.",
    ),
    Question(
        "Can a job use 100 GPUs?",
        "kit plan llama3-8b --site dgx-h100 --devices 100 --batch 512",
        "A layout uses all devices, and the number of replicas must divide the batch. The degree of"
        " tensor parallelism must divide the numbers of heads, the feed-forward size and the"
        " vocabulary. The number of pipeline stages must divide the number of layers, in which"
        " embedding and output may count as one layer each. The refusal names the nearest batch and"
        " the nearest number of devices.",
    ),
    Question(
        "How fast is a training with sequences of 131,072 tokens?",
        "kit plan llama3-8b --site dgx-h100 --devices 64 --batch 64 --seq 131072",
        "The kit plans layouts with context parallelism, but cannot train them. So the table has"
        " them only if no other layout fits in memory. For sequences of 16,384 tokens or more, the"
        " row `other engines` also states the fastest of them.",
    ),
    Question(
        "My run is slower than planned. What does that mean for 512 devices?",
        "kit plan llama3-8b --site dgx-h100 --devices 512 --batch 1024 --runs runs/first",
        "Here `runs/first` stands for a run of yours on 8 H100 with slower steps than planned, not"
        " for the demo run of the other pages. The fit contains this run only. Published runs, such"
        " as the nearest one, enter through the prior of the fit. The second warning says that the"
        " prediction for the nearest published run is wrong by more than the interval of this plan"
        " allows. The reason is that your run was slower than planned, and the nearest published"
        " run was not. The last lines say what the own run has changed, and how large the error of"
        " such an extrapolation was on published runs."
        " For that test, the planner was fitted to runs of a cluster on few devices, and predicted"
        " runs of this cluster on at least 64 times as many. `kit status runs/first --why` compares"
        " the run with its estimate, and `kit calibrate runs/first --out mine.toml` keeps it for"
        " later plans.",
    ),
    Question(
        "What does the kit predict for Frontier's model of 1T parameters as published?",
        "kit plan frontier-1t --devices 3072",
        "If you give the name of a published recipe, `kit plan` plans its layout on its"
        " machine. The batch per replica is that of the authors' script, since no source"
        " for the batch of the paper's run was found. HFU counts recomputation as the"
        " authors' code does, so it may be compared with the percentage of peak in the"
        " paper's abstract. The planner's fit contains no run of this model, but it"
        " contains the paper's results for its two smaller models.",
    ),
    Question(
        "Does HLAT's 70B fit on Trainium as published, and how long does it take?",
        "kit plan hlat-70b --rehearse",
        "A rehearsal counts what a job of this size needs, and compares it with the limits of the"
        " site. The terminal is too narrow for the table, so each row is printed as pairs of a"
        " column's name and its value. The column `known how` says how a number was found:"
        " `counted` from the behaviour of the code, or `modelled` by the planner's equations."
        " Whether sharding loses weights is not known, because NxD shards the model only on"
        " Trainium, where the kit was not tested. The productive time is not known, because this"
        " site file does not state the rates of its file system. The lines below the table name"
        " what no test has covered, and in brackets what tests have covered. Without --rehearse the"
        " command explains the layout.",
    ),
    Question(
        "How do I describe my own GPUs?",
        "kit plan gpt-1.4b --site lab.toml --nodes 2 --batch 256",
        "Each number has its source, and a number that is left out is asked for if the estimate"
        " needs it. `kit site init` writes such a file from what Slurm reports, and `base ="
        ' "dgx-h100"` takes over a packaged site.',
        ("lab.toml",),
    ),
    Question(
        "Can the kit plan Mixtral?",
        "kit plan mixtral.json --site dgx-h100 --devices 64 --batch 1024",
        "The planner has dense models only. A mixture of experts is refused before anything is"
        " computed.",
    ),
    Question(
        "How fast is training in nvfp4?",
        "kit plan llama3.1-70b --site gb200-nvl72 --devices 64 --batch 512"
        " --set plan.precision=nvfp4 --code-base megatron-core",
        "MFU and HFU are fractions of the peak in nvfp4, as in the metrics of a run. The kit plans"
        " this format and does not train in it.",
    ),
    Question(
        "Does a model of 405B fit on 8 B200?",
        "kit plan llama3.1-405b --site hgx-b200 --devices 8 --batch 64",
        "The refusal states the memory of the leanest layout, and the nearest number of devices"
        " that is enough.",
    ),
)


def page() -> str:
    """Returns the whole page, with the outputs that the commands print now."""
    parts = [INTRODUCTION]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_files(Path(folder))
        for number, question in enumerate(QUESTIONS, start=1):
            block = ""
            for name in question.shown_files:
                block += f"$ cat {name}\n{Path(name).read_text()}\n"
            block += f"$ {wrapped(question.command)}\n{output_of(question.command)}"
            parts.append(
                f"## {number}. {question.title}\n\n```\n{block}\n```\n\n{question.meaning}\n"
            )
    return "\n".join(parts)


def wrapped(command: str) -> str:
    """Returns a command that is continued on further lines if it is longer than 100 characters."""
    first, *options = re.split(r" (?=--)", command)
    lines = [first]
    for option in options:
        if len(lines[-1]) + len(option) > 100:
            lines.append(f"  {option}")
        else:
            lines[-1] += f" {option}"
    return " \\\n".join(lines)


def output_of(command: str) -> str:
    """Returns what a command prints to a terminal, standard output and error together."""
    screen = io.StringIO()
    argv = ["kit", *shlex.split(command)[1:]]
    with (
        mock.patch.dict(os.environ, TERMINAL),
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(screen),
        contextlib.redirect_stderr(screen),
        contextlib.suppress(SystemExit),
    ):
        main()
    return "\n".join(line.rstrip() for line in screen.getvalue().splitlines()).strip()


def write_files(folder: Path) -> None:
    """Writes the files that the commands read: a run on 8 H100 that is slower than predicted, a
    site file, and the shape of a mixture of experts.
    """
    site = Site.load("dgx-h100")
    spec = ModelSpec.preset("llama3-8b")
    plan = Plan(
        data_parallel=8, zero_stage=2, recompute="selective", global_batch_size=64, precision="bf16"
    ).replace(compile=True)
    predicted = published_calibration(site).predict(Layouts.of(spec, [plan])).total_s.item()
    # Two digits, so that other versions of NumPy write the same run.
    seconds = round(SLOWER * predicted, 1)
    steps = [row(step, step_time_s=seconds, tokens=64 * 8192) for step in range(1, 30)]
    made(folder / "runs" / "first", steps, plan, spec="llama3-8b", site="dgx-h100")
    (folder / "lab.toml").write_text(GPU_SITE)
    experts = {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "vocab_size": 32000,
    }
    (folder / "mixtral.json").write_text(json.dumps(experts))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
