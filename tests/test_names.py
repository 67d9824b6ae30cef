"""Nothing outside agents/ and recipes/ knows which algorithm it runs: what it must know, the agent contract says."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pirl
from pirl.agents.agent_config import AgentConfig

PACKAGE = Path(pirl.__file__).parent
CONTRACT = {"agent", "agent_config", "learner", "optim"}
"""Modules of agents/ that the rest may know: the contract, and what every algorithm is built with."""
FREE = ("agents/", "recipes/", "__init__.py")
"""Who may name algorithms: they themselves, named configurations, and the lazy names of `import pirl`."""


def algorithms() -> set[str]:
    """Classes of pirl's algorithms and of their settings."""
    kinds = [kind for kind in AgentConfig.kinds() if kind.__module__.startswith("pirl.")]
    return {kind.__name__ for kind in kinds} | {kind.agent.rpartition(":")[2] for kind in kinds}


def named(source: str) -> Iterator[str]:
    """Algorithms that a module imports or refers to; its texts may speak of them."""
    known = algorithms()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pirl.agents."):
            if (node.module or "").split(".")[2] not in CONTRACT:
                yield f"line {node.lineno}: from {node.module}"
        elif isinstance(node, ast.Import):
            yield from (f"line {node.lineno}: {one.name}" for one in node.names if one.name.startswith("pirl.agents."))
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in known:
                yield f"line {node.lineno}: {name}"


def test_the_rest_asks_the_contract() -> None:
    assert {"BCConfig", "BC", "ACRLPD", "RIPTConfig", "RECAP"} <= algorithms()
    files = {str(file.relative_to(PACKAGE)): file for file in PACKAGE.rglob("*.py")}
    found = {name: list(named(file.read_text())) for name, file in files.items() if not name.startswith(FREE)}
    assert len(found) > 150
    assert {name: places for name, places in found.items() if places} == {}


def test_the_search_finds_what_it_looks_for() -> None:
    source = """
from pirl.agents.config import RIPTConfig
import pirl.agents.bc
from pirl.agents.agent import Agent
def f(agent, pirl):
    "as RIPT does"
    return isinstance(agent, RIPTConfig) or isinstance(agent, pirl.ACRLPDConfig)
"""
    assert sorted(named(source)) == [
        "line 2: from pirl.agents.config",
        "line 3: pirl.agents.bc",
        "line 7: ACRLPDConfig",
        "line 7: RIPTConfig",
    ]
