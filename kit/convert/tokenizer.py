"""Tokenizers in Hugging Face folders: written so that transformers gives the kit's own ids, and
held against them.

A wrong id is a wrong word to the model and raises nothing, so each folder's tokenizer is loaded as
its user would load it and compared with the kit's on texts that tokenizers are known to disagree
about.
"""

import json
from pathlib import Path
from typing import Any

from kit.data.tokenizer import SentencePieceTokenizer, Tokenizer
from kit.errors import DataError, needed

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
    with needed("transformers", "eval", "Comparing an exported tokenizer"):
        from transformers import AutoTokenizer
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


SPACE = "▁"
"""How sentencepiece writes a space."""
NEVER = 1000.0
"""Below the lowest score of a unigram model: such a piece loses against its letters one by one."""


def to_tokenizer_json(data: bytes) -> bytes:
    """Returns a tokenizer.json with the vocabulary, the ids and the rules of a sentencepiece model.

    What transformers itself makes of such a file (its LlamaTokenizer) adds no space before a text
    that begins with one, and joins pieces of equal score in the order of their ids; its
    SentencePieceBackend gives the ids and not the text back: a byte stays `<0x0A>`. Sources:
    sentencepiece_model.proto, normalizer.cc, bpe_model.cc and unigram_model.cc of
    github.com/google/sentencepiece; the library `tokenizers`. Three things it cannot express, so
    that the comparison of the written folder refuses them where they show: user-defined symbols in
    a model that puts a space before the text, ties of a unigram model (its scores are added in
    another precision), and marks that NFKC moves.

    Raises:
        DataError: the model is neither BPE nor unigram.
        MissingPackageError: protobuf is not installed.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers

    model = _read(data)
    tokenizer = Tokenizer(_model(model))
    tokenizer.normalizer = normalizers.Sequence(_steps(model.normalizer_spec))
    strip = [decoders.Strip(" ", left=1, right=0)] if model.normalizer_spec.add_dummy_prefix else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    added = [piece for piece in model.pieces if piece.type in (piece.CONTROL, piece.USER_DEFINED)]
    tokenizer.add_tokens(
        [AddedToken(p.piece, special=p.type == p.CONTROL, normalized=False) for p in added],
    )
    return tokenizer.to_str().encode()


def piece_texts(data: bytes) -> list[str]:
    """Returns each piece of a model as text, user-defined symbols also between words."""
    model = _read(data)
    symbols = [f"a{piece.piece} b" for piece in model.pieces if piece.type == piece.USER_DEFINED]
    return [piece.piece.replace(SPACE, " ") for piece in model.pieces] + symbols


def _read(data: bytes) -> Any:
    with needed("protobuf", "eval", "Writing a .model for transformers"):
        from sentencepiece import sentencepiece_model_pb2
    protocol: Any = sentencepiece_model_pb2  # its classes are made at import
    return protocol.ModelProto.FromString(data)


def _model(model: Any) -> Any:
    from tokenizers import models

    trainer = model.trainer_spec
    ids = {piece.piece: number for number, piece in enumerate(model.pieces)}
    normal = {piece.piece: piece.score for piece in model.pieces if piece.type == piece.NORMAL}
    unknown = next(piece.piece for piece in model.pieces if piece.type == piece.UNKNOWN)
    if trainer.model_type == trainer.BPE:
        rules = {"unk_token": unknown, "byte_fallback": trainer.byte_fallback, "fuse_unk": True}
        return models.BPE(ids, _merges(normal), **rules)
    if trainer.model_type == trainer.UNIGRAM:
        # Of what text never yields, such as `</s>`.
        lowest = min(piece.score for piece in model.pieces) - NEVER
        scored = [(piece, normal.get(piece, lowest)) for piece in ids]
        return models.Unigram(scored, ids[unknown], trainer.byte_fallback)
    raise DataError(
        f"tokenizer: a sentencepiece model of type {trainer.ModelType.Name(trainer.model_type)} "
        f"cannot be written for transformers, only BPE and UNIGRAM. Export the model "
        f"without it in Python, by kit.convert.hugging_face.export_run."
    )


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Returns all pairs that make a piece, best score first.

    Of pairs that tie, sentencepiece takes the leftmost in the text. In a run of one character,
    where ties are seen (all pieces of spaces have one score in LLaMA's and Mistral's models), that
    is the one with the longest left.
    """
    pairs = [(piece, cut) for piece in scores for cut in range(len(piece) - 1, 0, -1)]
    pairs.sort(key=lambda pair: (-scores[pair[0]], -pair[1]))
    halves = ((piece[:cut], piece[cut:]) for piece, cut in pairs)
    return [(left, right) for left, right in halves if left in scores and right in scores]


def _steps(spec: Any) -> list[Any]:
    from tokenizers import Regex, normalizers

    charsmap = spec.precompiled_charsmap
    # The map knows sequences; `tokenizers` applies it to what shows as one character, and loses
    # parts of some.
    steps = [
        charsmap and spec.name.startswith("nmt") and normalizers.Replace("\r", " "),
        charsmap and "nfkc" in spec.name and normalizers.NFKC(),
        charsmap and normalizers.Precompiled(charsmap),
        spec.remove_extra_whitespaces
        and normalizers.Replace(Regex(rf"[ {SPACE}]+\z|\A +| +(?= )"), ""),
        spec.add_dummy_prefix and normalizers.Prepend(SPACE),
        spec.escape_whitespaces and normalizers.Replace(" ", SPACE),
    ]
    return [step for step in steps if step]
