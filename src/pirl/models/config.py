"""Sizes of π₀ and related policies, as data. No jax here: `pirl --help` reads this module.

OpenPI hard-codes SigLIP's size, the image size and the vocabulary; here they are fields, so a policy with a million
parameters uses the same code as one with three billion.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pirl.errors import ConfigError, did_you_mean
from pirl.names import CAMERAS

Remat = Literal["auto", "none", "names", "dots", "full"]
DType = Literal["bfloat16", "float32"]
Attention = Literal["auto", "plain", "xla", "cudnn"]
FlowTimes = Literal["beta", "uniform"]
"""Distribution of training flow times. beta: Beta(1.5, 1), denser near the noise (OpenPI). uniform: Q-chunking and
FQL."""
Predicts = Literal["velocity", "chunk"]
"""Output of an MLP policy's network. velocity: ε - a, as Q-chunking. chunk: the clean chunk a, from which the velocity
follows: the noise need not pass through the network."""
FreezeRule = Literal["full", "lora", "vlm_frozen", "expert_only", "frozen"]
"""full: everything trains. lora: OpenPI's rule (adapters, SigLIP and heads train; the transformers that carry adapters
do not). vlm_frozen: the action expert and the heads train. expert_only: only the expert's transformer trains."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters beside frozen matrices."""

    rank: int
    """Inner dimension of the adapter."""
    alpha: float
    """Attention scales the adapter's output by alpha / rank; the feed-forward does not, as in OpenPI."""

    @property
    def scaling(self) -> float:
        """Factor on the adapter's output in attention."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class GemmaConfig:
    """One of the two Gemma transformers that attend to each other."""

    width: int
    """Size of a token."""
    depth: int
    """Number of blocks; equal in both experts."""
    mlp_dim: int
    """Inner size of the gated feed-forward."""
    num_heads: int
    """Query heads; equal in both experts."""
    num_kv_heads: int = 1
    """Key/value heads, shared by groups of query heads; equal in both experts."""
    head_dim: int = 256
    """Size of a head; equal in both experts."""
    attn_lora: LoRAConfig | None = None
    """Adapters on the attention projections."""
    ffn_lora: LoRAConfig | None = None
    """Adapters on the feed-forward."""

    def with_lora(self, rank: int, alpha: float | None = None) -> "GemmaConfig":
        """The same transformer with adapters on attention and feed-forward."""
        lora = LoRAConfig(rank=rank, alpha=float(rank if alpha is None else alpha))
        return replace(self, attn_lora=lora, ffn_lora=lora)


@dataclass(frozen=True, kw_only=True)
class SigLIPConfig:
    """The vision transformer; its output is projected to the VLM's width."""

    width: int = 1152
    """Size of a patch token."""
    depth: int = 27
    """Number of blocks."""
    mlp_dim: int = 4304
    """Inner size of the feed-forward."""
    num_heads: int = 16
    """Attention heads."""
    patch_size: int = 14
    """Side of a square patch, in pixels."""


GEMMA_2B = GemmaConfig(width=2048, depth=18, mlp_dim=16_384, num_heads=8)
GEMMA_300M = GemmaConfig(width=1024, depth=18, mlp_dim=4096, num_heads=8)
GEMMA_DUMMY = GemmaConfig(width=64, depth=4, mlp_dim=128, num_heads=8, head_dim=16)

GEMMA_VARIANTS: dict[str, GemmaConfig] = {
    "dummy": GEMMA_DUMMY,
    "gemma_2b": GEMMA_2B,
    "gemma_2b_lora": GEMMA_2B.with_lora(16),
    "gemma_300m": GEMMA_300M,
    "gemma_300m_lora": GEMMA_300M.with_lora(32),
}
"""OpenPI's names for Gemma sizes."""


def gemma_variant(name: str) -> GemmaConfig:
    """A Gemma size by OpenPI's name."""
    if name not in GEMMA_VARIANTS:
        raise did_you_mean(name, GEMMA_VARIANTS, kind="Gemma variant")
    return GEMMA_VARIANTS[name]


@dataclass(frozen=True, kw_only=True)
class Pi0Config:
    """π₀ or π₀.₅: SigLIP and the VLM read images and prompt, the action expert reads state and noisy actions."""

    pi05: bool = False
    """π₀.₅: the flow time enters through adaptive RMS norms and the state is part of the prompt."""
    vlm: GemmaConfig = GEMMA_2B
    """The language model that reads images and prompt (expert 0)."""
    expert: GemmaConfig = GEMMA_300M
    """The action expert (expert 1, parameters named `..._1`)."""
    vision: SigLIPConfig = SigLIPConfig()
    """The vision tower."""
    image_size: int = 224
    """Images are letterboxed to this square."""
    vocab_size: int = 257_152
    """Rows of the token embedding (PaliGemma's)."""
    cameras: tuple[str, ...] = CAMERAS
    """Camera slots in sequence order. Cameras missing from an observation are left out of the sequence."""
    action_dim: int = 32
    """Size of padded states and actions."""
    horizon: int = 50
    """Actions per chunk."""
    max_token_len: int | None = None
    """Prompt tokens. None: OpenPI's 48 (π₀) or 200 (π₀.₅)."""
    discrete_state_input: bool | None = None
    """Write the state into the prompt. None: only for π₀.₅, as in OpenPI."""
    dtype: DType = "bfloat16"
    """Type of activations and matmuls. Parameters are float32, frozen ones bfloat16."""
    remat: Remat = "auto"
    """Rematerialisation per block. `full`: recompute everything. `dots`: all but matmuls without a batch dimension.
    `names`: all but the largest projections. `none`: nothing. Less recomputation is faster and takes more memory.
    `auto`: the least that fits, estimated as in `pirl plan`; training logs the choice."""
    attention: Attention = "auto"
    """Attention implementation. `plain`: materialised logits, exactly as OpenPI. `cudnn`: a fused kernel (NVIDIA GPUs,
    bfloat16), plus on a single Hopper GPU a kernel for gated products without gradients. `xla`: the same without
    kernels. `auto`: cudnn where supported, otherwise plain. They differ only by rounding, on an H200 within bfloat16
    precision (`benchmarks/gpu_parity.py`)."""
    feature_layer: int = -1
    """The critic reads the input of this VLM layer (-1: the last). `depth`: the final norm's output, which is trained
    only in a pretrained VLM: π₀'s loss has no gradient for anything after the last layer's keys and values."""

    def __post_init__(self) -> None:
        for name in ("depth", "num_heads", "num_kv_heads", "head_dim"):
            ours, theirs = getattr(self.vlm, name), getattr(self.expert, name)
            if ours != theirs:
                raise ConfigError(
                    f"the VLM's {name} is {ours}, the expert's is {theirs}",
                    hint="the two attend to each other layer by layer: depth and heads must agree, widths may differ",
                )
        if self.vlm.num_heads % self.vlm.num_kv_heads:
            raise ConfigError(f"{self.vlm.num_heads} query heads cannot share {self.vlm.num_kv_heads} key/value heads")
        if self.vision.width % self.vision.num_heads:
            raise ConfigError(f"SigLIP's width {self.vision.width} is not divisible by {self.vision.num_heads} heads")
        if not -self.vlm.depth <= self.feature_layer <= self.vlm.depth:
            raise ConfigError(f"feature_layer {self.feature_layer} is outside ±{self.vlm.depth}, the VLM's depth")

    @property
    def token_len(self) -> int:
        """Prompt tokens at the model's input."""
        return self.max_token_len if self.max_token_len is not None else (200 if self.pi05 else 48)

    @property
    def discrete_state(self) -> bool:
        """Whether the prompt contains the state."""
        return self.pi05 if self.discrete_state_input is None else self.discrete_state_input

    @property
    def state_dim(self) -> int:
        """Size of a state at the model's input: padded like an action."""
        return self.action_dim

    @property
    def feature_width(self) -> int | None:
        """Size of the prefix features that a critic reads."""
        return self.vlm.width

    @property
    def family(self) -> str:
        """Human-readable model name."""
        return "π₀.₅" if self.pi05 else "π₀"

    @property
    def tokens_per_image(self) -> int:
        """Patches per image."""
        return (self.image_size // self.vision.patch_size) ** 2

    @property
    def has_lora(self) -> bool:
        """Whether either expert has adapters."""
        return any(g.attn_lora or g.ffn_lora for g in (self.vlm, self.expert))


@dataclass(frozen=True, kw_only=True)
class MLPFlowConfig:
    """A flow policy over the state alone: Q-chunking's network."""

    state_dim: int
    """Size of the state."""
    action_dim: int
    """Size of an action."""
    horizon: int = 5
    """Actions per chunk."""
    hidden: tuple[int, ...] = (512, 512, 512, 512)
    """Widths of the hidden layers."""
    predicts: Predicts = "velocity"
    """Output of the network. velocity: ε - a, as Q-chunking. chunk: the clean chunk; learns long chunks of many joints
    with a narrow network."""
    dtype: DType = "float32"
    """Type of activations and matmuls. Parameters are float32."""

    # What `Pi0Config` has and a policy without images, text and pretrained weights does not.
    cameras: ClassVar[tuple[str, ...]] = ()
    token_len: ClassVar[int] = 0
    image_size: ClassVar[int] = 224
    pi05: ClassVar[bool] = False
    discrete_state: ClassVar[bool] = False
    has_lora: ClassVar[bool] = False
    feature_width: ClassVar[int | None] = None
    family: ClassVar[str] = "MLP"


_TINY_VISION = SigLIPConfig(width=64, depth=2, mlp_dim=128, num_heads=2, patch_size=8)
_TINY_GEMMA = GemmaConfig(width=64, depth=2, mlp_dim=128, num_heads=4, head_dim=16)
_MINI_VISION = SigLIPConfig(width=192, depth=6, mlp_dim=768, num_heads=6, patch_size=11)
_MINI_VLM = GemmaConfig(width=256, depth=6, mlp_dim=1024, num_heads=8, head_dim=32)
_MINI_EXPERT = GemmaConfig(width=192, depth=6, mlp_dim=768, num_heads=8, head_dim=32)
_SMALL_VISION = SigLIPConfig(width=384, depth=12, mlp_dim=1536, num_heads=6, patch_size=14)
_SMALL_VLM = GemmaConfig(width=640, depth=8, mlp_dim=3072, num_heads=8, head_dim=64)
_SMALL_EXPERT = GemmaConfig(width=384, depth=8, mlp_dim=1536, num_heads=8, head_dim=64)

PRESETS: dict[str, Pi0Config] = {
    "pi0": Pi0Config(),
    "pi05": Pi0Config(pi05=True),
    "pi0_lora": Pi0Config(vlm=GEMMA_VARIANTS["gemma_2b_lora"], expert=GEMMA_VARIANTS["gemma_300m_lora"]),
    "pi05_lora": Pi0Config(pi05=True, vlm=GEMMA_VARIANTS["gemma_2b_lora"], expert=GEMMA_VARIANTS["gemma_300m_lora"]),
    "pi0_small": Pi0Config(vlm=_SMALL_VLM, expert=_SMALL_EXPERT, vision=_SMALL_VISION, vocab_size=16_384),
    "pi0_mini": Pi0Config(
        vlm=_MINI_VLM,
        expert=_MINI_EXPERT,
        vision=_MINI_VISION,
        image_size=132,
        vocab_size=512,
        cameras=CAMERAS[:1],
        action_dim=16,
        horizon=20,
        max_token_len=8,
    ),
    "pi0_tiny": Pi0Config(
        vlm=_TINY_GEMMA,
        expert=_TINY_GEMMA,
        vision=_TINY_VISION,
        image_size=24,
        vocab_size=512,
        cameras=CAMERAS[:1],
        action_dim=4,
        horizon=4,
        max_token_len=8,
        dtype="float32",
        remat="none",
    ),
}
"""Named sizes: π₀ and π₀.₅ (3.2B and 3.4B parameters, with or without adapters), one of ~100M, one of ~10M that learns
from scratch in a simulator on one GPU, one for a CPU."""


def get_preset(name: str) -> Pi0Config:
    """A preset by name; an unknown name raises with the nearest matches."""
    if name not in PRESETS:
        raise did_you_mean(name, PRESETS, kind="model preset")
    return PRESETS[name]
