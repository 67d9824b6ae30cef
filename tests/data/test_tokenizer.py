"""Tokenizers and prompts: OpenPI's words, the cached batch path, and where the file is looked for."""

import warnings
from pathlib import Path

import fsspec
import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

import pirl.data.tokenizer as module
from pirl.data.tokenizer import (
    ByteTokenizer,
    PaliGemmaTokenizer,
    PromptEncoder,
    Tokenizer,
    WordTokenizer,
    clean_prompt,
    discretize_state,
    state_prompt,
    tokenize_prompt,
)
from pirl.errors import DataError, PirlWarning

SENTENCES = [
    "Task: put the bowl on the plate, State: 12 0 255 -1 7;",
    "Action: fold the towel",
    "Task: pick up the fork, State: 130 98 105 120 -1 139;",
    "transfer the cube 3 times, State: 1 2 3 4 5 6 7 8 9 0",
]

# Four ways to make a tokenizer. The first is Gemma's, as far as it matters here; the last merges digits.
KINDS: dict[str, dict] = {
    "gemma": {
        "model_type": "bpe",
        "split_digits": True,
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "user_defined_symbols": ["\n", "<loc0012>"],
        "vocab_size": 380,
    },
    "unigram": {"model_type": "unigram", "split_digits": True, "vocab_size": 50},
    "bpe": {"model_type": "bpe", "split_digits": True, "vocab_size": 120},
    "whole numbers": {"model_type": "bpe", "vocab_size": 140},
}


def train(prefix: Path, **options: object) -> Path:
    """A small sentencepiece model, made by the trainer that made PaliGemma's."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 8),
        model_prefix=str(prefix),
        **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "minloglevel": 2, **options},
    )
    return prefix.with_suffix(".model")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {kind: train(folder / kind.replace(" ", "_"), **options) for kind, options in KINDS.items()}


@pytest.fixture(scope="module")
def tokenizers(files: dict[str, Path]) -> dict[str, Tokenizer]:
    return {
        "bytes": ByteTokenizer(),
        "words": WordTokenizer(),
        **{kind: PaliGemmaTokenizer(file) for kind, file in files.items()},
    }


def test_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("aé\n") == [3 + 97, 3 + 0xC3, 3 + 0xA9, 3 + 10]
    assert max(tokenizer.encode("\xff")) < tokenizer.vocab_size


def test_word_tokenizer() -> None:
    tokenizer = WordTokenizer()
    assert isinstance(tokenizer, Tokenizer)
    # Ids are in datasets' statistics and checkpoints, so they must never change.
    assert tokenizer.encode("red block to left zone") == [78, 321, 80, 79, 476]
    assert tokenizer.encode(" Red  BLOCK, to\n") == [78, 321, *tokenizer.encode(","), 80, *tokenizer.encode("\n")]
    words = ["red", "blue", "green", "yellow", "block", "to", "left", "right", "top", "cyan", "pink", "olive", "zone"]
    ids = tokenizer.encode(" ".join([*words, "\n"]))
    assert len(set(ids)) == len(words) + 1
    many = tokenizer.encode(" ".join(f"word{i}" for i in range(5000)))
    assert (min(many), max(many)) == (3, tokenizer.vocab_size - 1)
    tokens, mask = tokenize_prompt(tokenizer, "red block to left zone", 8)
    assert tokens.tolist() == [2, 78, 321, 80, 79, 476, *tokenizer.encode("\n"), 0]
    assert mask.sum() == 7


def test_sentencepiece_ids_are_the_models_own(files: dict[str, Path]) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_file=str(files["gemma"]))
    tokenizer = PaliGemmaTokenizer(files["gemma"])
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.vocab_size == reference.vocab_size() == 380
    for text in SENTENCES:
        assert [tokenizer.bos_id, *tokenizer.encode(text)] == reference.encode(text, add_bos=True)


def test_vocabulary_tells_whether_digits_stand_alone(tokenizers: dict[str, Tokenizer]) -> None:
    found = {kind: tokenizer.digits_stand_alone for kind, tokenizer in tokenizers.items()}
    assert found.pop("words") is False
    assert found == {"bytes": True, "gemma": True, "unigram": True, "bpe": True, "whole numbers": False}


def test_words_are_openpis() -> None:
    assert clean_prompt(" Fold_the\ntowel \n") == "Fold the towel"
    edges = np.array([-7.0, -1.0, -0.99999, 1 - 2 / 256, 0.999, 1.0, 30.0])
    assert discretize_state(edges).tolist() == [-1, 0, 0, 255, 255, 255, 255]
    assert state_prompt("pick_up", [130, -1]) == "Task: pick up, State: 130 -1;\nAction: "


def test_prompt_is_padded_and_masked() -> None:
    tokens, mask = tokenize_prompt(ByteTokenizer(), " a_b", 8)
    assert tokens.tolist() == [2, 3 + 97, 3 + 32, 3 + 98, 3 + 10, 0, 0, 0]
    assert mask.tolist() == [True] * 5 + [False] * 3


@pytest.mark.parametrize("kind", ["bytes", "words", *KINDS])
@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    texts=st.lists(
        st.one_of(
            st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=30),
            st.sampled_from(["", "pick up 12 forks", "ends in 7", "State: 1 2", "<loc0012> <loc0", "- -1 0 ", "a  b"]),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_batches_equal_single_prompts(
    kind: str, data: st.DataObject, texts: list[str], tokenizers: dict[str, Tokenizer]
) -> None:
    """Putting a prompt together from cached parts gives what encoding the whole text gives, for any text and state."""
    tokenizer = tokenizers[kind]
    width = data.draw(st.integers(1, 9))
    values = st.floats(-1.3, 1.3)
    state = np.array([data.draw(st.lists(values, min_size=width, max_size=width)) for _ in texts])
    encoder = PromptEncoder(tokenizer, 300)
    for given_state in (None, state):
        tokens, mask = encoder(texts, given_state)
        for i, text in enumerate(texts):
            row, row_mask = tokenize_prompt(tokenizer, text, 300, None if given_state is None else state[i])
            np.testing.assert_array_equal(tokens[i], row)
            np.testing.assert_array_equal(mask[i], row_mask)


def test_every_number_in_every_place(tokenizers: dict[str, Tokenizer]) -> None:
    values = np.concatenate([[-2.0], (np.arange(256) + 0.5) / 128 - 1])
    state = np.stack([values, values[::-1], np.roll(values, 99)], axis=1)
    assert sorted(set(discretize_state(state)[:, 0].tolist())) == list(range(-1, 256))
    for tokenizer in tokenizers.values():
        tokens, mask = PromptEncoder(tokenizer, 120)(["pick up the fork"] * len(state), state)
        wanted = [tokenize_prompt(tokenizer, "pick up the fork", 120, row) for row in state]
        np.testing.assert_array_equal(tokens, np.stack([row for row, _ in wanted]))
        np.testing.assert_array_equal(mask, np.stack([row for _, row in wanted]))


def test_long_prompts_are_cut_with_one_warning_per_task(tokenizers: dict[str, Tokenizer]) -> None:
    state = np.linspace(-1.0, 1.0, 15).reshape(5, 3)
    for tokenizer in tokenizers.values():
        for given_state in (None, state):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("default")
                tokens, mask = PromptEncoder(tokenizer, 6)(["fold the towel" * 3] * 5, given_state)
            assert [str(w.message) for w in caught if w.category is PirlWarning] == [
                f"the prompt {'fold the towel' * 3!r} has more than 6 tokens and is cut off"
            ]
            assert mask.all()
            whole, _ = tokenize_prompt(
                tokenizer, "fold the towel" * 3, 400, None if given_state is None else given_state[4]
            )
            np.testing.assert_array_equal(tokens[4], whole[:6])


def test_prompts_are_encoded_once_per_task() -> None:
    class Counting(ByteTokenizer):
        calls = 0

        def encode(self, text: str) -> list[int]:
            self.calls += 1
            return super().encode(text)

    tokenizer = Counting()
    encoder = PromptEncoder(tokenizer, 64)
    for _ in range(3):
        encoder(["a", "b", "a"])
    assert tokenizer.calls == 4  # two tasks, each with its newline
    encoder(["a"], np.zeros((1, 2)))
    before = tokenizer.calls
    encoder(["a", "a"], np.ones((2, 5)))
    assert tokenizer.calls == before


def test_tokenizer_from_openpis_cache(files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(module, "PALIGEMMA_URL", "memory://absent/paligemma_tokenizer.model")
    cache = tmp_path / "big_vision" / "paligemma_tokenizer.model"
    with pytest.raises(DataError) as caught:
        PaliGemmaTokenizer()
    assert str(cache) in caught.value.message
    assert "memory://absent/paligemma_tokenizer.model" in caught.value.message
    assert str(cache) in caught.value.hint

    cache.parent.mkdir()
    cache.write_bytes(files["bpe"].read_bytes())
    assert PaliGemmaTokenizer().vocab_size == 120


def test_tokenizer_is_downloaded_into_openpis_cache(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "memory://models/paligemma_tokenizer.model"
    with fsspec.open(url, "wb") as file:
        file.write(files["unigram"].read_bytes())
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(module, "PALIGEMMA_URL", url)
    assert PaliGemmaTokenizer().vocab_size == 50
    stored = tmp_path / "big_vision" / "paligemma_tokenizer.model"
    assert [path.name for path in stored.parent.iterdir()] == [stored.name]
    assert stored.read_bytes() == files["unigram"].read_bytes()
    assert PaliGemmaTokenizer(url).encode("fold") == PaliGemmaTokenizer(stored).encode("fold")


def test_bad_tokenizers_are_refused(tmp_path: Path) -> None:
    missing = tmp_path / "none.model"
    with pytest.raises(DataError, match=r"none\.model") as caught:
        PaliGemmaTokenizer(missing)
    assert "FileNotFoundError" in caught.value.message
    missing.write_bytes(b"not a model")
    with pytest.raises(DataError, match="is not a sentencepiece model"):
        PaliGemmaTokenizer(missing)
    headless = train(tmp_path / "headless", model_type="bpe", vocab_size=60, bos_id=-1)
    with pytest.raises(DataError, match="no token that begins a text"):
        PaliGemmaTokenizer(headless)


TEXT = "red block, Advantage: positive"


@pytest.mark.parametrize("state", [None, np.zeros((1, 2))], ids=["words", "with the state"])
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), WordTokenizer()], ids=["assembled", "encoded"])
def test_a_prompt_whose_end_matters_is_refused_where_it_is_cut(tokenizer: Tokenizer, state: np.ndarray | None) -> None:
    long = PromptEncoder(tokenizer, 70, whole=True)([TEXT], state)
    used = int(long[1].sum())
    np.testing.assert_array_equal(PromptEncoder(tokenizer, used, whole=True)([TEXT], state)[0], long[0][:, :used])
    with pytest.raises(DataError, match="its end tells the policy what to do"):
        PromptEncoder(tokenizer, used - 1, whole=True)([TEXT], state)
    with pytest.warns(PirlWarning, match="cut off"):
        PromptEncoder(tokenizer, used - 1)([TEXT], state)
