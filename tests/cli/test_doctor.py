"""Each check of `pirl doctor`, where things are well and where they are not."""

import importlib.metadata
import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from pirl.cli import app, doctor
from pirl.cli.doctor import Check
from pirl.recipes import aloha

OLD, NEW, PREALLOCATE = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"
Usage = namedtuple("Usage", "free")
Memory = namedtuple("Memory", "available")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (OLD, NEW, PREALLOCATE, "MUJOCO_GL", "JAX_PLATFORMS", "HF_LEROBOT_HOME", "OPENPI_DATA_HOME"):
        monkeypatch.delenv(variable, raising=False)


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_python().ok is True
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    check = doctor.check_python()
    assert (check.ok, check.detail) == (False, "3.10.4")
    assert "3.11" in check.fix


def test_pirl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_pirl().ok is True
    monkeypatch.setattr("pirl.__version__", "99.0")
    check = doctor.check_pirl()
    assert check.ok is None
    assert check.detail.startswith("99.0 runs, ")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, list[str]]]:
    """The installed packages, by name: version and requirements."""
    installed = {
        "pirl": ("1", ["jax<2,>=1", 'jax[gpu9]; extra == "gpu"', "video-lib; extra == 'video'", "numpy"]),
        "jax": ("1.5", ['jaxlib==1.5; extra == "gpu9"', 'jax-gpu[with-gpu]<=2; extra == "gpu9"', "scipy"]),
        "jaxlib": ("1.5", []),
        "numpy": ("2.2", []),
    }

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name][0]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: installed[name][1])
    return installed


def test_dependencies(packages: dict) -> None:
    assert doctor.check_dependencies() == Check(name="dependencies", ok=True, detail="all 2 are installed")
    del packages["numpy"]
    check = doctor.check_dependencies()
    assert (check.ok, check.detail, check.fix) == (False, "missing: numpy", "pip install numpy")
    del packages["pirl"]
    assert doctor.check_dependencies().ok is None


def test_extras_are_read_from_the_metadata(packages: dict) -> None:
    check = doctor.check_extra("gpu")
    assert (check.ok, check.detail, check.fix) == (None, "not installed: jax-gpu", "pip install 'pirl[gpu]'")
    packages["jax-gpu"] = ("1.6", ["plain", 'cublas; extra == "with-gpu"'])
    assert doctor.check_extra("gpu").detail == "not installed: cublas"
    packages["cublas"] = ("13", [])
    check = doctor.check_extra("gpu")
    assert (check.ok, check.detail) == (True, "jax 1.5, jaxlib 1.5, jax-gpu 1.6, cublas 13")
    assert doctor.check_extra("video").detail == "not installed: video-lib"


def test_an_extra_of_extras_is_there_when_they_are(packages: dict) -> None:
    packages["pirl"][1].append("pirl[gpu,video]; extra == 'all'")
    assert "jax-gpu" in doctor.check_extra("all").detail
    assert "video-lib" in doctor.check_extra("all").detail
    assert doctor.check_extra("all").ok is None


def test_full_size_modes_that_fit_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)

    def told(count: int, gib: float) -> Check:
        return doctor.check_modes([{"kind": "GPU", "bytes": int(0.75 * gib * doctor.GIB)}] * count)

    small = told(1, 24)
    assert "22 GiB to train in fit act (pirl eval, pirl serve); LoRA ACRLPD, batch 16" in small.detail
    assert "not full BC, batch 32 (bc_aloha_fold) (62 GiB x 1)" in small.detail
    assert (small.ok, small.fix) == (True, "pirl plan RECIPE --device-gb GB")
    assert "not" not in told(8, 80).detail
    assert doctor.check_modes([{"kind": "cpu", "bytes": None}]).ok is None


def test_the_modes_are_those_that_the_recipes_speak_of() -> None:
    said = " ".join((aloha.__doc__ or "").split())
    for mode, (count, needed) in list(doctor.MODES.items())[1:]:
        recipe = mode.partition("(")[2].strip(")").partition(",")[0]
        assert f"{recipe} {needed} GiB" in said
        assert (f"{needed} GiB on each of {count} devices" in said) == (count > 1)


def test_every_declared_extra_is_checked() -> None:
    names = [name for name, _ in doctor.local_checks()]
    assert {"extra cuda", "extra gcs"} <= set(names)


@pytest.mark.parametrize(
    ("check", "missing"), [(doctor.check_video_decoder, "libdav1d"), (doctor.check_video_encoder, "libsvtav1")]
)
def test_video(check, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import av

    assert check().ok is True
    real = av.codec.Codec

    def codec(name: str, mode: str):
        return real("no-such-codec" if name == missing else name, mode)

    monkeypatch.setattr(av.codec, "Codec", codec)
    result = check()
    assert result.ok is (False if missing == "libdav1d" else None)
    assert missing in result.detail
    assert "pip install" in result.fix


@pytest.mark.parametrize(
    ("settings", "ok", "said"),
    [
        ({}, True, ""),
        ({NEW: "0.9"}, True, ""),
        ({OLD: "0.95"}, True, ""),
        ({NEW: "0.5"}, None, f"export {NEW}=0.9"),
        ({OLD: "0.5"}, None, f"export {OLD}=0.9"),
        ({NEW: "1.0"}, None, f"export {NEW}=0.9"),
        ({NEW: "90%"}, False, f"export {NEW}=0.9"),
        ({NEW: "nan"}, False, f"export {NEW}=0.9"),
        ({NEW: "0"}, False, f"export {NEW}=0.9"),
        ({NEW: "0.9", OLD: "0.8"}, False, f"unset {OLD}"),
        ({NEW: "0.9", OLD: "0.9"}, False, f"unset {OLD}"),
        ({NEW: "0.9", PREALLOCATE: "false"}, None, f"unset {PREALLOCATE}"),
        ({NEW: "0.9", PREALLOCATE: "true"}, True, ""),
    ],
)
def test_gpu_memory(settings: dict[str, str], ok: bool | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    check = doctor.check_gpu_memory_settings()
    assert check.ok is ok
    assert said in check.fix
    assert bool(check.fix) is (ok is not True)


def test_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: Memory(64 * doctor.GIB))
    monkeypatch.setattr(doctor, "container_limit", lambda: None)
    assert doctor.check_ram() == Check(name="RAM", ok=True, detail="64.0 GiB available")
    monkeypatch.setattr(doctor, "container_limit", lambda: 8 * doctor.GIB)
    check = doctor.check_ram()
    assert check.ok is None
    assert check.detail.startswith("8.0 GiB allowed to this container")
    monkeypatch.setattr("psutil.virtual_memory", lambda: Memory(2 * doctor.GIB))
    assert doctor.check_ram().detail.startswith("2.0 GiB available")


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "not" / "made" / "yet"
    free = 100 * doctor.GIB
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(free))
    assert doctor.check_place("x", folder, required=True) == Check(
        name="x", ok=True, detail=f"{folder}, 100.0 GiB free"
    )
    assert not folder.parent.exists()
    check = doctor.check_place("x", folder, variable="HF_LEROBOT_HOME", size=200 * 10**9)
    assert (check.ok, "200 GB" in check.fix, "export HF_LEROBOT_HOME=DIR" in check.fix) == (None, True, True)
    monkeypatch.setenv("HF_LEROBOT_HOME", str(folder))
    assert "(HF_LEROBOT_HOME)" in doctor.check_place("x", folder, variable="HF_LEROBOT_HOME").detail
    free = doctor.GIB // 2
    assert doctor.check_place("x", folder, required=True).ok is False
    assert doctor.check_place("x", folder).ok is None
    free = 100 * doctor.GIB
    monkeypatch.setattr("os.access", lambda path, mode: False)
    check = doctor.check_place("x", folder, required=True)
    assert (check.ok, check.fix) == (False, f"{tmp_path} is not writable: make it so")
    assert doctor.check_place("x", folder).ok is None


@pytest.mark.parametrize(
    ("libraries", "wanted", "mujoco", "ok"),
    [
        ({"OSMesa", "EGL"}, "egl", True, True),
        ({"OSMesa"}, "osmesa", True, True),
        ({"OSMesa"}, "EGL", True, False),
        ({"EGL"}, "osmesa", False, None),
        ({"EGL"}, "", True, None),
        (set(), "", True, False),
        (set(), "", False, None),
    ],
)
def test_gl(libraries: set[str], wanted: str, mujoco: bool, ok: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_library", lambda name: f"lib{name}.so" if name in libraries else None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if mujoco else None)
    if wanted:
        monkeypatch.setenv("MUJOCO_GL", wanted)
    check = doctor.check_gl()
    assert check.ok is ok
    if ok is not True:
        assert ("MUJOCO_GL=egl" if libraries and not wanted else "apt-get install -y libosmesa6 libegl1") in check.fix


def test_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path))
    check = doctor.check_tokenizer()
    expected = tmp_path / "big_vision" / "paligemma_tokenizer.model"
    assert check.ok is None
    assert str(expected) in check.detail
    assert "pirl[gcs]" in check.fix
    expected.parent.mkdir()
    expected.touch()
    assert doctor.check_tokenizer() == Check(name="tokenizer", ok=True, detail=str(expected))


def ask(code: str, monkeypatch: pytest.MonkeyPatch, *, nvidia: bool = False, timeout: float = 30.0) -> Check:
    """What is said of a jax that does this when it is asked."""
    monkeypatch.setattr(doctor, "PROBE", code)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/nvidia-smi" if nvidia else None)
    return doctor.check_jax(doctor.start_probe(), timeout)


def answering(backend: str, *devices: tuple[str, int | None]) -> str:
    listed = [{"kind": kind, "bytes": size} for kind, size in devices]
    answer = json.dumps({"version": "0.11.0", "backend": backend, "devices": listed})
    return f"import sys; sys.stderr.write('first\\nfell back\\n'); print('noise'); print({answer!r})"


def test_jax_is_asked_for_real() -> None:
    check = doctor.check_jax(doctor.start_probe(), 60.0)
    assert check.detail.startswith(importlib.metadata.version("jax"))


def test_jax_devices_are_counted_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = ("NVIDIA H100", 60 * doctor.GIB)
    check = ask(answering("gpu", gpu, gpu, ("other", None)), monkeypatch, nvidia=True)
    detail = "0.11.0, gpu: 2 x NVIDIA H100 (60.0 GiB each for XLA), 1 x other"
    assert check == Check(name="jax", ok=True, detail=detail)


def test_jax_on_the_cpu_beside_a_gpu_is_wrong_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(answering("cpu", ("cpu", None)), monkeypatch).ok is True
    check = ask(answering("cpu", ("cpu", None)), monkeypatch, nvidia=True)
    assert check.ok is False
    assert check.detail.endswith("but this machine has an NVIDIA GPU (fell back)")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert ask(answering("cpu", ("cpu", None)), monkeypatch, nvidia=True).ok is True


def test_a_broken_jax_is_told_by_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    check = ask("raise ImportError('libcudart.so.13 is missing')", monkeypatch)
    assert (check.ok, check.detail) == (False, "does not start: ImportError: libcudart.so.13 is missing")
    crashed = ask("import os; os.abort()", monkeypatch)
    assert (crashed.ok, crashed.detail) == (False, "does not start: exit code -6")


def test_a_hanging_jax_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBE", "import time; time.sleep(60)")
    probe = doctor.start_probe()
    check = doctor.check_jax(probe, 0.2)
    assert (check.ok, check.detail) == (False, "did not answer within 0.2 s")
    assert probe.returncode == -9


def test_the_probe_takes_no_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBE", f"import os; print(os.environ['{PREALLOCATE}'])")
    assert doctor.start_probe().communicate()[0] == "false\n"


def test_a_check_that_breaks_is_a_result() -> None:
    def check() -> Check:
        raise OSError("disk on fire")

    broken = Check(name="disk", ok=False, detail="could not be checked: OSError: disk on fire")
    assert doctor.guarded("disk", check) == broken


def results(monkeypatch: pytest.MonkeyPatch, *checks: Check) -> None:
    monkeypatch.setattr(doctor, "local_checks", lambda: [(check.name, lambda check=check: check) for check in checks])
    monkeypatch.setattr(doctor, "PROBE", answering("cpu", ("cpu", None)))
    monkeypatch.setattr("shutil.which", lambda name: None)


def test_one_line_each_and_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fine = Check(name="a", ok=True, detail="there")
    absent = Check(name="b", ok=None, detail="absent [x]", fix="get it")
    results(monkeypatch, fine, absent)
    assert app.main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "✓ a                there",
        "– b                absent [x]  if needed: get it",
        "✓ jax              0.11.0, cpu: 1 x cpu",
        "– full-size modes  no GPU that tells its memory: full-size models need one",
    ]
    results(monkeypatch, Check(name="c", ok=False, detail="broken", fix="mend it"), fine)
    assert app.main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("✗ c                broken  fix: mend it\n✓ a ")


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results(monkeypatch, Check(name="c", ok=False, detail="broken", fix="mend it"))
    assert app.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["checks"][0] == {"name": "c", "ok": False, "detail": "broken", "fix": "mend it"}
    assert [check["name"] for check in found["checks"]] == ["c", "jax", "full-size modes"]


def test_it_answers_where_jax_is_broken(tmp_path: Path) -> None:
    (tmp_path / "jax.py").write_text("raise RuntimeError('this jax is broken')")
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/bin:/usr/bin", "HOME": str(tmp_path), "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "pirl", "doctor"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, "")
    said = "✗ jax              does not start: RuntimeError: this jax is broken  fix: "
    lines = done.stdout.splitlines()
    others = [line for line in lines if not line.startswith(said)]
    assert len(others) == len(lines) - 1
    assert len(others) > 10
    assert [line for line in others if "could not be checked" in line] == []
