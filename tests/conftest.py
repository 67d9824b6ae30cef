"""Fixtures for all tests, and XLA flags that make them fast."""

import os
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests spend their time compiling: optimisation level 0 halves it, and XLA's older loop emitter takes a third of the
# rest. jaxlib 0.11 no longer has that emitter, and aborts on an unknown flag.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""),
)
# Programs this small gain nothing from a second thread; leave the other core to the other pytest worker.
os.environ.setdefault("PJRT_NPROC", "1")

from collections.abc import Iterator

import hypothesis
import jaxtyping
import pytest

from golden_data import FAMILIES, GOLDEN, Family

# The same examples in every run, so failures are reproducible. `--hypothesis-profile default` draws others.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

LONGEST_FIRST = ("promises/test_tabletop", "promises", "parity", "e2e", "agents", "models")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long files first: started last, they would keep the other workers waiting."""

    def place(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((i for i, part in enumerate(LONGEST_FIRST) if f"/tests/{part}" in path), len(LONGEST_FIRST))

    items.sort(key=place)


@pytest.fixture(scope="module", autouse=True)
def shapes_are_checked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shapes of arguments are checked everywhere but in the promises: of these long runs the checks are a third."""
    long = "/tests/promises/" in request.path.as_posix()
    jaxtyping.config.update("jaxtyping_disable", long)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session", params=sorted(FAMILIES) or [None])
def family(request: pytest.FixtureRequest) -> Family:
    """Each model of the golden set."""
    assert request.param is not None, f"no family folder with a config.json in {GOLDEN}"
    return FAMILIES[request.param]
