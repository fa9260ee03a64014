"""First step of a build: reads all text, counts it, and decides which text is for validation."""

from collections import Counter
from typing import NamedTuple

from kit.data.corpus import Corpus, Document
from kit.data.dataset import MOST_NAMED, BuildSettings
from kit.data.workers import Advance, Workers
from kit.errors import DataError

UNPACKED = {".gz": 3, ".zst": 3, ".zstd": 3, ".bz2": 4, ".xz": 4, ".parquet": 3}
"""Assumed bytes of text per byte of a compressed file, by extension. Used for the estimate of the
time left."""
LEAST_SHARE = 0.01
"""Smallest fraction of the text, in bytes, that must be left to train on."""


class ValidationRule(NamedTuple):
    """Rule that decides which text is for validation. A process needs no other state to apply
    it.
    """

    purpose: str
    """Argument `purpose` of `Document.draw`. It contains the seed of the build."""
    fraction: float
    """Upper bound of the draw of a chosen document: a document is chosen if its draw is smaller."""
    digest: bytes | None
    """Digest of the document that is chosen if no draw is below `fraction`. None if a draw is below
    it."""
    largest_bytes: int
    """Size in bytes of text of the largest document that is for validation as a whole. Only the end
    of a larger chosen document is."""

    def split(self, document: Document) -> tuple[Document | None, Document | None]:
        """Returns (text to train on, text for validation).

        One of them is the document and the other is None. If the document is large and chosen, they
        are its beginning and its end.
        """
        is_chosen = document.draw(self.purpose) < self.fraction or document.digest == self.digest
        if not is_chosen:
            return document, None
        if document.num_bytes <= self.largest_bytes:
            return None, document
        return document.cut(self.largest_bytes)


class Survey(NamedTuple):
    """Content of the text of a build: its counts, its pieces, and the rule that splits it."""

    name: str
    """Names of the sources, for error messages."""
    pieces: list[Corpus]
    """Pieces of the text, each a corpus of some of the files."""
    piece_counts: list[Counter[str]]
    """Counts of each piece, as in `Corpus.counts`."""
    counts: Counter[str]
    """Sums of the counts over all pieces."""
    skipped: list[str]
    """Documents that cannot be read, each with the reason."""
    rule: ValidationRule
    """Rule that splits the text into training and validation."""

    def check_training_share(self, training_bytes: int, text_bytes: int) -> None:
        """Raises DataError if less than 1 % of the text is left to train on.

        `text_bytes` is the size of the text that can be read.
        """
        unreadable = self.counts["skipped_bytes"]
        whole = text_bytes + unreadable
        if training_bytes < max(1, LEAST_SHARE * whole):
            reasons = "".join(f"; {reason}" for reason in self.skipped[:MOST_NAMED])
            raise DataError(
                f"{self.name}: {training_bytes:,} of {whole:,} bytes of text would be trained"
                f" on, less than 1 %: {text_bytes - training_bytes:,} bytes are held out"
                f" (--validation-fraction), {unreadable:,} cannot be read{reasons}."
            )


class PieceSurvey(NamedTuple):
    """Counts of one piece, with the numbers that the validation rule needs."""

    counts: Counter[str]
    skipped: list[str]
    chosen: int
    """Number of documents whose draw chooses them for validation."""
    largest: tuple[int, bytes]
    """(size in bytes, digest) of the largest document."""


def survey_text(corpus: Corpus, settings: BuildSettings, workers: Workers) -> Survey:
    """Reads all text of a build, and returns its content.

    Raises:
        DataError: Text cannot be read, or no text would be left to train on.
    """
    purpose = f"validation {settings.seed}"
    fraction = settings.validation_fraction
    pieces = corpus.pieces()
    arguments = [(piece, purpose, fraction) for piece in pieces]
    sizes = [_expected_bytes(piece) for piece in pieces]
    found: list[PieceSurvey] = workers.map("Reading", survey_piece, arguments, sizes)

    counts = Counter[str]()
    skipped = []
    for piece in found:
        counts += piece.counts
        skipped += piece.skipped
    chosen = sum(piece.chosen for piece in found)
    largest_bytes, largest_digest = max(piece.largest for piece in found)
    digest = None if chosen else largest_digest
    rule = ValidationRule(
        purpose=purpose,
        fraction=fraction,
        digest=digest,
        largest_bytes=max(1, int(fraction * counts["text_bytes"])),
    )
    survey = Survey(
        name=", ".join(name for name, _ in corpus.groups),
        pieces=pieces,
        piece_counts=[piece.counts for piece in found],
        counts=counts,
        skipped=skipped,
        rule=rule,
    )
    survey.check_training_share(counts["text_bytes"], counts["text_bytes"])
    if chosen == counts["documents"] and largest_bytes <= rule.largest_bytes:
        raise DataError(
            f"{survey.name}: all {chosen} documents would be held out. Lower validation_fraction"
            " (--validation-fraction), or add text."
        )
    return survey


def survey_piece(piece: Corpus, purpose: str, fraction: float, advance: Advance) -> PieceSurvey:
    """Reads the documents of a piece, and returns its counts and its largest document."""
    chosen = 0
    largest = (0, b"")
    for document in piece:
        if document.draw(purpose) < fraction:
            chosen += 1
        largest = max(largest, (document.num_bytes, document.digest))
        advance(document.num_bytes)
    return PieceSurvey(piece.counts, piece.skipped, chosen, largest)


def _expected_bytes(piece: Corpus) -> int:
    """Returns the assumed bytes of text of a piece, estimated from the sizes of its files."""
    return sum(UNPACKED.get(file.suffix, 1) * file.stat().st_size for file, _ in piece.files)
