"""Typed records: frozen dataclasses with a strict JSON round trip.

The descriptions of a run in its directory (spec, plan, site, job, recipe, state) are records. When
a record is read, every key and every value is checked against the annotations. An error names the
dotted path of the wrong key or value. Standard library only.
"""

import dataclasses
import difflib
import enum
import functools
import json
import os
import re
import shlex
import types
import typing
from pathlib import Path
from typing import Any, Self

from cluster.field_docs import WithFields, html_table
from cluster.files import NO_RECORD, read_small, write_atomic

LARGEST_FLOAT = 2**1023
"""Whole numbers with an absolute value below this limit can be converted to float without an
overflow error."""
BITS = 63
"""Maximum number of bits of a whole number in a record. No field needs more, and the 64-bit
integers of NumPy have no more."""


class ConfigError(ValueError):
    """A value from the user is wrong. The message names the field, the value, the allowed values
    and what to do next.
    """


class MissingError(ConfigError):
    """Required fields are missing. `names` are the dotted paths of these fields."""

    def __init__(self, names: list[str], advice: str = "") -> None:
        super().__init__(f"{', '.join(names)}: missing. Add a value; there is no default.{advice}")
        self.names = names


def counted(number: int, one: str, many: str = "") -> str:
    """Returns a number with its noun, such as "1 rank" or "2 ranks". `one` is the singular. `many`
    is the plural, by default the singular with an s.
    """
    word = one if number == 1 else many or f"{one}s"
    return f"{number:,} {word}"


def kit_command(*words: str | os.PathLike[str]) -> str:
    """Returns a command of the kit for a message that advises it. The words are quoted for the
    shell, as in `kit watch 'runs/a b'`.
    """
    return shlex.join(["kit", *(os.fspath(word) for word in words)])


def config_folder() -> Path:
    """Returns the folder of this user's configuration of the kit. The folder may be missing."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "kit"


Check = typing.Callable[[Any, str], object]
"""Function that takes a value, which is never None, and the dotted path of its field. It raises
ConfigError if the field may not have this value."""


def field_doc(text: str, *checks: Check, **kwargs: Any) -> Any:
    """Returns a dataclass field with the text of its meaning and with checks of its values. `help`
    of the record and the tables of notebooks show the meaning.
    """
    return dataclasses.field(metadata={"doc": text, "checks": checks}, **kwargs)


def must(hold: typing.Callable[[Any], object], advice: str) -> Check:
    """Returns a check that raises ConfigError unless `hold` is true for a value, or for each item
    of a tuple. The error message ends with `advice`.
    """

    def check(value: Any, path: str) -> None:
        values = value if isinstance(value, tuple) else (value,)
        for each in values:
            if not hold(each):
                raise ConfigError(f"{path}: {each!r} is not allowed. {advice}")

    return check


from_one = must(lambda number: number >= 1, "Give a number from 1.")
one_line = must(
    lambda text: text.strip() and text.isprintable(), "Give one line of printable characters."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """Base class of all records: frozen dataclasses with keyword-only fields that can be written as
    JSON and read back.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__doc__ = WithFields(cls.__dict__.get("__doc__"))  # pyright: ignore[reportAttributeAccessIssue]

    def __new__(cls, **given: Any) -> Self:
        """Raises an error that names the unknown or the missing fields, if there are any."""
        _check_known(cls, given, path_name(cls))
        if missing := [name for name in _required(cls) if name not in given]:
            advice = f" Write {missing[0]}=...; help({cls.__name__}) says what each field means."
            raise MissingError([f"{path_name(cls)}.{name}" for name in missing], advice)
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        """Returns the arguments with which `copy` and `pickle` call `__new__`."""
        return (), vars(self)

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for field in dataclasses.fields(self):
            path = f"{path_name(type(self))}.{field.name}"
            value = _convert(getattr(self, field.name), hints[field.name], path)
            object.__setattr__(self, field.name, value)
            if value is None:
                continue
            for check in field.metadata.get("checks", ()):
                check(value, path)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain dicts, lists, numbers and strings. Tuples become lists."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed.

        Raises:
            ConfigError: A name is not a field, or a value has the wrong type.
        """
        return type(self).from_dict(
            {**self.to_dict(), **{k: _plain(v) for k, v in changes.items()}}
        )

    @classmethod
    def unknown_key_advice(cls, key: str, value: Any) -> str:
        """Returns advice on a key that is not a field of this record, or an empty text."""
        return ""

    @classmethod
    def from_dict(cls, data: Any, path: str = "") -> Self:
        """Returns the record that `data` describes.

        Raises:
            ConfigError: A key is unknown, keys are missing, or a value has the wrong type. The
                message names each by its dotted path.
        """
        path = path or path_name(cls)
        if not isinstance(data, dict):
            raise ConfigError(
                f"{path}: expected a table of keys, got {type(data).__name__}"
                f" {shortened(repr(data), 200)}."
            )
        _check_known(cls, data, path)
        hints = _hints(cls)
        required = _required(cls)
        values = dict(data)
        missing = [f"{path}.{name}" for name in required if name not in data]
        # The error about missing keys also names the missing keys of nested records. Other values
        # are converted only once, by `cls(**values)` below.
        for name, value in data.items():
            try:
                if type(value) not in _as_they_are(hints[name]):
                    values[name] = _convert(value, hints[name], f"{path}.{name}")
            except MissingError as error:
                missing += error.names
        if missing:
            raise MissingError(missing)
        try:
            return cls(**values)
        except ConfigError as error:  # The path in the error begins with the class's name.
            raise ConfigError(
                re.sub(rf"^{path_name(cls)}\b", lambda _: path, str(error))
            ) from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Returns the record that a JSON text describes.

        Raises:
            ConfigError: The text is not valid JSON, or does not describe this record.
        """
        return _from_json(cls, text)

    @classmethod
    def read(cls, file: Path) -> Self:
        """Returns the record stored in a JSON file.

        Raises:
            ConfigError: The file is missing, cannot be read, is not a plain file, or does not
                describe this record.
        """
        try:
            text = read_small(Path(file))
        except OSError as error:
            raise ConfigError(
                f"{file}: {error.strerror}; expected a {cls.__name__} as JSON."
            ) from error
        try:
            return cls.from_json(text)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error

    @classmethod
    def read_or_none(cls, file: Path) -> Self | None:
        """Returns the record in a JSON file. Unknown keys are ignored. Returns None if the file
        cannot be read, or if it contains no record of this class.
        """
        try:
            return cls.parsed(read_small(file))
        except OSError:
            return None

    @classmethod
    def read_present(cls, file: Path) -> Self | None:
        """Returns the record in a JSON file. Unknown keys are ignored. Returns None if the file is
        missing or contains no record of this class.

        A caller that will write the record again must use this method. `read_or_none` also returns
        None for a file that temporarily cannot be read, and the content of the file would be lost.

        Raises:
            OSError: The file system fails.
        """
        try:
            return cls.parsed(read_small(file))
        except OSError as error:
            if error.errno not in NO_RECORD:
                raise
            return None

    @classmethod
    def parsed(cls, text: bytes) -> Self | None:
        """Returns the record that a JSON text describes. Ignores unknown keys. Returns None if the
        text is incomplete (a torn write), or does not describe a record of this class.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            return cls.from_dict({k: v for k, v in json.loads(text).items() if k in known})
        except (ValueError, AttributeError, RecursionError):
            return None

    def write(self, file: Path) -> None:
        """Writes the record as JSON, by atomic rename."""
        write_atomic(Path(file), self.to_json())

    def _repr_html_(self) -> str:
        rows = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return html_table(type(self).__name__, rows, type(self))


@functools.lru_cache(64)
def _from_json(cls: type[Record], text: str | bytes) -> Any:
    """Returns the record that a text describes. Equal texts share one cached record, since many of
    a thousand runs have an equal site, model or plan.
    """
    try:
        data = json.loads(text)
    # The text is not JSON, contains a number of thousands of digits, or is nested too deeply.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path_name(cls)}: not valid JSON ({error}).") from error
    return cls.from_dict(data)


def _check_known(cls: type[Record], given: dict[str, Any], path: str) -> None:
    """Raises ConfigError for a key that is not a field of the record."""
    hints = _hints(cls)
    for key, value in given.items():
        if key not in hints:
            advice = cls.unknown_key_advice(str(key), value) or suggestion(str(key), hints)
            raise ConfigError(f"{path}.{key}: unknown key. {advice}")


@functools.cache
def _required(cls: type[Record]) -> list[str]:
    """Returns the names of the fields of a record that have no default."""
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    # The result is cached, because heartbeats are records and a job writes one heartbeat per
    # second.
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def _as_they_are(hint: Any) -> frozenset[type]:
    """Returns the types whose values fit an annotation without a check or a conversion. This fast
    path covers most values of most records.
    """
    if hint in (bool, int, float, str, type(None)):
        return frozenset({hint})
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return frozenset().union(*map(_as_they_are, typing.get_args(hint)))
    return frozenset()


def path_name(cls: type) -> str:
    """Returns the first part of the dotted paths of a record class, such as `spec` for `ModelSpec`,
    `job` for `JobSpec`, and `there` for `RemotePaths`, which is the table `[there]` of a site file.
    """
    name = cls.__name__
    names = {"ModelSpec": "spec", "JobSpec": "job", "RemotePaths": "there"}
    return names.get(name, name.lower())


def suggestion(name: str, allowed: typing.Iterable[str]) -> str:
    """Returns the end of an error message about an unknown name: the closest allowed name, then all
    allowed names.
    """
    names = sorted(allowed)
    return f"{did_you_mean(name, names)}Allowed: {', '.join(names)}."


def did_you_mean(name: str, allowed: typing.Iterable[str]) -> str:
    """Returns 'Did you mean NAME? ' with the closest allowed name, or an empty text if no name is
    close.

    A name with different numbers does not count as close. `llama3-70b` is not a misspelling of
    `llama3-8b`, and `a100` is not a misspelling of `h100`.
    """
    close = difflib.get_close_matches(name, allowed, n=1)
    if not close or _numbers(close[0]) != _numbers(name):
        return ""
    return f"Did you mean {close[0]!r}? "


def _numbers(name: str) -> list[str]:
    """Returns the numbers in a name, sorted. A number includes the letter before it if this letter
    stands alone, as in `a100`.
    """
    return sorted("".join(re.findall(r"(?:(?<![a-z0-9])[a-z])?\d+", name.lower())))


def check_file_name(name: str, path: str) -> None:
    """Raises ConfigError unless `name` is the plain name of a file in the folder of the record. The
    record may come from an untrusted source.
    """
    if "\0" in name or name in ("", "..") or Path(name).name != name:
        raise ConfigError(
            f"{path}: {name!r} is not allowed. Give the plain name of a file in the same folder."
        )


def check_file_below(name: str, path: str) -> None:
    """Raises ConfigError unless `name` is the relative path of a file in the folder of the record
    or in a folder below it.
    """
    for part in name.split("/"):
        check_file_name(part, path)


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _convert(value: Any, hint: Any, path: str) -> Any:  # noqa: C901 - one flat case per kind of annotation
    """Returns `value` converted to the annotated type `hint`. Raises ConfigError, which names
    `path`, if the value does not fit.
    """
    size = value.bit_length() if isinstance(value, int) else 0
    is_large = size > BITS
    if hint is Any or (type(value) in _as_they_are(hint) and not is_large):
        return value
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    is_class = isinstance(hint, type)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(value, next(arg for arg in args if arg is not type(None)), path)
    if origin is typing.Literal or (is_class and issubclass(hint, enum.Enum)):
        allowed = args or [member.value for member in hint]
        if value not in allowed:
            told = ", ".join(map(repr, allowed))
            raise ConfigError(f"{path}: {value!r} is not allowed. Allowed: {told}.")
        return value if args else hint(value)
    if is_class and issubclass(hint, Record):
        return value if isinstance(value, hint) else hint.from_dict(value, path)
    if origin is tuple and isinstance(value, tuple | list):
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(kinds) == len(value):
            pairs = enumerate(zip(value, kinds, strict=True))
            return tuple(_convert(item, kind, f"{path}[{i}]") for i, (item, kind) in pairs)
    if origin is dict and isinstance(value, dict):
        return {key: _convert(item, args[1], f"{path}.{key}") for key, item in value.items()}
    if hint is float and type(value) is int and abs(value) < LARGEST_FLOAT:
        return float(value)
    # Subclasses of `hint`, such as NumPy's float64 for float, are accepted. True is an int in
    # Python, but not in a record.
    if is_class and isinstance(value, hint) and type(value) is not bool and not is_large:
        return value
    expected = hint.__name__ if is_class else str(hint)
    limit = f" below 2^{BITS}" if is_large and hint is int else ""
    # Python raises an error when it formats an int of thousands of digits.
    got = f"of {size} bits" if is_large else shortened(repr(value), 200)
    raise ConfigError(f"{path}: expected {expected}{limit}, got {type(value).__name__} {got}.")


def shortened(text: str, length: int) -> str:
    """Returns a text of at most `length` characters unchanged. A longer text is cut after at most
    `length` characters, between two words if possible, and ends with "…".
    """
    return text if len(text) <= length else f"{text[:length].rsplit(maxsplit=1)[0]} …"
