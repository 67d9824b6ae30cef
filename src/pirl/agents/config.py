"""The settings of every algorithm. Does not import jax."""

from pirl.agents.advantage_config import FilteredConfig, RECAPConfig
from pirl.agents.critic_actor_config import CriticNFTConfig, QCFQLConfig
from pirl.agents.frozen_policy_config import DSRLConfig, RLTokenConfig
from pirl.agents.imitation_config import BCConfig, DAggerConfig
from pirl.agents.ppo_config import FlowPPOConfig
from pirl.agents.q_chunking_config import ACRLPDConfig, QChunkingConfig
from pirl.agents.rollout_config import RIPTConfig

__all__ = [
    "ACRLPDConfig",
    "BCConfig",
    "CriticNFTConfig",
    "DAggerConfig",
    "DSRLConfig",
    "FilteredConfig",
    "FlowPPOConfig",
    "QCFQLConfig",
    "QChunkingConfig",
    "RECAPConfig",
    "RIPTConfig",
    "RLTokenConfig",
]
