"""A sentencepiece model as a `tokenizer.json` for transformers, with the same ids."""

from typing import Any

from kit.errors import DataError, needed

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
        f"without it in Python, by kit.interop.weights.hugging_face.export_run."
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
