"""`pirl plan`: does a run fit into the devices' memory, and what to change where it does not."""

import argparse

from pirl.cli.app import positive

NAME = "plan"
HELP = """\
Tells how much memory a training step needs on each device, what of it is weights, optimizer, averages, critic and
activations, and the largest batch that fits. Computed from shapes: no weights are loaded and no GPU is needed. Any
setting of the recipe can be changed by a flag, as in `pirl train`."""
EXAMPLES = """\
examples:
  pirl plan acrlpd_libero --devices 8 --device-gb 80 --mesh.fsdp 8
  pirl plan acrlpd_aloha_fold_lora --device-gb 24
  pirl plan my.yaml --device-gb 24 --batch-size 8 --freeze expert_only"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl plan`; settings are left to the recipe's own flags."""
    parser.usage = "%(prog)s RECIPE --device-gb GB [--devices N] [--SETTING VALUE ...]"
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe's name, or a YAML file")
    _add_devices(parser)
    parser.add_argument("settings", nargs=argparse.REMAINDER, metavar="--SETTING VALUE", help="see `pirl train`")


def _add_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=positive, metavar="N", help="number of devices (default: mesh.fsdp)")
    parser.add_argument("--device-gb", type=float, metavar="GB", help="memory of one device in GiB, as nvidia-smi says")


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    from pirl.recipes import cli

    devices = argparse.ArgumentParser(prog=f"pirl {NAME}", add_help=False, allow_abbrev=False)
    _add_devices(devices)
    args, settings = devices.parse_known_args(args.settings, args)
    config = cli([args.recipe, *settings], prog=f"pirl {NAME}")
    if args.device_gb is None or not args.device_gb > 0:
        devices.error("--device-gb says how much memory one device has, such as 24 or 80")

    from pirl.agents.config import ACRLPDConfig
    from pirl.errors import ConfigError
    from pirl.models.config import Pi0Config
    from pirl.models.critic import make_critic
    from pirl.models.params import count, flatten
    from pirl.training.plan import plan

    if not isinstance(config.model, Pi0Config):
        raise ConfigError("the policy is an MLP over the state", hint="it fits everywhere; `plan` is for π₀")
    critic = make_critic(
        config.critic,
        feature_width=config.model.vlm.width,
        state_dim=config.robot.state_dim,
        real_action_dim=config.real_action_dim,
        critic_horizon=config.critic_horizon,
    )
    found = plan(
        config.model,
        batch_size=config.batch_size,
        device_gb=args.device_gb,
        devices=args.devices or config.mesh.fsdp,
        fsdp=config.mesh.fsdp,
        rule=config.freeze_rule,
        ema=config.policy_ema_decay is not None,
        copy=isinstance(config.agent, ACRLPDConfig) and config.agent.actor == "distill",
        critic_parameters=count(flatten(critic.param_shapes()).values()) if config.has_critic else None,
        optimizer=config.policy_optimizer,
        cameras=len(config.cameras),
        draws=config.agent.flow_draws,
    )
    print(f"{config.name}: freeze rule {config.freeze_rule}, {len(config.cameras)} camera(s)")
    print(found)
    if found.accumulate is not None and found.accumulate > config.agent.accumulate:
        print(f"split the batch with --agent.accumulate {found.accumulate}")
    return 0
