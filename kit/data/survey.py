"""First step of a dataset build: reads all text, counts its documents and bytes, and decides which
text is for validation.
"""

from collections import Counter
from typing import NamedTuple

from kit.data.corpus import Corpus, Document
from kit.data.dataset import MOST_NAMED, BuildSettings
from kit.data.workers import Advance, Workers
from kit.errors import DataError

UNPACKED = {".gz": 3, ".zst": 3, ".zstd": 3, ".bz2": 4, ".xz": 4, ".parquet": 3}
"""Assumed bytes of text per byte of a compressed file, by extension. The numbers are used to
estimate the time left."""
LEAST_SHARE = 0.01
"""Smallest fraction of the bytes of text that must be left to train on. A build with less is
refused."""


class ValidationRule(NamedTuple):
    """Rule that decides which text is for validation. Each process of a build applies it to its own
    files, without other state.
    """

    purpose: str
    """Label from which, with a document's text, the pseudo-random number of the document is
    computed. It contains the seed of the build."""
    fraction: float
    """Fraction of the documents for validation. A document is chosen if its pseudo-random number in
    [0, 1) is below this fraction."""
    digest: bytes | None
    """Hash of the largest document, which is chosen if no document has a pseudo-random number below
    `fraction`. None if a document has one."""
    largest_bytes: int
    """Largest size of a document, in bytes of text, that goes to validation as a whole. Of a larger
    chosen document, only the end goes to validation."""

    def split(self, document: Document) -> tuple[Document | None, Document | None]:
        """Returns (text to train on, text for validation).

        A document that this rule does not choose for validation gives (document, None), and a
        chosen document gives (None, document). A chosen document above `largest_bytes` is divided:
        its beginning is for training, and its end for validation.
        """
        is_chosen = document.draw(self.purpose) < self.fraction or document.digest == self.digest
        if not is_chosen:
            return document, None
        if document.num_bytes <= self.largest_bytes:
            return None, document
        return document.cut(self.largest_bytes)


class Survey(NamedTuple):
    """Result of reading all text of a dataset build once: what was counted, and the rule that
    divides the text into training and validation.
    """

    name: str
    """Names of the sources, joined by commas, for error messages."""
    pieces: list[Corpus]
    """Pieces of the text. Each piece is a corpus of some of the files, which one process reads."""
    piece_counts: list[Counter[str]]
    """Numbers of documents, bytes of text, duplicates and so on in each piece, by the names that
    the class `Corpus` explains."""
    counts: Counter[str]
    """Sum of each count in `piece_counts` over all pieces of the text."""
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


class CorpusPieceSurvey(NamedTuple):
    """Counts of one piece of the text (a group of corpus files), and the size of its largest
    document.
    """

    counts: Counter[str]
    skipped: list[str]
    chosen: int
    """Number of documents that are chosen for validation by their pseudo-random numbers."""
    largest: tuple[int, bytes]
    """(Size in bytes of text, hash of the text) of the largest document."""


def survey_text(corpus: Corpus, settings: BuildSettings, workers: Workers) -> Survey:
    """Reads all text of a dataset build, counts it, and returns the counts and the rule that
    chooses the validation text.

    Raises:
        DataError: Text cannot be read, or no text would be left to train on.
    """
    purpose = f"validation {settings.seed}"
    fraction = settings.validation_fraction
    pieces = corpus.pieces()
    arguments = [(piece, purpose, fraction) for piece in pieces]
    sizes = [_expected_bytes(piece) for piece in pieces]
    found: list[CorpusPieceSurvey] = workers.map("Reading", survey_corpus_piece, arguments, sizes)

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


def survey_corpus_piece(
    piece: Corpus, purpose: str, fraction: float, advance: Advance
) -> CorpusPieceSurvey:
    """Reads one piece of the text (a group of corpus files). Returns its counts and the size of its
    largest document.
    """
    chosen = 0
    largest = (0, b"")
    for document in piece:
        if document.draw(purpose) < fraction:
            chosen += 1
        largest = max(largest, (document.num_bytes, document.digest))
        advance(document.num_bytes)
    return CorpusPieceSurvey(piece.counts, piece.skipped, chosen, largest)


def _expected_bytes(piece: Corpus) -> int:
    """Returns the assumed bytes of text in a group of corpus files. They are estimated from the
    sizes of the files.
    """
    return sum(UNPACKED.get(file.suffix, 1) * file.stat().st_size for file, _ in piece.files)
