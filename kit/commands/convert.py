"""Commands on other software's checkpoints: export-hf and import-checkpoint."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from kit.commands.options import JsonOption, RunArgument, print_record
from kit.errors import ConfigError
from kit.run import Run
from kit.show.terminal import PlainConsole

app = typer.Typer()
StepArgument = Annotated[str, typer.Argument(help="of the checkpoint, or `newest`", metavar="STEP")]
OutArgument = Annotated[
    Path, typer.Argument(help="folder to make: config.json and safetensors", metavar="OUT")
]


@app.command("export-hf")
def export_hf(
    run: RunArgument,
    step: StepArgument,
    out: OutArgument,
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="float32 (exact), bfloat16 or float16", metavar="TYPE"),
    ] = "float32",
    tokenizer: Annotated[
        bool, typer.Option(help="with the tokenizer that it was trained with")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder, with its tokenizer."""
    from kit.convert.hugging_face import export_run

    _tell(
        export_run(*_chosen(run, step), out, precision=precision, with_tokenizer=tokenizer), as_json
    )


@app.command("import-checkpoint")
def import_checkpoint(
    kind: Annotated[
        Literal["nxd", "megatron-deepspeed", "deepspeed-universal"],
        typer.Argument(
            help="who wrote it: nxd, megatron-deepspeed or deepspeed-universal",
            metavar="KIND",
            show_choices=False,
        ),
    ],
    source: Annotated[Path, typer.Argument(help="folder of its files", metavar="SOURCE")],
    out: OutArgument,
    model: Annotated[
        str,
        typer.Option(
            help="a preset, spec.json or config.json: these files do not say their shapes"
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Write the shards of another trainer as a Hugging Face folder."""
    from kit.convert import deepspeed, megatron, neuron
    from kit.convert.hugging_face import export_hugging_face
    from kit.convert.hugging_face_config import load_spec

    spec = load_spec(model)
    load = {
        "nxd": neuron.import_nxd,
        "megatron-deepspeed": megatron.import_megatron_deepspeed,
        "deepspeed-universal": deepspeed.import_universal,
    }
    _tell(export_hugging_face(load[kind](source, spec), out), as_json)


def _chosen(directory: Path, step: str) -> tuple[Run, int | None]:
    """Returns the run and the step, None for the newest, after saying that they will take a
    while to read.
    """
    if step != "newest" and not step.isdecimal():
        raise ConfigError(f"step: {step!r} is not allowed. Give a number, or `newest`.")
    run = Run.open(directory)
    PlainConsole(stderr=True).print("Checking and reading the checkpoint, then writing ...")
    return run, None if step == "newest" else int(step)


def _tell(folder: Path, as_json: bool) -> None:
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print_record("Written", {"folder": str(folder), "bytes": size}, as_json)
