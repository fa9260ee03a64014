"""Tokenizers in Hugging Face folders: written so that transformers gives the kit's own ids, and
held against them.

A wrong id is a wrong word to the model and raises nothing, so each folder's tokenizer is loaded as
its user would load it and compared with the kit's on texts that tokenizers are known to disagree
about.
"""

import json
from pathlib import Path
from typing import Any

from kit.convert.sentencepiece_model import piece_texts, to_tokenizer_json
from kit.data.tokenizer import SentencePieceTokenizer, Tokenizer
from kit.errors import DataError, MissingPackageError

HARD_TEXTS = (
    "¦ ¦  ¦\n¦\n\n¦\t¦\r\n¦\x00¦Hello¦Hello world¦Hello  two   spaces¦ one before¦   three"
    " before¦after ¦after   ¦a\nb¦a\n\n b\n¦tab\tand\r\nlines  ¦x  \n  y¦nul\x00inside¦def f(x):\n "
    "   return x  # 1e-5\n¦\tif a:\n\t\tb\n¦12 345"
    " 6789¦2024-11-22T08:10¦3.14159¦https://a.b/c?d=e&f¦it's \\n¦[INST] hi"
    " [/INST]¦<|im_start|>user\n¦é naïve Straße¦e\u0301 in two parts¦Vie\u0323\u0302t¦ﬁ ½ Ⅷ ™¦Ａ"
    " ｗｉｄｅ¦\u00a0no\u00a0break¦wide\u3000space¦\ufeffmark¦zero\u200bwidth¦日本語のテキスト¦中文"
    " 字符。¦한국어 단어¦ไทย עברית العربية¦Привет, мир¦٣٤¦🙂¦a🙂b¦👩\u200d👩\u200d👧"
    " family¦🇫🇷¦\U0010fffd¦\ufffd¦▁¦a▁b¦<s>¦</s>¦x </s> y¦<unk>¦<0x0A>¦<|endoftext|>"
).split("¦") + [
    f"Title\n{character * length}x" for character in " *-=.a" for length in (17, 40, 61, 79)
]
"""Spaces at the ends, tabs, line ends, NUL, code, digits, marks of their own, wide and joined
characters, scripts, emoji, text that spells special tokens or bytes, and runs of a character; the
first is empty."""


def write_tokenizer(folder: Path, tokenizer: Tokenizer, sequence_length: int) -> None:
    """Writes a tokenizer for transformers into a folder that has a `config.json`: nothing is added
    to a text.

    Text that spells a special token is ordinary text, as in training; `split_special_tokens=False`
    in a call of transformers takes it for the token. A sentencepiece model is written as
    `tokenizer.json` too.

    Raises:
        DataError: transformers gives other ids for some text.
        MissingPackageError: transformers or protobuf is not installed.
    """
    import tokenizers

    is_sentencepiece = isinstance(tokenizer, SentencePieceTokenizer)
    if is_sentencepiece:
        (folder / tokenizer.file_name).write_bytes(tokenizer.data)
    data = to_tokenizer_json(tokenizer.data) if is_sentencepiece else _bare(tokenizer.data)
    (folder / "tokenizer.json").write_bytes(data)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # what reads tokenizer.json as it is
        "eos_token": tokenizers.Tokenizer.from_str(data.decode()).id_to_token(tokenizer.eos_id),
        "split_special_tokens": True,
        "model_max_length": sequence_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    _compare(
        folder, tokenizer, [*HARD_TEXTS, *(piece_texts(tokenizer.data) if is_sentencepiece else [])]
    )


def _bare(data: bytes) -> bytes:
    """Returns a tokenizer.json that adds, cuts and pads nothing, as the kit reads it."""
    table = json.loads(data)
    extra = [
        key for key in ("truncation", "padding", "post_processor") if table.get(key) is not None
    ]
    return (
        json.dumps({**table, **dict.fromkeys(extra)}, ensure_ascii=False).encode()
        if extra
        else data
    )


def _compare(folder: Path, tokenizer: Tokenizer, texts: list[str]) -> None:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingPackageError(
            "transformers", "eval", "Comparing an exported tokenizer"
        ) from error
    # Not verbose: that some of these texts are long for the model is meant.
    theirs: Any = AutoTokenizer.from_pretrained(folder)(texts, verbose=False)["input_ids"]
    differ = [
        found
        for found in zip(texts, theirs, tokenizer.encode_batch(texts), strict=True)
        if found[1] != found[2]
    ]
    if differ:
        text, found, own = differ[0]
        raise DataError(
            f"tokenizer: transformers reads {text[:60]!r} as {found[:12]}, but the model was"
            f" trained on {own[:12]}; {len(differ)} of {len(texts):,} texts differ, so nothing was"
            " written. Export the model without it in Python, by"
            " kit.convert.hugging_face.export_run, and tokenise with"
            f" {tokenizer.file_name} itself."
        )
