"""`pirl export`: weights and statistics of a checkpoint for OpenPI, in JAX or PyTorch form."""

import argparse
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pirl.cli.app import positive
from pirl.errors import CheckpointError, PirlWarning

if TYPE_CHECKING:
    from pirl.config import RLTrainConfig

NAME = "export"
HELP = "Exports the weights and normalisation statistics of a checkpoint, without its training state."
EXAMPLES = """\
examples:
  pirl export openpi checkpoints/my_run/20000 --out to_robot
  pirl export pytorch checkpoints/my_run/20000 --out to_torch
  pirl export openpi pi0_torch --model pi0 --out pi0_jax"""
OPENPI = """\
Writes an OpenPI checkpoint, ready for OpenPI's server, and openpi_config.py: the TrainConfig that fits it, ready to
paste, with the command that serves it. Takes any checkpoint; for PyTorch files, name the preset with --model. Keeps
LoRA adapters."""
OPENPI_EXAMPLES = """\
examples:
  pirl export openpi checkpoints/my_run/20000 --out to_robot
  pirl export openpi checkpoints/my_run/20000 --out to_robot_small --dtype bfloat16   half the size
  pirl export openpi pi0_torch --model pi0 --out pi0_jax                              from PyTorch"""
PYTORCH = """\
Writes a checkpoint for OpenPI's PyTorch port: model.safetensors, config.json, statistics and openpi_config.py. Merges
LoRA adapters, because the port has none. Chunk length and adapters' scale come from the run."""
PYTORCH_EXAMPLES = """\
examples:
  pirl export pytorch checkpoints/my_run/20000 --out to_torch
  pirl export pytorch checkpoints/my_run/20000 --out to_torch_exact --dtype float32   exact
  pirl export pytorch checkpoints/lora/20000 --out lora_torch --lora-scale 1 0.5      weights of no run"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl export`."""
    forms = parser.add_subparsers(dest="form", metavar="form", title="forms", required=True)
    openpi = forms.add_parser("openpi", help="OpenPI's own (JAX)", description=OPENPI, epilog=OPENPI_EXAMPLES)
    openpi.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of the weights (default: as stored)")
    torch = forms.add_parser("pytorch", help="OpenPI's PyTorch port", description=PYTORCH, epilog=PYTORCH_EXAMPLES)
    torch.add_argument(
        "--dtype",
        choices=("mixed", "bfloat16", "float32"),
        default="mixed",
        help="mixed: the port's compute types (default); bfloat16: smallest; float32: exact",
    )
    torch.add_argument(
        "--horizon", type=positive, metavar="H", help="actions per chunk (default: the run's or the preset's)"
    )
    torch.add_argument(
        "--lora-scale",
        nargs=2,
        type=float,
        metavar=("VLM", "EXPERT"),
        help="alpha / rank of the attention adapters (default: the run's, or 1 1 as in OpenPI's configs)",
    )
    for form in (openpi, torch):
        form.add_argument("--name", metavar="NAME", help="name of OpenPI's config (default: the run's)")
        form.add_argument("checkpoint", metavar="CHECKPOINT", help="folder, file, gs:// or hf:// address")
        form.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder")
        form.add_argument("--model", metavar="NAME", help="model preset, if the files do not tell")
        form.add_argument("--overwrite", action="store_true", help="replace an earlier export")


def run(args: argparse.Namespace) -> int:
    """Load the weights and write them in the chosen form."""
    from pirl.checkpoints.export_folder import check_replaceable
    from pirl.checkpoints.fetch import fetch
    from pirl.checkpoints.handover import BESIDE
    from pirl.checkpoints.inspect import describe
    from pirl.checkpoints.openpi import save_openpi
    from pirl.models.config import Pi0Config, get_preset
    from pirl.names import ASSETS_ITEM, NORM_STATS_FILE

    path = fetch(args.checkpoint)
    found = describe(path)
    run_config = _run_config(found.path)
    own = None if run_config is None or not isinstance(run_config.model, Pi0Config) else run_config.model
    config = get_preset(args.model) if args.model else own
    if run_config is not None and run_config.agent.only_beside:
        _warn(f"{found.path}: {BESIDE}")
    _check_target(args.out, found.path)
    check_replaceable(args.out.expanduser().absolute(), overwrite=args.overwrite)
    norm_stats = {asset: found.path / ASSETS_ITEM / asset / NORM_STATS_FILE for asset in found.norm_stats}
    if not norm_stats:
        _warn(f"{found.path} has no normalisation statistics, and OpenPI serves nothing without")
    params = _load(path, found, config, dtype=args.dtype if args.form == "openpi" else None)
    texts = {} if run_config is None or not norm_stats else _handover(run_config, args, sorted(norm_stats))
    if args.form == "openpi":
        out = save_openpi(params, args.out, norm_stats=norm_stats, texts=texts, overwrite=args.overwrite)
    else:
        out = _save_pytorch(params, config, args, norm_stats, texts)
    print(f"{found.parameters:,} parameters of {found.model}, statistics of {', '.join(norm_stats) or 'none'} -> {out}")
    for name, text in texts.items():
        print(f"\n{out / name}:\n\n{text}")
    return 0


def _run_config(folder: Path) -> "RLTrainConfig | None":
    """The configuration of the checkpoint's run, if it is stored."""
    from pirl.errors import PirlError
    from pirl.training.acting import find_checkpoint

    try:
        return find_checkpoint(folder).config
    except PirlError:
        return None


def _handover(config: "RLTrainConfig", args: argparse.Namespace, assets: list[str]) -> dict[str, str]:
    """Additional text files: OpenPI's config for this checkpoint; none for an MLP policy."""
    from pirl.checkpoints import handover
    from pirl.data.assets import named_asset
    from pirl.data.transforms import suffixed
    from pirl.models.config import Pi0Config
    from pirl.names import HANDOVER_FILE

    model = config.model
    if not isinstance(model, Pi0Config):
        return {}
    if args.form == "pytorch":
        model = handover.without_adapters(model)
    named = named_asset(config.data, config.robot)
    asset = named if named in assets else assets[0]
    name = args.name or re.sub(r"\W", "_", f"{config.name}_{config.exp_name}")
    prompt, suffixes = _only_task(config) or config.robot.prompt, config.agent.prompt_suffixes
    whole = suffixed(prompt, suffixes[0]) if prompt and suffixes else prompt
    source = handover.openpi_config(name, model, config.robot, asset, whole)
    command = handover.serve_command(name, args.out.expanduser().absolute())
    problems = handover.problems(model, config.robot, beside=config.agent.only_beside)
    if config.agent.one_step:
        problems += (handover.ONE_STEP,)
    if suffixes:
        problems += (handover.suffix_problem(suffixes[0], prompt),)
    return {HANDOVER_FILE: handover.handover_text(source, command, problems)}


def _only_task(config: "RLTrainConfig") -> str | None:
    """The datasets' instruction, if they are on this machine and share a single one."""
    from pirl.data import lerobot
    from pirl.errors import PirlError

    try:
        roots = [lerobot.resolve(name) for name in config.data.repo_ids if not lerobot.to_download(name)]
        tasks = {task for root in roots for task in lerobot.read_meta(root).tasks.values()}
    except PirlError:
        return None
    return tasks.pop() if len(tasks) == 1 else None


def _load(path: Path, found: Any, config: Any, *, dtype: str | None) -> Any:
    """Load a checkpoint's weights: an OpenPI checkpoint defines its shapes, other files need the preset's."""
    from pirl.checkpoints import compare as fit
    from pirl.checkpoints import weights
    from pirl.models.pi0 import param_shapes

    if config is None and found.kind != "openpi":
        raise CheckpointError(
            f"{path} holds {found.kind} weights, which do not tell their model",
            hint="name its preset, such as --model pi0",
        )
    if found.kind != "openpi":
        return weights.load(path, param_shapes(config), dtype=dtype)
    if config is not None:
        shapes = {name: leaf.shape for name, leaf in found.leaves.items()}
        fit.compare(shapes, fit.leaf_shapes(param_shapes(config)), source=str(path))
    return weights.load_openpi(path, dtype=dtype)


def _save_pytorch(
    params: Any, model: Any, args: argparse.Namespace, norm_stats: Mapping[str, Path], texts: Mapping[str, str]
) -> Path:
    from pirl.checkpoints.pytorch import merge_lora, save_pytorch
    from pirl.models.params import flatten

    leaves = flatten(params)
    if any("lora" in name for name in leaves):
        vlm, expert = args.lora_scale or [
            1.0 if gemma is None or gemma.attn_lora is None else gemma.attn_lora.scaling
            for gemma in (getattr(model, "vlm", None), getattr(model, "expert", None))
        ]
        print(f"merging adapters, scaled in attention by {vlm:g} (VLM) and {expert:g} (expert)")
        params = merge_lora(params, attn=(vlm, expert), ffn=(1.0, 1.0))
    if model is None and args.horizon is None:
        _warn(f"{args.checkpoint} does not define its chunk length; config.json gets 50. Set it with --horizon H")
    return save_pytorch(
        params,
        args.out,
        action_horizon=args.horizon or (model.horizon if model else 50),
        paligemma_variant=variant_of(leaves["PaliGemma/llm/layers/mlp/linear"].shape, "gemma_2b"),
        action_expert_variant=variant_of(leaves["PaliGemma/llm/layers/mlp_1/linear"].shape, "gemma_300m"),
        dtype=args.dtype,
        norm_stats=norm_stats,
        texts=texts,
        overwrite=args.overwrite,
    )


def variant_of(shape: tuple[int, ...], default: str) -> str:
    """OpenPI's name for a Gemma whose feed-forward weights have this shape; `default` with a warning if unknown."""
    from pirl.models.config import GEMMA_VARIANTS

    for name, gemma in GEMMA_VARIANTS.items():
        if shape == (gemma.depth, gemma.mlp_dim, gemma.width):
            return name
    _warn(f"OpenPI has no name for a Gemma of layers x inner x width {shape}; config.json gets {default}")
    return default


def _warn(message: str) -> None:
    warnings.warn(message, PirlWarning, stacklevel=3)


def _check_target(out: Path, source: Path) -> None:
    """Raise if the output folder is or contains the source, before gigabytes are read."""
    out, source = out.expanduser().resolve(), source.resolve()
    if source.is_relative_to(out):
        raise CheckpointError(f"{out} is or contains the checkpoint that is exported", hint="write to another folder")
