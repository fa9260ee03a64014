"""Commands on text: data build."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kit.commands.options import JsonOption, console

app = typer.Typer()
data_app = typer.Typer(no_args_is_help=True)
app.add_typer(data_app, name="data", help="Build token files, and look at them.")


@data_app.command("build")
def data_build(
    out: Annotated[Path, typer.Argument(help="folder to make")],
    source: Annotated[
        list[Path] | None, typer.Option(help="text, jsonl or parquet; default: Python's own texts")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="tokenizer.json, .model or folder; default: train one")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="of a trained tokenizer; default 4096")] = None,
    max_megabytes: Annotated[float | None, typer.Option(help="of text to read")] = None,
    validation_fraction: Annotated[float, typer.Option(help="of the documents, held out whole")] = 0.02,
    overwrite: Annotated[bool, typer.Option(help="replace another dataset in that folder")] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn text into token files for training."""
    from kit.data import build_dataset

    limit: dict[str, Any] = {} if max_megabytes is None else {"max_bytes": int(max_megabytes * 1e6)}
    dataset = build_dataset(
        out,
        sources=source,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        validation_fraction=validation_fraction,
        overwrite=overwrite,
        progress=not as_json,
        **limit,
    )
    if as_json:
        print(json.dumps(dataset.info.to_dict()))
    else:
        console().print(dataset)
