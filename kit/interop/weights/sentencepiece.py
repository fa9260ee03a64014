"""Converts a SentencePiece model to a `tokenizer.json` with equal token ids."""

from typing import Any

from kit.errors import DataError, needed

SPACE = "▁"
"""Character with which SentencePiece writes a space."""
NEVER = 1000.0
"""Difference between the lowest score of a unigram model and the score that is given to pieces that
must never be chosen. Split into single characters, such a piece has a better total score."""


def to_tokenizer_json(data: bytes) -> bytes:
    """Returns a tokenizer.json with the vocabulary, the ids and the rules of a SentencePiece model.

    The converters of transformers are not used, because their results differ. LlamaTokenizer adds
    no space before a text that begins with a space. It also merges pieces of equal score in the
    order of their ids. SentencePieceBackend decodes a byte as `<0x0A>`.

    A tokenizer.json cannot express three things. The first is user-defined symbols in a model that
    puts a space before the text. The second is ties of a unigram model: `tokenizers` adds the
    scores in another precision. The third is combining marks that NFKC moves. If they change the
    ids of a text, `write_tokenizer` refuses the result.

    Sources: sentencepiece_model.proto, normalizer.cc, bpe_model.cc and unigram_model.cc of
    github.com/google/sentencepiece, and the package `tokenizers`.

    Raises:
        DataError: The model is neither BPE nor unigram.
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
    """Returns texts for a comparison of tokenizers: the text of each piece of a SentencePiece
    model, and for each user-defined symbol a text with the symbol between two letters.
    """
    model = _read(data)
    symbols = [f"a{piece.piece} b" for piece in model.pieces if piece.type == piece.USER_DEFINED]
    return [piece.piece.replace(SPACE, " ") for piece in model.pieces] + symbols


def _read(data: bytes) -> Any:
    with needed("protobuf", "eval", "Writing a .model for transformers"):
        from sentencepiece import sentencepiece_model_pb2
    protocol: Any = sentencepiece_model_pb2  # The module creates its classes at import.
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
        # Score of pieces that never come from a text, such as `</s>`.
        lowest = min(piece.score for piece in model.pieces) - NEVER
        scored = [(piece, normal.get(piece, lowest)) for piece in ids]
        return models.Unigram(scored, ids[unknown], trainer.byte_fallback)
    raise DataError(
        f"tokenizer: a sentencepiece model of type {trainer.ModelType.Name(trainer.model_type)} "
        f"cannot be written for transformers, only BPE and UNIGRAM. Export the model "
        f"without it in Python, by kit.interop.weights.hugging_face.export_run."
    )


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Returns the merges of a BPE model: all pairs of pieces whose concatenation is a piece,
    sorted by the score of the joined piece.

    If pairs tie, SentencePiece joins the leftmost pair in the text. Ties occur in repetitions of
    one character: in LLaMA's and Mistral's models all pieces of spaces have one score. In a
    repetition, the leftmost pair has the longest left piece. So among pairs with equal scores, the
    pair with the longest left piece comes first.
    """
    pairs = [(piece, cut) for piece in scores for cut in range(len(piece) - 1, 0, -1)]
    pairs.sort(key=lambda pair: (-scores[pair[0]], -pair[1]))
    halves = ((piece[:cut], piece[cut:]) for piece, cut in pairs)
    return [(left, right) for left, right in halves if left in scores and right in scores]


def _steps(spec: Any) -> list[Any]:
    from tokenizers import Regex, normalizers

    charsmap = spec.precompiled_charsmap
    steps: list[Any] = []
    if charsmap:
        # The map replaces sequences of characters. `tokenizers` applies it to one grapheme at a
        # time, and loses parts of some graphemes. The two steps before the map replace the
        # characters of these parts.
        if spec.name.startswith("nmt"):
            steps.append(normalizers.Replace("\r", " "))
        if "nfkc" in spec.name:
            steps.append(normalizers.NFKC())
        steps.append(normalizers.Precompiled(charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"[ {SPACE}]+\z|\A +| +(?= )"), ""))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    return steps
