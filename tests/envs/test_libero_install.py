"""LIBERO's set-up: what is missing is installed in order, what fails is said, and everything is checked at the end."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pirl.envs import libero_install
from pirl.errors import EnvError


class Machine:
    """What is on it, and the commands that were run there."""

    def __init__(self, *, works: bool = True) -> None:
        self.has: set[str] = set()
        self.ran: list[list[str]] = []
        self._works = works

    def run(self, command: list[str], check: bool) -> Any:
        self.ran.append(command)
        if self._works:
            self.has.add("assets" if "-c" in command else command[-1])
        return SimpleNamespace(returncode=0 if self._works else 1)

    def check(self, name: str, needs: str) -> Callable[[], str]:
        def look() -> str:
            if needs not in self.has:
                raise EnvError(f"no {name}", hint="install it")
            return "there"

        return look


def on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"packages": "hf-libero==0.1.4", "assets": "assets"}
    steps = [(name, machine.check(name, needs[name]), repairs) for name, _, repairs in libero_install.STEPS]
    monkeypatch.setattr(libero_install, "STEPS", tuple(steps))
    monkeypatch.setattr(libero_install, "tasks", lambda: "libero_goal 10")
    monkeypatch.setattr(subprocess, "run", machine.run)


def test_everything_is_installed_and_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine()
    on(machine, monkeypatch)
    assert libero_install.main([]) == 0
    assert [command[0] for command in machine.ran] == [sys.executable] * 3
    assert [command[3:] for command in machine.ran[:2]] == [
        ["install", "pirl[libero]"],
        ["install", "--no-deps", "robosuite==1.4.0", "bddl==1.0.1", "hf-libero==0.1.4"],
    ]
    assert "download_assets" in machine.ran[2][2]
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line[0] in "✓✗"] == [
        "✓ packages: there",
        "✓ assets: there",
        "✓ tasks: libero_goal 10",
    ]
    machine.ran.clear()
    assert libero_install.main([]) == 0
    assert not machine.ran, "all is there already"


def test_a_check_installs_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine()
    on(machine, monkeypatch)
    assert libero_install.main(["--check"]) == 1
    assert not machine.ran
    said = capsys.readouterr().out
    assert "✗ packages: no packages" in said
    assert "✗ assets: no assets" in said
    assert "to repair: install it" in said
    assert "tasks" not in said, "they cannot be loaded yet"


def test_a_command_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(works=False)
    on(machine, monkeypatch)
    assert libero_install.main([]) == 1
    assert len(machine.ran) == 2, "the first of the packages, and the assets"
    assert "✗ packages: that command failed" in capsys.readouterr().out
