"""What a batch needs of a device while one step runs, read off jax's own trace of the model.

The model is three scans over stacked blocks: SigLIP, the VLM and the action expert. Each is traced alone, with the
leaves that train and, where something trains before it, its input as what is differentiated. What its forward pass
hands to its backward pass is then known exactly, for any remat setting, freeze rule and size, and it follows the code.
Two batch sizes are traced: the difference is what one sample needs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from pirl.models import gemma, siglip
from pirl.models.config import FreezeRule, Pi0Config
from pirl.models.freeze import freeze_dtypes, join, trainable_mask
from pirl.models.params import Params, flatten, nest
from pirl.models.pi0 import Context, Pi0, param_shapes
from pirl.training.memory import leaf_bytes

ModelPart = Literal["vision", "embedder", "vlm", "expert"]
SCANS = ("vision", "vlm", "expert")
"""Parts that are a scan over blocks."""


class Load(NamedTuple):
    """Bytes that grow with the batch: fixed + per_sample · batch."""

    fixed: int | float = 0
    per_sample: int | float = 0

    def at(self, batch: int) -> int | float:
        """Bytes at this batch."""
        return self.fixed + self.per_sample * batch

    def plus(self, *others: "Load") -> "Load":
        """The sum."""
        return Load(*(sum(column) for column in zip(self, *others, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What the batch needs, on one device."""

    saved: Mapping[str, Load]
    """Kept from the forward to the backward pass, by part (vision, vlm, expert); zero where nothing trains."""
    products: Mapping[str, Load]
    """Outputs of all matrix products of one block."""
    kept: Mapping[str, Load]
    """Those of them that the remat setting keeps, so that they are not recomputed."""
    cache: Load
    """Keys and values of the prefix in all layers."""

    def backward(self, part: str) -> Load:
        """Transient bytes of one block in the backward pass: recomputed products and a cotangent of every product."""
        return Load(0, 2 * self.products[part].per_sample - self.kept[part].per_sample)


def part_of(path: str) -> ModelPart:
    """The part of the model whose backward pass yields a parameter's gradient; the heads go with the expert."""
    if path.startswith("PaliGemma/img/"):
        return "vision"
    if path.startswith("PaliGemma/llm/embedder/"):
        return "embedder"
    return "vlm" if path.startswith("PaliGemma/llm/") and "_1/" not in path else "expert"


@lru_cache(maxsize=64)
def stored_shapes(model: Pi0Config, rule: FreezeRule) -> tuple[Params, Params]:
    """The parameters as they are stored, and which of them train."""
    shapes = param_shapes(model)
    mask = trainable_mask(shapes, model, rule)
    return freeze_dtypes(shapes, mask), mask


@lru_cache(maxsize=64)
def activations(model: Pi0Config, rule: FreezeRule, cameras: int, draws: int = 1) -> Activations:
    """What a batch needs, by part of the model."""
    one, two = (_pieces(replace(model, remat="none"), rule, cameras, draws, batch) for batch in (1, 2))
    products = {part: _line(_products(one[part]), _products(two[part])) for part in SCANS}
    saved = _saved_by_part(model, rule, cameras, draws)
    least = _saved_by_part(replace(model, remat="full"), rule, cameras, draws)
    depths = {"vision": model.vision.depth, "vlm": model.vlm.depth, "expert": model.expert.depth}
    kept = {
        part: Load(0, min((saved[part].per_sample - least[part].per_sample) / depths[part], products[part].per_sample))
        for part in SCANS
    }
    cache = _line(*(sum(map(leaf_bytes, pieces["expert"].inputs)) for pieces in (one, two)))
    return Activations(saved=saved, products=products, kept=kept, cache=cache)


@lru_cache(maxsize=64)
def _saved_by_part(model: Pi0Config, rule: FreezeRule, cameras: int, draws: int) -> dict[str, Load]:
    one, two = (_pieces(model, rule, cameras, draws, batch) for batch in (1, 2))
    return {part: _line(_saved(one[part]), _saved(two[part])) for part in SCANS}


def _line(one: int, two: int) -> Load:
    """The line through the bytes of batches of 1 and 2."""
    return Load(2 * one - two, two - one)


class _Piece(NamedTuple):
    """One scan of the model with the shapes of its arguments: function(params, inputs, rest)."""

    function: Callable[..., Any]
    own: Params
    others: Params
    inputs: Any
    rest: Any
    upstream: bool


def _pieces(model: Pi0Config, rule: FreezeRule, cameras: int, draws: int, batch: int) -> dict[str, _Piece]:
    """The three scans. `own` are the leaves that train within one; `upstream`: something before it trains as well."""
    shapes, mask = stored_shapes(model, rule)
    length = cameras * model.tokens_per_image + model.token_len

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *shape), dtype)

    def vision(params: Params, inputs: Any, images: Any) -> Any:
        return siglip.encode_images(params["PaliGemma"]["img"], model, images)

    def vlm(params: Params, x: Any, tokens: Any) -> Any:
        prefix = gemma.encode_prefix(params["PaliGemma"]["llm"], model, x, *tokens)
        return prefix.keys, prefix.values

    def expert(params: Params, cache: Any, rest: Any) -> Any:
        mask, positions, hidden, state, chunks, time = rest
        context = Context(keys=cache[0], values=cache[1], mask=mask, positions=positions, features=hidden, state=state)
        return Pi0(model).velocity(params, context, chunks, time)

    images = jax.ShapeDtypeStruct((batch * cameras, model.image_size, model.image_size, 3), jnp.float32)
    tokens = (array(length, dtype=bool), array(length, dtype=jnp.int32))
    hidden = array(length, model.vlm.width, dtype=jnp.dtype(model.dtype))
    cache = jax.eval_shape(vlm, shapes, hidden, tokens)
    suffix = (hidden, array(model.action_dim), array(draws, model.horizon, model.action_dim), array(draws))
    flat, flags = flatten(shapes), flatten(mask)
    trains = {part_of(path) for path, flag in flags.items() if flag}
    before_vlm = not trains.isdisjoint({"vision", "embedder"})

    def piece(part: str, function: Callable[..., Any], inputs: Any, rest: Any, upstream: bool) -> _Piece:
        own = {path: leaf for path, leaf in flat.items() if flags[path] and part_of(path) == part}
        others = {path: leaf for path, leaf in flat.items() if path not in own}
        return _Piece(function, nest(own), nest(others), inputs, rest, upstream)

    return {
        "vision": piece("vision", vision, (), images, False),
        "vlm": piece("vlm", vlm, hidden, tokens, before_vlm),
        "expert": piece("expert", expert, cache, (*tokens, *suffix), before_vlm or "vlm" in trains),
    }


def _saved(piece: _Piece) -> int:
    """Bytes the forward pass hands to the backward pass beyond its own arguments, which are there anyway."""
    function, own, others, inputs, rest, upstream = piece
    if not own and not upstream:
        return 0

    def residuals(own: Params, others: Params, inputs: Any, rest: Any) -> list[Any]:
        if upstream:
            back = jax.vjp(lambda own, inputs: function(join(own, others), inputs, rest), own, inputs)[1]
        else:
            back = jax.vjp(lambda own: function(join(own, others), inputs, rest), own)[1]
        return jax.tree.leaves(back)

    jaxpr = jax.make_jaxpr(residuals)(own, others, inputs, rest).jaxpr
    arguments = {id(var) for var in jaxpr.invars}
    kept = {id(var): var for var in jaxpr.outvars if id(var) not in arguments}
    return sum(leaf_bytes(var.aval) for var in kept.values())


def _products(piece: _Piece) -> int:
    """Bytes of the outputs of all matrix products in one block."""
    params = join(piece.own, piece.others)
    return sum(
        leaf_bytes(product.outvars[0].aval)
        for scan in jax.make_jaxpr(piece.function)(params, piece.inputs, piece.rest).jaxpr.eqns
        if scan.primitive.name == "scan"
        for product in _equations(scan.params["jaxpr"])
        if product.primitive.name == "dot_general"
    )


def _equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Any]:
    """All equations, also those of functions called inside."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            if isinstance(value, Jaxpr | ClosedJaxpr):
                yield from _equations(value)
