"""Writes the tables of `docs/` that repeat facts of the code: `python -m tests.docs`.

A table is between two comments: `<!-- site cluster.site.Device -->` and `<!-- /site -->`. The first
word is the kind of the table, a key of TABLES. The rest of the comment is its argument.
"""

import dataclasses
import json
import pkgutil
import re
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.record import Record
from cluster.scheduler import Broadcast, Kubernetes, Slurm
from cluster.site import SITES, Device, Fact, RemotePaths, Site
from kit.run.columns import COLUMN_MEANINGS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MARK = re.compile(r"(<!-- (\w+) ?([\w.]*) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
"""Matches a generated table with the HTML comments before and after it."""
FIRST_SITES = ("frontier", "perlmutter", "lumi", "trn1.32xlarge", "eks-trn1")
"""Names of the site files that are searched first for an example value of a field. The other site
files that the kit contains follow."""
LONGEST_EXAMPLE = 150
"""Largest number of characters of an example that comes from a packaged site."""
TYPES = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "`true` or `false`",
    Fact: "number with source",
}
"""Names of types in the tables, for readers who know TOML."""
EXAMPLES: dict[type[Record], dict[str, Any]] = {
    Site: {
        "base": "frontier",
        "login": "mycluster",
        "cores_per_node": {"value": 64, "source": "user guide"},
        "engine": "deepspeed",
    },
    Device: {
        "peak_flops_per_s": {"bf16": {"value": 989e12, "source": "data sheet, dense"}},
        "matmul_flops_per_s": {"bf16": {"value": 700e12, "source": "kit bench on one node"}},
    },
    Broadcast: {"archive": "/project/abc123/kit-env.tar"},
    Fact: {"value": 1.6e12, "source": "data sheet of the device", "error": 0.05},
    RemotePaths: {
        "python": "/project/abc123/kit-env/bin/python",
        "folder": "/scratch/abc123/runs",
        "source": "/project/abc123/pretraining-notebook-kit",
        "sync": True,
    },
    Slurm: {
        "account": "abc123",
        "partition": "gpu",
        "qos": "regular",
        "cpu_bind": "cores",
        "sbatch_options": ["--exclusive"],
        "srun_options": ["--container-image=/project/image.sqsh"],
        "modules": ["cuda"],
        "setup": ["ulimit -n 65536"],
        "task_setup": ["export MIOPEN_USER_DB_PATH=/tmp/miopen-$SLURM_LOCALID"],
        "container": ["apptainer", "exec", "--nv", "-B", "/project", "/project/image.sif"],
        "environment": {"NCCL_IB_HCA": "mlx5"},
        "profiles": {"debug": {"NCCL_DEBUG": "INFO"}},
        "master_port": 29500,
    },
    Kubernetes: {
        "image": "registry/kit:1",
        "claim": "shared-claim",
        "queue": "team-queue",
        "max_restarts": 10,
        "environment": {"FI_PROVIDER": "efa"},
        "profiles": {"debug": {"FI_LOG_LEVEL": "warn"}},
        "secrets": {"WANDB_API_KEY": "wandb/key"},
        "resources": {"aws.amazon.com/neuron": "16", "cpu": "100"},
        "setup": ["ulimit -n 65536"],
    },
}
"""Examples of fields that no packaged site sets, or whose value in the packaged sites is long or
only a placeholder."""


def site_table(name: str) -> str:
    """Returns the table of the fields of a record in a site file: field, type, default, meaning and
    example. `name` is the full name of the record's class.
    """
    record = pkgutil.resolve_name(name)
    lines = ["| field | type | default | meaning | example |", "|---|---|---|---|---|"]
    for field in dataclasses.fields(record):
        example = example_of(record, field.name)
        shown = "" if example is None else f"`{field.name} = {toml(example)}`"
        cells = (f"`{field.name}`", type_name(record, field), default_of(field), doc_of(field))
        lines.append(table_line(*cells, shown))
    return "\n".join(lines)


def record_table(name: str) -> str:
    """Returns the table of the fields of a record in a file of a run directory."""
    record = pkgutil.resolve_name(name)
    lines = ["| key | type | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(record):
        lines.append(table_line(f"`{field.name}`", type_name(record, field), doc_of(field)))
    return "\n".join(lines)


def columns_table(_: str) -> str:
    """Returns the table of the columns of metrics.jsonl."""
    lines = ["| column | meaning |", "|---|---|"]
    lines += [table_line(f"`{name}`", text) for name, text in COLUMN_MEANINGS.items()]
    return "\n".join(lines)


TABLES = {
    "columns": columns_table,
    "record": record_table,
    "site": site_table,
}
"""Function that makes a table, by the first word of the comment above it."""


def refreshed(text: str) -> str:
    """Returns the text of a page with all its tables made again."""

    def made(found: re.Match[str]) -> str:
        begin, kind, argument, end = found.groups()
        return f"{begin}{TABLES[kind](argument)}\n{end}" if kind in TABLES else found[0]

    return MARK.sub(made, text)


def table_line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def doc_of(field: dataclasses.Field) -> str:
    """Returns the description of a field with a capital letter at its beginning."""
    text = field.metadata["doc"].replace("<", "&lt;").replace("*", r"\*")
    return text[:1].upper() + text[1:]


def default_of(field: dataclasses.Field) -> str:
    """Returns the default of a field as TOML, "required", or an empty text if the default is None
    or empty.
    """
    if field.default is not dataclasses.MISSING:
        return f"`{toml(field.default)}`" if field.default not in (None, ()) else ""
    return "" if field.default_factory is not dataclasses.MISSING else "required"


def type_name(record: type[Record], field: dataclasses.Field) -> str:
    """Returns the type of a field in words that do not need Python."""
    words = _type_words(typing.get_type_hints(record)[field.name])
    # The record `Compilation` is a table of both schedulers, and PLACES has only that of Slurm.
    return words.replace("[slurm.", "[kubernetes.") if record is Kubernetes else words


def _type_words(hint: Any) -> str:
    if hint in TYPES:
        return TYPES[hint]
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return ", ".join(f"`{toml(value)}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_words(each) for each in arguments if each is not types.NoneType)
    if origin is tuple:
        return f"list of: {_type_words(arguments[0])}"
    if origin is dict:
        return f"table of: {_type_words(arguments[1])}"
    if issubclass(hint, str):
        return "text"
    if not issubclass(hint, Record):
        return hint.__name__
    return f"table `[{'.'.join(PLACES[hint.__name__])}]`" if hint.__name__ in PLACES else "object"


def example_of(record: type[Record], name: str) -> Any:
    """Returns an example of a field: from EXAMPLES, or from the first packaged site that sets it to
    a short value. Returns None if the field is a table with a section of its own, or if there is
    no example.
    """
    if name in EXAMPLES.get(record, {}):
        return EXAMPLES[record][name]
    if "table `[" in _type_words(typing.get_type_hints(record)[name]):
        return None
    for table in _tables_of(record):
        value = table.get(name)
        if value not in (None, "EDIT", [], {}) and len(toml(value)) <= LONGEST_EXAMPLE:
            return value
    return None


def _tables_of(record: type[Record]) -> Iterator[dict[str, Any]]:
    """Yields the tables of the packaged site files that describe a record, as they are in TOML."""
    place = PLACES[record.__name__]
    others = [name for name in Site.names() if name not in FIRST_SITES]
    for name in (*FIRST_SITES, *others):
        found: list[Any] = [tomllib.loads((SITES / f"{name}.toml").read_text(encoding="utf-8"))]
        for key in place:
            found = [each[key] for each in found if key in each]
            found = [
                part for each in found for part in (each if isinstance(each, list) else [each])
            ]
        yield from found


PLACES: dict[str, tuple[str, ...]] = {
    "Site": (),
    "Device": ("device",),
    "Fact": ("device", "memory_bytes"),
    "Links": ("links",),
    "IntraNodeLink": ("links", "intra_node"),
    "Storage": ("storage",),
    "RemotePaths": ("there",),
    "Slurm": ("slurm",),
    "Walltime": ("slurm", "walltime"),
    "Broadcast": ("slurm", "broadcast"),
    "Compilation": ("slurm", "compilation"),
    "Kubernetes": ("kubernetes",),
}
"""Keys that lead from a site file to the table of a record, by the record's name."""


def toml(value: Any) -> str:
    """Returns a value as TOML in one line."""
    if isinstance(value, dict):
        parts = (f"{_key(name)} = {toml(part)}" for name, part in value.items())
        return "{ " + ", ".join(parts) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float) and abs(value) >= 1e6:
        return f"{value:g}".replace("e+", "e")
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name) else json.dumps(name)


def main() -> None:
    """Writes all pages whose tables have changed."""
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = refreshed(text)
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
