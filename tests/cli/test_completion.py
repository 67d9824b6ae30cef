"""Shell completion: asked as a shell asks, through argcomplete's variables, and once by a real bash."""

import io
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from pirl import recipes
from pirl.agents.agent_config import AgentConfig
from pirl.cli import app
from pirl.cli.completion import complete
from pirl.config_io import write_yaml
from pirl.errors import ConfigError


class _LeftError(Exception):
    """The answer was given."""


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A function from what was typed to what is offered."""
    monkeypatch.chdir(tmp_path)
    # It would take file descriptor 9 for its own, which is pytest's here.
    monkeypatch.setattr("argcomplete.finders.CompletionFinder._init_debug_stream", lambda self: None)
    monkeypatch.setenv("_ARGCOMPLETE_IFS", "\n")
    monkeypatch.setenv("_ARGCOMPLETE_SUPPRESS_SPACE", "1")

    def asked(line: str, start: int = 1) -> list[str]:
        answer = io.StringIO()
        for name, value in (("_ARGCOMPLETE", start), ("COMP_LINE", line), ("COMP_POINT", len(line))):
            monkeypatch.setenv(name, str(value))

        def leave(code: int) -> None:
            assert code == 0
            raise _LeftError

        with pytest.raises(_LeftError):
            complete(answer, leave)
        return answer.getvalue().splitlines()

    return asked


def test_verbs_and_flags(ask) -> None:
    assert ask("pirl ") == list(app.VERBS)
    assert ask("pirl t") == ["train", "tune"]
    assert ask("pirl doctor --js") == ["--json"]
    assert ask("pirl recipes s") == ["show"]
    assert ask("pirl completion ") == ["bash", "zsh", "fish"]
    assert ask("python -m pirl nor", start=3) == ["norm-stats"]


def test_recipes(ask) -> None:
    assert ask("pirl train ") == [*recipes.list_configs(), *recipes.ALIASES]
    for words in ("plan", "tune", "record", "recipes show", "recipes cp"):
        assert ask(f"pirl {words} acrlpd_l") == ["acrlpd_libero", "acrlpd_libero_lora"]
    assert ask("pirl eval somewhere --recipe ript_t") == ["ript_tabletop"]
    Path("mine.yaml").touch()
    Path("mine.txt").touch()
    assert ask("pirl train mi") == ["mine.yaml"]


def test_settings_are_those_of_the_recipe(ask) -> None:
    assert ask("pirl train acrlpd_libero --agent.ta") == ["--agent.target-update-rate", "--agent.target-ess"]
    assert ask("pirl train ript_tabletop --agent.ta") == []
    assert ask("pirl train ript_tabletop --agent.gr") == ["--agent.group-size", "--agent.groups-per-iteration"]
    assert ask("pirl plan debug --mesh.") == ["--mesh.fsdp"]
    assert ask("pirl train debug --batch-size 3 --no-w") == ["--no-wandb"]
    assert ask("pirl train debug --res") == ["--resume"]
    # A part that is not set has settings too.
    assert "--early-stop.patience" in ask("pirl train debug --early-stop.p")
    # What has flags of its own takes dotted settings only.
    assert ask("pirl record bc_tabletop --env.le") == ["--env.level"]
    assert ask("pirl record bc_tabletop --batch") == []
    # What cannot be read offers the verb's own.
    Path("broken.yaml").write_text("recipe: nothing\n")
    assert ask("pirl train broken.yaml --re") == ["--resume"]
    assert ask("pirl train broken.yaml --agent.") == []


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("train debug --variant ", ["quick", "full", "benchmark"]),
        ("train debug --agent.actor ", ["awr", "distill", "best_of_n"]),
        ("train debug --agent.actor=d", ["--agent.actor=distill"]),
        ("train debug --freeze v", ["vlm_frozen"]),
        ("train debug --freeze N", ["None"]),
        ("train debug --agent.no-aug", ["--agent.no-augment"]),
        ("train debug --sinks wandb t", ["trackio", "tensorboard"]),
        ("train debug --agent.discount ", ["0.9"]),
        ("tune bc_tabletop --keep ", ["best", "all"]),
        ("eval x --split ", ["test", "validation"]),
    ],
)
def test_values(line: str, offered: list[str], ask) -> None:
    assert ask(f"pirl {line}") == offered


def test_agents_are_offered(ask) -> None:
    """Every one of pirl's, by name; then those of modules that other tests have imported."""
    own = [kind.__name__.removesuffix("Config") for kind in AgentConfig.kinds() if kind.__module__.startswith("pirl.")]
    assert {"ACRLPD", "BC", "RIPT"} < set(own)
    assert ask("pirl train debug --agent.type ")[: len(own)] == sorted(own)


def test_what_is_offered_is_taken(ask) -> None:
    """Flags that need no value, and those whose value is offered, of recipes of each kind."""
    for recipe in ("acrlpd_tabletop_online", "ript_libero_goal", "bc_aloha_fold_lora"):
        flags = [flag for flag in ask(f"pirl train {recipe} --") if "." in flag and not flag.endswith(".type")]
        assert len(flags) > 120
        taken = 0
        for flag in flags[:: len(flags) // 12]:
            values = [value for value in ask(f"pirl train {recipe} {flag} ")[:1] if not value.startswith("-")]
            if values or ".no-" in flag:
                with suppress(ConfigError):  # understood, though it does not go with the rest
                    recipes.cli([recipe, flag, *values])
                taken += 1
        assert taken > 6


def test_checkpoints_are_folders_with_settings_of_their_own(ask, tmp_path: Path) -> None:
    run = tmp_path / "checkpoints" / "bc_tabletop" / "first"
    (run / "400").mkdir(parents=True)
    write_yaml(run / "config.yaml", recipes.get_config("bc_tabletop"))
    assert ask("pirl eval che") == ["checkpoints/"]
    assert ask("pirl report checkpoints/bc_tabletop/") == ["checkpoints/bc_tabletop/first/"]
    for folder in (run, run / "400"):
        assert ask(f"pirl eval {folder} --env.level ") == ["easy", "colours", "two_blocks", "stitch"]
        assert ask(f"pirl eval {folder} --best") == ["--best", "--best-of"]
    assert ask("pirl eval checkpoints --env.") == []


@pytest.mark.parametrize(
    ("shell", "sign"), [("bash", "complete -o"), ("zsh", "#compdef pirl"), ("fish", "function __fish")]
)
def test_scripts(shell: str, sign: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["completion", shell]) == 0
    shown = capsys.readouterr().out
    assert sign in shown
    assert "pirl" in shown


def test_a_shell_is_answered_and_nothing_else_pays_for_it() -> None:
    """A real bash runs the script and the command; `pirl --help` does not even import argcomplete."""
    bash = shutil.which("bash")
    assert bash is not None
    line = "pirl train debug --agent.q-aggregation m"
    script = f"""
        source <(pirl completion bash)
        COMP_LINE="{line}" COMP_POINT={len(line)} COMP_TYPE=9
        _python_argcomplete pirl
        printf '%s|' "${{COMPREPLY[@]}}"
    """
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [bash, "--norc", "-c", script]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120)
    assert [word.strip() for word in done.stdout.rstrip("|").split("|")] == ["mean", "min"], done.stderr
    program = "import sys; from pirl.cli.app import main; main(['--help']); print('argcomplete' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False"
