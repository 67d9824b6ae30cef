"""`pirl recipes`: pirl's named configurations."""

import argparse
from collections.abc import Iterator
from pathlib import Path

NAME = "recipes"
HELP = "Lists recipes, shows one with all settings, or copies it to a YAML file."
EXAMPLES = """\
examples:
  pirl recipes ls
  pirl recipes show acrlpd_libero
  pirl recipes cp acrlpd_libero my.yaml           then: pirl train my.yaml --exp-name first"""
LS_EXAMPLES = """\
examples:
  pirl recipes ls
  pirl recipes ls acrlpd                          names that contain acrlpd"""
SHOW_EXAMPLES = """\
examples:
  pirl recipes show debug
  pirl recipes show my.yaml --bare                the resolved settings without explanations"""
CP_EXAMPLES = """\
examples:
  pirl recipes cp debug my.yaml
  pirl recipes cp acrlpd_aloha_fold_lora configs/box.yaml"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `pirl recipes`."""
    actions = parser.add_subparsers(dest="action", metavar="action", title="actions", required=True)
    text = "the recipes: algorithm, model, robot, sizes"
    one = actions.add_parser("ls", help=text, description=f"Lists {text}.", epilog=LS_EXAMPLES)
    one.add_argument("part", metavar="PART", nargs="?", default="", help="list only names that contain this")
    text = "all settings as YAML, with explanations"
    one = actions.add_parser("show", help=text, description=f"Prints {text}.", epilog=SHOW_EXAMPLES)
    one.add_argument("name", metavar="RECIPE", help="recipe name or YAML file")
    one.add_argument("--bare", action="store_true", help="omit the explanations")
    text = "a recipe to a YAML file to edit"
    one = actions.add_parser("cp", help=text, description=f"Copies {text}; never overwrites.", epilog=CP_EXAMPLES)
    one.add_argument("name", metavar="RECIPE", help="recipe name")
    one.add_argument("file", metavar="FILE", type=Path, help="output file, such as my.yaml")


def run(args: argparse.Namespace) -> int:
    """List, show or copy recipes."""
    for line in {"ls": ls, "show": show, "cp": cp}[args.action](args):
        print(line)
    return 0


def ls(args: argparse.Namespace) -> Iterator[str]:
    """A table of all recipes."""
    from pirl.config_io import tag
    from pirl.recipes import ALIASES, get_config, list_configs
    from pirl.text import table

    rows = [("recipe", "agent", "model", "trains", "robot", "chunk", "batch", "steps")]
    for name in [name for name in (*list_configs(), *ALIASES) if args.part in name]:
        config = get_config(name)
        family = config.model.family
        chunk = f"{config.horizon}, {config.critic_horizon} scored" if config.has_critic else f"{config.horizon}"
        sizes = (f"{config.batch_size}", f"{config.num_train_steps:,}")
        agent = tag(type(config.agent))
        alias = f" (= {config.name})" if name in ALIASES else ""
        rows.append((name + alias, agent, family, config.freeze_rule, config.data.robot, chunk, *sizes))
    yield from table(rows, "<<<<<<>>", indent="  ")


def show(args: argparse.Namespace) -> Iterator[str]:
    """A configuration as YAML."""
    from pirl.config_io import to_yaml
    from pirl.recipes import load

    yield to_yaml(load(args.name), comments=not args.bare).rstrip()


def cp(args: argparse.Namespace) -> Iterator[str]:
    """Write a recipe's YAML."""
    from pirl.config_io import write_yaml
    from pirl.errors import ConfigError
    from pirl.recipes import about, get_config

    if args.file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{args.file} does not end in .yaml", hint=f"call it {args.file.with_suffix('.yaml')}")
    file = write_yaml(args.file, get_config(args.name), comments=True, header=about(args.name) + "\n\n")
    yield f"{args.name} -> {file}; train it with: pirl train {file} --exp-name NAME"
