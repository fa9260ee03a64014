"""What a model writes: a prompt continued by a run's checkpoint or a Hugging Face folder, token
by token.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kit.convert import load_model
from kit.errors import ConfigError
from kit.evaluate.folder import is_hugging_face_folder
from kit.evaluate.generation import Generation, Prompt, generate, prompt_random
from kit.run import Run

if TYPE_CHECKING:
    from kit.data.tokenizer import Tokenizer
    from kit.model import Decoder

CUT = "\ufffd"
"""What a tokenizer says of a character whose bytes have not all come yet."""


def continue_text(
    source: Run | str | Path,
    prompt: str = "",
    *,
    step: int | None = None,
    num_tokens: int = 100,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    tell: Callable[[str], object] | None = None,
) -> str:
    """Returns what a model writes after a prompt, until it ends the text or has written
    `num_tokens`.

    The source is a run, of which `step` names the checkpoint (by default the newest), or a folder
    of Hugging Face's. With a temperature above 0 tokens are drawn, the same for the same seed, from
    the fewest that together have probability `top_p`; else each is the most likely one. `tell` gets
    each piece of text as it comes, whole characters only. The whole model is on the CPU, fp32.

    Raises:
        ConfigError: an option is out of its range, or prompt and tokens are longer than the model's
            sequences.
        CheckpointError, RunError, DataError: the model or its tokenizer cannot be read.
    """
    if num_tokens < 1 or temperature < 0 or not 0 < top_p <= 1:
        raise ConfigError(
            f"num_tokens {num_tokens}, temperature {temperature}, top_p {top_p}: not allowed. Give"
            " a token or more, a temperature from 0, and a top_p above 0 up to 1."
        )
    decoder, tokenizer = _model(source, step)
    given = tokenizer.encode(prompt)
    tokens, before = (tokenizer.start_id, *given), len(tokenizer.decode(given))
    longest = decoder.spec.sequence_length
    if len(tokens) + num_tokens > longest:
        raise ConfigError(
            f"prompt: {len(tokens):,} tokens, and {num_tokens:,} to write, are more than the"
            f" {longest:,} of a sequence of the model. Give a shorter one, or ask for fewer."
        )
    told = 0

    def text_of(new: list[int]) -> str:
        # With the prompt: some tokenizers drop the space that a text begins with.
        return tokenizer.decode([*given, *(new[:-1] if new[-1] == tokenizer.eos_id else new)])[
            before:
        ]

    def is_last(new: list[int]) -> bool:
        nonlocal told
        text = text_of(new)
        if tell is not None and not text.endswith(CUT):
            tell(text[told:])
            told = len(text)
        return new[-1] == tokenizer.eos_id

    asked = Generation(stops=(), max_new_tokens=num_tokens, temperature=temperature, top_p=top_p)
    new = generate(
        decoder,
        [Prompt(index=0, tokens=tokens, random=prompt_random(seed, tokens, 0))],
        asked,
        is_last=is_last,
    )[0]
    text = text_of(new)
    if tell is not None and told < len(text):
        tell(text[told:])
    return text


def _model(source: Run | str | Path, step: int | None) -> "tuple[Decoder, Tokenizer]":
    if not isinstance(source, Run) and is_hugging_face_folder(Path(source)):
        from kit.convert.hugging_face import import_hugging_face
        from kit.data.tokenizer import load_tokenizer

        if step is not None:
            raise ConfigError(
                f"step {step}: {source} is a Hugging Face folder, which has one model. Leave it"
                " out."
            )
        return import_hugging_face(source).decoder(), load_tokenizer(Path(source))
    run = source if isinstance(source, Run) else Run.open(source)
    return load_model(run, step), run.dataset().tokenizer()
