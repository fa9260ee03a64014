"""Reads tokenizers of the libraries `tokenizers` and `sentencepiece` behind one interface, and
trains a byte-level BPE tokenizer.

Each tokenizer is one file whose bytes are stored unchanged. So a dataset can store its tokenizer
and needs no other files.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cluster.files import file_size, open_for_reading, read_small
from kit.errors import DataError, needed

TOKENIZER_BYTES = 256 << 20
"""Largest size of a tokenizer file in bytes. The tokenizer file of Gemma 3 has 33 MB."""
END_OF_TEXT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 4096
"""Default number of entries of a tokenizer that is trained by a dataset build."""
SMALLEST_VOCAB_SIZE = 257
"""Entries that every trained tokenizer has: 256 bytes and the end-of-text token."""
KNOWN_END_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "<|im_end|>")
"""Names of end-of-text tokens, tried in this order if a tokenizer does not name its own."""

HUGGING_FACE_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
"""Patterns of the names of tokenizer files in a Hugging Face repository. Only these files are
downloaded."""


class Tokenizer:
    """Converts text to token ids and back.

    `eos_id` is the token that ends every document. Token ids are below `vocab_size`. `data` is the
    content of the tokenizer's file, which is stored under the name `file_name`.
    """

    file_name: str

    def __init__(self, data: bytes, vocab_size: int, eos_id: int) -> None:
        self.data = data
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.vocab_size = vocab_size
        self.eos_id = eos_id

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without added special tokens.

        A text that spells a special token is encoded as ordinary text.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, without added special tokens. Uses all cores."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids. An incomplete character becomes U+FFFD."""
        raise NotImplementedError


class BytePairTokenizer(Tokenizer):
    """Tokenizer from the content of a `tokenizer.json` file of the `tokenizers` library."""

    file_name = "tokenizer.json"

    def __init__(
        self, data: bytes, eos_id: int | None = None, eos_token: str | None = None
    ) -> None:
        """Reads the content of a tokenizer.json.

        The end-of-text token is `eos_id`. If it is None, it is the token `eos_token`. If both are
        None, it is the first of KNOWN_END_TOKENS in the vocabulary.

        Raises:
            DataError: The content is not a tokenizer.json, or has no end-of-text token.
        """
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        except BaseException as error:  # The library raises Exception or panics.
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise DataError(
                f"{self.file_name}: not a file of the tokenizers library ({error})."
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Source code in a corpus can spell special tokens. They must not become special tokens.
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        eos_id = _find_eos(vocabulary, eos_token) if eos_id is None else eos_id
        super().__init__(data, max(vocabulary.values()) + 1, eos_id)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with _no_panic():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        with _no_panic():
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


@contextlib.contextmanager
def _no_panic() -> Iterator[None]:
    """Raises DataError for a panic of the tokenizers library within the block.

    A panic is a BaseException. One cause is a regular expression that needs too many steps on a
    text.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"tokenizer.json: the tokenizers library failed on a text ({str(error)[:200]}). A"
            " regular expression of the file may take too many steps. Give another tokenizer."
        ) from error


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer from the content of a sentencepiece `.model` file.

    The library sentencepiece itself reads the file, since conversions of such files by other
    libraries give other token ids on some texts.
    """

    file_name = "tokenizer.model"

    def __init__(self, data: bytes) -> None:
        with needed("sentencepiece", "eval", "Reading a sentencepiece .model"):
            import sentencepiece
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(data)
        except RuntimeError as error:
            raise DataError(f"{self.file_name}: not a sentencepiece model ({error}).") from error
        super().__init__(data, self._processor.vocab_size(), self._processor.eos_id())
        if self.eos_id < 0:
            raise DataError(
                f"{self.file_name}: this sentencepiece model has no end-of-sentence token; train"
                " one with it."
            )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # -1 means one thread per core. A dataset build with one process per core sets
        # TOKENIZERS_PARALLELISM to "false", a variable of the tokenizers library, so that each
        # process uses one thread.
        num_threads = -1
        if os.environ.get("TOKENIZERS_PARALLELISM") == "false":
            num_threads = 1
        return self._processor.encode(list(texts), num_threads=num_threads)

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(i) for i in ids])


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB_SIZE
) -> BytePairTokenizer:
    """Returns a byte-level BPE tokenizer with exactly `vocab_size` entries: `<|endoftext|>` (id 0),
    256 bytes, then merges.

    Decoding returns every text unchanged, since all bytes are in the vocabulary. Each digit is a
    separate token.

    Raises:
        DataError: `vocab_size` is below 257, or the texts yield fewer entries.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCAB_SIZE:
        raise DataError(
            f"vocab_size: {vocab_size} is not allowed. Give at least {SMALLEST_VOCAB_SIZE} (bytes"
            " and eos)."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise DataError(
            f"vocab_size: {vocab_size} entries asked, but the text yields only {found}. Ask fewer,"
            " or add text."
        )
    return BytePairTokenizer(tokenizer.to_str().encode(), eos_token=END_OF_TEXT)


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Returns the tokenizer in a tokenizer.json, a sentencepiece .model, a Hugging Face folder, or
    a hub repository.

    Raises:
        DataError: The tokenizer does not exist, cannot be read, or has no end-of-text token.
    """
    path = Path(source)
    if path.suffix in (".json", ".model") and not (path.is_file() or path.is_dir()):
        raise DataError(
            f"{path}: no such file. Give a tokenizer.json, a .model, a folder, or a hub name."
        )
    if path.is_dir():
        return _load_folder(path)
    if not path.is_file():
        return _load_folder(_download(str(source)))
    try:
        if path.suffix == ".model":
            return SentencePieceTokenizer(_content(path))
        return BytePairTokenizer(_content(path), eos_token=_configured_eos(path.parent))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def read_tokenizer(file: Path, eos_id: int) -> Tokenizer:
    """Returns the tokenizer that a dataset stores. `eos_id` is the end-of-text token with which the
    dataset was built.
    """
    data = _content(file)
    if file.suffix == ".model":
        return SentencePieceTokenizer(data)
    return BytePairTokenizer(data, eos_id)


def _content(file: Path) -> bytes:
    """Returns the content of a tokenizer file.

    Raises:
        DataError: The file is larger than TOKENIZER_BYTES, or is a pipe or a device, which may
            never end.
    """
    try:
        if file_size(file, follows=True) > TOKENIZER_BYTES:
            raise DataError(
                f"{file} is larger than {TOKENIZER_BYTES >> 20:,} MiB, the largest size of a"
                " tokenizer file. Give another file."
            )
        with open_for_reading(file, follows=True) as stream:
            return stream.read(TOKENIZER_BYTES)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise DataError(f"{file}: {error.strerror}. Give a plain file.") from error


def _load_folder(folder: Path) -> Tokenizer:
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file():
            return load_tokenizer(folder / name)
    with needed("transformers", "eval", f"Reading the tokenizer in {folder}"):
        from transformers import AutoTokenizer
    try:
        wrapper = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        data = wrapper.backend_tokenizer.to_str().encode()
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(
            f"{folder}: no tokenizer.json, no tokenizer.model, and transformers finds none. Give a"
            " tokenizer.json, a .model, or a folder with one."
        ) from error
    return BytePairTokenizer(data, eos_token=wrapper.eos_token)


def _download(name: str) -> Path:
    """Returns the folder with the tokenizer files of a hub repository, from the local cache or the
    network.

    Raises:
        DataError: The repository does not exist or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[*HUGGING_FACE_FILES, "config.json"]))
    except Exception as error:
        # An invalid name, a lost network and a missing repository raise unrelated exceptions.
        raise DataError(
            f"tokenizer {name!r}: no such file or folder here, and no such repository in reach"
            f" ({str(error).splitlines()[0]}). Give a tokenizer.json, a .model, a folder, or a hub"
            " name."
        ) from error


def _configured_eos(folder: Path) -> str | None:
    """Returns the end-of-text token that tokenizer_config.json or special_tokens_map.json in the
    folder states, or None.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            table = json.loads(read_small(file, follows=True))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{file}: cannot be read as JSON ({error}). Copy it again.") from error
        token = table.get("eos_token") if isinstance(table, dict) else None
        if isinstance(token, dict):
            return token["content"]
        if token is not None:
            return token
    return None


def _find_eos(vocabulary: dict[str, int], eos_token: str | None) -> int:
    tokens = KNOWN_END_TOKENS if eos_token is None else (eos_token,)
    for token in tokens:
        if token in vocabulary:
            return vocabulary[token]
    raise DataError(
        f"no end-of-text token: looked for {', '.join(tokens)}. "
        'Name it in a tokenizer_config.json beside the file: {"eos_token": "..."}.'
    )
