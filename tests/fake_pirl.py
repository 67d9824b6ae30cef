"""Stands for `pirl` and for the robot in tests of the loop: a checkpoint is a folder with a number in it, its skill.

    fake_pirl.py train RECIPE --exp-name NAME --init-weights BASE --checkpoint.base-dir RUNS --data-path D... --gain G
    fake_pirl.py eval CHECKPOINT --episodes N --out DIR
    fake_pirl.py serve CHECKPOINT --host H --port P
    fake_pirl.py robot SERVER DATASET INITS
    fake_pirl.py label DATASET --classify CHECKPOINT ...     says success of all but the last episode

With $FAKE_PIRL_SILENT the robot records no outcomes while it collects.

Every call is noted in $FAKE_PIRL_CALLS; a call whose number is in $FAKE_PIRL_FAIL fails half-way.
"""

import json
import os
import sys
import threading
from pathlib import Path

import numpy as np

from pirl.data.labels import Label, append
from pirl.data.lerobot import read_meta
from pirl.data.writer import LeRobotWriter
from pirl.robot.client import PolicyClient

FEATURES = {
    "observation.state": {"dtype": "float32", "shape": [1], "names": None},
    "action": {"dtype": "float32", "shape": [2], "names": None},
    "policy": {"dtype": "string", "shape": [1], "names": None},
    "next.success": {"dtype": "bool", "shape": [1], "names": None},
}


def skill(checkpoint: str) -> float:
    file = Path(checkpoint) / "skill"
    return float(file.read_text())


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def train(words: list[str]) -> None:
    folder = Path(option(words, "--checkpoint.base-dir")) / "recipe" / option(words, "--exp-name") / "10"
    began, known = folder.is_dir(), (folder / "skill").exists()
    if "--resume" in words and words[-2:] != ["--resume", "auto"] and not known:
        sys.exit("no complete checkpoint to resume from")
    if "--resume" not in words and began:
        sys.exit("an existing run")
    folder.mkdir(parents=True, exist_ok=True)
    if not began:
        fail_if_told()
    gain = float(option(words, "--gain"))
    (folder / "skill").write_text(str(np.clip(skill(option(words, "--init-weights")) + gain, 0, 1)))


def evaluate(words: list[str]) -> None:
    out = Path(option(words, "--out"))
    out.mkdir(parents=True)
    success = {"rate": skill(words[0]), "low": 0.0, "high": 1.0}
    (out / "eval.json").write_text(json.dumps({"result": {"success": success}}))


def reply_of(checkpoint: str) -> dict:
    """Every action of a policy is its skill."""
    return {"actions": np.full((2, 2), skill(checkpoint), np.float32), "pirl/policy": checkpoint}


def serve(words: list[str]) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from policy_server import policy_server

    with policy_server(lambda _: reply_of(words[0]), port=int(option(words, "--port"))):
        threading.Event().wait()


def robot(words: list[str]) -> None:
    """Success is drawn with the served skill; where initial states repeat, so does the draw."""
    server, dataset, inits = words
    silent = "FAKE_PIRL_SILENT" in os.environ and dataset.endswith("episodes")
    features = {name: one for name, one in FEATURES.items() if not (silent and name == "next.success")}
    numbers = [int(word) for word in inits.split(",")]
    with PolicyClient(server) as client, LeRobotWriter(dataset, fps=5, features=features) as writer:
        for place, number in enumerate(numbers):
            reply = client.infer({"state": np.zeros(1, np.float32), "prompt": "go"})
            success = bool(np.random.default_rng(number).random() < reply["actions"][0, 0])
            row = {"observation.state": 0.0, "action": reply["actions"][0], "policy": reply["pirl/policy"]}
            writer.add_frame(row if silent else {**row, "next.success": success})
            writer.save_episode(task="go")
            if place == len(numbers) // 2:
                fail_if_told()


def label(words: list[str]) -> None:
    root = Path(words[0])
    for index in range(len(read_meta(root).episodes) - 1):
        append(root, Label(episode_index=index, by="classifier", outcome="success", score=0.99))


def fail_if_told() -> None:
    calls = Path(os.environ["FAKE_PIRL_CALLS"]).read_text().count("\n")
    if str(calls) in os.environ.get("FAKE_PIRL_FAIL", "").split(","):
        sys.exit("told to fail")


def main(words: list[str]) -> None:
    verb, *rest = words
    if verb != "serve":
        with open(os.environ["FAKE_PIRL_CALLS"], "a") as calls:
            calls.write(f"{verb} {' '.join(rest)}\n")
    {"train": train, "eval": evaluate, "serve": serve, "robot": robot, "label": label}[verb](rest)


if __name__ == "__main__":
    main(sys.argv[1:])
