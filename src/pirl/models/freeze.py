"""Which parameters train: rules over parameter paths. Frozen ones are stored in bfloat16, as OpenPI does."""

import re

import jax
import jax.numpy as jnp

from pirl.models.config import FreezeRule, Pi0Config
from pirl.models.params import Params, flatten, nest

_EXPERT = re.compile(r".*llm.*_1.*")
_LLM = re.compile(r".*llm.*")
_LORA = re.compile(r".*lora.*")
_PALIGEMMA = re.compile(r"PaliGemma/.*")


def is_trainable(path: str, config: Pi0Config, rule: FreezeRule) -> bool:
    """Whether the rule trains the parameter at this path."""
    expert = bool(_EXPERT.fullmatch(path))
    if rule in ("full", "frozen"):
        return rule == "full"
    if rule == "expert_only":
        return expert
    if rule == "vlm_frozen":
        return expert or not _PALIGEMMA.fullmatch(path)
    vlm_lora, expert_lora = (bool(g.attn_lora or g.ffn_lora) for g in (config.vlm, config.expert))
    if _LORA.fullmatch(path) or not _LLM.fullmatch(path):
        return True
    # The adaptive norms of π₀.₅'s expert carry `_1` and freeze with it.
    return not (expert_lora if expert else vlm_lora)


def default_rule(config: Pi0Config) -> FreezeRule:
    """`lora` for a model with adapters, `full` otherwise, as in OpenPI."""
    return "lora" if config.has_lora else "full"


def trainable_mask(tree: Params, config: Pi0Config, rule: FreezeRule | None = None) -> Params:
    """A tree of booleans like `tree`: True for trainable leaves."""
    rule = default_rule(config) if rule is None else rule
    return nest({path: is_trainable(path, config, rule) for path in flatten(tree)})


def freeze_dtypes(shapes: Params, mask: Params) -> Params:
    """`shapes` with frozen leaves in bfloat16."""
    return jax.tree.map(
        lambda leaf, trains: leaf if trains else jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes, mask
    )


def cast_frozen(params: Params, mask: Params) -> Params:
    """`params` with frozen leaves rounded to bfloat16."""
    return jax.tree.map(lambda leaf, trains: leaf if trains else leaf.astype(jnp.bfloat16), params, mask)


def split(params: Params, mask: Params) -> tuple[Params, Params]:
    """(trainable, frozen) subtrees, so that only trainable leaves get gradients and optimizer state."""
    flat, flags = flatten(params), flatten(mask)
    return nest({p: x for p, x in flat.items() if flags[p]}), nest({p: x for p, x in flat.items() if not flags[p]})


def join(trainable: Params, frozen: Params) -> Params:
    """Inverse of `split`."""
    return nest(dict(sorted((flatten(trainable) | flatten(frozen)).items())))
