"""The table of parameter paths: complete, without overlap, and right about what it splits."""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from tfm.config import ModelConfig
from tfm.models import init_params, presets
from tfm.parallel.mesh import AXES, make_mesh, parse_mesh
from tfm.parallel.rules import PARAMETER_RULES, constrain, parameter_rule, parameter_shardings, path_name

PRESETS = sorted(name for name, function in inspect.getmembers(presets, inspect.isfunction)
                 if function.__module__ == presets.__name__ and not name.startswith("_"))
ODD = {
    "shaw": ModelConfig(vocab_size=9, d_model=8, num_heads=2, position="shaw"),
    "alone": ModelConfig(vocab_size=9, d_model=8, num_heads=2, tie_embeddings="none", logit_bias=True),
    "norms": ModelConfig(vocab_size=9, d_model=8, num_heads=2, qk_norm=True, position="learned", gated=True),
}


@functools.cache
def shapes_of(name, scan=False):
    config = ODD[name] if name in ODD else getattr(presets, name)(vocab_size=96)
    config = dataclasses.replace(config, scan_layers=scan, encoder_layers=min(config.encoder_layers, 2),
                                 decoder_layers=min(config.decoder_layers, 2))
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


@pytest.mark.parametrize("name", [*PRESETS, *ODD])
def test_each_path_matches_exactly_one_rule(name):
    for scan in (False, True):
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes_of(name, scan)):
            matching = [axes for pattern, axes in PARAMETER_RULES if re.search(pattern, path_name(path))]
            assert len(matching) == 1, (path_name(path), matching)
            assert len(matching[0]) <= leaf.ndim


def test_an_unknown_path_is_an_error():
    with pytest.raises(ValueError, match="decoder/new_layer/kernel"):
        parameter_rule("decoder/new_layer/kernel")


MESH = AbstractMesh((1, 2, 4, 1), AXES, axis_types=(AxisType.Auto,) * 4)


def specs(name, scan=False):
    found = parameter_shardings(shapes_of(name, scan), MESH)
    return {path_name(path): leaf.spec for path, leaf in jax.tree_util.tree_leaves_with_path(found)}


def test_what_is_split_on_two_by_four():
    found = specs("bart_base")
    assert found["decoder/layers_0/self_attention/query/kernel"] == PartitionSpec("fsdp", "tensor")
    assert found["decoder/layers_1/cross_attention/output/kernel"] == PartitionSpec("tensor", "fsdp")
    assert found["encoder/layers_0/feed_forward/down/kernel"] == PartitionSpec("tensor", "fsdp")
    assert found["encoder/layers_0/feed_forward/up/bias"] == PartitionSpec("tensor")
    assert found["token_embedding/table"] == PartitionSpec("tensor", "fsdp")
    assert found["encoder/layers_0/self_attention_norm/scale"] == PartitionSpec(None)
    assert found["decoder/layers_0/self_attention/output/bias"] == PartitionSpec(None)
    scanned = specs("bart_base", scan=True)
    assert scanned["decoder/layers/self_attention/query/kernel"] == PartitionSpec(None, "fsdp", "tensor")


def test_a_dimension_that_does_not_divide_stays_whole():
    shape = {"token_embedding": {"table": jax.ShapeDtypeStruct((50257, 768), jnp.float32)}}
    assert parameter_shardings(shape, MESH)["token_embedding"]["table"].spec == PartitionSpec(None, "fsdp")


@pytest.mark.parametrize("spec, message", [
    ("date=2", "no axis 'date'"), ("data=2,data=3", "twice"), ("data=x", "size 'x'"), ("data=0", "size '0'"),
    ("data=-1,fsdp=-1", "-1 twice"), ("data", "size ''"), ("data=1.5", "size '1.5'"), ("stage=2", "reserved"),
])
def test_what_is_wrong_with_a_mesh_is_named(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_mesh(spec)


def test_mesh_fills_up_and_must_fit():
    devices = jax.devices()[:1] * 8
    assert dict(make_mesh("data=-1,fsdp=4", devices).shape) == {"data": 2, "fsdp": 4, "tensor": 1, "sequence": 1}
    assert dict(make_mesh("", devices).shape)["data"] == 8
    with pytest.raises(ValueError, match="8 devices"):
        make_mesh("data=3", devices)
    with pytest.raises(ValueError, match="8 devices"):
        make_mesh("fsdp=3,data=-1", devices)


def test_constrain_without_a_mesh_is_the_identity():
    x = jnp.ones((2, 3, 4))
    assert constrain(x, ("B", "T", "M")) is x
