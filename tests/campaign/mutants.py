"""Mutation tests of the readers: datasets and files changed in one place, and a judge of what the readers return.

Mutant number i of a seed is deterministic. Verdicts: `right` (the recorded data), `refused` (a pirl error with a hint),
`warned` (other data with a warning), `raw` (any other exception) or `wrong` (other data silently). The last two are
failures.
"""

import argparse
import atexit
import json
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pirl.data import labels, outcomes
from pirl.data.cache import CacheConfig
from pirl.data.dataset import LeRobotSource
from pirl.data.lerobot import DatasetMeta
from pirl.data.normalize import load_norm_stats
from pirl.data.replay import ReplayBuffer
from pirl.data.writer import LeRobotWriter
from pirl.errors import PirlError
from pirl.records import Episode

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot"
LEROBOT = ("v21_image", "v21_video", "v30_image", "v30_video", "v30_video_multifile")
OWN = ("own_v21", "own_v30")
"""Datasets written by pirl, with a checksum in every page of their parquet files."""
FILES = ("norm_stats", "success", "labels", "replay")
CAMERAS = tuple(f"observation.images.cam_{name}" for name in ("high", "left_wrist", "right_wrist"))
VECTORS = ("observation.state", "action")
FLAGS = ("next.done", "next.success")
STANDARD = ("timestamp", "frame_index", "episode_index", "index", "task_index")

Rng = np.random.Generator
Attack = Callable[[Path, Rng], str]

ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 0.5, 1e308, -1e308, math.nan, math.inf, -math.inf, 2**31, 2**63, 10**400),
    *("", "0", "1", "True", "False", "nan", "float17", "float", "video", "image", "string", "int8", "bool", "float16"),
    *("../../etc/passwd", "/etc/passwd", "\0", "\ud800", "é" * 200, "x" * 5000, "{0}", "{episode_index:09999999999d}"),
    *("data/{episode_index.__class__}", "videos/{video_key}/{chunk_index}.mp4", "v3.0", "v2.1", "v9"),
    *([], {}, [None], [0], [-1], [[]], [14, None], [2**40], {"dtype": None}, [[[[[[[[[1]]]]]]]]]),
)


@dataclass(frozen=True)
class Mutant:
    """One mutant."""

    number: int
    subject: str
    attack: str
    told: str
    """Description of the change."""


@dataclass(frozen=True)
class Verdict:
    """The reader's result."""

    kind: str
    said: str


# Subjects.


@cache
def subjects() -> Path:
    """A folder with an unmodified copy of every subject."""
    root = Path(tempfile.mkdtemp(prefix="mutants-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for name in LEROBOT:
        shutil.copytree(GOLDEN / name, root / name)
        (root / name / "golden.npz").unlink(missing_ok=True)
    for name, version in zip(OWN, ("v2.1", "v3.0"), strict=True):
        _record(root / name, version)
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(2, 4, 14))
    low = -np.abs(numbers[:, 0])
    stats = {
        key: {"mean": m[0].tolist(), "std": np.abs(m[1]).tolist(), "q01": q.tolist(), "q99": (-q).tolist()}
        for key, m, q in zip(("state", "actions"), numbers, low, strict=True)
    }
    for name in FILES:
        (root / name).mkdir()
    (root / "norm_stats/norm_stats.json").write_text(json.dumps({"norm_stats": stats}, indent=2))
    (root / "success/success.json").write_text(json.dumps({str(i): i != 1 for i in range(5)}))
    lines = [{"episode_index": i, "by": by, "outcome": "success" if i % 2 else "failure", "moment": None, "quality": i}
             for by in ("ann", "bob") for i in range(5)]  # fmt: skip
    (root / "labels/meta").mkdir()
    (root / "labels" / labels.LABELS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    state = replay().save(root / "replay")
    (root / "replay/state.json").write_text(json.dumps(state))
    return root


def _record(root: Path, version: str) -> None:
    vector = {"dtype": "float32", "shape": (14,), "names": None}
    flag = {"dtype": "bool", "shape": (1,), "names": None}
    image = {"dtype": "image", "shape": (16, 24, 3), "names": None}
    features = dict.fromkeys(VECTORS, vector) | dict.fromkeys(FLAGS, flag) | dict.fromkeys(CAMERAS, image)
    features["next.reward"] = {"dtype": "float32", "shape": (1,), "names": None}
    with LeRobotWriter(root, fps=10, features=features, version=version) as writer:  # type: ignore[arg-type]
        for index, length in enumerate((7, 12, 9)):
            rng, last = np.random.default_rng(index), np.arange(length) == length - 1
            columns: dict[str, Any] = {key: rng.normal(size=(length, 14)).astype(np.float32) for key in VECTORS}
            columns |= {"next.done": last, "next.success": last & (index != 1)}
            columns["next.reward"] = columns["next.success"].astype(np.float32)
            for camera, key in enumerate(CAMERAS):
                columns[key] = rng.integers(40 * camera, 40 * camera + 150, (length, 16, 24, 3)).astype(np.uint8)
            writer.add_episode(columns, task=f"task {index % 2}", save=False)
        writer.save()


def replay() -> ReplayBuffer:
    """A replay buffer of two episodes."""
    buffer = ReplayBuffer(cameras=("a",), max_episodes=9, max_bytes=10**9)
    for index in range(2):
        rng = np.random.default_rng(index)
        end = np.arange(6) == 5
        episode = Episode(
            task=f"task {index}",
            state=rng.normal(size=(6, 3)).astype(np.float32),
            actions=rng.normal(size=(6, 2)).astype(np.float32),
            rewards=end.astype(np.float32),
            terminated=end,
            truncated=end & False,
            success=True,
        )
        buffer.append(episode, {"a": rng.integers(0, 255, (6, 8, 8, 3)).astype(np.uint8)})
    return buffer


# Reading.


def observe(subject: str, root: Path) -> Any:
    """Everything that a reader returns for the subject, as plain data."""
    if subject == "norm_stats":
        found = load_norm_stats(root)
        return {
            key: [None if (v := getattr(one, n)) is None else v.tolist() for n in _STATS] for key, one in found.items()
        }
    if subject == "success":
        return outcomes.read_success_file(root / "success.json", range(5))
    if subject == "labels":
        verdicts = labels.newest(labels.read(root, dict.fromkeys(range(5), 50)))
        return {
            index: [(one.by, one.outcome, one.moment, one.quality) for one in v.labels] for index, v in verdicts.items()
        }
    if subject == "replay":
        buffer = ReplayBuffer(cameras=("a",), max_episodes=9, max_bytes=10**9)
        buffer.restore(root, json.loads((root / "state.json").read_text()))
        return [(_plain(buffer.episode(i)), buffer.frames(i)["a"].tobytes()) for i in range(len(buffer))]
    cameras = dict(zip(("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"), CAMERAS, strict=True))
    source = LeRobotSource(
        root, cameras=cameras, image_size=None, cache=CacheConfig(tier="pool", workers=1, folder=str(root / "cache"))
    )
    episodes = [_plain(source.episode(i)) for i in range(len(source))]
    source.cache._built = True  # the pool tier, regardless of available memory
    return {"fps": source.meta.fps, "episodes": episodes, "pictures": _pictures(subject, root, source)}


def _plain(episode: Episode) -> tuple[Any, ...]:
    columns = (episode.state, episode.actions, episode.rewards, episode.terminated, episode.truncated)
    return (episode.task, episode.success, *((column.shape, column.tobytes()) for column in columns))


def _pictures(subject: str, root: Path, source: LeRobotSource) -> list[Any]:
    """A hash of every episode's images; videos read from the same place of the same file are not decoded."""
    known = _places(subject, root, source.meta)
    if subjects() / subject in reference_places and known == reference_places[subjects() / subject]:
        return reference_pictures[subjects() / subject]
    decoded = [hash(tuple(f.tobytes() for f in source.frames(i).values())) for i in range(len(source))]
    if root == subjects() / subject:
        reference_places[root], reference_pictures[root] = known, decoded
    return decoded


reference_places: dict[Path, Any] = {}
reference_pictures: dict[Path, list[Any]] = {}


def _places(subject: str, root: Path, meta: DatasetMeta) -> Any:
    spans = [(e.length, c, s.path.relative_to(meta.root), s.first) for e in meta.episodes for c, s in e.cameras.items()]
    files = sorted({span[2] for span in spans})
    same = [
        os.path.samefile(root / file, subjects() / subject / file) if (root / file).exists() else None for file in files
    ]
    return meta.version, meta.fps, [meta.features[key] for key in CAMERAS], spans, same


_STATS = ("mean", "std", "q01", "q99")


@cache
def reference(subject: str) -> Any:
    """The unmodified subject's contents."""
    return observe(subject, subjects() / subject)


def expected(subject: str, root: Path) -> Any:
    """The mutant's contents by an independent reader, for files without redundancy; None for invalid files."""
    if subject == "norm_stats":
        return _expected_stats(root / "norm_stats.json")
    if subject == "success":
        return _expected_success(root / "success.json")
    if subject == "labels":
        return _expected_labels(root / labels.LABELS_FILE)
    return reference(subject)


def _expected_stats(file: Path) -> Any:
    try:
        found = json.loads(file.read_bytes().decode())["norm_stats"]
        assert {"state", "actions"} <= set(found)
        wanted = {}
        for key, one in found.items():
            columns = [None if one.get(name) is None else [float(x) for x in one[name]] for name in _STATS]
            mean, std, low, high = columns
            assert mean
            assert len({len(c) for c in columns if c is not None}) == 1
            assert all(type(x) in (int, float) and abs(x) < 3.5e38 for name in _STATS for x in one.get(name) or ())
            assert all(s >= 0 for s in std)
            assert low is None or high is None or all(a <= b for a, b in zip(low, high, strict=True))
            wanted[key] = columns
        return wanted
    except Exception:
        return None


def _expected_success(file: Path) -> Any:
    try:
        found = json.loads(file.read_bytes().decode())
        if "episode_index" in found:
            found = {found["episode_index"]: found["success"]}
        assert found
        assert all(type(v) is bool and int(k) in range(5) for k, v in found.items())
        return {int(k): v for k, v in found.items()}
    except Exception:
        return None


def _expected_labels(file: Path) -> Any:
    """The newest label of each person; an incomplete last line does not count."""
    latest: dict[tuple[int, str], Any] = {}
    lines = file.read_bytes().split(b"\n") if file.is_file() else []
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line.decode()) if line.strip() else None
        except Exception:
            if number == len(lines) - 1:
                continue
            return None
        if entry is not None:
            told = (
                (entry.get("outcome"), entry.get("moment"), entry.get("quality")) if isinstance(entry, dict) else None
            )
            if told is None or type(entry.get("episode_index")) is not int or not isinstance(entry.get("by"), str):
                return None
            latest[entry["episode_index"], entry["by"].strip()] = told
    found: dict[int, list[Any]] = {}
    for (index, by), told in sorted(latest.items()):
        if told[0] is not None:
            found.setdefault(index, []).append((by, *told))
    return found


# Changes.


def _choose(rng: Rng, items: Any) -> Any:
    items = list(items)
    return items[int(rng.integers(len(items)))]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _own_copy(path: Path) -> Path:
    """The file as a copy that is no longer linked to the unmodified subject."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    return path


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, item in items:
        yield from _leaves(item, (*path, key))


def _change_value(value: Any, rng: Rng) -> tuple[Any, str]:
    """The JSON value with one part changed."""
    path = _choose(rng, _leaves(value)) if isinstance(value, dict | list) and value else ()
    if not path:
        return _choose(rng, ODD), "all"
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    old, where = parent[path[-1]], "/".join(map(str, path))
    kind = _choose(rng, ("odd", "odd", "odd", "delete", "text", "list", "nudge", "swap"))
    if kind == "delete":
        del parent[path[-1]]
        return value, f"{where} deleted"
    new = _choose(rng, ODD)
    if kind == "text":
        new = str(old)
    elif kind == "list":
        new = [old]
    elif kind == "nudge" and type(old) in (int, float):
        new = _choose(rng, (old + 1, old - 1, -old, old * 2, old + 0.5))
    elif kind == "swap" and isinstance(parent, dict):
        other = _choose(rng, parent)
        new, parent[other] = parent[other], old
    parent[path[-1]] = new
    return value, f"{where}: {str(old)[:40]!r} -> {str(new)[:40]!r}"


def json_value(root: Path, rng: Rng) -> str:
    """Change one value of a JSON file."""
    path = _own_copy(_choose(rng, sorted([*root.rglob("*.json"), *root.rglob("*.jsonl")])))
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    at = int(rng.integers(len(lines)))
    changed, told = _change_value(json.loads(lines[at]), rng)
    lines[at] = json.dumps(changed)
    path.write_text("\n".join(lines) + ("\n" if path.suffix == ".jsonl" else ""))
    return f"{path.name}, line {at}: {told}"


def json_text(root: Path, rng: Rng) -> str:
    """Change a JSON file's text: deep nesting, a duplicate key, lines lost, doubled or joined."""
    path = _own_copy(_choose(rng, sorted([*root.rglob("*.json"), *root.rglob("*.jsonl")])))
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    at = int(rng.integers(len(lines)))
    kind = _choose(rng, ("deep", "twice", "lose", "double", "join", "bom", "empty", "comma"))
    if kind == "deep":
        text = _choose(rng, ("[" * 200_000, '{"a":' * 200_000, text[:-2] + ', "z": ' + "[" * 200_000))
    elif kind == "twice":
        whole = json.loads(text) if path.suffix == ".json" else json.loads(lines[at])
        key = _choose(rng, whole) if isinstance(whole, dict) and whole else "a"
        again = json.dumps(whole)[:-1] + f", {json.dumps(key)}: {json.dumps(_choose(rng, ODD[:16]))}}}"
        text = again if path.suffix == ".json" else "".join([*lines[:at], again + "\n", *lines[at + 1 :]])
    elif kind == "lose":
        text = "".join([*lines[:at], *lines[at + 1 :]])
    elif kind == "double":
        text = "".join([*lines[:at], lines[at], *lines[at:]])
    elif kind == "join":
        text = text.replace("\n", " ")
    else:
        text = {"bom": "\ufeff" + text, "empty": "", "comma": text.replace(",", ",,", 1)}[kind]
    path.write_text(text)
    return f"{path.name}, line {at}: {kind}"


def _file_bytes(path: Path, rng: Rng) -> str:
    content = bytearray(_own_copy(path).read_bytes())
    at = int(rng.integers(max(len(content), 1)))
    kind = _choose(rng, ("flip", "flip", "flip", "cut", "zero", "insert", "append", "missing", "folder"))
    if kind == "flip" and content:
        content[at] ^= 1 << int(rng.integers(8))
    elif kind == "cut":
        del content[at:]
    elif kind == "zero":
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    elif kind == "insert":
        content[at:at] = rng.bytes(7)
    elif kind == "append":
        content += rng.bytes(100)
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(content)
    return f"{path.name}: {kind} at {at}"


def meta_bytes(root: Path, rng: Rng) -> str:
    """Change bytes of a metadata file."""
    found = [path for path in root.rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl", ".parquet")]
    return _file_bytes(_choose(rng, sorted(path for path in found if "data" not in path.relative_to(root).parts)), rng)


def data_bytes(root: Path, rng: Rng) -> str:
    """Change bytes of a data file."""
    return _file_bytes(_choose(rng, sorted([*root.rglob("data/**/*.parquet"), *root.rglob("*.npz")])), rng)


def _tables(root: Path, rng: Rng, pattern: str) -> tuple[Path, pa.Table]:
    path = _own_copy(_choose(rng, sorted(root.glob(pattern))))
    return path, pq.read_table(path)


def _column_changed(table: pa.Table, name: str, rng: Rng) -> tuple[pa.Table, str]:
    """A table with one column dropped, renamed, of another type, or with odd values."""
    place, rows = table.column_names.index(name), table[name].to_pylist()
    at = int(rng.integers(len(rows)))
    kind = _choose(
        rng, ("drop", "rename", "null", "text", "nest", "flat", "double", "odd", "type", "twice", "scale", "stuct")
    )
    if kind == "drop":
        return table.drop_columns([name]), f"{name} dropped"
    if kind == "rename":
        return table.rename_columns([f"{n}_" if n == name else n for n in table.column_names]), f"{name} renamed"
    if kind == "twice":
        return table.append_column(name, table[name]), f"{name} twice"
    if kind == "null":
        rows[at] = None
    elif kind == "text":
        rows = [str(row) for row in rows]
    elif kind == "nest":
        rows = [[row] for row in rows]
    elif kind == "flat":
        rows = [row[0] if isinstance(row, list) and row else row for row in rows]
    elif kind == "double":
        rows = [row + row if isinstance(row, list) else row for row in rows]
    elif kind == "stuct":
        rows = [{"value": row} for row in rows]
    elif kind == "odd":
        odd = _choose(rng, (math.nan, math.inf, -1, 7, 10**12, -(10**12), 0.25))
        rows[at] = [odd, *rows[at][1:]] if isinstance(rows[at], list) and rows[at] else odd
    elif kind == "type":
        kinds = (np.int8, np.int64, np.float16, np.float64, np.bool_, np.uint8)
        with np.errstate(all="ignore"):
            rows = np.asarray(rows).astype(_choose(rng, kinds)).tolist()
    elif kind == "scale":
        rows = (np.asarray(rows) * 2).tolist()
    return table.set_column(place, name, pa.array(rows)), f"{name}: {kind} at {at}"


def _rows_changed(table: pa.Table, rng: Rng) -> tuple[pa.Table, str]:
    """A table with rows lost, doubled or reordered."""
    rows, at = np.arange(len(table)), int(rng.integers(len(table)))
    kind = _choose(rng, ("lose", "double", "roll", "swap", "none"))
    other = (at + 1 + int(rng.integers(max(len(rows) - 1, 1)))) % len(rows)
    swapped = rows.copy()
    swapped[[at, other]] = swapped[[other, at]]
    taken = {"lose": np.delete(rows, at), "double": np.insert(rows, at, at), "roll": np.roll(rows, 1), "swap": swapped}
    return table.take(taken.get(kind, rows[:0])), f"rows: {kind} at {at}"


def _names_changed(table: pa.Table, rng: Rng) -> tuple[pa.Table, str]:
    """A table with the names of two columns of the same type swapped."""
    alike = [
        (a.name, b.name)
        for i, a in enumerate(table.schema)
        for b in list(table.schema)[i + 1 :]
        if a.type == b.type and not a.name.startswith("stats/") and not b.name.startswith("stats/")
    ]
    first, second = _choose(rng, alike)
    swap = {first: second, second: first}
    return table.rename_columns([swap.get(name, name) for name in table.column_names]), f"{first} <-> {second}"


def _change_table(root: Path, rng: Rng, pattern: str) -> str:
    path, table = _tables(root, rng, pattern)
    kind = _choose(rng, ("column", "column", "column", "rows", "names"))
    if kind == "names" and len(table.column_names) < 3:
        kind = "rows"
    try:
        if kind == "column":
            names = [name for name in table.column_names if not name.startswith("stats/")]
            table, told = _column_changed(table, _choose(rng, names), rng)
        else:
            table, told = (_rows_changed if kind == "rows" else _names_changed)(table, rng)
        pq.write_table(table, path)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):  # no such file can be written
        return _change_table(root, rng, pattern)
    return f"{path.name}: {told}"


def data_table(root: Path, rng: Rng) -> str:
    """Change a data file's table."""
    return _change_table(root, rng, "data/*/*.parquet")


def meta_table(root: Path, rng: Rng) -> str:
    """Change a parquet file of metadata (episodes or tasks)."""
    return _change_table(root, rng, _choose(rng, ("meta/episodes/*/*.parquet", "meta/tasks.parquet")))


def ragged(root: Path, rng: Rng) -> str:
    """Move list values from one row to the next."""
    path, table = _tables(root, rng, "data/*/*.parquet")
    name = _choose(rng, VECTORS)
    rows = table[name].to_pylist()
    at = int(rng.integers(len(rows) - 1))
    rows[at], rows[at + 1] = [*rows[at], rows[at + 1][0]], rows[at + 1][1:]
    pq.write_table(table.set_column(table.column_names.index(name), name, pa.array(rows, pa.list_(pa.float32()))), path)
    return f"{name}: a value of row {at + 1} in row {at}"


def swapped_videos(root: Path, rng: Rng) -> str:
    """Swap the video files of two cameras or two episodes."""
    path, other = (_choose(rng, sorted(root.glob("videos/**/*.mp4"))) for _ in range(2))
    one, two = path.read_bytes(), other.read_bytes()
    for file, content in ((path, two), (other, one)):
        file.unlink()
        file.write_bytes(content)
    return f"{path.relative_to(root)} <-> {other.relative_to(root)}"


def video_bytes(root: Path, rng: Rng) -> str:
    """Truncate, empty or delete a video."""
    path = _choose(rng, sorted(root.glob("videos/**/*.mp4")))
    content = _own_copy(path).read_bytes()
    kind = _choose(rng, ("cut", "empty", "missing", "text"))
    path.unlink()
    if kind != "missing":
        path.write_bytes({"cut": content[: int(rng.integers(len(content)))], "empty": b"", "text": b"no video"}[kind])
    return f"{path.relative_to(root)}: {kind}"


ATTACKS: dict[str, tuple[Attack, tuple[str, ...], int]] = {
    "a JSON value": (json_value, (*LEROBOT, *OWN, "norm_stats", "success", "labels"), 6),
    "JSON text": (json_text, (*LEROBOT, *OWN, "norm_stats", "success", "labels"), 2),
    "bytes of metadata": (meta_bytes, (*LEROBOT, *OWN, "norm_stats", "success", "labels"), 3),
    "bytes of rows": (data_bytes, (*OWN, "replay"), 2),
    "a table of rows": (data_table, (*LEROBOT, *OWN), 6),
    "a table of metadata": (meta_table, (*(n for n in LEROBOT if n.startswith("v30")), "own_v30"), 4),
    "ragged rows": (ragged, (*LEROBOT, *OWN), 1),
    "swapped videos": (swapped_videos, ("v21_video", "v30_video", "v30_video_multifile"), 1),
    "a damaged video": (video_bytes, ("v21_video", "v30_video", "v30_video_multifile"), 1),
}
"""Name -> (attack, subjects it applies to, weight)."""


# Judging.


def make(seed: int, number: int, root: Path) -> Mutant:
    """Make mutant `number` of a seed in a new folder. Unmodified files are links."""
    rng = np.random.default_rng((seed, number))
    names = list(ATTACKS)
    weights = np.array([ATTACKS[name][2] for name in names], float)
    name = names[int(rng.choice(len(names), p=weights / weights.sum()))]
    attack, fits, _ = ATTACKS[name]
    subject = _choose(rng, fits)
    shutil.copytree(subjects() / subject, root, copy_function=_link)
    return Mutant(number, subject, name, attack(root, rng))


def judge(mutant: Mutant, root: Path) -> Verdict:
    """Read the mutant and return the verdict."""
    wanted = expected(mutant.subject, root)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = observe(mutant.subject, root)
        except PirlError as error:
            return Verdict("refused" if error.hint else "raw", str(error))
        except Exception:
            return Verdict("raw", traceback.format_exc())
    said = "\n".join(str(one.message) for one in caught)
    if found == wanted or _differs_in_words(found, wanted, mutant):
        return Verdict("right", said)
    return Verdict("warned" if said else "wrong", said)


def _differs_in_words(found: Any, wanted: Any, mutant: Mutant) -> bool:
    """Whether only a task's wording or a rounded fps differs, for which a dataset has no redundancy."""
    if mutant.subject in FILES or wanted is None or len(found["episodes"]) != len(wanted["episodes"]):
        return False
    same = all(a[1:] == b[1:] for a, b in zip(found["episodes"], wanted["episodes"], strict=True))
    words = "task" in mutant.told or mutant.attack == "bytes of metadata"
    close = abs(found["fps"] / wanted["fps"] - 1) < 0.02  # less than half a frame in the longest episode
    return same and close and words and found["pictures"] == wanted["pictures"]


def attack(seed: int, numbers: range, folder: Path) -> Iterator[tuple[Mutant, Verdict]]:
    """Make, judge and remove mutants."""
    for number in numbers:
        root = folder / str(number)
        mutant = make(seed, number, root)
        reference(mutant.subject)
        yield mutant, judge(mutant, root)
        shutil.rmtree(root)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="SEED:NUMBER", help="one mutant, and all that is said of it")
    args = parser.parse_args()
    began, counts, failures = time.monotonic(), Counter[tuple[str, str]](), 0
    seed, numbers = args.seed, range(args.count)
    if args.only:
        seed, first = map(int, args.only.split(":"))
        numbers = range(first, first + 1)
    with tempfile.TemporaryDirectory(prefix="mutants-", dir=subjects().parent) as folder:
        for mutant, verdict in attack(seed, numbers, Path(folder)):
            counts[mutant.attack, verdict.kind] += 1
            if args.only or verdict.kind in ("raw", "wrong"):
                failures += verdict.kind in ("raw", "wrong")
                print(f"{seed}:{mutant.number} {verdict.kind}: {mutant.subject}: {mutant.attack}: {mutant.told}")
                print("\n".join("    " + line for line in verdict.said.splitlines()[-8:]), flush=True)
    kinds = ("right", "refused", "warned", "raw", "wrong")
    print(f"{'':<22}" + "".join(f"{kind:>9}" for kind in kinds))
    for name in (*ATTACKS, "all"):
        row = [sum(n for (a, k), n in counts.items() if k == kind and name in (a, "all")) for kind in kinds]
        print(f"{name:<22}" + "".join(f"{n:>9}" for n in row))
    print(f"{len(numbers)} mutants of seed {seed} in {time.monotonic() - began:.0f} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
