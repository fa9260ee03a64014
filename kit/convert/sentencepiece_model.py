"""A sentencepiece `.model` as the `tokenizer.json` that gives the same ids.

What transformers itself makes of such a file splits at spaces, adds no space before a text that begins with one, and
joins pieces of equal score in the order of their ids. Sources: sentencepiece_model.proto, normalizer.cc, bpe_model.cc
and unigram_model.cc of github.com/google/sentencepiece; the library `tokenizers`. Three things it cannot express, so
that the comparison of the written folder refuses them where they show: user-defined symbols in a model that puts a
space before the text, ties of a unigram model (its scores are added in another precision), and marks that NFKC moves.
"""

from typing import Any

from kit.errors import DataError, MissingPackageError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of pieces."""
UNIGRAM, BPE = 1, 2
SPACE = "▁"
"""How sentencepiece writes a space."""
NEVER = 1000.0
"""Below the lowest score of a unigram model: such a piece loses against the same text letter by letter."""


def to_tokenizer_json(data: bytes) -> bytes:
    """Returns a tokenizer.json with the vocabulary, the ids and the rules of a sentencepiece model.

    Raises:
        DataError: the model is neither BPE nor unigram.
        MissingPackageError: protobuf is not installed.
    """
    from tokenizers import AddedToken, Tokenizer, decoders

    model = _read(data)
    tokenizer = Tokenizer(_model(model))
    tokenizer.normalizer = _normalizer(model.normalizer_spec)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    for kind in (CONTROL, USER_DEFINED):
        pieces = [piece.piece for piece in model.pieces if piece.type == kind]
        add = tokenizer.add_special_tokens if kind == CONTROL else tokenizer.add_tokens
        add([AddedToken(piece, normalized=False, special=kind == CONTROL) for piece in pieces])
    return tokenizer.to_str().encode()


def piece_texts(data: bytes) -> list[str]:
    """Returns each piece of a sentencepiece model as text, user-defined symbols also between words."""
    model = _read(data)
    symbols = [piece.piece for piece in model.pieces if piece.type == USER_DEFINED]
    return [piece.piece.replace(SPACE, " ") for piece in model.pieces] + [f"a{symbol} b" for symbol in symbols]


def _read(data: bytes) -> Any:
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise MissingPackageError("protobuf", "eval", "Writing a sentencepiece model for transformers") from error
    protocol: Any = sentencepiece_model_pb2  # its classes are made at import
    return protocol.ModelProto.FromString(data)


def _model(model: Any) -> Any:
    from tokenizers import models

    ids = {piece.piece: number for number, piece in enumerate(model.pieces)}
    unknown = next(piece.piece for piece in model.pieces if piece.type == UNKNOWN)
    kind, bytes_too = model.trainer_spec.model_type, model.trainer_spec.byte_fallback
    if kind == BPE:
        scores = {piece.piece: piece.score for piece in model.pieces if piece.type == NORMAL}
        return models.BPE(ids, _merges(scores), unk_token=unknown, fuse_unk=True, byte_fallback=bytes_too)
    if kind == UNIGRAM:
        lowest = min(piece.score for piece in model.pieces) - NEVER  # of what text never yields, such as `</s>`
        scored = [(piece.piece, piece.score if piece.type == NORMAL else lowest) for piece in model.pieces]
        return models.Unigram(scored, ids[unknown], bytes_too)
    name = model.trainer_spec.DESCRIPTOR.enum_types_by_name["ModelType"].values_by_number[kind].name
    raise DataError(
        f"tokenizer: a sentencepiece model of type {name} cannot be written for transformers, only BPE and UNIGRAM. "
        f"Export without it (`--no-tokenizer`, or tokenizer=None)."
    )


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Returns all pairs that make a piece, best score first.

    Of pairs that tie, sentencepiece takes the leftmost in the text. In a run of one character, which is where ties are
    seen (all pieces of spaces have one score in LLaMA's and Mistral's models), that is the one with the longest left.
    """
    found = []
    for number, (piece, score) in enumerate(scores.items()):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                found.append((-score, -cut, number, left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _normalizer(spec: Any) -> Any:
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if spec.precompiled_charsmap:
        # The map knows sequences; `tokenizers` applies it to what is shown as one character, and loses parts of some.
        if spec.name.startswith("nmt"):
            steps.append(normalizers.Replace("\r", " "))
        if "nfkc" in spec.name:
            steps.append(normalizers.NFKC())
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"[ {SPACE}]+\z|\A +| +(?= )"), ""))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)
