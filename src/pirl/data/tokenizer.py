"""Prompts to token ids, exactly as OpenPI formats them.

π₀ reads the instruction and a newline; π₀.₅ can also read the robot's state as numbers in the text. π₀'s prompt is
tokenized once per task. π₀.₅'s changes with every sample: the instruction, the numbers -1 ... 255 and the ending are
tokenized once each and concatenated. This is exact for tokenizers that never merge a digit with a neighbour, which is
checked in the vocabulary; with others, every sample's whole text is encoded without caching.
"""

import re
import warnings
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from zlib import crc32

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from pirl.errors import DataError, PirlWarning
from pirl.files import write_bytes
from pirl.paths import tokenizer_path
from pirl.records import Array

PALIGEMMA_URL = "gs://big_vision/paligemma_tokenizer.model"
"""OpenPI's address of the tokenizer; public, no account needed."""

STATE_BINS = np.linspace(-1.0, 1.0, 256 + 1)[:-1]

_CACHED_PROMPTS = 65536
_WORD = re.compile(r"\w+|[^\w\s]|\n")


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids, without any special token."""

    @property
    def bos_id(self) -> int:
        """The id of the token that begins a prompt."""

    @property
    def vocab_size(self) -> int:
        """Upper bound of ids (exclusive)."""

    @property
    def digits_stand_alone(self) -> bool:
        """Whether every digit of a number in a prompt is its own token in any context. False is always safe."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""


class ByteTokenizer:
    """One token per UTF-8 byte. Needs no file; for models trained from scratch."""

    bos_id = 2
    vocab_size = 3 + 256
    digits_stand_alone = True

    def encode(self, text: str) -> list[int]:
        """Ids 0, 1 and 2 are padding, end and beginning, as in PaliGemma."""
        return [3 + byte for byte in text.encode()]


class WordTokenizer:
    """One token per word. Needs no file; for small models and short instructions.

    A word's id is its hash, so ids do not depend on a vocabulary. Collisions are possible but rare among a handful of
    instructions; compare `encode` of yours.
    """

    bos_id = 2
    vocab_size = 512
    digits_stand_alone = False

    def encode(self, text: str) -> list[int]:
        """Ids of lower-case words, punctuation and newlines; 0, 1 and 2 are reserved as in `ByteTokenizer`."""
        return [3 + crc32(word.encode()) % (self.vocab_size - 3) for word in _WORD.findall(text.lower())]


class PaliGemmaTokenizer:
    """PaliGemma's sentencepiece model.

    Without a source, reads OpenPI's cache, and downloads the model into it on first use, as OpenPI does.
    """

    def __init__(self, source: str | Path | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        place, model = _read_model(source)
        try:
            self._model = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"{place} is not a sentencepiece model: {error}", hint="delete it and try again") from error
        if self.bos_id < 0:
            raise DataError(f"the tokenizer {place} has no token that begins a text", hint="use PaliGemma's")

    @property
    def bos_id(self) -> int:
        """The id that begins a prompt."""
        return self._model.bos_id()

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self._model.vocab_size()

    @cached_property
    def digits_stand_alone(self) -> bool:
        """True if no piece can contain a digit of the state together with another character.

        Such a piece would have to consist of characters of the text around the numbers only, or reach back over the
        whole word "State" into the instruction. So checking the vocabulary proves it for every prompt.
        """
        pieces = [self._model.id_to_piece(i) for i in range(self.vocab_size)]
        around = set(", State: -;\nAction: ▁0123456789")
        for piece in pieces:
            if len(piece) > 1 and any("0" <= c <= "9" for c in piece) and ("State" in piece or set(piece) <= around):
                return False
        return set("0123456789") <= set(pieces)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        return self._model.encode(text)


def _read_model(source: str | Path | None) -> tuple[str, bytes]:
    """(location of the tokenizer, its bytes)."""
    cache = tokenizer_path()
    looked: list[str] = []
    for place in (str(cache), PALIGEMMA_URL) if source is None else (str(source),):
        try:
            model = _read_url(place) if "://" in place else Path(place).expanduser().read_bytes()
        except Exception as error:  # remote file systems each raise their own
            looked.append(f"{place} ({type(error).__name__}: {error})")
            continue
        if source is None and place == PALIGEMMA_URL:
            write_bytes(cache, model)
        return place, model
    raise DataError(
        "the PaliGemma tokenizer was not found; looked at\n    " + "\n    ".join(looked),
        hint=f"put paligemma_tokenizer.model at {cache}, or name another file; "
        "pip install 'pirl[gcs]' lets it be downloaded",
    )


def _read_url(url: str) -> bytes:
    import fsspec  # only here: most runs find the tokenizer on disk

    options: dict[str, Any] = {"token": "anon"} if url == PALIGEMMA_URL else {}
    with fsspec.open(url, "rb", **options) as file:
        return file.read()


def clean_prompt(text: str) -> str:
    """Clean an instruction as OpenPI does."""
    return text.strip().replace("_", " ").replace("\n", " ")


def discretize_state(state: Float[Array, "*B S"]) -> Int[Array, "*B S"]:
    """Normalised state to the integers π₀.₅ reads: 0 ... 255 over [-1, 1], -1 below, 255 above."""
    return np.digitize(state, STATE_BINS) - 1


def state_prompt(text: str, bins: Sequence[int]) -> str:
    """π₀.₅'s prompt with the state in it."""
    return f"Task: {clean_prompt(text)}, State: {' '.join(map(str, bins))};\nAction: "


def tokenize_prompt(
    tokenizer: Tokenizer, text: str, length: int, state: Float[Array, "S"] | None = None, *, whole: bool = False
) -> tuple[Int32[Array, "L"], Bool[Array, "L"]]:
    """One prompt's tokens, padded with 0 to `length`, and the mask of real ones; `state` is the normalised state.

    Without a state this is π₀'s prompt, whose newline is encoded separately: it marks where the answer starts. A prompt
    that is too long is truncated with a warning; with `whole` it raises.
    """
    if state is None:
        ids = [tokenizer.bos_id, *tokenizer.encode(clean_prompt(text)), *tokenizer.encode("\n")]
    else:
        ids = [tokenizer.bos_id, *tokenizer.encode(state_prompt(text, discretize_state(state).tolist()))]
    if len(ids) > length:
        _cut(text, length, whole=whole)
    tokens = np.zeros(length, np.int32)
    tokens[: len(ids)] = ids[:length]
    return tokens, np.arange(length) < len(ids)


def _cut(text: str, length: int, *, whole: bool) -> None:
    """Warn (or with `whole` raise) about a truncated prompt. Python shows the warning once per task."""
    problem = f"the prompt {text!r} has more than {length} tokens"
    if whole:
        raise DataError(
            f"{problem}, and its end tells the policy what to do",
            hint="give the model longer prompts, such as --model.max-token-len 64",
        )
    warnings.warn(f"{problem} and is cut off", PirlWarning, stacklevel=3)


class PromptEncoder:
    """`tokenize_prompt` for batches: same result, with caching of the parts that do not change between samples."""

    def __init__(self, tokenizer: Tokenizer, length: int, *, whole: bool = False) -> None:
        """`whole` raises for prompts that are too long instead of truncating them."""
        self._tokenizer = tokenizer
        self._length = length
        self._whole = whole
        self._prompt = lru_cache(maxsize=_CACHED_PROMPTS)(self._encode_prompt)
        self._head = lru_cache(maxsize=_CACHED_PROMPTS)(self._encode_head)

    def __call__(
        self, texts: Sequence[str], state: Float[Array, "B S"] | None = None
    ) -> tuple[Int32[Array, "B L"], Bool[Array, "B L"]]:
        """Tokens and masks of B prompts; `state` is the normalised state, for prompts that include it."""
        if state is None:
            rows = [self._prompt(text) for text in texts]
        elif self._tokenizer.digits_stand_alone:
            return self._assemble(texts, discretize_state(state))
        else:
            rows = [self._encode_prompt(text, one) for text, one in zip(texts, state, strict=True)]
        return np.stack([tokens for tokens, _ in rows]), np.stack([mask for _, mask in rows])

    def _encode_prompt(self, text: str, state: Array | None = None) -> tuple[Array, Array]:
        return tokenize_prompt(self._tokenizer, text, self._length, state, whole=self._whole)

    def _encode_head(self, text: str, below: bool) -> Array:
        """Tokens before the state's first digit, with its sign: a minus may share a token with the preceding space."""
        text = f"Task: {clean_prompt(text)}, State: {'-' if below else ''}0"
        return np.array([self._tokenizer.bos_id, *self._tokenizer.encode(text)[:-1]], np.int32)

    @cached_property
    def _numbers(self) -> tuple[Array, Array, Array]:
        """Tokens of the digits of -1 ... 255, of the same numbers after another number, and of the ending; -1 pads.

        Each is encoded after a "0" that is then removed, because tokens at the start of a text may differ.
        """
        encode = self._tokenizer.encode
        start = len(encode("0"))
        digits = [encode(f"0{abs(number)}")[start:] for number in range(-1, 256)]
        following = [encode(f"0 {number}")[start:] for number in range(-1, 256)]
        return _table(digits), _table(following), np.array(encode("0;\nAction: ")[start:], np.int32)

    def _assemble(self, texts: Sequence[str], bins: Int[Array, "B S"]) -> tuple[Array, Array]:
        """Concatenate the cached parts of every prompt with padding between them, then remove the padding."""
        digits, following, ending = self._numbers
        heads = _table([self._head(text, below) for text, below in zip(texts, (bins[:, 0] < 0).tolist(), strict=True)])
        size = len(texts)
        wide = np.concatenate(
            [
                heads,
                digits[bins[:, 0] + 1],
                following[bins[:, 1:] + 1].reshape(size, -1),
                np.broadcast_to(ending, (size, len(ending))),
            ],
            axis=1,
        )
        used = wide >= 0
        lengths = used.sum(axis=1)
        for i in np.flatnonzero(lengths > self._length).tolist():
            _cut(texts[i], self._length, whole=self._whole)
        if lengths.max(initial=0) > self._length:
            used &= np.cumsum(used, axis=1) <= self._length
        mask = np.arange(self._length) < lengths[:, None]
        tokens = np.zeros((size, self._length), np.int32)
        tokens[mask] = wide[used]
        return tokens, mask


def _table(rows: Sequence[Sequence[int] | Array]) -> Int32[Array, "N W"]:
    """Rows of different lengths as one array, padded with -1."""
    table = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int32)
    for row, out in zip(rows, table, strict=True):
        out[: len(row)] = row
    return table
