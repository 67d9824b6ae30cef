"""Export a checkpoint for OpenPI (JAX) and for its PyTorch port, and check that the export is lossless.

    python examples/10_export.py
    python examples/10_export.py checkpoints/acrlpd_aloha_fold/box1/50000 --horizon 20

`pirl export openpi|pytorch CHECKPOINT --out DIR` does the same. Without a checkpoint it exports a π₀ of 270,000
parameters with random weights. `--dtype float32` is bit-exact; `mixed` stores the port's compute dtypes.
"""

import argparse
from pathlib import Path

import jax
import numpy as np

import pirl
from pirl.checkpoints.inspect import describe, render
from pirl.checkpoints.weights import load, load_openpi
from pirl.models.params import flatten

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint", nargs="?", type=Path, help="a step's folder")
parser.add_argument("--horizon", type=int, default=4, help="actions of a chunk; PyTorch's config.json says it")
args = parser.parse_args()
OUT = Path("example_runs/export")

if args.checkpoint is None:
    stats = {"state": {"mean": [0.0] * 4, "std": [1.0] * 4}, "actions": {"mean": [0.0] * 3, "std": [1.0] * 3}}
    weights = jax.jit(pirl.Pi0(pirl.get_preset("pi0_tiny")).init)(jax.random.key(0))
    args.checkpoint = pirl.save_openpi(weights, OUT / "trained", norm_stats={"tabletop": stats}, overwrite=True)
print(render(describe(args.checkpoint)), end="\n\n")

# Norm stats must accompany the weights: with other statistics the same weights move a robot wrongly.
params = load_openpi(args.checkpoint)
assets = args.checkpoint / "assets"
stats = {file.parent.relative_to(assets).as_posix(): file for file in assets.rglob("norm_stats.json")}
openpi = pirl.save_openpi(params, OUT / "openpi", norm_stats=stats, overwrite=True)
torch = pirl.save_pytorch(
    params, OUT / "pytorch", action_horizon=args.horizon, dtype="float32", norm_stats=stats, overwrite=True
)

# Read back: the same names, shapes, dtypes and bits. The kind of checkpoint is detected from the files.
expected, shapes = flatten(params), jax.eval_shape(lambda: params)
for folder in (openpi, torch):
    found = flatten(load(folder, shapes))
    same = all(np.asarray(found[name]).tobytes() == np.asarray(expected[name]).tobytes() for name in expected)
    assert found.keys() == expected.keys()
    assert same
    copied = {file.relative_to(folder / "assets").as_posix() for file in (folder / "assets").rglob("*.json")}
    print(f"{folder.name}: {len(found)} arrays are equal to the bit; statistics: {', '.join(sorted(copied))}")
