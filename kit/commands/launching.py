"""Commands that start jobs: launch, resume."""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from cluster.login.submit import attach as attach_run
from cluster.login.submit import first_commands
from cluster.record import counted
from cluster.render import scripts, to_fill_in
from cluster.scheduler import EDIT
from cluster.site import Site
from cluster.state import JobError
from kit import launcher
from kit.commands.asked import Asked, as_given, ask_for, on_devices, read_data, read_phases
from kit.commands.options import (
    DeviceOption,
    MinutesOption,
    RunArgument,
    SetOption,
    console,
    hint,
    parse_settings,
)
from kit.engines import check_site
from kit.errors import ConfigError, DataError, RunError
from kit.measure.device import on_device
from kit.recipe import Recipe
from kit.run import Run
from kit.show.terminal import PlainConsole

app = typer.Typer()
SELECTIVE = (
    "Selective recomputation that is not compiled costs some 4 ms of Python a layer and "
    "micro-batch, in which a GPU may wait. Compile it (--set plan.compile=true), or use --set "
    "plan.recompute=full."
)


@app.command()
def launch(
    run: RunArgument,
    model: Annotated[
        str | None, typer.Option(help="as `kit plan --model`; default: the recipe's, or demo")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="a .toml or .json of Recipe's fields, or a published one: frontier-175b, hlat-7b"
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="layout made by `kit plan --out`; default: the recipe's")
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(
            help="folder of Hugging Face's: start from its weights, and by default its model"
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "folder made by `kit data build` (demo: data/demo), or a mix: 0.7=WEB, and again"
                " 0.3=CODE"
            )
        ),
    ] = None,
    then: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "from a token or step on, other weights of the mix: 1.4e12=0.3,0.7 or"
                " 5000steps=0.3,0.7"
            )
        ),
    ] = None,
    hook: Annotated[
        str | None, typer.Option(help="Python file with on_step(state): numbers of your own")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps; demo: 100")] = None,
    devices: Annotated[int | None, typer.Option(help="as many replicas as fill so many")] = None,
    nodes: Annotated[int | None, typer.Option(help="the same in nodes of the site")] = None,
    site: Annotated[
        str | None, typer.Option(help="where: a name or a .toml file; default: laptop")
    ] = None,
    measure_peak: Annotated[
        bool, typer.Option(help="time matrix products first, so that MFU is known")
    ] = True,
    device: DeviceOption = None,
    minutes: MinutesOption = None,
    show: Annotated[
        bool,
        typer.Option(
            "--show",
            help="print all scripts, and what is still to fill in; start and write nothing",
        ),
    ] = False,
    settings: SetOption = None,
) -> None:
    """Start a training job in a new run directory. It goes on when this command ends.

    In the directory of a run that has begun it is `kit resume`: what is not given is that run's
    own.

    On GPUs a plan of neither file nor paper is bf16 and compiled; change it by --set plan.precision
    and plan.compile.
    """
    begun = Run.open(run) if (run.expanduser() / "spec.json").exists() else None
    place = begun.site if begun and site is None else Site.load(site or "laptop")
    changes = parse_settings(settings)
    given = {
        **read_data(data or []),
        "num_steps": steps,
        "init_from": init_from and str(init_from),
        "hook": hook,
    }
    asked = ask_for(model, recipe, plan, given, changes, begun)
    tokens_per_step = asked.plan.global_batch_size * asked.spec.sequence_length
    asked.fields.update(read_phases(then or [], given.get("sources", []), tokens_per_step))
    asked = dataclasses.replace(asked, plan=on_devices(asked.plan, place, devices, nodes))
    place = on_device(place, asked.plan, device)
    if place.device.is_gpu:
        asked = dataclasses.replace(asked, plan=asked.plan.replace(**asked.unsaid))
        if (
            asked.plan.recompute == "selective"
            and asked.plan.engine == "native"
            and not asked.plan.compile
        ):
            PlainConsole(stderr=True, soft_wrap=True).print(Text(SELECTIVE))
    if begun and not show:
        launcher.refuse_done(begun, asked.plan, steps or begun.recipe.num_steps)
    time_limit_s, chosen = _seconds(minutes), as_given(asked.fields)
    if show:
        is_own = site is not None and site.endswith(".toml")
        where = (
            f"in {site}" if is_own else f"in a site file of your own, with base = {place.name!r}"
        )
        _show(run, asked, chosen, place, time_limit_s, where)
        return
    if asked.lacking:
        raise ConfigError(
            f"{'; '.join(f'recipe.{name}: {how}' for name, how in asked.lacking.items())}."
        )
    if place.login is None:
        _tell_data(asked, chosen)
    measured = functools.partial(_measured, run) if measure_peak else None
    with told_if_interrupted(run):
        started = launcher.launch(
            run,
            spec=asked.spec,
            plan=asked.plan,
            recipe=chosen,
            site=place,
            time_limit_s=time_limit_s,
            measured=measured,
        )
    _tell_schedule(started.recipe)
    _tell(started)


@app.command()
def resume(
    run: RunArgument,
    steps: Annotated[int | None, typer.Option(help="new total of optimizer steps")] = None,
    device: DeviceOption = None,
    minutes: MinutesOption = None,
    settings: SetOption = None,
) -> None:
    """Continue a run from its last checkpoint, on the same plan or another (--set plan...).

    With other --steps the learning rate's schedule still ends where it did: --set
    recipe.decay_steps=N moves its end.
    """
    changes = parse_settings(settings, allowed=("plan", "recipe"))
    if others := changes["recipe"].keys() - {"decay_steps"}:
        raise ConfigError(
            f"--set recipe.{min(others)}: a run keeps it. Allowed: plan.KEY, recipe.decay_steps."
        )
    plan = Run.open(run).plan.replace(**changes["plan"])
    limit_s = _seconds(minutes)
    with told_if_interrupted(run):
        started = launcher.resume(
            run,
            plan=plan,
            num_steps=steps,
            **changes["recipe"],
            device=device,
            time_limit_s=limit_s,
        )
    _tell_schedule(started.recipe)
    _tell(started)


def _tell(run: Run) -> None:
    begin = max(run.checkpoints.steps(), default=0)
    at = f" from step {begin} on" if begin else ""
    where = f", device: {run.site.device.name}" if run.site.scheduler == "local" else ""
    hint(
        f"Started {counted(run.plan.num_devices, 'process', 'processes')}{at}{where}. Watch:",
        "watch",
        run.directory,
    )


def _seconds(minutes: float | None) -> float | None:
    """Returns a time limit in seconds; raises ConfigError for one that is no time."""
    if minutes is not None and not 0 < minutes < math.inf:
        raise ConfigError(f"--minutes {minutes:g}: not allowed. Give a number above 0.")
    return None if minutes is None else 60 * minutes


def _show(
    run: Path, asked: Asked, recipe: Recipe, site: Site, time_limit_s: float | None, where: str
) -> None:
    """Prints every script to standard output, and to standard error what nobody but the user can
    fill in.

    A login node is not asked; the commands by which it would be are printed, since the site file
    says what they run. Of such a site no script is shown before the file says all that it has to.
    """
    prepared = Run(
        run.expanduser().absolute(), spec=asked.spec, plan=asked.plan, recipe=recipe, site=site
    )
    asked.plan.check(asked.spec)
    check_site(asked.spec, asked.plan, site)
    job, lacking = launcher.job_spec(prepared, time_limit_s), to_fill_in(site)
    texts = {} if site.login and lacking else scripts(job, site)
    left = []
    for name, text in texts.items():
        print(text if len(texts) == 1 else f"#### {name} {'#' * 60}\n{text}", end="")
        for number, line in enumerate(text.splitlines(), start=1):
            if re.search(rf"\b{EDIT}\b", line):
                left.append(f"{name}, line {number}: {line.strip()}")
    left += [f"{field}: {where}" for field in lacking]
    left += [f"recipe.{name}: {how}" for name, how in asked.lacking.items()]
    if not asked.lacking and site.login is None:
        try:
            _tell_data(asked, recipe)
        except DataError as error:
            left.append(f"recipe.data: {error}")
    said = PlainConsole(stderr=True, soft_wrap=True)
    if site.login and texts:
        said.print(f"A launch begins on {site.login} by:")
        for line in first_commands(site):
            said.print(Text(f"  {line}"))
    if left:
        said.print("Still to fill in:")
        for line in left:
            said.print(Text(f"  {line}"))


def _tell_data(asked: Asked, recipe: Recipe) -> None:
    """Says how often each source is read, and where the recipe asks for what its data cannot
    give exactly.
    """
    from kit.data import Dataset, located, rounded_weights

    sources = launcher.check_data(asked.spec, asked.plan, recipe)
    told = [
        f"Reads {epochs:.3g} {'epoch' if epochs == 1 else 'epochs'} of {name}"
        for name, epochs in sources
    ]
    for name, (wanted, drawn) in rounded_weights(located(recipe)).items():
        told.append(
            f"{name}: {drawn:.4g} of the sequences, not {wanted:.4g}: weights are rounded to"
            " 1/65,536."
        )
    there = Dataset.open(located(recipe).data).held_out_sequences(asked.spec.sequence_length)
    if recipe.validation_every and there < recipe.validation_sequences:
        told.append(
            f"Validates on all {there:,} held-out sequences, not {recipe.validation_sequences:,}."
        )
    PlainConsole(stderr=True, soft_wrap=True).print(Text("\n".join(told)))


def _tell_schedule(recipe: Recipe) -> None:
    """Says where the learning rate's schedule ends, unless that is where the run does."""
    end, last = recipe.decay_steps or recipe.num_steps, recipe.num_steps
    if recipe.schedule == "constant" or end == last:
        return
    then = f"and stays there to step {last:,}"
    if last < end:
        then = f"but the run ends before, at step {last:,} and {recipe.learning_rate_at(last):.3g}"
    told = (
        f"The learning rate reaches {recipe.learning_rate_at(end):.3g} at step {end:,}"
        f" (recipe.decay_steps), {then}."
    )
    PlainConsole(stderr=True, soft_wrap=True).print(Text(told))


def _measured(run: Path, site: Site, dtype: str) -> Site:
    """Returns a local site with its peak, measured if nobody has given it; another site as it
    is.
    """
    from kit.measure.gemm import is_settled, measured_site

    if site.scheduler != "local" or site.peak_flops_per_s(dtype) is not None:
        return site
    PlainConsole(stderr=True).print("Measuring this machine's matrix products, for MFU ...")
    site = measured_site(site, dtype)
    if not is_settled(site.device.peak_flops_per_s[dtype]):
        hint(
            "The peak was measured on a busy machine. For MFU, measure it again:",
            "bench",
            "site",
            "--apply",
            run,
        )
    return site


@contextlib.contextmanager
def told_if_interrupted(run: Path) -> Iterator[None]:
    """Says after Ctrl-C whether a job runs, and how to end it; the command ends with the code
    that a shell expects.
    """
    try:
        yield
    except KeyboardInterrupt:
        try:
            status = Run.open(run).job.status()
        except (RunError, JobError, ConfigError):
            status = None
        if status is None or status.state.is_final:
            console().print("Interrupted: nothing was started.")
        else:
            hint(
                f"Interrupted, but the job runs: attempt {status.attempt} is {status.state}."
                " End it:",
                "stop",
                run,
            )
        raise typer.Exit(130) from None


@app.command()
def attach(
    run: RunArgument,
    there: Annotated[
        str, typer.Option(help="its run directory on the other side of the site's login node")
    ],
    site: Annotated[str, typer.Option(help="a .toml file with login")],
) -> None:
    """Look from here at a run that was launched elsewhere: makes a mirror of it, a run directory
    like any other.
    """
    attach_run(run.expanduser().absolute(), Site.load(site), there)
    hint("Watch:", "watch", run)
