"""Cache folders on this machine. OpenPI's and LeRobot's environment variables apply, so caches are shared."""

import os
from pathlib import Path


def openpi_home() -> Path:
    """OpenPI's download cache (`OPENPI_DATA_HOME`, default ~/.cache/openpi)."""
    return Path(os.environ.get("OPENPI_DATA_HOME", "~/.cache/openpi")).expanduser()


def lerobot_home() -> Path:
    """LeRobot's dataset folder (`HF_LEROBOT_HOME`, default ~/.cache/huggingface/lerobot)."""
    if home := os.environ.get("HF_LEROBOT_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "lerobot"


def pirl_home() -> Path:
    """pirl's cache of decoded frames and compiled programs (`PIRL_HOME`, default ~/.cache/pirl)."""
    return Path(os.environ.get("PIRL_HOME", "~/.cache/pirl")).expanduser()


def tokenizer_path() -> Path:
    """PaliGemma's sentencepiece model, at the path to which OpenPI downloads it."""
    return openpi_home() / "big_vision" / "paligemma_tokenizer.model"
