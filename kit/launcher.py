"""Starts jobs: training from a spec, plan and recipe, and scoring of a checkpoint.

`prepare` makes all checks that are possible before a job starts, and yields a `PreparedLaunch`,
which contains all files and scripts of the launch. `submit` writes these files and starts the job.
`launch` calls both. `score_in_job` and `submit_eval` start the job that scores a checkpoint.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from cluster import local, submission
from cluster.attempts import Files, new_folders, refuse_live
from cluster.files import lock_file, try_lock
from cluster.interpreter import module_command
from cluster.job import Job, JobSpec
from cluster.login.submit import check_remote_paths
from cluster.logs import end_reason
from cluster.ownership import refuse_other_owner
from cluster.render import nodes_for
from cluster.site import Site
from cluster.state import JobState
from kit.config.plan import Plan
from kit.config.recipe import Recipe
from kit.config.spec import ModelSpec
from kit.engines import configuration
from kit.engines.build import check_engine, check_site
from kit.engines.neuron.configuration import job_environment
from kit.errors import CheckpointError, ConfigError, RunError, kit_command
from kit.measure.device import DeviceName, on_device
from kit.measure.gemm import measured_site
from kit.run import LAUNCH_LOCK, Run
from kit.run.checkpoint import Checkpoints

MAX_PADDING = 512
"""Largest number of unused vocabulary entries that is taken for padding. Padding makes the
vocabulary divisible by the tensor parallel degree."""
PADDING_SHARE = 0.02
"""Largest fraction of a vocabulary that is taken for padding and reserved tokens. In Qwen's models
it is 0.3 %."""
MAX_EPOCHS = 4
"""Largest number of epochs up to which repeated text improves the model about as much as new text.
Source: arXiv 2305.16264."""
TOO_OFTEN = f"above {MAX_EPOCHS}, repeated text is worth less than new text: arXiv 2305.16264"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedLaunch:
    """A launch that has passed all checks: its run, its job, and all files that `submit` writes."""

    run: Run
    """Run to be started, with its directory, spec, plan, recipe and site."""
    job: submission.PreparedJob
    """Job with its scripts, and with the files that are written before the job is submitted."""
    notes: tuple[str, ...] = ()
    """Notes on the data, which are shown to the user before the job starts."""

    def with_site(self, site: Site) -> Self:
        """Returns a copy of this launch with another `site`, which contains the measured peak
        FLOP/s.
        """
        run = Run(
            self.run.directory,
            spec=self.run.spec,
            plan=self.run.plan,
            recipe=self.run.recipe,
            site=site,
        )
        files = {**self.job.files, "site.json": site.to_json()}
        job = dataclasses.replace(self.job, site=site, files=files)
        return dataclasses.replace(self, run=run, job=job)


def launch(
    directory: str | Path,
    *,
    spec: ModelSpec,
    plan: Plan,
    recipe: Recipe,
    site: Site | str = "laptop",
    device: DeviceName | None = None,
    time_limit_s: float | None = None,
    measured: Callable[[Site, str], Site] | None = None,
) -> Run:
    """Starts a training job and returns its run. The job continues when this process ends.

    Example, with token files made by `kit data build data/demo`:

        >>> import kit
        >>> run = kit.launch(
        ...     "runs/first",
        ...     spec=kit.ModelSpec.preset("demo"),
        ...     plan=kit.Plan(global_batch_size=8, micro_batch_size=4),
        ...     recipe=kit.Recipe(data="data/demo", num_steps=5),
        ... )
        >>> print(run.job.wait().state)
        done

    Next: `kit.Run` describes how to follow a run. In a notebook, `kit.monitor.Monitor(run)` shows
    the run live. `kit.resume` continues the run. `help` explains the fields of `kit.Plan`,
    `kit.Recipe` and `kit.Site`.

    Args:
        directory: a new run directory, or the directory of a run with this model and recipe. Such a
            run continues from its last checkpoint, even if the plan is another.
        spec: sizes of the model: a preset, or `ModelSpec.llama(...)`.
        plan: layout of the model on devices, as `kit plan` or `kit.estimate.search` chooses it.
        recipe: data, number of steps, learning rate and checkpoints.
        site: machine that runs the job: a name in `Site.names()`, a .toml file, or a `Site`.
        device: device of the ranks on this machine, `cpu` or `cuda`. Default: GPUs if this machine
            has one for each rank, otherwise its CPU. The run's site records the device.
        time_limit_s: time limit of one job, in seconds. Default: the site's limit. A longer run is
            resubmitted until it is done.
        measured: function that measures the peak FLOP/s of the site, for MFU. It is called with
            (site, dtype) after all other checks, and returns the site with its measured peak.

    Raises:
        ConfigError, DataError, CheckpointError, RunError, JobError, MissingPackageError: An
            argument, the data, a checkpoint or the environment is unsuitable. Nothing was started.
    """
    with prepare(
        directory,
        spec=spec,
        plan=plan,
        recipe=recipe,
        site=site,
        device=device,
        time_limit_s=time_limit_s,
        measured=measured,
    ) as prepared:
        return submit(prepared)


def resume(
    directory: str | Path,
    *,
    plan: Plan | None = None,
    num_steps: int | None = None,
    decay_steps: int | None = None,
    device: DeviceName | None = None,
    time_limit_s: float | None = None,
) -> Run:
    """Resumes the run in `directory` from its last checkpoint, and returns the run. If `plan` or
    `device` is given, it replaces that of the run.

    `num_steps` replaces the number of steps of the run. The learning-rate schedule still ends at
    its former step, unless `decay_steps` is given as its new end.

    Raises:
        ConfigError, DataError, CheckpointError, RunError, JobError, MissingPackageError: The run
            cannot be resumed, for the reasons listed at `launch`. Nothing was started.
    """
    run = Run.open(directory)
    plan = plan or run.plan
    # This is checked before the recipe changes. A recipe with fewer steps than its warm-up would
    # raise another, less helpful error.
    refuse_done(run, plan, num_steps or run.recipe.num_steps)
    lengths = {"num_steps": num_steps, "decay_steps": decay_steps}
    given = {name: steps for name, steps in lengths.items() if steps is not None}
    recipe = run.recipe.replace(**given)
    site = run.site if device is None else on_device(run.site, plan, device)
    measured = None if site is run.site else measured_site
    return launch(
        run.directory,
        spec=run.spec,
        plan=plan,
        recipe=recipe,
        site=site,
        time_limit_s=time_limit_s,
        measured=measured,
    )


@contextlib.contextmanager
def prepare(
    directory: str | Path,
    *,
    spec: ModelSpec,
    plan: Plan,
    recipe: Recipe,
    site: Site | str = "laptop",
    device: DeviceName | None = None,
    time_limit_s: float | None = None,
    measured: Callable[[Site, str], Site] | None = None,
) -> Iterator[PreparedLaunch]:
    """Context manager: checks a launch and yields it as a `PreparedLaunch`. Within the context,
    `submit` may start it.

    It first checks records, data and weights, and writes nothing. Then it takes the lock of the run
    directory, creates the directory if it is missing, and checks its files. It holds the lock until
    the context ends, so that no other launch changes the checked files. If the context ends with an
    error, a new and empty directory is removed. The arguments are those of `launch`.

    Raises:
        ConfigError, DataError, CheckpointError, RunError, JobError, MissingPackageError: The launch
            is not possible, for the reasons listed at `launch`.
    """
    from kit.config.recipe_rules import check_recipe

    directory = Path(directory).expanduser().resolve()
    refuse_other_owner(directory, "start a job in it")
    if (directory / "import.json").exists():
        raise RunError(
            f"{directory}: it was imported from a log, so there is no checkpoint to go on from. "
            "Launch a run of its model and plan in another directory."
        )
    site = Site.load(site) if isinstance(site, str) else site
    recipe = _with_whole_paths(recipe, site)
    plan.check(spec)
    site = on_device(site, plan, device)
    check_site(spec, plan, site)
    if site.scheduler != "local":
        nodes_for(plan.num_devices, site)  # Raises ConfigError if the last node is not full.
    check_engine(plan)
    check_recipe(recipe, plan, spec)
    begins = not Checkpoints(directory / "checkpoints").steps()
    notes = _check_inputs(spec, plan, recipe, site, begins)
    with _launch_lock(directory):
        run = Run.prepare(directory, spec=spec, plan=plan, recipe=recipe, site=site)
        refuse_done(run, plan, recipe.num_steps)
        if site.login is None:
            run.checkpoints.check_space(spec)
            if warning := run.checkpoints.space_warning(spec, recipe):
                notes = (*notes, warning)
        job = submission.prepare_job(job_spec(run, time_limit_s), site, _files(run))
        prepared = PreparedLaunch(run=run, job=job, notes=notes)
        if measured is not None:
            prepared = prepared.with_site(measured(site, plan.precision))
        yield prepared


def draft(run: Run, time_limit_s: float | None = None) -> PreparedLaunch:
    """Returns the launch of a run that may be incomplete, without most checks of `prepare`. The
    run's data may be missing, and fields of its site may still have the value EDIT.

    Raises:
        ConfigError: Plan, model and site do not fit each other.
        RunError: The hook's file cannot be read.
    """
    return PreparedLaunch(
        run=run, job=submission.draft_job(job_spec(run, time_limit_s), run.site, _files(run))
    )


def submit(prepared: PreparedLaunch) -> Run:
    """Starts the job of a launch that `prepare` has checked, and returns its run.

    Before the job is submitted, the files of the launch are written in the order that
    `cluster.submission.submit_prepared` describes.

    Raises:
        JobError: A job is live in the directory, or the scheduler refuses the job. The files of the
            directory are unchanged.
    """
    submission.submit_prepared(prepared.job)
    return prepared.run


@contextlib.contextmanager
def _launch_lock(directory: Path) -> Iterator[None]:
    """Context manager that holds the lock of a run directory, so that only one launch at a time
    checks and writes it.

    Creates the directory if it is missing. If the context ends with an error, a new and empty
    directory is removed.

    Raises:
        RunError: The directory cannot be written, or another launch holds the lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(new_folders(directory))
            lock = stack.enter_context(lock_file(directory / LAUNCH_LOCK))
        except OSError as error:
            raise RunError(
                f"{directory} cannot be written: {error.strerror}. Use another run directory."
            ) from error
        # On a file system without locks, `claim_attempt` later lets only one launch continue. If
        # the locked file has no name any more, a launch that has just ended has removed it, and the
        # lock protects nothing.
        if not try_lock(lock, 0.0) or not os.fstat(lock.fileno()).st_nlink:
            raise RunError(
                f"{directory} is being launched by another process. Use that run, or another run"
                " directory."
            )
        stack.callback((directory / LAUNCH_LOCK).unlink, missing_ok=True)
        yield


def _files(run: Run) -> Files:
    """Returns the texts of a launch's files by file name, in the order in which they are written:
    first configuration files of the engine, then the records of the run. A file that belongs to
    another engine has the value None, so that it is removed.
    """
    of_any_engine = dict.fromkeys(configuration.FILES)
    of_its_engine = configuration.configuration_files(run.spec, run.plan, run.recipe)
    return {**of_any_engine, **of_its_engine, **run.configuration_texts()}


def _with_whole_paths(recipe: Recipe, site: Site) -> Recipe:
    """Returns the recipe with absolute paths, since the job starts in another directory. If the
    site is behind a login node, paths of data are on that machine and stay unchanged. The hook is
    always a file of this machine.
    """
    from kit.data import resolve_paths  # This imports NumPy, which `import kit` must not import.

    if site.login is None:
        recipe = resolve_paths(recipe)
    if recipe.hook is not None:
        recipe = recipe.replace(hook=str(Path(recipe.hook).expanduser().resolve()))
    return recipe


def _check_inputs(
    spec: ModelSpec, plan: Plan, recipe: Recipe, site: Site, begins: bool
) -> tuple[str, ...]:
    """Checks the data of a run. If the run `begins` without a checkpoint, also checks its initial
    weights. Returns notes on the data for the user. If the site is behind a login node, there are
    no notes.

    Raises:
        ConfigError, DataError, MissingPackageError, JobError: Data or weights do not fit the model,
            or are missing on the machine of the job.
    """
    needs_weights = begins and recipe.init_from is not None
    if site.login is not None:
        needed = [recipe.data]
        for source in recipe.sources:
            needed += source.paths
        if needs_weights:
            needed.append(str(recipe.init_from))
        check_remote_paths(site, needed, "torch")
        return ()
    notes = data_notes(spec, plan, recipe)
    if needs_weights:
        check_weights(spec, recipe)
    return notes


def job_spec(run: Run, time_limit_s: float | None = None) -> JobSpec:
    """Returns the job that trains a run on its site: one process per device of its plan.

    If this machine is a Trainium host and the run has several ranks, the job has one process
    instead: torchrun, which starts the ranks. torch_neuronx assigns NeuronCores only to ranks that
    torchrun has started.
    """
    argv = module_command("kit.train", "--run", str(run.directory))
    is_trainium = run.plan.capabilities.runs_on_trainium
    num_processes = run.plan.num_devices
    is_local = run.site.scheduler == "local"
    if is_local:
        # The number is checked here, before one torchrun process replaces the ranks.
        local.check_count(num_processes)
    if is_local and is_trainium and num_processes > 1:
        agent = module_command(
            "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"
        )
        # Without `--`, torchrun would read `--run` as one of its own options.
        argv = (*agent, "--no-python", "--", *argv)
        num_processes = 1
    num_nodes = 1
    if not is_local:
        num_nodes = nodes_for(run.plan.num_devices, run.site)
    environment = {}
    if is_trainium:
        environment = job_environment(run.plan, run.site)
    return JobSpec(
        name=run.name,
        run_dir=str(run.directory),
        argv=argv,
        num_processes=num_processes,
        num_nodes=num_nodes,
        forks=is_local and num_processes > 1,
        environment=environment,
        time_limit_s=time_limit_s,
    )


def refuse_done(run: Run, plan: Plan, num_steps: int) -> None:
    """Raises an error if a run has already done `num_steps` steps. The message contains the command
    that continues it with `plan`.

    Raises:
        JobError: A job is live in the run directory, or the directory belongs to another user.
        RunError: The newest checkpoint is of step `num_steps` or a later step.
        CheckpointError: The run has checkpoints, but none is complete.
    """
    if (run.directory / "state.json").exists():
        refuse_live(run.directory)
    if run.site.login is None:
        newest = _newest_complete_step(run.checkpoints)
    else:
        # The local mirror of the run has the names of its checkpoints, but not their files.
        newest = max(run.checkpoints.steps(), default=None)
    if newest is not None and newest >= num_steps:
        last_step = run.recipe.num_steps
        done = f"has finished its {newest} steps"
        if newest < last_step:
            done = f"has trained {newest} of {last_step} steps"
        raise RunError(
            f"{run.directory} {done}, and {num_steps} were asked for."
            f" {Run.open(run.directory).resume_advice(plan, num_steps)}"
        )


def _newest_complete_step(checkpoints: Checkpoints) -> int | None:
    """Returns the step of the newest checkpoint whose files have the sizes in its manifest. Returns
    None if there are no checkpoints. The checksums are verified later, by the job.

    Raises:
        CheckpointError: The run has checkpoints, but none is complete.
    """
    steps = checkpoints.steps()
    if not steps:
        return None
    for step in reversed(steps):
        with contextlib.suppress(CheckpointError):
            return checkpoints.manifest(step).step
    return checkpoints.manifest(steps[-1]).step  # This raises the error of the newest checkpoint.


def check_weights(spec: ModelSpec, recipe: Recipe) -> None:
    """Checks that the initial weights fit the model, and that the data was made with the tokenizer
    of these weights.

    Raises:
        ConfigError: The weights belong to another model, or the data to another tokenizer.
        DataError, MissingPackageError: The folder of the weights cannot be read.
    """
    from kit.data import Dataset
    from kit.data.tokenizer import load_tokenizer
    from kit.interop.weights.hugging_face import hugging_face_weights

    folder = Path(str(recipe.init_from))
    hugging_face_weights(folder, spec)
    if not Path(recipe.data).exists():
        return  # `check_data` reports missing data.
    dataset = Dataset.open(Path(recipe.data))
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        ours = dataset.info.tokenizer_sha256
        theirs = load_tokenizer(folder).sha256
        if theirs != ours:
            raise ConfigError(
                f"recipe.data: {recipe.data} is in tokens of {ours[:12]},"
                f" the weights in {folder} know those of its own tokenizer, {theirs[:12]}. Build"
                f" the data with --tokenizer {folder}."
            )


def unused_vocabulary(spec: ModelSpec, tokenizer_size: int) -> str | None:
    """Returns a warning if the model's vocabulary is larger than the tokenizer's vocabulary by more
    than usual padding. Otherwise returns None.
    """
    unused = spec.vocab_size - tokenizer_size
    if unused <= max(MAX_PADDING, PADDING_SHARE * spec.vocab_size):
        return None
    return (
        f"The model has {spec.vocab_size:,} tokens and the tokenizer of the data only"
        f" {tokenizer_size:,}: {unused / spec.vocab_size:.0%} of the vocabulary is never trained."
        " Is it this model's tokenizer? Build the data with `--tokenizer FOLDER`, or give"
        f" --set spec.vocab_size={tokenizer_size}."
    )


def data_notes(spec: ModelSpec, plan: Plan, recipe: Recipe) -> tuple[str, ...]:
    """Returns notes for the user: the number of epochs of each data source, and differences between
    the recipe and the data, such as rounded weights and unused vocabulary.

    Raises:
        ConfigError, DataError: The data does not fit the model or the run, as described at
            `check_data`.
    """
    from kit.data import Dataset, resolve_paths, rounded_weights

    notes = []
    for name, epochs in check_data(spec, plan, recipe):
        number = f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.3g}"
        unit = "epoch" if epochs == 1 else "epochs"
        text = f"Reads {number} {unit} of {name}"
        notes.append(f"{text} ({TOO_OFTEN})" if epochs > MAX_EPOCHS else text)
    for name, (wanted, drawn) in rounded_weights(resolve_paths(recipe)).items():
        notes.append(
            f"{name}: {drawn:.4g} of the sequences, not {wanted:.4g}: weights are rounded to"
            " 1/65,536."
        )
    dataset = Dataset.open(Path(resolve_paths(recipe).data))
    if unused := unused_vocabulary(spec, dataset.vocab_size):
        notes.append(unused)
    there = dataset.num_validation_sequences(spec.sequence_length)
    if recipe.validation_every and there < recipe.validation_sequences:
        notes.append(
            f"Validates on all {there:,} held-out sequences, not {recipe.validation_sequences:,}."
        )
    return tuple(notes)


def check_data(spec: ModelSpec, plan: Plan, recipe: Recipe) -> list[tuple[str, float]]:
    """Checks the data of a run. Returns (name of the source, number of epochs that the run will
    read) for each data source.

    Raises:
        ConfigError: The tokenizer of the data has more tokens than the model's vocabulary.
        DataError: Token files are missing or truncated, or have less than one sequence.
    """
    from kit.data import Dataset, resolve_paths, training_samples

    recipe = resolve_paths(recipe)
    dataset = Dataset.open(Path(recipe.data))
    if dataset.vocab_size > spec.vocab_size:
        raise ConfigError(
            f"recipe.data: the tokenizer of {recipe.data} has {dataset.vocab_size:,} tokens, the"
            f" model's vocab_size is {spec.vocab_size:,}. Build the data with `--vocab-size"
            f" {spec.vocab_size}`, or raise spec.vocab_size."
        )
    epochs = training_samples(recipe, spec.sequence_length).epochs(
        recipe.num_steps * plan.global_batch_size
    )
    if recipe.validation_every:
        dataset.samples("validation", spec.sequence_length, recipe.seed)
    names = []
    for source in recipe.sources:
        first_and_last = dict.fromkeys((source.paths[0], source.paths[-1]))
        names.append(" to ".join(first_and_last))
    if not names:
        names = [recipe.data]
    return list(zip(names, epochs, strict=True))


# Scoring ------------------------------------------------------------------------------------------


def eval_job(run: Run, step: int, arguments: Sequence[str], num_devices: int) -> JobSpec:
    """Returns the job that scores one checkpoint. It has one process per device, and each process
    runs `kit eval`.

    `arguments` are the options of `kit eval` after RUN and `--step` on the command line.
    `kit.evaluate.eval_arguments` returns them.
    """
    num_nodes = 1
    if run.site.scheduler != "local":
        num_nodes = nodes_for(num_devices, run.site)
    return JobSpec(
        name=f"{run.name}-eval-{step}",
        run_dir=str(run.directory / "eval" / "jobs" / f"step_{step:08d}"),
        argv=module_command("kit", "eval", str(run.directory), "--step", str(step), *arguments),
        num_processes=num_devices,
        num_nodes=num_nodes,
        max_restarts=0,
    )


def submit_eval(run: Run, step: int, arguments: Sequence[str], num_devices: int) -> Job:
    """Returns the job that scores a checkpoint: the live job if there is one, otherwise a newly
    submitted job.

    A live job may have been submitted by an earlier call with other arguments. To find out, compare
    the command in its `JobSpec` with the command in the result of `eval_job`.

    Raises:
        ConfigError, JobError: The site cannot run the job.
    """
    job = eval_job(run, step, arguments, num_devices)
    if (Path(job.run_dir) / "job.json").exists():
        earlier = Job.attach(job.run_dir)
        if not earlier.state.is_final:
            return earlier
    return submission.submit(job, run.site)


def score_in_job(run: Run, step: int, arguments: Sequence[str], num_devices: int) -> None:
    """Scores a checkpoint in a job on the run's site, and returns when the job has ended. Ctrl-C
    cancels the job.

    The arguments are those of `eval_job`.

    Raises:
        ConfigError, JobError: The site cannot run the job, or another live job scores this
            checkpoint.
        RunError: The job has ended without scoring the checkpoint.
    """
    job = submission.submit(eval_job(run, step, arguments, num_devices), run.site)
    try:
        status = job.wait()
    except KeyboardInterrupt:
        job.cancel()
        raise
    if status.state is not JobState.DONE:
        words = (end_reason(job.logs(0)) or status.reason).rstrip(".")
        more = kit_command("logs", job.run_dir)
        raise RunError(f"{run.name}, step {step}: not scored: {words}. All that it said: `{more}`.")
