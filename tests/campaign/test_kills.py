"""`kill -9`, and the same command again: nothing is lost, nothing differs. See kills.py.

A slice runs with the other tests; `make campaign` (CAMPAIGN=1) runs the whole.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = {"train": 3, "export": 3}
if os.environ.get("CAMPAIGN"):
    CASES = {"train": 40, "ript": 24, "ript-workers": 16, "online": 24, "export": 24, "eval": 16, "tune": 6}
    CASES |= {"record": 16, "norm-stats": 16}


@pytest.mark.skipif(sys.platform != "linux", reason="copies processes and reads /proc")
@pytest.mark.parametrize("case", CASES)
def test_killed_and_repeated_it_ends_as_if_nobody_had_touched_it(case: str) -> None:
    words = ["--only", case, "--kills", str(CASES[case]), "--per-round", "3", "--seed", "1"]
    script = Path(__file__).with_name("kills.py")
    done = subprocess.run(
        [sys.executable, str(script), *words], check=False, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    assert "nothing lost, nothing different" in done.stdout
