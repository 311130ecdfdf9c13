"""Checkpoints: damage, space, averaging."""

import dataclasses
import errno
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from run_toy import make_config, run_toy
from toy import init

from tfm.config import DataConfig, ModelConfig
from tfm.training.checkpoint import (
    Checkpoints,
    average_checkpoints,
    best_step,
    checkpoint_steps,
    find_checkpoint,
    load_checkpoint_config,
    load_checkpoint_params,
)
from tfm.training.step import init_state


def state_at(step, fill):
    state = init_state(init, optax.adam(0.1), 0)
    return state.replace(step=jnp.int32(step), params=jax.tree.map(lambda x: jnp.full_like(x, fill), state.params))


def save(folder, step, fill=0.0, config=None, scores=None, params=None):
    checkpoints, state = Checkpoints(folder, keep=10), state_at(step, fill)
    state = state.replace(params=params) if params else state
    checkpoints.save(state, config=config or make_config(50), data_state={"position": step}, scores=scores or {})
    checkpoints.close()
    return folder / "checkpoints" / str(step)


def abstract():
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), state_at(0, 0.0))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with the checkpoints of steps 10 and 20, to be copied."""
    folder = tmp_path_factory.mktemp("two")
    save(folder, 10, 1.0)
    save(folder, 20, 2.0)
    return folder


def copy(two, tmp_path):
    return shutil.copytree(two, tmp_path / "run")


def biggest(path):
    return max((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def cut(path):
    file = biggest(path)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(path):
    file = biggest(path / "params")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def without_checksums(path):
    (path / "checksums.json").unlink()
    cut(path / "params")


def remove_item(path):
    shutil.rmtree(path / "optimizer")


@pytest.mark.parametrize("damage", [cut, flip, without_checksums, remove_item])
def test_a_damaged_newest_checkpoint_is_passed_over(two, tmp_path, damage, capsys):
    run = copy(two, tmp_path)
    damage(run / "checkpoints" / "20")
    assert find_checkpoint(run).name == ("20" if damage is without_checksums else "10")
    said = []
    checkpoints = Checkpoints(run, keep=2, say=said.append)
    restored = checkpoints.restore_newest(abstract())
    checkpoints.close()
    assert restored.step == 10 and restored.data_state == {"position": 10}
    np.testing.assert_array_equal(restored.state.params["layer"]["bias"], 1.0)
    assert "checkpoints/20 is damaged" in said[0]
    assert (run / "checkpoints" / "20.damaged").is_dir() and checkpoint_steps(run) == [10]


def test_no_whole_checkpoint_is_an_error_and_not_a_new_start(two, tmp_path):
    run = copy(two, tmp_path)
    for step in (10, 20):
        flip(run / "checkpoints" / str(step))
    checkpoints = Checkpoints(run, keep=2, say=lambda text: None)
    with pytest.raises(ValueError, match="no whole checkpoint"):
        checkpoints.restore_newest(abstract())
    checkpoints.close()
    assert checkpoint_steps(run) == [10, 20]


def test_half_written_checkpoints_are_not_counted(two, tmp_path):
    run, said = copy(two, tmp_path), []
    (run / "checkpoints" / "30.orbax-checkpoint-tmp").mkdir()
    checkpoints = Checkpoints(run, keep=2, say=said.append)
    assert checkpoints.restore_newest(abstract()).step == 20
    checkpoints.close()
    assert "never written to its end" in said[0]


def test_choosing_a_checkpoint(two, tmp_path):
    run = copy(two, tmp_path)
    save(run, 30, scores={"bleu": 5.0})
    save(run, 40, scores={"bleu": 4.0})
    assert best_step(run) == 30
    assert find_checkpoint(run).name == "40"
    assert find_checkpoint(run, "best").name == "30"
    assert find_checkpoint(run, 10).name == "10"
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 7: there are 10, 20, 30, 40"):
        find_checkpoint(run, 7)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        find_checkpoint(tmp_path)


def test_config_travels_with_the_parameters(two):
    assert load_checkpoint_config(two / "checkpoints" / "10") == make_config(50)


def test_average_is_the_mean_in_float32(tmp_path):
    fills = [0.1, 0.25, -3.0]
    paths = [save(tmp_path, step, fill) for step, fill in enumerate(fills)]
    average = average_checkpoints(paths)
    for leaf in jax.tree.leaves(average):
        assert leaf.dtype == jnp.float32
        np.testing.assert_allclose(leaf, np.mean(np.float32(fills), dtype=np.float64), rtol=1e-6)


def test_average_of_adapters_is_that_of_their_products(tmp_path):
    config, rng, paths, wanted = make_config(50), np.random.default_rng(0), [], np.zeros((3, 4))
    config = config.replace(model=dataclasses.replace(config.model, lora_rank=2, lora_alpha=5.0))
    kernel = rng.normal(size=(3, 4))
    for step in range(3):
        down, up = rng.normal(size=(3, 2)), rng.normal(size=(2, 4))
        wanted += (kernel + 5.0 / 2 * down @ up) / 3
        query = {"kernel": kernel, "lora_a": down, "lora_b": up}
        paths.append(save(tmp_path, step, config=config, params={"query": jax.tree.map(jnp.float32, query)}))
    average = average_checkpoints(paths)
    assert list(average["query"]) == ["kernel"]
    np.testing.assert_allclose(average["query"]["kernel"], wanted, rtol=1e-5, atol=1e-5)


def test_average_refuses_other_configs(tmp_path, two):
    config = dataclasses.replace(make_config(50), model=ModelConfig(vocab_size=3, d_ff=64))
    other = save(tmp_path, 10, config=config)
    with pytest.raises(ValueError, match=r"model.d_ff 2048 -> 64"):
        average_checkpoints([two / "checkpoints" / "10", other])
    with pytest.raises(ValueError, match="at least one"):
        average_checkpoints([])
    with pytest.raises(FileNotFoundError):
        average_checkpoints([tmp_path / "none"])


def test_average_of_a_run_trained_longer_is_allowed(two, tmp_path):
    """And of one whose tokens were kept elsewhere meanwhile, which a run may change, too."""
    longer = save(tmp_path, 30, 3.0, config=make_config(90).replace(data=DataConfig(cache_dir="elsewhere")))
    average = average_checkpoints([two / "checkpoints" / "10", longer])
    np.testing.assert_allclose(average["layer"]["bias"], 2.0)


def test_moving_average_is_what_is_loaded(tmp_path):
    state, _ = run_toy(tmp_path, 10)
    params = load_checkpoint_params(tmp_path / "checkpoints" / "10")
    np.testing.assert_array_equal(params["layer"]["kernel"], state.ema["layer"]["kernel"])
    assert not np.array_equal(params["layer"]["kernel"], state.params["layer"]["kernel"])


def test_no_space_is_one_clear_error_and_loses_nothing(two, tmp_path, monkeypatch):
    run = copy(two, tmp_path)
    full = shutil.disk_usage(run)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    checkpoints = Checkpoints(run, keep=1)
    with pytest.raises(OSError, match="no space left for a checkpoint") as caught:
        checkpoints.save(state_at(30, 3.0), config=make_config(50), data_state={}, scores={})
    checkpoints.close()
    assert caught.value.errno == errno.ENOSPC
    assert checkpoint_steps(run) == [10, 20]


def test_a_disk_that_fills_up_while_writing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        first = save(disk, 10, 1.0)
        (disk / "filler").write_bytes(b"x" * max(shutil.disk_usage(disk).free - 4096, 0))
        checkpoints = Checkpoints(disk, keep=1)
        with pytest.raises(OSError, match="no space left"):
            checkpoints.save(state_at(20, 2.0), config=make_config(50), data_state={}, scores={})
            checkpoints.wait()
        checkpoints.close()
        assert find_checkpoint(disk) == first
    finally:
        subprocess.run(["umount", disk], check=True)
