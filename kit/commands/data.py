"""Commands on text: data build."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from kit.commands.options import JsonOption, tell
from kit.errors import ConfigError

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
    text_key: Annotated[str, typer.Option(help="key of a .jsonl object or column of a .parquet file")] = "text",
    skip_corrupt: Annotated[
        bool, typer.Option("--skip-corrupt", help="leave out what cannot be read, named in dataset.json")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace another dataset in that folder")] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn text into token files for training."""
    from kit.data import build_dataset

    if max_megabytes is not None and not 0 < max_megabytes < 1e12:
        raise ConfigError(f"--max-megabytes {max_megabytes:g}: not allowed. Give a number above 0.")
    limit: dict[str, Any] = {} if max_megabytes is None else {"max_bytes": int(max_megabytes * 1e6)}
    dataset = build_dataset(
        out,
        sources=source,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        validation_fraction=validation_fraction,
        text_key=text_key,
        skip_corrupt=skip_corrupt,
        overwrite=overwrite,
        progress=not as_json,
        **limit,
    )
    tell(dataset.info.to_dict(), as_json, Text(repr(dataset)))
