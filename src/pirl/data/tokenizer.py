"""Prompts to token ids, exactly as OpenPI formats them.

π₀ reads the instruction and a newline; π₀.₅ can read the robot's state as numbers in the text as well. The first kind
is tokenized once per task. The second changes with every sample: there the instruction, the numbers -1 ... 255 and
the ending are tokenized once each and laid together. That is exact for a tokenizer that never merges a digit with a
neighbour, which its vocabulary tells; with any other the whole text is encoded anew for every sample, and not cached.
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
        """The id that begins a prompt."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    @property
    def digits_stand_alone(self) -> bool:
        """Is every digit of a number in a prompt one token, whatever stands beside it? False is always safe."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""


class ByteTokenizer:
    """One token per UTF-8 byte: needs no file, for models that are trained from nothing."""

    bos_id = 2
    vocab_size = 3 + 256
    digits_stand_alone = True

    def encode(self, text: str) -> list[int]:
        """Ids 0, 1 and 2 are padding, end and beginning, as in PaliGemma."""
        return [3 + byte for byte in text.encode()]


class WordTokenizer:
    """One token per word: needs no file, for small models and short instructions.

    A word's id is a hash of it, so that it never depends on which words came before. Two words may share one; among a
    handful of instructions that is rare, and `encode` shows it.
    """

    bos_id = 2
    vocab_size = 512
    digits_stand_alone = False

    def encode(self, text: str) -> list[int]:
        """Words in lower case, punctuation and newlines; ids 0, 1 and 2 are as in `ByteTokenizer`."""
        return [3 + crc32(word.encode()) % (self.vocab_size - 3) for word in _WORD.findall(text.lower())]


class PaliGemmaTokenizer:
    """The sentencepiece model of PaliGemma.

    Without a source it is taken from OpenPI's cache, or else downloaded into it, as OpenPI does on first use.
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
        """True where no piece could hold a digit of the state together with anything else.

        Such a piece would be cut from the text around the numbers: it is made of these characters only, or it reaches
        over the whole word "State" into the instruction. The vocabulary thus proves it for every prompt at once.
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
    """The place the tokenizer was found at, and its bytes."""
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
    """The instruction as OpenPI writes it into a prompt."""
    return text.strip().replace("_", " ").replace("\n", " ")


def discretize_state(state: Float[Array, "*B S"]) -> Int[Array, "*B S"]:
    """Normalised state to the whole numbers π₀.₅ reads: 0 ... 255 over [-1, 1], -1 below."""
    return np.digitize(state, STATE_BINS) - 1


def state_prompt(text: str, bins: Sequence[int]) -> str:
    """π₀.₅'s prompt with the state in it."""
    return f"Task: {clean_prompt(text)}, State: {' '.join(map(str, bins))};\nAction: "


def tokenize_prompt(
    tokenizer: Tokenizer, text: str, length: int, state: Float[Array, "S"] | None = None, *, whole: bool = False
) -> tuple[Int32[Array, "L"], Bool[Array, "L"]]:
    """One prompt, padded with 0 to `length`, and the mask of what is not padding; `state` is the normalised state.

    Without a state this is π₀'s prompt, in which the newline is encoded by itself: it marks where the answer starts.
    A prompt that is too long is cut off, or refused where it is to stay `whole`.
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
    """The text of this warning depends on the task alone, so Python's default filter shows it once per task."""
    problem = f"the prompt {text!r} has more than {length} tokens"
    if whole:
        raise DataError(
            f"{problem}, and its end tells the policy what to do",
            hint="give the model longer prompts, such as --model.max-token-len 64",
        )
    warnings.warn(f"{problem} and is cut off", PirlWarning, stacklevel=3)


class PromptEncoder:
    """`tokenize_prompt` for batches: equal to it, and remembers what does not change from sample to sample."""

    def __init__(self, tokenizer: Tokenizer, length: int, *, whole: bool = False) -> None:
        """`whole` refuses prompts that are too long, where their end matters."""
        self._tokenizer = tokenizer
        self._length = length
        self._whole = whole
        self._prompt = lru_cache(maxsize=_CACHED_PROMPTS)(self._encode_prompt)
        self._head = lru_cache(maxsize=_CACHED_PROMPTS)(self._encode_head)

    def __call__(
        self, texts: Sequence[str], state: Float[Array, "B S"] | None = None
    ) -> tuple[Int32[Array, "B L"], Bool[Array, "B L"]]:
        """Tokens and masks of B prompts; `state` is the normalised state, for prompts that hold it."""
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
        """Everything before the first digit of the state; a minus sign may share a token with the space before it."""
        text = f"Task: {clean_prompt(text)}, State: {'-' if below else ''}0"
        return np.array([self._tokenizer.bos_id, *self._tokenizer.encode(text)[:-1]], np.int32)

    @cached_property
    def _numbers(self) -> tuple[Array, Array, Array]:
        """Tokens of the digits of -1 ... 255, of the same numbers after another number, and of the ending; -1 fills.

        Each is encoded behind a "0" that is cut off again, because a text may begin differently from its middle.
        """
        encode = self._tokenizer.encode
        start = len(encode("0"))
        digits = [encode(f"0{abs(number)}")[start:] for number in range(-1, 256)]
        following = [encode(f"0 {number}")[start:] for number in range(-1, 256)]
        return _table(digits), _table(following), np.array(encode("0;\nAction: ")[start:], np.int32)

    def _assemble(self, texts: Sequence[str], bins: Int[Array, "B S"]) -> tuple[Array, Array]:
        """Lay the known parts of every prompt side by side with holes, then close the holes."""
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
    """Rows of different lengths as one array, filled with -1."""
    table = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int32)
    for row, out in zip(rows, table, strict=True):
        out[: len(row)] = row
    return table
