"""A policy of 270,000 parameters on a synthetic task: a complete run on a laptop, without files.

    pirl train debug --exp-name first            Q-chunking (ACRLPD)
    pirl train debug_bc --exp-name first         behaviour cloning, the baseline

Hardware: a CPU. The demonstrations move a point on a plane, and are good, slow or wrong; imitation copies the mixture.
`--debug` shrinks any other recipe to this size: same algorithm, robot, chunks and datasets, but a tiny randomly
initialised policy and a few steps, to test the set-up.
"""

from dataclasses import replace

from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.config import RLTrainConfig
from pirl.data.config import DataConfig
from pirl.envs.config import LiberoConfig
from pirl.models.config import GemmaConfig, MLPFlowConfig, Pi0Config, get_preset
from pirl.models.critic_config import CriticConfig, get_critic_preset
from pirl.rollout.config import EvalConfig
from pirl.training.config import CheckpointConfig, ConstantSchedule, MeshConfig

_ACRLPD = RLTrainConfig(
    name="debug",
    # The default prompt length: 48 tokens, or 200 with --model.pi05.
    model=replace(get_preset("pi0_tiny"), max_token_len=None),
    # Episodes have about ten steps.
    agent=ACRLPDConfig(discount=0.9, augment=False, policy_ema_decay=0.99),
    critic=get_critic_preset("tiny"),
    data=DataConfig(repo_ids=("synthetic",), robot="synthetic", tokenizer="byte", outcome="columns"),
    policy_schedule=ConstantSchedule(lr=1e-3, warmup_steps=20),
    critic_schedule=ConstantSchedule(lr=1e-3),
    checkpoint=CheckpointConfig(save_interval=100, keep_period=None),
    batch_size=32,
    num_train_steps=300,
    log_interval=20,
)

RECIPES = (_ACRLPD, replace(_ACRLPD, name="debug_bc", agent=BCConfig(augment=False)))


def shrink(config: RLTrainConfig) -> RLTrainConfig:
    """The same run shrunk to a test of under a minute; it learns nothing useful."""
    tokenizer = config.data.tokenizer if config.data.tokenizer in ("none", "word") else "byte"  # needs no file
    return replace(
        config,
        model=_shrink_model(config.model),
        agent=config.agent.small(),
        critic=_shrink_critic(config.critic),
        init_weights=None,
        data=replace(config.data, tokenizer=tokenizer),
        rollout=replace(config.rollout, num_envs=4, num_workers=min(config.rollout.num_workers, 2)),
        online=config.online and replace(config.online, start_step=min(config.online.start_step, 2), episodes=2),
        evaluation=config.evaluation and replace(config.evaluation, interval=5, episodes=4),
        mesh=MeshConfig(),
        checkpoint=replace(config.checkpoint, save_interval=5, keep_period=None),
        batch_size=8,
        num_train_steps=config.agent.debug_steps,
        log_interval=1,
    )


def vary(config: RLTrainConfig, variant: str) -> RLTrainConfig:
    """`quick`: the real model for a few steps, to see speed and memory. `full`: unchanged. `benchmark`: evaluates 50
    episodes of each task's test states before and after training.
    """
    if variant == "quick":
        return replace(
            config,
            agent=config.agent.quick(),
            evaluation=config.evaluation and replace(config.evaluation, episodes=min(config.evaluation.episodes, 10)),
            num_train_steps=min(config.num_train_steps, 20 if config.agent.groups is None else 2),
            log_interval=1,
        )
    if variant == "benchmark" and config.env is not None:
        tasks = len(config.env.task_ids or range(10)) if isinstance(config.env, LiberoConfig) else 1
        evaluation = EvalConfig(interval=config.num_train_steps, episodes=50 * tasks, split="test")
        return replace(config, evaluation=evaluation)
    return config


def _shrink_model(model: Pi0Config | MLPFlowConfig) -> Pi0Config | MLPFlowConfig:
    """The model with tiny transformers (and adapters if it has some); robot, cameras and chunks are unchanged."""
    if isinstance(model, MLPFlowConfig):
        return replace(model, hidden=tuple(min(width, 64) for width in model.hidden))
    tiny = get_preset("pi0_tiny")

    def small(gemma: GemmaConfig) -> GemmaConfig:
        return tiny.vlm.with_lora(4) if gemma.attn_lora or gemma.ffn_lora else tiny.vlm

    return replace(
        model,
        vlm=small(model.vlm),
        expert=small(model.expert),
        vision=tiny.vision,
        image_size=tiny.image_size,
        vocab_size=tiny.vocab_size,
        dtype=tiny.dtype,
        remat=tiny.remat,
        feature_layer=-1,
    )


def _shrink_critic(critic: CriticConfig) -> CriticConfig:
    tiny = get_critic_preset("tiny")
    return replace(
        tiny, num_critics=critic.num_critics, loss=critic.loss, dropout=critic.dropout, action_clip=critic.action_clip
    )
