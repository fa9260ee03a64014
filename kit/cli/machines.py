"""Commands on machines: check the environment (doctor), measure speeds (bench), check and fit the
planner's estimates (validate, calibrate), and write first site files (site init). A site file
describes a machine.
"""

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from cluster.files import write_atomic
from cluster.login.connection import ssh
from cluster.record import ConfigError, counted, kit_command
from cluster.scheduler import EDIT
from cluster.site import Site
from cluster.slurm import inventory
from cluster.slurm.queries import slurm_command
from cluster.state import JobError
from kit.cli.options import (
    advice,
    names_table,
    next_step,
    note,
    print_result,
    refuse_options,
)
from kit.config.plan import Plan
from kit.doctor import examine, examine_site
from kit.engines.capabilities import capabilities_of
from kit.measure.device import on_device
from kit.measure.gemm import measured_site
from kit.measure.site import measure_site, remeasure, to_toml
from kit.run import Run
from kit.show.results import format_value
from kit.show.terminal import Table

app = typer.Typer()
site_app = typer.Typer(no_args_is_help=True)
app.add_typer(
    site_app,
    name="site",
    help="Write a site file, which describes a machine, with `kit site init`.",
)
LEAST_BYTES = 40e9
"""Smallest device memory of a node, in bytes, for which `site init` suggests planning gpt-1.4b or
hlat-7b instead of the demo model. The 1.4 billion parameters of gpt-1.4b need 16 bytes each, and
activations need memory in addition."""
LOCAL = """\
# This machine, as torch sees it.
# EDIT: peaks and links, by `kit bench --out FILE.toml` or from a data sheet
"""


@app.command()
def validate(
    rows: Annotated[
        Path | None,
        typer.Option(
            help="CSV of runs to check, with the columns of"
            " kit/estimate/fit/data/published_runs.csv. Default: published_runs.csv"
            " itself."
        ),
    ] = None,
    calibrate: Annotated[
        int | None,
        typer.Option(
            help="With --rows: first fit the planner to this many runs of each machine, and"
            " print the error on the other runs. Default: no fit."
        ),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            help="With --rows: machine on which all runs of the CSV ran, a packaged site"
            " (`kit plan --list`) or a .toml file. Default: the machine named in each row."
        ),
    ] = None,
) -> None:
    """Print the error of the planner's estimates on published runs, or on the runs of your own CSV.
    The runs of a machine are divided into groups, for example by hidden size. The planner predicts
    a published run after a fit to the other groups.
    """
    if rows is None and calibrate is not None:
        raise ConfigError(
            f"--calibrate {calibrate}: needs --rows FILE, the CSV of runs whose machines it fits."
            " Give both."
        )
    if rows is None and site is not None:
        raise ConfigError(
            f"--site {site}: needs --rows FILE, the CSV of runs on this site. Give both."
        )
    from kit.estimate.validation.validate import validate as validate_runs

    place = Site.load(site) if site else None
    results = validate_runs(rows, calibrate, site=place)
    met = {True: Text("yes", style="green"), False: Text("no", style="red"), None: Text()}
    lines = []
    for result in results:
        value = format_value(result.value, result.unit)
        remark = Text(result.note, style="dim")
        lines.append((result.name, value, result.target, met[result.ok], remark))
    title = "Estimates against measurements"
    print_result(
        [result.to_dict() for result in results],
        Table("", "found", "target", "met", "", title=title, rows=lines),
    )
    next_step("Fit the estimates to a run of your own:", "calibrate", "runs/first")


@app.command()
def calibrate(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories of one machine.", metavar="RUN...")
    ],
    site: Annotated[
        str | None,
        typer.Option(
            help="Machine of the runs: a packaged site (`kit plan --list`) or a .toml file."
            " Default: the site in the run directories."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Site file to write, NAME.toml. It contains the step times of the runs, and `kit"
            " plan --site NAME.toml` fits its estimates to them."
        ),
    ] = None,
) -> None:
    """Fit the efficiencies in the planner's estimates to measured runs, and print a table of them.
    The table says which of them these runs are enough to determine.
    """
    from kit.estimate.fit.calibrate import calibrate as fit

    place = Site.load(site) if site else None
    if out is not None:
        _refuse_existing(out)
    found = fit(runs, place)
    record = {
        "coefficients": found.coefficients.to_dict(),
        "unidentified": found.unidentified,
        "num_runs": found.num_runs,
        "error": found.error,
    }
    rows = []
    for name, value in record["coefficients"].items():
        is_determined = "no" if name in found.unidentified else "yes"
        rows.append((name, f"{value:.4g}", is_determined))
    title = f"{counted(found.num_runs, 'attempt')}, mean error of the fit {found.error:.1%}"
    print_result(
        record, Table("coefficient", "value", "determined by the runs", title=title, rows=rows)
    )
    if out is None:
        next_step("Keep the runs in a site file:", "calibrate", *runs, "--out", "mine.toml")
        return
    from kit.estimate.fit.own_runs import kept_runs, site_text

    place = place or Run.open(runs[0]).site
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, site_text(place, out.stem, kept_runs(runs)))
    sizes = ("--devices", str(place.devices_per_node), "--batch", str(16 * place.devices_per_node))
    next_step("Plan with these runs:", "plan", "llama3-8b", "--site", out, *sizes)


@app.command()
def bench(
    out: Annotated[
        Path | None,
        typer.Option(
            help="Site file to write, NAME.toml. The option --site of other commands reads it."
        ),
    ] = None,
    apply: Annotated[
        Path | None,
        typer.Option(
            help="Run directory: measure only the peak FLOP/s, and write it into the run's"
            " site.json. The run's MFU is then computed with this peak.",
            metavar="RUN",
        ),
    ] = None,
) -> None:
    """Measure the speed of matrix products, memory and collectives on this machine. With --apply,
    measure only the peak FLOP/s and write it into a run, whose MFU then uses this peak.
    """
    if apply is not None:
        refuse_options(
            {f"--out {out}": out}, "not with --apply, which writes into the run. Give one of them."
        )
        _apply_peak(apply)
        next_step("Compare the run with the estimate:", "status", apply, "--why")
        return
    if out is not None and out.suffix != ".toml":
        raise ConfigError(f"--out {out}: not a .toml file. Give a name that ends in .toml.")
    note("Measuring matrix products, memory and collectives; up to two minutes ...")
    # The planner searches layouts in bf16, so the peak is measured in bf16.
    site = measure_site(measured_site(Site.load("laptop"), "bf16"))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, to_toml(site.replace(name=out.stem)))
    facts = {
        **{
            f"peak {dtype}, FLOP/s": str(fact)
            for dtype, fact in site.device.peak_flops_per_s.items()
        },
        "memory, bytes/s": str(site.device.memory_bytes_per_s),
        **{
            f"within {link.num_devices} processes, bytes/s": str(link.bytes_per_s)
            for link in site.links.intra_node
        },
    }
    print_result(site.to_dict(), names_table(site.description, facts.items()))
    if out is None:
        next_step("Keep it as a site file:", "bench", "--out", "mine.toml")
    else:
        sizes = (
            "--devices",
            str(site.devices_per_node),
            "--batch",
            str(16 * site.devices_per_node),
        )
        next_step("Choose a layout for this machine:", "plan", "demo", "--site", out, *sizes)


def _apply_peak(directory: Path) -> None:
    """Measures the peak FLOP/s of a run's machine again and writes it into the site.json of the
    run. Prints the new peak and the resulting MFU.
    """
    found = remeasure(Run.open(directory))
    metrics = Run.open(directory).metrics()
    mfu = metrics.summary().get("mfu")
    why = metrics.why_no_mfu
    facts = {
        f"{dtype} peak, FLOP/s": f"{old or 'unknown'} before, {new} now"
        for dtype, (old, new) in found.items()
    }
    facts["MFU, last 20 steps"] = f"none: {why or 'no step'}" if mfu is None else f"{mfu:.1%}"
    print_result(
        {
            "peak_flops_per_s": {dtype: new.to_dict() for dtype, (_, new) in found.items()},
            "mfu": mfu,
            "why_no_mfu": why,
        },
        names_table(str(directory), facts.items()),
    )


@app.command()
def doctor(
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also train one step with DeepSpeed. Takes up to a minute."),
    ] = False,
    site: Annotated[
        str | None,
        typer.Option(
            help="Also test the container of this site. Run this command on a login node of"
            " the site. Name of a packaged site (`kit plan --list`), or a .toml file."
        ),
    ] = None,
) -> None:
    """Check which packages and devices work on this machine, and print how to install what is
    missing.
    """
    findings = examine(deep=deep)
    if site is not None:
        findings += examine_site(Site.load(site))
    mark = {True: Text("✔", style="green"), False: Text("✖", style="red"), None: Text("–")}
    rows = [(mark[f.ok], f.subject, f.found, Text(f.advice, style="dim")) for f in findings]
    print_result(
        [dataclasses.asdict(finding) for finding in findings],
        Table("", "", "found", "advice", title="This machine", rows=rows),
    )
    next_step("Build token files to train on:", "data", "build", "data/demo")
    has_failed = any(finding.ok is False for finding in findings)
    raise typer.Exit(code=int(has_failed))


@site_app.command()
def init(
    out: Annotated[Path, typer.Argument(help="Site file to write, NAME.toml.", metavar="FILE")],
    partition: Annotated[
        str | None,
        typer.Option(help="Slurm partition to describe. Default: one with GPUs or Trainium."),
    ] = None,
    node_type: Annotated[
        str | None,
        typer.Option(
            help="Nodes to describe, if a partition has several kinds: a GPU type (h100), a"
            " GRES (gpu:h100:8) or a feature. Default: the most frequent kind of node"
            " with GPUs."
        ),
    ] = None,
    login: Annotated[
        str | None,
        typer.Option(
            help="Login node to ask over ssh: a name in ~/.ssh/config."
            " Default: Slurm on this machine."
        ),
    ] = None,
    account: Annotated[
        str | None,
        typer.Option(
            help="Slurm account that jobs are charged to. Default: EDIT, for you to fill in."
        ),
    ] = None,
    local: Annotated[
        bool,
        typer.Option(
            "--local",
            help="Describe this machine instead of a cluster: its GPUs, or its CPU cores.",
        ),
    ] = False,
) -> None:
    """Write a site file (description of a machine) from what Slurm or this machine reports. Lines
    marked EDIT are left for you to fill in.
    """
    _refuse_existing(out)
    if local:
        refuse_options(
            {
                "--partition": partition,
                "--node-type": node_type,
                "--login": login,
                "--account": account,
            },
            "not with --local, which asks no Slurm. Leave one of them out.",
        )
        here = on_device(Site.load("laptop"), Plan()).replace(
            name=os.uname().nodename.partition(".")[0]
        )
        _finish(out, LOCAL + to_toml(here))
        return
    found = inventory.parse_node_types(_ask(login, inventory.SINFO))
    if not found:
        raise JobError(
            "sinfo names no nodes here. Are you on a login node of the cluster? Or give --login"
            " NAME."
        )
    nodes = inventory.choose_node_type(found, partition, node_type)
    settings = inventory.parse_settings(_ask(login, inventory.CONFIG))
    beside = inventory.other_node_types(found, nodes)
    text = inventory.site_text(nodes, settings, login=login, account=account, beside=beside)
    _finish(out, text, _about_nodes(found, nodes, settings))


def _refuse_existing(out: Path) -> None:
    """Raises ConfigError if a site file would replace another file, or does not end with .toml."""
    if out.exists():
        raise ConfigError(f"{out}: already exists. Give a new file, NAME.toml.")
    if out.suffix != ".toml":
        raise ConfigError(f"{out}: not a .toml file. Give a new file, NAME.toml.")


def _about_nodes(
    found: Sequence[inventory.NodeType], nodes: inventory.NodeType, settings: dict[str, str]
) -> list[str]:
    """Returns lines of text for the user. They name the nodes that the new site file describes, the
    other nodes of the cluster, and the packaged site from which numbers of the device were taken.
    """
    lines = []
    beside = inventory.other_node_types(found, nodes)
    if beside:
        lines.append(f"Taken of partition {nodes.partition}: {nodes}. Its other nodes:")
        for other in beside:
            name = inventory.unique_node_type_name(other, found)
            line = f"  {other}"
            if name:
                line += f": --partition {other.partition} --node-type {name}"
            lines.append(line)
    lines += _about_gpus(nodes)
    partitions = _other_partitions(found, nodes.partition)
    if partitions:
        lines.append(f"Other partitions: {', '.join(partitions)}.")
    site, assumed = inventory.packaged_site(nodes)
    if site is not None:
        lines.append(f"Numbers of the device: those of the packaged site {site}.")
    elif nodes.gpu or nodes.trainium:
        device = nodes.gpu.text if nodes.gpu else nodes.device_text
        lines.append(f"No packaged site has the numbers of this device ({device}).")
    if assumed:
        lines.append(f"To check: {assumed}.")
    own = settings.get("ClusterName", "").lower()
    if own in Site.names():
        lines.append(
            f'The kit has a site {own}. A file with base = "{own}" and your account also has its'
            " network and modules."
        )
    return lines


def _other_partitions(found: Sequence[inventory.NodeType], partition: str) -> list[str]:
    """Returns the names of all partitions except `partition`, each with the kinds of its nodes."""
    kinds_of: dict[str, list[str]] = {}
    for node in found:
        if node.partition == partition:
            continue
        kinds = kinds_of.setdefault(node.partition, [])
        if node.device_text not in kinds:
            kinds.append(node.device_text)
    return [f"{name} ({', '.join(kinds)})" for name, kinds in sorted(kinds_of.items())]


def _about_gpus(nodes: inventory.NodeType) -> list[str]:
    """Returns lines of text for the user about two special cases: the nodes have further types of
    GPU that jobs do not request, or their GPUs are MIG slices.
    """
    lines = []
    for gpu in inventory.other_gpus(nodes):
        what = f"{gpu} (MIG slices)" if gpu.is_slice else str(gpu)
        lines.append(
            f"These nodes also have {what}, which jobs do not request. To use it instead:"
            f" --partition {nodes.partition} --node-type {gpu}"
        )
    if nodes.gpu and nodes.gpu.is_slice:
        lines.append(
            f"{nodes.gpu.kind} is a MIG slice of a GPU. MIG slices have no peer-to-peer access to"
            " each other, so NCCL may fail between them: use one device per job."
        )
    return lines


def _finish(out: Path, text: str, about: Sequence[str] = ()) -> None:
    """Writes a site file. Prints its description, the lines that the user must still edit, and the
    next command.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, text)
    left = []
    for number, line in enumerate(text.splitlines(), start=1):
        if f"{EDIT}:" in line:
            left.append(f"  {out}, line {number}: {line}")
    site = Site.load(str(out))
    what, words = _next_command(site, out)
    said = what.capitalize()
    if left:
        said = f"Edit {counted(len(left), 'line')} of it, as below. Then {what}"
    print_result(
        {"said": said, "command": kit_command(*words), "left": left, "about": list(about)},
        f"{out}: {site.description}",
        *about,
        advice(said, *words),
        *left,
    )


def _next_command(site: Site, out: Path) -> tuple[str, list[str]]:
    """Returns (sentence on the next step, words of its command).

    For nodes with GPUs or Trainium, the next step is to plan a layout for one node, which needs no
    numbers of the network. For other nodes, it is to read the script of a job.
    """
    if site.device.is_cpu or site.scheduler == "local":
        return "look at a job of it:", ["launch", "runs/first", "--site", str(out), "--show"]
    model = "hlat-7b" if capabilities_of(site.engine).runs_on_trainium else "gpt-1.4b"
    memory = site.device.memory_bytes
    if memory and memory.value * site.devices_per_node < LEAST_BYTES:
        model = "demo"
    sizes = ["--devices", str(site.devices_per_node), "--batch", "64"]
    what = "choose a layout for one of its nodes:"
    return what, ["plan", model, "--site", str(out), *sizes, "--out", "plan.json"]


def _ask(login: str | None, words: Sequence[str]) -> str:
    """Returns the output of a Slurm command. The command runs on the login node `login` by ssh, or
    on this machine if `login` is None. By ssh it runs in a login shell, since some clusters put
    Slurm's commands on the PATH of login shells only.
    """
    if login is not None:
        return ssh(login, f"bash -lc {shlex.quote(shlex.join(words))}").decode()
    try:
        return slurm_command([*words])
    except JobError as error:
        raise JobError(
            f"{str(error).rstrip('.')}. Or give --login NAME; this machine alone is site laptop,"
            " which needs no file, or --local, which makes one."
        ) from error
