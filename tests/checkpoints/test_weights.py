"""Weights from any source fit the reference, or the error says exactly what does not."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import fsspec
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from pirl.checkpoints import fetch
from pirl.checkpoints.compare import _count_on_device
from pirl.checkpoints.openpi import save_openpi
from pirl.checkpoints.pytorch import save_pytorch
from pirl.checkpoints.torch_names import EMBED_TOKENS, EXPERT_LM_HEAD, LM_HEAD
from pirl.checkpoints.weights import check_finite, fit, load, load_openpi, load_paligemma_npz, load_pytorch
from pirl.errors import CheckpointError, MissingExtraError
from pirl.models.params import flatten, nest

GOLDEN = Path(__file__).parents[1] / "golden" / "openpi"


def step_zero(family: str = "pi0_asym") -> Path:
    return next((GOLDEN / family / "ckpt").glob("*/*/0"))


@pytest.fixture(scope="module")
def params() -> dict:
    return load_openpi(step_zero())


@pytest.fixture(scope="module")
def reference(params: dict) -> dict:
    return struct_of(params)


def struct_of(params: dict, dtype: type = np.float32) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)


def assert_equal(found: dict, expected: dict) -> None:
    found, expected = flatten(found), flatten(expected)
    assert set(found) == set(expected)
    for path, leaf in expected.items():
        np.testing.assert_array_equal(np.asarray(found[path], np.float32), np.asarray(leaf, np.float32), err_msg=path)


# --- OpenPI folders


def test_step_params_and_experiment_folders_are_the_same_checkpoint(params: dict, reference: dict) -> None:
    for path in (step_zero(), step_zero() / "params", step_zero().parent, str(step_zero())):
        loaded = load_openpi(path, reference)
        assert all(isinstance(leaf, jax.Array) for leaf in flatten(loaded).values())
        assert_equal(loaded, params)


def test_of_several_steps_the_latest_is_taken_and_said(tmp_path: Path, params: dict, caplog) -> None:
    for step, value in ((9, 1.0), (10, 2.0)):
        save_openpi({"a": np.full(3, value, np.float32)}, tmp_path / str(step), norm_stats={})
    (tmp_path / "11.orbax-checkpoint-tmp-0").mkdir()
    with caplog.at_level(logging.INFO):
        assert load_openpi(tmp_path)["a"].tolist() == [2.0, 2.0, 2.0]
    assert "taking the latest, 10" in caplog.text


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("params/_METADATA", "_METADATA"),
        ("params/manifest.ocdbt", "manifest"),
        ("params/d/*", "params"),
        ("params/ocdbt.process_0/d/*", "ocdbt.process_0/d/"),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_missing_and_cut_files_are_noticed_before_reading(tmp_path: Path, file: str, names: str, cut: bool) -> None:
    step = shutil.copytree(step_zero(), tmp_path / "0")
    victim = max(step.glob(file), key=lambda path: path.stat().st_size)
    if cut:
        victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    else:
        victim.unlink()
    with pytest.raises(CheckpointError, match=names):
        load_openpi(step)


def test_places_that_are_no_checkpoint(tmp_path: Path, reference: dict) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="it holds nothing; expected params/_METADATA"):
        load(tmp_path / "empty", reference)
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="a file that holds no known weights"):
        load(tmp_path / "text.txt", reference)
    with pytest.raises(CheckpointError, match="there is nothing at"):
        load(tmp_path / "absent", reference)
    half = tmp_path / "half"
    (half / "3.orbax-checkpoint-tmp-1").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="a save was interrupted"):
        load_openpi(half)
    no_params = shutil.copytree(step_zero(), tmp_path / "0", ignore=shutil.ignore_patterns("params"))
    with pytest.raises(CheckpointError, match="it holds _CHECKPOINT_METADATA, assets, train_state"):
        load_openpi(no_params)
    with pytest.raises(CheckpointError, match="expected one tree named 'params'"):
        load_openpi(no_params / "train_state")


def test_a_tree_with_and_without_value_is_refused(tmp_path: Path) -> None:
    tree = {"params": {"a": {"value": np.ones(2)}, "b": {"kernel": np.ones(2)}, "value": {"bias": np.ones(2)}}}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", tree)
    with pytest.raises(CheckpointError, match="1 leaf paths end in `value` and 2 do not"):
        load_openpi(tmp_path)


# --- fit


def test_what_does_not_fit_is_one_error_by_kind(params: dict, reference: dict) -> None:
    leaves = flatten(params)
    del leaves["state_proj/bias"]
    leaves["surplus/kernel"] = np.ones((2, 3))
    leaves["action_in_proj/kernel"] = np.ones((7, 5))
    with pytest.raises(CheckpointError) as error:
        fit(nest(leaves), reference)
    expected = list(flatten(reference)["action_in_proj/kernel"].shape)
    assert "1 missing:\n    state_proj/bias" in str(error.value)
    assert "1 unexpected:\n    surplus/kernel [2, 3]" in str(error.value)
    assert f"1 of another shape:\n    action_in_proj/kernel: found [7, 5], expected {expected}" in str(error.value)


def test_long_lists_are_cut_and_counted(reference: dict) -> None:
    with pytest.raises(CheckpointError) as error:
        fit({"surplus": np.ones(1)}, reference)
    missing = len(flatten(reference))
    assert f"{missing} missing" in str(error.value)
    assert f"... and {missing - 10} more" in str(error.value)


def test_the_hint_tells_pi05_from_pi0_lora_from_full_and_widths() -> None:
    pi0, pi05 = struct_of(load_openpi(step_zero("pi0"))), struct_of(load_openpi(step_zero("pi05")))
    with pytest.raises(CheckpointError, match=r"these are π₀\.₅ weights and the model is π₀"):
        load(step_zero("pi05"), pi0)
    with pytest.raises(CheckpointError, match=r"these are π₀ weights and the model is π₀\.₅"):
        load(step_zero("pi0"), pi05)
    with pytest.raises(CheckpointError, match="another model size"):
        load(step_zero("pi0_asym"), pi0)
    with pytest.raises(CheckpointError, match="carry LoRA adapters and the model has none"):
        load(step_zero("pi0_lora_asym"), struct_of(load_openpi(step_zero("pi0_asym"))))
    narrow = flatten(pi0)
    for head in ("action_in_proj/kernel", "action_out_proj/kernel", "action_out_proj/bias", "state_proj/kernel"):
        shape = [8 if n == 32 else n for n in narrow[head].shape]
        narrow[head] = jax.ShapeDtypeStruct(shape, np.float32)
    with pytest.raises(CheckpointError, match="action_dim differs"):
        load(step_zero("pi0"), nest(narrow))


def test_missing_adapters_come_from_init_and_nothing_else_does() -> None:
    adapted = load_openpi(step_zero("pi0_lora_asym"))
    reference = struct_of(adapted)
    base = nest({path: leaf for path, leaf in flatten(adapted).items() if "lora" not in path})
    fitted = flatten(fit(base, reference, init=lambda path: np.full(flatten(reference)[path].shape, 0.5)))
    for path, leaf in fitted.items():
        assert leaf.dtype == np.float32
        expected = 0.5 if "lora" in path else np.asarray(flatten(adapted)[path], np.float32)
        np.testing.assert_array_equal(leaf, np.broadcast_to(expected, leaf.shape))
    assert_equal(fit(base, reference, init=adapted), adapted)
    with pytest.raises(CheckpointError, match="pass init="):
        fit(base, reference)
    with pytest.raises(CheckpointError, match=r"the initial values[\s\S]*of another shape"):
        fit(base, reference, init=lambda path: np.zeros(1))


def test_non_finite_weights_are_named_and_counted(params: dict) -> None:
    check_finite(params)
    leaves = dict(flatten(params))
    kernel = leaves["action_out_proj/kernel"].copy()
    kernel[0, :3] = np.nan, np.inf, -np.inf
    norm = leaves["PaliGemma/llm/final_norm/scale"].astype(ml_dtypes.bfloat16)
    norm[0] = np.nan
    leaves |= {"action_out_proj/kernel": jax.device_put(kernel), "PaliGemma/llm/final_norm/scale": norm}
    with pytest.raises(CheckpointError) as error:
        check_finite(nest(leaves))
    assert f"2 of {len(leaves)} leaves" in str(error.value)
    assert f"action_out_proj/kernel: 3 of {kernel.size} values" in str(error.value)
    assert f"PaliGemma/llm/final_norm/scale: 1 of {norm.size} values" in str(error.value)
    assert int(_count_on_device(leaves["action_out_proj/kernel"])) == 3  # what accelerators run


# --- PyTorch


@pytest.fixture
def torch_file(tmp_path: Path, params: dict) -> Path:
    return save_pytorch(params, tmp_path / "pt", action_horizon=4, dtype="float32") / "model.safetensors"


def test_pytorch_bfloat16_is_widened_exactly(tmp_path: Path, params: dict, reference: dict) -> None:
    save_pytorch(params, tmp_path / "pt", action_horizon=4, dtype="bfloat16")
    rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), params)
    assert_equal(load_pytorch(tmp_path / "pt", reference), rounded)


def test_either_name_of_the_embedding_and_lerobots_prefix_are_read(
    torch_file: Path, params: dict, reference: dict
) -> None:
    tensors = safetensors.numpy.load_file(torch_file)
    assert LM_HEAD in tensors
    assert EMBED_TOKENS not in tensors
    tensors[EMBED_TOKENS] = tensors.pop(LM_HEAD)
    del tensors[EXPERT_LM_HEAD]
    safetensors.numpy.save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, torch_file)
    assert_equal(load(torch_file, reference), params)


def test_a_torch_file_that_lacks_a_tensor_or_is_cut(torch_file: Path, reference: dict) -> None:
    content = torch_file.read_bytes()
    tensors = safetensors.numpy.load(content)
    del tensors["state_proj.bias"]
    safetensors.numpy.save_file(tensors, torch_file)
    with pytest.raises(CheckpointError, match=r"1 missing:\n    state_proj\.bias"):
        load_pytorch(torch_file, reference)
    torch_file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_pytorch(torch_file, reference)


def test_torch_weights_of_pi05_are_told_by_their_names_not_their_path(tmp_path: Path) -> None:
    pi05 = load_openpi(step_zero("pi05"))
    folder = save_pytorch(pi05, tmp_path / "called_pi0", action_horizon=4, dtype="float32")
    assert_equal(load(folder, struct_of(pi05)), pi05)
    with pytest.raises(CheckpointError, match=r"these are π₀\.₅ weights and the model is π₀"):
        load(folder, struct_of(load_openpi(step_zero("pi0"))))


# --- PaliGemma


def paligemma_arrays(params: dict) -> dict[str, np.ndarray]:
    """What big_vision would have stored of these weights, and one array the model has no place for."""
    expert = re.compile(r"PaliGemma/llm/.*_1/.*")
    vlm = {p: leaf for p, leaf in flatten(params).items() if p.startswith("PaliGemma/") and not expert.match(p)}
    arrays = {"params/" + path.removeprefix("PaliGemma/"): leaf for path, leaf in vlm.items()}
    return arrays | {"params/llm/surplus": np.ones(2, np.float32)}


@pytest.mark.parametrize("stacked", [True, False])
def test_paligemma_fills_its_part_and_lists_the_rest(
    tmp_path: Path, params: dict, reference: dict, stacked: bool
) -> None:
    arrays = paligemma_arrays(params)
    if not stacked:
        for key in [key for key in arrays if "/encoderblock/" in key]:
            for i, layer in enumerate(arrays.pop(key)):
                arrays[key.replace("/encoderblock/", f"/encoderblock_{i}/")] = layer
    np.savez(tmp_path / "pt_224.npz", **arrays)
    loaded, missing = load_paligemma_npz(tmp_path / "pt_224.npz", reference)
    assert not set(missing) & set(flatten(loaded))
    assert set(missing) | set(flatten(loaded)) == set(flatten(reference))
    assert all(re.match(r"PaliGemma/llm/.*_1/|(state_proj|action_).*/", path) for path in missing)
    assert {"state_proj/kernel", "PaliGemma/llm/layers/attn/q_einsum_1/w"} <= set(missing)
    assert_equal(loaded, nest({path: flatten(params)[path] for path in flatten(loaded)}))
    zeros = load(tmp_path / "pt_224.npz", reference, init=lambda path: np.zeros(flatten(reference)[path].shape))
    assert np.all(np.asarray(zeros["state_proj"]["kernel"]) == 0)


def test_paligemma_in_bfloat16_and_broken_archives(tmp_path: Path, params: dict, reference: dict) -> None:
    file = tmp_path / "pt_224.npz"
    arrays = {key: array.astype(ml_dtypes.bfloat16) for key, array in paligemma_arrays(params).items()}
    np.savez(file, **arrays)
    loaded, _ = load_paligemma_npz(file, reference)
    embedding = flatten(params)["PaliGemma/llm/embedder/input_embedding"]
    np.testing.assert_array_equal(
        loaded["PaliGemma"]["llm"]["embedder"]["input_embedding"], embedding.astype(ml_dtypes.bfloat16).astype("f4")
    )
    del arrays["params/img/Transformer/encoderblock/MlpBlock_0/Dense_1/kernel"]
    np.savez(file, **arrays)
    with pytest.raises(CheckpointError, match=r"1 missing:\n    PaliGemma/img/.*/Dense_1/kernel"):
        load_paligemma_npz(file, reference)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_paligemma_npz(file, reference)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("params/x.npy", b"no array")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_paligemma_npz(file, reference)


# --- Addresses


def test_google_storage_is_looked_up_in_openpis_cache_first(
    tmp_path: Path, params: dict, reference: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path))
    shutil.copytree(step_zero(), tmp_path / "openpi-assets" / "checkpoints" / "pi0_base")
    assert_equal(load("gs://openpi-assets/checkpoints/pi0_base", reference), params)
    assert_equal(load(Path("gs://openpi-assets/checkpoints/pi0_base/params"), reference), params)
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pi05_base[\s\S]*pirl\[gcs\]") as error:
        load("gs://openpi-assets/checkpoints/pi05_base", reference)
    assert str(tmp_path / "openpi-assets" / "checkpoints" / "pi05_base") in str(error.value)


def test_unreachable_addresses_name_every_place(tmp_path: Path, reference: dict, monkeypatch) -> None:
    import huggingface_hub

    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(fsspec, "filesystem", offline)
    with pytest.raises(CheckpointError, match="no route to host") as error:
        load("gs://bucket/weights", reference)
    assert str(tmp_path / "bucket" / "weights") in str(error.value)
    assert "gs://bucket/weights" in str(error.value)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"hf://me/policy/pt could not be had.*the hub's cache.*no route"):
        load("hf://me/policy/pt", reference)


@pytest.mark.parametrize("address", ["s3://bucket/weights", "https://host/model.safetensors", "hf://alone", "gs://"])
def test_unknown_addresses_are_refused(address: str, reference: dict) -> None:
    with pytest.raises(CheckpointError, match="cannot read weights from"):
        load(address, reference)


def test_hugging_face_addresses_name_repository_revision_and_path(tmp_path: Path, monkeypatch) -> None:
    import huggingface_hub

    asked = {}

    def snapshot(repository: str, **options: object) -> str:
        asked.update(repository=repository, **options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert fetch.fetch("hf://me/policy@v1/a/b") == tmp_path / "a" / "b"
    assert asked == {"repository": "me/policy", "revision": "v1", "allow_patterns": ["a/b", "a/b/*"]}
    with pytest.raises(CheckpointError, match="holds no 'c'"):
        fetch.fetch("hf://me/policy/c")


def test_a_download_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    remote = fsspec.filesystem("memory")
    remote.pipe({"/bucket/w/params/_METADATA": b"{}", "/bucket/w/params/d/x": b"abc"})
    target = fetch.download(remote, "/bucket/w", tmp_path / "bucket" / "w")
    assert (target / "params" / "d" / "x").read_bytes() == b"abc"
    with pytest.raises(FileNotFoundError):
        fetch.download(remote, "/bucket/absent", tmp_path / "bucket" / "absent")
    assert not (tmp_path / "bucket" / "absent").exists()


# --- Shardings

SHARDED = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pirl.checkpoints.openpi import save_openpi
from pirl.checkpoints.pytorch import save_pytorch
from pirl.models.params import flatten
from pirl.checkpoints.weights import load, load_openpi

source, out = sys.argv[1:]
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
def like(leaf):
    axes = [i for i, n in enumerate(leaf.shape) if n % 8 == 0]
    spec = [None] * leaf.ndim
    if axes:
        spec[axes[-1]] = "fsdp"
    return jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
reference = jax.tree.map(like, load_openpi(source))
params = load(source, reference)
save_openpi(params, out + "/openpi", norm_stats={})
save_pytorch(params, out + "/pt", action_horizon=4, dtype="float32")
again = load(out + "/pt", reference)
report = {}
for path, leaf in flatten(params).items():
    assert leaf.sharding == flatten(reference)[path].sharding == flatten(again)[path].sharding, path
    report[path] = [len(leaf.addressable_shards), leaf.addressable_shards[3].data.size, leaf.size]
print(json.dumps(report))
"""


def test_leaves_are_read_and_written_in_shards(tmp_path: Path, params: dict, reference: dict) -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", SHARDED, str(step_zero()), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert set(report) == set(flatten(params))
    sharded = [path for path, leaf in flatten(params).items() if any(n % 8 == 0 for n in leaf.shape)]
    assert len(sharded) > 40
    for path in sharded:
        devices, shard, whole = report[path]
        assert (devices, shard * 8) == (8, whole), path
    assert_equal(load_openpi(tmp_path / "openpi"), params)
    assert_equal(load_pytorch(tmp_path / "pt", reference), params)
