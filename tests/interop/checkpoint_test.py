"""What from_huggingface and to_huggingface refuse, and into which type and sharding they read."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tfm.interop import from_huggingface, to_huggingface
from tfm.models import init_params, presets
from tfm.models.scanned import stack_layers

CONFIG = presets.gpt2(11, d_model=8, d_ff=12, num_heads=2, decoder_layers=2, max_positions=6)


@pytest.fixture(scope="module")
def params():
    return jax.jit(init_params, static_argnums=0)(CONFIG, jax.random.key(0))


@pytest.fixture
def folder(tmp_path, params):
    to_huggingface(CONFIG, params, tmp_path)
    return tmp_path


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_and_left_over_tensors_are_listed(folder):
    change(folder, lambda t: t.update(extra=t.pop("transformer.h.1.ln_1.weight")))
    with pytest.raises(ValueError, match=r"missing: transformer\.h\.1\.ln_1\.weight; .* left over: extra"):
        from_huggingface(folder)


def test_a_wrong_shape_names_the_tensor_and_the_parameter(folder):
    change(folder, lambda t: t.update({"transformer.h.0.mlp.c_fc.weight": np.zeros((8, 13), np.float32)}))
    with pytest.raises(ValueError, match=r"c_fc\.weight of shape \(8, 13\) .*feed_forward/up/kernel .* \(8, 12\)"):
        from_huggingface(folder)


def test_a_fused_tensor_of_a_wrong_width_is_named(folder):
    change(folder, lambda t: t.update({"transformer.h.0.attn.c_attn.bias": np.zeros(23, np.float32)}))
    with pytest.raises(ValueError, match=r"c_attn\.bias: it has shape \(23,\), but 24 columns"):
        from_huggingface(folder)


def test_a_tied_copy_must_be_a_copy(folder):
    change(folder, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].copy()}))
    from_huggingface(folder)
    change(folder, lambda t: t["lm_head.weight"].__setitem__((3, 2), 9.0))
    with pytest.raises(ValueError, match=r"lm_head\.weight and transformer\.wte\.weight differ"):
        from_huggingface(folder)


def test_a_tied_tensor_may_come_under_the_name_of_its_copy(folder, params):
    change(folder, lambda t: t.update({"lm_head.weight": t.pop("transformer.wte.weight")}))
    _, read = from_huggingface(folder)
    np.testing.assert_array_equal(read["token_embedding"]["table"], params["token_embedding"]["table"])


def test_names_without_the_prefix_and_buffers_are_read(folder, params):
    def bare(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 6, 6), np.float32)

    change(folder, bare)
    jax.tree.map(np.testing.assert_array_equal, from_huggingface(folder)[1], params)


def test_the_stored_type_is_kept_and_another_one_is_converted_to(folder, params):
    config, read = from_huggingface(folder, dtype=jnp.bfloat16)
    assert (config.dtype, config.param_dtype) == ("bfloat16", "bfloat16")
    to_huggingface(config, read, folder)
    again, same = from_huggingface(folder)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, same, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        from_huggingface(folder, dtype=jnp.int8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("value, kind", [(np.nan, "NaN"), (-np.nan, "NaN"), (np.inf, "infinite"),
                                         (-np.inf, "infinite")])
def test_a_value_that_is_no_number_is_named_with_its_tensor(folder, dtype, sharded, value, kind):
    mesh = jax.make_mesh((1,), ("model",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()) if sharded else None
    from_huggingface(folder, dtype=dtype, sharding=sharding)
    change(folder, lambda t: t["transformer.h.1.mlp.c_fc.weight"].__setitem__((3, 2), value))
    with pytest.raises(ValueError, match=rf"tensor transformer\.h\.1\.mlp\.c_fc\.weight has a value that is {kind}"):
        from_huggingface(folder, dtype=dtype, sharding=sharding)


def test_a_number_too_large_for_the_type_is_infinite_in_it(folder):
    change(folder, lambda t: t["transformer.ln_f.weight"].__setitem__(0, 7e4))
    from_huggingface(folder)
    with pytest.raises(ValueError, match=r"ln_f\.weight has a value that is infinite in float16"):
        from_huggingface(folder, dtype="float16")


def test_an_infinite_bias_of_the_logits_rules_a_token_out(tmp_path):
    config = presets.marian(11, d_model=8, d_ff=12, num_heads=2, encoder_layers=1, decoder_layers=1, max_positions=6)
    to_huggingface(config, init_params(config, jax.random.key(0)), tmp_path)
    change(tmp_path, lambda t: t["final_logits_bias"].__setitem__((0, 10), -np.inf))
    assert from_huggingface(tmp_path)[1]["output"]["bias"][10] == -np.inf
    change(tmp_path, lambda t: t["final_logits_bias"].__setitem__((0, 10), np.nan))
    with pytest.raises(ValueError, match="final_logits_bias has a value that is NaN"):
        from_huggingface(tmp_path)


def test_parameters_are_read_into_a_sharding(folder, params):
    mesh = jax.make_mesh((1,), ("model",))
    one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    shardings = jax.tree.map(lambda x: columns if x.ndim == 2 else one, params)
    _, read = from_huggingface(folder, sharding=shardings)
    assert read["decoder"]["layers_0"]["self_attention"]["query"]["kernel"].sharding == columns
    jax.tree.map(np.testing.assert_array_equal, read, params)


def test_stacked_layers_are_written_as_separate_ones(tmp_path, params):
    stacked = dataclasses.replace(CONFIG, scan_layers=True)
    to_huggingface(stacked, stack_layers(params, CONFIG), tmp_path)
    jax.tree.map(np.testing.assert_array_equal, from_huggingface(tmp_path)[1], params)


def test_parameters_that_do_not_fit_the_config_are_refused(tmp_path, params):
    with pytest.raises(ValueError, match="params do not fit the config: decoder/layers_1/"):
        to_huggingface(dataclasses.replace(CONFIG, decoder_layers=1), params, tmp_path)


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        from_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        from_huggingface(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model": {}}))
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(ValueError, match="model_type is None"):
        from_huggingface(tmp_path)
