"""The command `data build`, which builds token files from text."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.interpreter import module_command
from cluster.job import JobSpec
from cluster.logs import end_reason, log_tail
from cluster.record import counted
from cluster.site import Site
from cluster.slurm import submit_array
from kit.cli.options import (
    AS_JSON,
    OverwriteOption,
    names_table,
    next_step,
    note,
    print_result,
)
from kit.config.spec import ModelSpec
from kit.errors import ConfigError

app = typer.Typer()
ALL_PARTS = "When all parts are built, train on them:"
data_app = typer.Typer(no_args_is_help=True)
app.add_typer(data_app, name="data", help="Build token files with `kit data build`.")


@data_app.command("build")
def data_build(
    out: Annotated[Path, typer.Argument(help="Output folder.", metavar="FOLDER")],
    source: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text to read: .txt (one document a file, or see --separator), JSON lines or"
            " arrays, .parquet, .arrow, or a folder of them; text and JSON also compressed (.gz,"
            " .zst, .bz2, .xz). Can be repeated. Default: the language reference and"
            " the standard library of this Python installation, up to 24 MB."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Tokenizer: a tokenizer.json, a SentencePiece .model, or a folder"
            " with one. Default: train one on the text."
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Vocabulary size of the tokenizer that is trained. Default: 4096."),
    ] = None,
    max_megabytes: Annotated[
        float | None, typer.Option(help="Read at most this much text, in MB. Default: all of it.")
    ] = None,
    validation_fraction: Annotated[
        float,
        typer.Option(
            help="Fraction of the text to hold out for validation, in whole documents. If one"
            " document is larger than this fraction, only its end is held out."
        ),
    ] = 0.02,
    text_key: Annotated[
        str,
        typer.Option(
            help="Key of a JSON object, or column of a table, that holds the text. A dot"
            " separates nested keys: meta.text."
        ),
    ] = "text",
    separator: Annotated[
        str | None,
        typer.Option(
            help="Text between the documents of a .txt file: '<|endoftext|>', or '\\n\\n' for"
            " blank lines (\\n is a line end, \\t a tab). Default: a file is one document."
            " A file above 16 MiB is split into documents of about 1 MiB.",
        ),
    ] = None,
    skip_corrupt: Annotated[
        bool,
        typer.Option(
            "--skip-corrupt",
            help="Skip documents that cannot be read, and list them in dataset.json. Default:"
            " stop with an error at the first one.",
        ),
    ] = False,
    allow_unread: Annotated[
        bool,
        typer.Option(
            "--allow-unread",
            help="Build although much of a folder is not read. Default: stop and list the unread"
            " files, such as files of other types, if they hold more bytes than the files that are"
            " read, or if one is a Git LFS pointer or a broken link.",
        ),
    ] = False,
    overwrite: OverwriteOption = False,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Build only part I of N: file I, file I + N and so on. With --site, all/N"
            " builds all parts, each in one Slurm job.",
        ),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            help="With --part all/N: .toml file of the cluster on which Slurm jobs build the"
            " parts. Default: this machine builds them."
        ),
    ] = None,
) -> None:
    """Build token files for training from text. The build uses all cores of this machine (`taskset`
    limits them). With --site and --part all/N, each part is built on a Slurm node.
    """
    from kit.data.build import build_dataset, unbuilt_parts

    number, count = _part(part, site)
    if max_megabytes is not None and not 0 < max_megabytes < 1e12:
        raise ConfigError(f"--max-megabytes {max_megabytes:g}: not allowed. Give a number above 0.")
    given: dict[str, Any] = {
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "validation_fraction": validation_fraction,
        "text_key": text_key,
    }
    max_bytes = None if max_megabytes is None else int(max_megabytes * 1e6)
    arguments = {
        **given,
        "sources": source,
        "max_bytes": max_bytes,
        "seed": 1234,
        "skip_corrupt": skip_corrupt,
        "separator": _unescaped(separator),
        "allow_unread": allow_unread,
        "overwrite": overwrite,
    }
    if site is None:
        part_numbers = (number, count) if part else None
        dataset = build_dataset(out, progress=not AS_JSON.get(), part=part_numbers, **arguments)
        print_result(dataset.info.to_dict(), names_table(str(dataset.directory), dataset.facts()))
        text = "Train the demo model on it:"
        words = ["launch", "runs/first", "--data", str(out)]
        if part:
            text = ALL_PARTS
            words[-1] = str(out / "part_*")
        if dataset.vocab_size > ModelSpec.preset("demo").vocab_size:
            words += ["--set", f"spec.vocab_size={dataset.vocab_size}"]
        next_step(text, *words)
        return
    given["max_megabytes"] = max_megabytes
    given["separator"] = separator
    words = [f"--source={file}" for file in source or ()]
    for key, value in given.items():
        if value is not None:
            words.append(f"--{key.replace('_', '-')}={value}")
    if skip_corrupt:
        words.append("--skip-corrupt")
    if overwrite:
        words.append("--overwrite")
    if allow_unread:
        words.append("--allow-unread")
    report = _submit(out, count, site, words, unbuilt_parts(out, count, **arguments))
    print_result({"told": report}, report)
    next_step(ALL_PARTS, "launch", "runs/first", "--data", out / "part_*")


def _unescaped(separator: str | None) -> str | None:
    r"""Returns the separator of documents with real line ends and tabs in place of the escapes
    `\n`, `\r` and `\t`, which are easier to type in a shell.
    """
    if separator is None:
        return None
    if not separator:
        raise ConfigError("--separator: is empty. Give the text between documents.")
    characters = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}
    return re.sub(r"\\[ntr\\]", lambda found: characters[found[0]], separator)


def _part(word: str | None, site: str | None) -> tuple[int, int]:
    """Returns (I, N) of the option `--part I/N`: number of the part, and number of parts. For
    `all/N`, I is 0. If the option is not given, both are 0.

    Raises:
        ConfigError: The option has another form, all/N is given without --site, or --site is given
            without all/N.
    """
    if not word and not site:
        return 0, 0
    found = re.fullmatch(r"(all|\d+)/([1-9]\d*)", word or "")
    if found is None or (found[1] == "all") != bool(site):
        what = f"--part: {word!r} is not allowed"
        raise ConfigError(f"{what}. Give I/N, such as 3/12, or all/N with --site.")
    number = 0 if site else int(found[1])
    return number, int(found[2])


def _submit(out: Path, count: int, name: str, words: list[str], parts: list[int]) -> str:
    """Submits a Slurm job array that builds the parts with the numbers `parts` of a dataset of
    `count` parts. Each part is built on one node. Returns a sentence for the user about the
    submission.
    """
    site = Site.load(name)
    if site.scheduler != "slurm" or site.login is not None:
        raise ConfigError(
            f"--site {name}: parts are built on Slurm, by this command on a login node of its own. "
            f"Elsewhere build them one by one: --part I/{count}."
        )
    if not parts:
        return f"All {counted(count, 'part')} are in {out}."
    job = JobSpec(
        name=out.absolute().name,
        run_dir=str(out),
        argv=module_command("kit", "data", "build", str(out), *words, "--part"),
        num_processes=site.devices_per_node,
    )
    for number in parts:
        log = out / "logs" / f"task-{number}.log"
        if said := end_reason(log_tail(log)):
            note(f"Part {number} was not built by an earlier job. {log} ends with: {said}")
    array = submit_array(job, site, parts, count)
    return (
        f"{counted(len(parts), 'part')} of {count} sent as job {array}; logs in {out / 'logs'}. "
        f"Give this again when it has left the queue: it sends what is still lacking."
    )
