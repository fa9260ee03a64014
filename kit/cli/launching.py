"""Commands that start training jobs: launch, resume."""

import contextlib
import dataclasses
import functools
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.files import other_writers
from cluster.login.submit import attach, first_commands
from cluster.record import counted
from cluster.render import scripts, to_fill_in
from cluster.request import derived
from cluster.scheduler import EDIT
from cluster.shadows import find_shadowing_modules, summary
from cluster.site import Site
from cluster.state import JobError, JobState, find_log, read_exit, read_history
from cluster.status import read_status
from kit import launcher
from kit.cli.launch_settings import (
    LaunchSettings,
    draft_recipe,
    fit_micro_batch,
    gather_settings,
)
from kit.cli.options import (
    MODEL,
    MinutesOption,
    RunArgument,
    advice,
    hint,
    note,
    parse_settings,
    print_result,
)
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.engines.build import check_site
from kit.errors import ConfigError, DataError, RunError
from kit.measure.device import on_device
from kit.run import Run

app = typer.Typer()
SELECTIVE = (
    "Selective recomputation that is not compiled costs some 4 ms of Python a layer and "
    "micro-batch, in which a GPU may wait. Compile it (--set plan.compile=true), or use --set "
    "plan.recompute=full."
)
NOT_STARTED = "Interrupted: nothing was started."
VARYING = re.compile(r"; given up after .* without a new step|0x[0-9a-f]+|\d+")
"""Parts of the reason of a failure that may differ between two failures with one cause: the number
of starts, and numbers such as process ids, addresses and sizes."""


@app.command()
def launch(
    run: RunArgument,
    model: Annotated[
        str | None, typer.Option(help=f"{MODEL} Default: the recipe's model, or demo.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Training settings: a .toml or .json file with fields of kit.Recipe, or a"
            " published recipe (`kit plan --list`). Default for the demo model: its"
            " built-in recipe. Other models need this option."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Layout: a file written by `kit plan --out`. Default: the layout of the"
            " published recipe, or of the demo model."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder of token files, made by `kit data build`. Default for the demo model:"
            " data/demo. To mix several data sets, give [\\[sources]] in the recipe file."
            " [\\[phases]] changes the weights of the mixture during training."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Optimizer steps of the whole run. Default: the recipe's, or 100 for the"
            " demo model."
        ),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            help="Machine: the name of a packaged site (`kit plan --list`) or a .toml file."
            " Default: this machine."
        ),
    ] = None,
    there: Annotated[
        str | None,
        typer.Option(
            help="Path of a run directory that is already on the cluster of --site. No job is"
            " started. RUN becomes a local copy of the run, which you can watch."
        ),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate. Default: the recipe's.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Sequences per optimizer step. Default: the plan's.", metavar="N"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of weights and data order. Default: the recipe's.")
    ] = None,
    init_from: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face folder whose weights training starts from.", metavar="FOLDER"
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            "-N",
            help="Number of nodes. data_parallel is set so that the layout uses all their"
            " devices. Default: as many nodes as the plan needs.",
            metavar="N",
        ),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option("--partition", "-p", help="Slurm partition, in place of the site's."),
    ] = None,
    account: Annotated[
        str | None, typer.Option("--account", "-A", help="Slurm account, in place of the site's.")
    ] = None,
    qos: Annotated[
        str | None,
        typer.Option("--qos", "-q", help="Slurm quality of service, in place of the site's."),
    ] = None,
    minutes: MinutesOption = None,
    time: Annotated[
        str | None,
        typer.Option(
            "--time",
            "-t",
            help="Time limit of each job, instead of --minutes. The formats are those of sbatch:"
            " minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS.",
            metavar="TIME",
        ),
    ] = None,
    show: Annotated[
        bool,
        typer.Option(
            "--show",
            help="Print the job's scripts, and the lines of the site file that you must fill"
            " in. Nothing is started.",
        ),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Set a field of spec, plan or recipe: plan.data_parallel=8,"
            " recipe.hook=FILE, recipe.init_from=FOLDER. Can be repeated. `python -m"
            " pydoc kit.Plan` lists the fields of a plan, `python -m pydoc kit.Recipe` those"
            " of a recipe, and `python -m pydoc kit.ModelSpec` those of a spec.",
        ),
    ] = None,
) -> None:
    """Launch a training job in a new run directory. The job continues when this command ends.

    If the directory holds a run that has begun, the run is resumed. Settings that you do not give
    stay unchanged.

    The number of devices follows from the plan. --set plan.data_parallel=N changes it. On GPUs, the
    default is bf16 with torch.compile. A plan from a file, or of a published recipe, is trained
    with its own precision and compilation instead. Ranks on this machine use its GPUs if there is
    one for each rank. With an empty CUDA_VISIBLE_DEVICES, the ranks run on CPU cores.
    """
    if there is not None:
        attach(run.expanduser().absolute(), Site.load(site or "laptop"), there)
        hint("Watch:", "watch", run)
        return
    begun = Run.open(run) if (run.expanduser() / "spec.json").exists() else None
    place = begun.site if begun and site is None else Site.load(site or "laptop")
    place = _with_slurm(place, {"partition": partition, "account": account, "qos": qos})
    options = {"data": data, "num_steps": steps}
    flags = {
        "recipe.learning_rate": learning_rate,
        "recipe.seed": seed,
        "recipe.init_from": init_from,
        "plan.global_batch_size": batch,
    }
    changes = _with_flags(parse_settings(settings), flags)
    gathered = gather_settings(model, recipe, plan, options, changes, begun)
    gathered = _on_nodes(gathered, nodes, place)
    place = on_device(place, gathered.plan)
    if place.device.is_gpu:
        gathered = _on_gpus(gathered)
    if begun and not show:
        # This is checked before the recipe is built. A recipe with fewer steps than its warm-up
        # would raise another error.
        launcher.refuse_done(begun, gathered.plan, steps or begun.recipe.num_steps)
    time_limit_s = _time_limit(minutes, time)
    if begun and not show:
        _tell_last_failure(begun)
    chosen = draft_recipe(gathered.recipe_fields)
    for text in gathered.notes:
        note(text)
    if show:
        where = f"in a site file of your own, with base = {place.name!r}"
        if site is not None and site.endswith(".toml"):
            where = f"in {site}"
        _show(run, gathered, chosen, place, time_limit_s, where)
        return
    if gathered.missing:
        lines = [f"recipe.{name}: {how}" for name, how in gathered.missing.items()]
        raise ConfigError(f"{'; '.join(lines)}.")
    prepare = launcher.prepare(
        run,
        spec=gathered.spec,
        plan=gathered.plan,
        recipe=chosen,
        site=place,
        time_limit_s=time_limit_s,
        measured=functools.partial(_measured, run),
    )
    with report_interrupted_launch(run), prepare as prepared:
        if prepared.notes:
            note("\n".join(prepared.notes))
        _warn_of_memory(prepared.run)
        _warn_of_shadows(place)
        started = launcher.submit(prepared)
    _tell(started)


@app.command()
def resume(
    run: RunArgument,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Optimizer steps of the whole run, including the steps already trained."
            " Default: unchanged."
        ),
    ] = None,
    minutes: MinutesOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change a field of the plan, such as plan.data_parallel=2, or"
            " recipe.decay_steps=N. Can be repeated.",
        ),
    ] = None,
) -> None:
    """Resume a run from its last checkpoint, with its plan or a changed plan (--set
    plan.KEY=VALUE).

    If --steps is larger than before, the learning-rate schedule still ends at the former last step,
    and the learning rate then stays constant. --set recipe.decay_steps=N changes the end of the
    schedule.
    """
    changes = parse_settings(settings, allowed=("plan", "recipe"))
    if others := changes["recipe"].keys() - {"decay_steps"}:
        raise ConfigError(
            f"--set recipe.{min(others)}: cannot change on a resume. Allowed: plan.KEY,"
            " recipe.decay_steps."
        )
    begun = Run.open(run)
    plan = begun.plan.replace(**changes["plan"])
    limit_s = _seconds(minutes)
    _warn_of_memory(begun, plan)
    _tell_last_failure(begun)
    _warn_of_shadows(begun.site)
    with report_interrupted_launch(run):
        started = launcher.resume(
            run, plan=plan, num_steps=steps, **changes["recipe"], time_limit_s=limit_s
        )
    _tell(started)


def _warn_of_memory(run: Run, plan: Plan | None = None) -> None:
    """Warns the user if the layout of a run probably needs more memory than its devices have. If
    `plan` is given, it replaces that of the run.
    """
    from kit.estimate.choose.memory_advice import memory_warning

    warning = memory_warning(
        run.spec, plan or run.plan, run.site.device, optimizer=run.recipe.optimizer
    )
    if warning is not None:
        note(warning)


def _tell_last_failure(run: Run) -> None:
    """Prints why the last attempt of a run failed or was lost. If the failure before it was at the
    same step and for the same reason, says that a plain resume will probably fail again. Prints
    nothing about a run that has not failed.
    """
    status = read_status(run.directory, waits=False)
    if status.state not in (JobState.FAILED, JobState.LOST):
        return
    step = f"at step {status.step:,}" if status.step else "before the first step"
    said = status.reason.removesuffix(".")
    earlier = [
        event
        for event in read_history(run.directory)
        if event.state is JobState.FAILED and event.attempt < status.attempt
    ]
    last = earlier[-1] if earlier else None
    is_repeated = (
        last is not None
        and not status.is_cancelled
        and (last.step or 0) == (status.step or 0)
        and VARYING.sub("", last.reason) == VARYING.sub("", status.reason)
    )
    if last is None or not is_repeated:
        note(f"Attempt {status.attempt} ended {step} ({status.state}): {said}.")
        return
    report = read_exit(run.directory)
    rank = (report.failing_rank if report else None) or 0
    log = find_log(run.directory, status.attempt, rank, run.site.devices_per_node)
    note(
        f"WARNING: attempts {last.attempt} and {status.attempt} both ended {step} with: {said}. The"
        " new attempt will probably end in the same way. If it does, change what the reason names"
        " first, such as data, hook, environment or plan (--set plan.KEY=VALUE). The whole error"
        f" is in {log}."
    )


def _warn_of_shadows(site: Site) -> None:
    """Warns the user if ranks would import modules from the user's own folders instead of this
    environment.

    Ranks behind a login node or in a container do not receive the PYTHONPATH of this process, so
    nothing is printed for such sites.
    """
    if site.login or (site.slurm and site.slurm.is_in_container) or site.scheduler == "kubernetes":
        return
    if shadows := find_shadowing_modules():
        note(f"In the ranks too, {summary(shadows)}. {shadows[0].advice} before you launch.")


def _with_flags(
    changes: dict[str, dict[str, Any]], flags: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Returns the fields that `--set` changes, together with the fields that have their own
    command-line options.

    Args:
        changes: values that `--set` gives, by record (such as plan) and field.
        flags: value of each option, by the RECORD.FIELD that it sets. None means that the option is
            not given.

    Raises:
        ConfigError: A field is given both by `--set` and by an option.
    """
    merged = {record: dict(fields) for record, fields in changes.items()}
    for key, value in flags.items():
        record, _, field = key.partition(".")
        if value is None:
            continue
        if field in merged[record]:
            raise ConfigError(f"--set {key}: given by an option of its own too. Give one of them.")
        merged[record][field] = value
    return merged


def _with_slurm(site: Site, given: dict[str, str | None]) -> Site:
    """Returns the site with some fields of its `[slurm]` table replaced by the values in `given`
    that are not None.

    Raises:
        ConfigError: The site has no `[slurm]` table, or a value is not allowed.
    """
    fields = {name: value for name, value in given.items() if value is not None}
    if not fields:
        return site
    if site.slurm is None:
        raise ConfigError(
            f"--{min(fields)}: the jobs of {site.name} are not sent by Slurm. Leave it out, or give"
            " --site with a site that has a [slurm] table."
        )
    return site.replace(slurm=site.slurm.replace(**fields))


def _on_nodes(gathered: LaunchSettings, nodes: int | None, site: Site) -> LaunchSettings:
    """Returns the settings with the data parallel degree with which the plan uses all devices of
    `nodes` nodes. If `nodes` is None, returns them unchanged.

    Raises:
        ConfigError: The number of devices of the nodes is not a multiple of the devices of a
            replica, or the batch cannot be divided among the replicas.
    """
    if nodes is None:
        return gathered
    devices = nodes * site.devices_per_node
    replica_devices = gathered.plan.num_devices // gathered.plan.data_parallel
    if nodes < 1 or devices % replica_devices:
        raise ConfigError(
            f"--nodes {nodes}: {counted(devices, 'device')} of {site.name} cannot be shared by"
            f" replicas of {counted(replica_devices, 'device')} each (tensor, pipeline and context"
            " parallel ranks). Give another number, or another plan."
        )
    replicas = devices // replica_devices
    if gathered.is_micro_batch_default:
        plan = gathered.plan.replace(data_parallel=replicas, micro_batch_size=1)
        plan = fit_micro_batch(plan)
    else:
        plan = gathered.plan.replace(data_parallel=replicas)
    return dataclasses.replace(gathered, plan=plan)


def _time_limit(minutes: float | None, time: str | None) -> float | None:
    """Returns the time limit of a job in seconds, from the option --minutes or the option --time.
    Returns None if neither is given.

    Raises:
        ConfigError: Both options are given, or a value is not a time.
    """
    if time is None:
        return _seconds(minutes)
    if minutes is not None:
        raise ConfigError(f"--time {time}: not with --minutes {minutes:g}. Give one of them.")
    return slurm_seconds(time)


def slurm_seconds(text: str) -> float:
    """Returns the number of seconds of a time that is written as for sbatch's option `--time`.

    Raises:
        ConfigError: The text has none of sbatch's formats, or the time is 0.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if found is None:
        raise ConfigError(
            f"--time {text!r}: not allowed. Give minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or"
            " D-HH:MM:SS, as for sbatch."
        )
    days, *rest = found.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours = 0
        minutes, seconds = (*numbers, 0)[:2]
    total_s = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total_s == 0:
        raise ConfigError(f"--time {text!r}: not allowed. Give a time above 0.")
    return float(total_s)


def _on_gpus(gathered: LaunchSettings) -> LaunchSettings:
    """Returns the settings with the plan's default precision and compilation for GPUs. Warns if the
    plan recomputes selectively without compilation.
    """
    plan = gathered.plan.replace(**gathered.gpu_defaults)
    if plan.recompute == "selective" and plan.capabilities.compiles_blocks and not plan.compile:
        note(SELECTIVE)
    return dataclasses.replace(gathered, plan=plan)


def _warn_of_writers(run: Run) -> None:
    """Warns the user if other users may write in the run directory and the directory contains
    programs.

    The programs are a copy of the hook and the shell lines of the site. They run with this user's
    rights at every restart. Another user who replaces one of these files could therefore run
    programs as this user.
    """
    table = run.site.slurm or run.site.kubernetes
    has_lines = any(getattr(table, name, ()) for name in ("setup", "task_setup"))
    if run.site.login or not (run.recipe.hook or has_lines):
        return
    if writers := other_writers(run.directory):
        programs = "hook.py" if run.recipe.hook else "the site's setup lines"
        note(
            f"WARNING: {writers} may write in {run.directory}, and {programs} in it runs as you at"
            " every start: they could run programs as you. Remove the permission: `chmod -R"
            f" go-w {shlex.quote(str(run.directory))}`, and launch with umask 022."
        )


def _tell(run: Run) -> None:
    """Prints which job was started. If the learning-rate schedule does not end at the last step of
    the run, also prints at which step it ends.
    """
    _warn_of_writers(run)
    _tell_schedule(run.recipe)
    begin = max(run.checkpoints.steps(), default=0)
    text = f"Started {counted(run.plan.num_devices, 'process', 'processes')}"
    if begin:
        text += f" from step {begin} on"
    if run.site.scheduler == "local":
        text += f", device: {run.site.device.name}"
    hint(f"{text}. Watch:", "watch", run.directory)


def _seconds(minutes: float | None) -> float | None:
    """Returns a time limit in seconds, converted from minutes. Returns None if no limit is given.

    Raises:
        ConfigError: The limit is not above 0, or not finite.
    """
    if minutes is None:
        return None
    if not 0 < minutes < math.inf:
        raise ConfigError(f"--minutes {minutes:g}: not allowed. Give a number above 0.")
    return 60 * minutes


def _show(
    run: Path,
    gathered: LaunchSettings,
    recipe: Recipe,
    site: Site,
    time_limit_s: float | None,
    where: str,
) -> None:
    """Prints every script of the job to standard output, for `kit launch --show`. Prints the fields
    that the user must still fill in to standard error. `where` tells the user in which file to fill
    in fields of the site.

    If the site is behind a login node, no connection is made. The first commands that a launch
    would run on the login node are printed. Scripts are then printed only if the site file is
    complete.
    """
    directory = run.expanduser().absolute()
    spec = gathered.spec
    plan = gathered.plan
    plan.check(spec)
    check_site(spec, plan, site)
    if recipe.init_from is not None and site.login is None:
        launcher.check_weights(spec, recipe)
    drafted = Run(directory, spec=spec, plan=plan, recipe=recipe, site=site)
    prepared = launcher.draft(drafted, time_limit_s)
    job = prepared.job.job
    lacking = to_fill_in(site)
    texts = prepared.job.scripts
    if site.login and not lacking:
        texts = scripts(job, site)
    for name, text in texts.items():
        if len(texts) > 1:
            print(f"#### {name} {'#' * 60}")
        print(text, end="")
    left = _lines_to_edit(texts)
    left += [f"{field}: {where}" for field in lacking]
    left += [f"recipe.{name}: {how}" for name, how in gathered.missing.items()]
    if not gathered.missing and site.login is None:
        try:
            note("\n".join(launcher.data_notes(spec, plan, recipe)))
        except DataError as error:
            left.append(f"recipe.data: {error}")
    _warn_of_memory(drafted)
    if texts and (lines := derived(job, site)):
        of = site.scheduler.capitalize()
        note("\n  ".join([f"Asked of {of} where the site file says nothing:", *lines]))
    if site.login and texts:
        note("\n  ".join([f"A launch begins on {site.login} by:", *first_commands(site)]))
    if left:
        note("\n  ".join(["Still to fill in:", *left]))


def _lines_to_edit(texts: Mapping[str, str]) -> list[str]:
    """Returns the lines of the scripts that contain the word EDIT, each with file name and line
    number.
    """
    lines = []
    for name, text in texts.items():
        for number, line in enumerate(text.splitlines(), start=1):
            if re.search(rf"\b{EDIT}\b", line):
                lines.append(f"{name}, line {number}: {line.strip()}")
    return lines


def _tell_schedule(recipe: Recipe) -> None:
    """Prints at which step the learning-rate schedule ends, unless this is the last step of the
    run.
    """
    end = recipe.decay_steps or recipe.num_steps
    last = recipe.num_steps
    if recipe.schedule == "constant" or end == last:
        return
    then = f"and stays there to step {last:,}"
    if last < end:
        then = f"but the run ends before, at step {last:,} and {recipe.learning_rate_at(last):.3g}"
    note(
        f"The learning rate reaches {recipe.learning_rate_at(end):.3g} at step {end:,}"
        f" (recipe.decay_steps), {then}."
    )


def _measured(run: Path, site: Site, dtype: str) -> Site:
    """Returns a local site with its peak FLOP/s, which is measured if the site file does not
    contain it. Returns other sites unchanged.
    """
    from kit.measure.gemm import is_settled, measured_site

    if site.scheduler != "local" or site.peak_flops_per_s(dtype) is not None:
        return site
    note("Measuring this machine's matrix products, for MFU ...")
    site = measured_site(site, dtype)
    if not is_settled(site.device.peak_flops_per_s[dtype]):
        busy = "The peak was measured on a busy machine. For MFU, measure it again:"
        note(advice(busy, "bench", "--apply", run))
    return site


@contextlib.contextmanager
def report_interrupted_launch(run: Path) -> Iterator[None]:
    """Context manager for commands that start a job. After Ctrl-C it prints whether a job runs, and
    the command that ends the job. Then it exits with code 130, which shells use for Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        try:
            status = Run.open(run).job.status()
        except (RunError, JobError, ConfigError):
            status = None
        if status is None or status.state.is_final:
            print_result({"said": NOT_STARTED}, NOT_STARTED)
        else:
            hint(
                f"Interrupted, but the job runs: attempt {status.attempt} is {status.state}."
                " End it:",
                "stop",
                run,
            )
        raise typer.Exit(130) from None
