"""Configurations: they hold together, survive a file exactly, and answer mistakes by name."""

import math
import os
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pirl import config_io, recipes
from pirl.agents.config import ACRLPDConfig, BCConfig
from pirl.config import EarlyStop, RLTrainConfig
from pirl.config_io import ABSENT, Change, diff, from_dict, parse_yaml, to_dict, to_yaml
from pirl.errors import ConfigError
from pirl.models import freeze
from pirl.models.config import MLPFlowConfig
from pirl.recipes.debug import shrink
from pirl.recipes.families import OF_THE_TASK
from pirl.training.config import SGD, AdamW, ConstantSchedule, CosineSchedule, KeepBest, MeshConfig, RsqrtSchedule

DEBUG = recipes.get_config("debug")
STATE_ONLY = replace(
    DEBUG,
    name="state_only",
    model=MLPFlowConfig(state_dim=2, action_dim=2, hidden=(8, 8)),
    data=replace(DEBUG.data, cameras=(), tokenizer="none", weights=(1.5,)),
    policy_optimizer=SGD(clip_gradient_norm=1e-5),
    policy_schedule=RsqrtSchedule(peak_lr=1e22),
    critic=replace(DEBUG.critic, action_clip=math.inf),
    checkpoint=replace(DEBUG.checkpoint, base_dir="a: 'b' # c", keep_best=KeepBest(mode="min")),
    early_stop=EarlyStop(patience=3),
    sinks=("wandb", "tensorboard"),
    exp_name="1e5",
)
"""Everything the recipes do not have: other members of each union, parts that are mostly None, awkward values."""


@pytest.mark.parametrize("name", [*recipes.list_configs(), "state_only"])
@pytest.mark.parametrize("comments", [False, True])
def test_a_configuration_survives_a_file(name: str, comments: bool) -> None:
    config = STATE_ONLY if name == "state_only" else recipes.get_config(name)
    read = from_dict(RLTrainConfig, parse_yaml(to_yaml(config, comments=comments)))
    assert read == config
    assert _types(read) == _types(config)
    assert parse_yaml(to_yaml(config)) == to_dict(config)
    assert diff(config, read) == []


def _types(value: Any) -> Any:
    """1 and 1.0 are equal; what was read must also be of the same type."""
    if is_dataclass(value):
        return type(value), [_types(getattr(value, f.name)) for f in fields(value)]
    return [_types(item) for item in value] if isinstance(value, tuple) else type(value)


def test_every_setting_is_explained() -> None:
    def missing(cls: type, path: str) -> list[str]:
        found = [f"{path}.{f.name}" for f in fields(cls) if f.name not in config_io.field_docs(cls)]
        for f in fields(cls):
            for part in config_io._dataclasses(config_io._hints(cls)[f.name]).values():
                if part.__module__.startswith("pirl."):  # other tests import agents of their own
                    found += missing(part, f"{path}.{f.name}")
        return found

    assert missing(RLTrainConfig, "config") == []
    assert "  # Discount per environment step. A good start is" in to_yaml(DEBUG, comments=True)
    assert "# Which weights train." in to_yaml(DEBUG, comments=True)
    assert "#" not in to_yaml(DEBUG)


def test_a_file_starts_from_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "recipe: acrlpd_libero\n"
        "batch_size: 64\n"
        "agent: {discount: 0.995}\n"
        "policy_schedule: {type: ConstantSchedule, lr: 1e-5}\n"
        "checkpoint: {keep_best: {count: 3}}\n"
    )
    expected = recipes.get_config("acrlpd_libero")
    assert isinstance(expected.agent, ACRLPDConfig)
    expected = replace(
        expected,
        batch_size=64,
        agent=replace(expected.agent, discount=0.995),
        policy_schedule=ConstantSchedule(lr=1e-5),
        checkpoint=replace(expected.checkpoint, keep_best=KeepBest(count=3)),
    )
    assert recipes.load(str(file)) == expected


def test_another_kind_starts_from_its_defaults() -> None:
    read = from_dict(RLTrainConfig, {"agent": {"type": "BC", "flow_draws": 3}}, base=DEBUG)
    assert read.agent == BCConfig(flow_draws=3)


def test_a_complete_file_needs_no_recipe_and_no_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.yml"
    file.write_text(
        "name: mine\n"
        "model: {type: MLPFlow, state_dim: 14, action_dim: 14}\n"
        "agent: {type: ACRLPD}\n"
        "data: {robot: aloha, cameras: []}\n"
        "critic_optimizer: {clip_gradient_norm: null}\n"
    )
    read = recipes.load(str(file))
    assert read.model == MLPFlowConfig(state_dim=14, action_dim=14)
    # A part of a default part is laid over it.
    assert read.critic_optimizer == AdamW(b2=0.999, weight_decay=1e-4, clip_gradient_norm=None)


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("agent: {discout: 0.9}", "unknown setting 'agent.discout'", "did you mean: agent.discount"),
        ("batchsize: 3", "unknown setting 'batchsize'", "did you mean: batch_size"),
        ("model: {vlm: {attn_lora: {rnk: 3}}}", "unknown setting 'model.vlm.attn_lora.rnk'", "attn_lora.rank"),
        ("batch_size: many", "batch_size: found the text 'many', expected a whole number", ""),
        ("batch_size: 1.5", "batch_size: found the number 1.5, expected a whole number", ""),
        ("batch_size: true", "batch_size: found true or false True, expected a whole number", ""),
        ("batch_size: null", "batch_size: found nothing (null), expected a whole number", ""),
        ("agent: {discount: '0.9'}", "agent.discount: found the text '0.9', expected a number", "may not"),
        ("model: {max_token_len: long}", "model.max_token_len: found the text 'long', expected a whole number", ""),
        ("exp_name: no", "exp_name: found true or false False, expected text", "quote"),
        ("data: {repo_ids: one}", "data.repo_ids: found the text 'one', expected a list of text", "[a, b]"),
        ("data: {repo_ids: [1]}", "data.repo_ids[0]: found the whole number 1, expected text", ""),
        ("mesh: 8", "mesh: found the whole number 8, expected the settings of Mesh", ""),
        ("early_stop: 8", "early_stop: found the whole number 8, expected the settings of EarlyStop or null", ""),
        ("model: {dtype: bfloat61}", "unknown value of model.dtype: 'bfloat61'", "did you mean: bfloat16"),
        ("freeze: vlm", "unknown value of freeze: 'vlm'", "vlm_frozen"),
        ("agent: {type: BCC}", "unknown agent.type 'BCC'", "did you mean: BC"),
        ("agent: {type: 3}", "agent.type is the whole number 3", "ACRLPD, BC"),
        ("agent: {type: BC, discount: 0.9}", "unknown setting 'agent.discount'", ""),
        ("batch_size: 3\nbatch_size: 4", "'batch_size' is set twice", ""),
        ("3: 4", "a key must be a plain word", ""),
        ("batch_size: [", "not YAML", "recipes show"),
        ("- a", "found the list ['a'], expected settings", ""),
        ("batch_size: !!python/object/apply:os.getpid []", "could not determine a constructor", ""),
        ("recipe: [a]", "recipe is ['a']", "acrlpd_libero"),
        ("recipe: acrlpd_libro", "unknown recipe 'acrlpd_libro'", "did you mean: acrlpd_libero"),
        ("agent: {discount: 3}", "discount is 3.0", "between 0 and 1"),
    ],
)
def test_a_mistake_in_a_file_is_named(text: str, problem: str, hint: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text if text.startswith(("recipe", "-")) else f"recipe: debug\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        recipes.load(str(file))
    assert caught.value.message.startswith(f"{file}: ")
    assert problem in caught.value.message
    assert hint in caught.value.hint


def test_a_complete_file_says_everything_that_has_no_default() -> None:
    data = to_dict(DEBUG)
    for path in ("name", "model", "data"):
        with pytest.raises(ConfigError, match=f"^{path} is missing"):
            from_dict(RLTrainConfig, {key: value for key, value in data.items() if key != path})
    with pytest.raises(ConfigError, match=r"agent\.type is missing"):
        from_dict(RLTrainConfig, data | {"agent": {"accumulate": 1}})
    with pytest.raises(ConfigError, match=r"model\.state_dim is missing"):
        from_dict(RLTrainConfig, data | {"model": {"type": "MLPFlow"}})


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml cannot be read"):
        recipes.load(str(tmp_path / "no.yaml"))


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Annotations no configuration has yet."""

    pair: tuple[int, float] = (1, 2.0)
    number: int | str = 3


def test_tuples_of_fixed_length_and_unions_of_plain_types() -> None:
    assert from_dict(Shapes, {"pair": [4, 5], "number": "x"}) == Shapes(pair=(4, 5.0), number="x")
    with pytest.raises(ConfigError, match="pair: found the list"):
        from_dict(Shapes, {"pair": [4]})
    with pytest.raises(ConfigError, match=r"number: found the number 1\.5, expected a whole number or text"):
        from_dict(Shapes, {"number": 1.5})


def test_diff_names_what_changed() -> None:
    assert diff(DEBUG, replace(DEBUG, mesh=MeshConfig(fsdp=2), exp_name="x")) == [
        Change("exp_name", "run", "x"),
        Change("mesh.fsdp", "auto", 2),
    ]
    changed = diff(replace(DEBUG, critic_schedule=CosineSchedule()), DEBUG)
    assert ("critic_schedule.type", "CosineSchedule", "ConstantSchedule") in changed
    assert ("critic_schedule.decay_steps", 30_000, ABSENT) in changed


def test_a_written_file_replaces_nothing_unless_told_to(tmp_path: Path) -> None:
    file = config_io.write_yaml(tmp_path / "deep" / "mine.yaml", DEBUG, header="why\n\nnot")
    assert file.read_text().startswith("# why\n#\n# not\nname: debug\n")
    with pytest.raises(ConfigError, match="exists"):
        config_io.write_yaml(file, STATE_ONLY)
    assert recipes.load(str(file)) == DEBUG
    config_io.write_yaml(file, STATE_ONLY, overwrite=True)
    assert recipes.load(str(file)) == STATE_ONLY
    assert os.listdir(file.parent) == ["mine.yaml"]


LIBERO = recipes.get_config("acrlpd_libero")


def changed(config: RLTrainConfig, **settings: Any) -> RLTrainConfig:
    """Dotted settings (written with __) replaced, checked once, at the end."""
    data: dict[str, Any] = {}
    for path, value in settings.items():
        *parents, name = path.split("__")
        node = data
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return from_dict(RLTrainConfig, data, base=config)


@pytest.mark.parametrize(
    ("config", "settings", "problem", "hint"),
    [
        (DEBUG, {"exp_name": "../x"}, "exp_name is '../x'", "folder"),
        (DEBUG, {"name": ""}, "name is ''", "folder"),
        (DEBUG, {"num_train_steps": 0}, "num_train_steps is 0", "at least 1"),
        (DEBUG, {"seed": -1}, "seed is -1", ""),
        (DEBUG, {"sinks": ["wandb", "wandb"]}, "sinks are wandb, wandb", "once"),
        (DEBUG, {"early_stop": {"patience": 0}}, "patience is 0", "at least 1"),
        (DEBUG, {"agent__real_time_delay": 4}, "a chunk has 4 steps", "minus the steps"),
        (STATE_ONLY, {"agent__real_time_delay": 1}, "the policy is an MLP", "flow time per step"),
        (recipes.get_config("ript_tabletop"), {"agent__real_time_delay": 1}, "train with given steps", "guides"),
        (DEBUG, {"data__critic_horizon": 5}, "data.critic_horizon is 5, model.horizon is 4", "whole chunk"),
        (DEBUG, {"freeze": "lora"}, "the model has no adapters", "_lora"),
        (DEBUG, {"data__tokenizer": "paligemma"}, "has 257,152 tokens, the model embeds 512", "tokenizer byte"),
        (DEBUG, {"data__tokenizer": "none", "model__pi05": True}, "state in its prompt", "tokenizer"),
        (DEBUG, {"data__robot": "aloha"}, "the state of robot 'aloha' has 14 dimensions, the model has room for 4", ""),
        (DEBUG, {"data__robot": "alhoa"}, "unknown robot 'alhoa'", "did you mean: aloha"),
        (LIBERO, {"model__action_dim": 7}, "the state of robot 'libero' has 8 dimensions", "room"),
        (LIBERO, {"model__cameras": ["base_0_rgb"]}, "left_wrist_0_rgb, which the model does not", "base_0_rgb"),
        (LIBERO, {"data__cameras": ["right_wrist_0_rgb"]}, "unknown camera slot of robot 'libero'", "left_wrist"),
        (LIBERO, {"data__outcome": "step_penalty"}, "rewards from -1 to 0", "--agent.reward-low -1"),
        (
            LIBERO,
            {"data__outcome": "step_penalty", "agent__reward_low": -1, "agent__reward_high": 0},
            "a reward at every step",
            "--agent.no-reward-once",
        ),
        (LIBERO, {"mesh__fsdp": 3}, "batch_size 128 cannot be split over 3 device(s) in 1 part(s)", "= 3"),
        (LIBERO, {"mesh__fsdp": 8, "agent__accumulate": 32}, "in 32 part(s)", "= 256"),
        (STATE_ONLY, {"data__cameras": None, "data__weights": None}, "which the model does not see", "--data.cameras"),
        (STATE_ONLY, {"freeze": "expert_only"}, "the policy is an MLP", "full"),
        (STATE_ONLY, {"model__state_dim": 1}, "the state of robot 'synthetic' has 2 dimensions", ""),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    config: RLTrainConfig, settings: dict[str, Any], problem: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(config, **settings)
    assert problem in caught.value.message
    assert "hint: " in str(caught.value)
    assert hint in str(caught.value)


def test_values_follow_from_what_is_set() -> None:
    pi0 = recipes.get_config("acrlpd_aloha_fold")
    assert (pi0.token_len, pi0.quantile_norm, pi0.discrete_state, pi0.state_dim) == (48, False, False, 32)
    pi05 = changed(pi0, model__pi05=True)
    assert (pi05.token_len, pi05.quantile_norm, pi05.discrete_state) == (200, True, True)
    assert (pi0.horizon, pi0.critic_horizon, pi0.real_action_dim, pi0.discount) == (20, 20, 14, 0.999)
    assert changed(pi0, model__horizon=30).critic_horizon == 30
    assert changed(pi0, model__horizon=30, data__critic_horizon=7).critic_horizon == 7
    assert pi0.cameras == ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    assert changed(pi0, data__cameras=["left_wrist_0_rgb"]).cameras == ("left_wrist_0_rgb",)
    assert changed(pi0, checkpoint__base_dir="out", exp_name="x").run_dir == Path("out/acrlpd_aloha_fold/x")
    assert (pi0.has_critic, pi0.policy_ema_decay, pi0.freeze_rule) == (True, 0.999, "full")
    cloning = recipes.get_config("bc_aloha_fold_lora")
    assert (cloning.has_critic, cloning.policy_ema_decay, cloning.freeze_rule) == (False, None, "lora")
    assert changed(cloning, freeze="expert_only").freeze_rule == "expert_only"
    assert (STATE_ONLY.token_len, STATE_ONLY.quantile_norm, STATE_ONLY.state_dim) == (0, False, 2)


def test_the_freeze_rules_are_those_of_the_models() -> None:
    for name in recipes.list_configs():
        config = recipes.get_config(name)
        if isinstance(config.model, MLPFlowConfig):
            assert config.freeze is None  # it trains whole
            continue
        rule = "frozen" if config.agent.freezes_policy else freeze.default_rule(config.model)
        assert replace(config, freeze=None).freeze_rule == rule


def test_the_box_folding_preset_fits_a_task_of_twenty_seconds() -> None:
    config = recipes.get_config("rl_fold_box")
    assert config is recipes.get_config("acrlpd_aloha_fold")
    assert (config.horizon, config.real_action_dim, config.discount) == (20, 14, 0.999)
    assert config.discount ** (20 * 50) > 0.3  # of a success is left at the start
    assert (config.critic.num_critics, config.critic.hidden, config.critic.dropout) == (10, (512, 512, 512), 0.1)
    assert config.critic.loss == "hl_gauss"
    agent = config.agent
    assert isinstance(agent, ACRLPDConfig)
    assert (agent.num_action_samples, agent.target_update_rate, agent.bc_loss_weight) == (4, 0.005, 0.05)
    assert (agent.policy_ema_decay, agent.critic_ema_decay) == (0.999, 0.99)
    for schedule, low, high in ((config.policy_schedule, 1e-5, 3e-5), (config.critic_schedule, 3e-4, 1e-3)):
        assert isinstance(schedule, CosineSchedule)
        assert low <= schedule.peak_lr <= high
    assert config.policy_optimizer == config.critic_optimizer == AdamW(weight_decay=1e-4)
    assert 128 <= config.batch_size <= 256
    assert config.num_train_steps == 50_000


@pytest.mark.parametrize("name", recipes.list_configs())
def test_a_recipe_is_told_of_and_can_be_shrunk(name: str) -> None:
    config = recipes.get_config(name)
    assert config.name == name
    assert f"pirl train {name.removesuffix('_lora')}" in recipes.about(name)
    small = shrink(config)
    assert small.num_train_steps <= 10
    assert small.init_weights is None
    kept = ("horizon", "critic_horizon", "cameras", "real_action_dim", "token_len", "has_critic", "freeze_rule")
    assert [getattr(small, value) for value in kept] == [getattr(config, value) for value in kept]
    assert small.critic.num_critics == config.critic.num_critics
    assert small.data.tokenizer == {"paligemma": "byte"}.get(config.data.tokenizer, config.data.tokenizer)
    if isinstance(small.model, MLPFlowConfig):
        assert max(small.model.hidden) == 64
    else:
        assert small.model.vlm.width == 64


@pytest.mark.parametrize("task", ["aloha_fold", "libero", "droid", "aloha_transfer_small", "metaworld_mt10"])
def test_algorithms_share_what_belongs_to_their_task(task: str) -> None:
    base, own = recipes.get_config(f"acrlpd_{task}"), {"num_action_samples", "flow_steps"}
    others = ["filtered", "recap", "dsrl", *([] if base.env else ["dagger", "critic_nft", "qc_fql", "rl_token"])]
    for found in (recipes.get_config(f"{algorithm}_{task}") for algorithm in others):
        shared = {*OF_THE_TASK} & {f.name for f in fields(found.agent)} & {f.name for f in fields(base.agent)} - own
        assert len(shared) >= 3
        for name in shared:
            assert getattr(found.agent, name) == getattr(base.agent, name), (found.name, name)
        for name in ("init_weights", "critic", "critic_schedule", "num_train_steps", "batch_size", "env"):
            assert getattr(found, name) == getattr(base, name), (found.name, name)
        assert found.data.held_out == base.data.held_out
        assert found.policy_ema_decay in (None, base.policy_ema_decay)
        if found.agent.freezes_policy:
            assert (found.freeze_rule, found.policy_schedule) == ("frozen", base.critic_schedule)
            assert getattr(found.agent, "flow_steps", None) == found.rollout.flow_steps
        assert (found.rollout.flow_steps == 1) == found.agent.one_step


def test_an_unknown_recipe_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean: rl_fold_box"):
        recipes.get_config("rl_foldbox")
    with pytest.raises(ConfigError, match=r"known are: acrlpd_.*rl_fold_box"):
        recipes.get_config("zzz")


def test_neither_configurations_nor_recipes_nor_flags_import_jax() -> None:
    program = (
        "import sys; sys.modules['jax'] = None\n"
        "import pirl.config, pirl.config_io, pirl.recipes\n"
        "print([name for name in ('tyro', 'jaxlib', 'pyarrow', 'av') if name in sys.modules])\n"
        "print(pirl.recipes.cli(['debug', '--model.pi05']).token_len)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n200\n", "")
