"""Configs check themselves: each mistake is refused with a message that names the field."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tfm.config import (
    AttentionPattern,
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    RotaryScaling,
    TrainConfig,
)

LINEAR = (AttentionPattern("linear"),)

BAD_MODELS = [
    ({"vocab_size": 0}, "model.vocab_size is 0"),
    ({"d_model": -4}, "model.d_model is -4"),
    ({"num_heads": 7}, "model.num_heads is 7.*d_model=512"),
    ({"decoder_num_heads": 5}, "model.decoder_num_heads is 5.*d_model=512"),
    ({"num_kv_heads": 3}, "model.num_kv_heads is 3.*num_heads=8"),
    ({"encoder_layers": 0, "decoder_layers": 0}, "model.encoder_layers is 0.*decoder_layers"),
    ({"encoder_layers": -1}, "model.encoder_layers is -1"),
    ({"dropout_rate": 1.0}, "model.dropout_rate is 1.0.*0, 1"),
    ({"attention_dropout_rate": -0.1}, "model.attention_dropout_rate is -0.1"),
    ({"norm_epsilon": 0.0}, "model.norm_epsilon is 0.0"),
    ({"attention_pattern": ()}, "model.attention_pattern is"),
    ({"attention_pattern": LINEAR, "position": "t5"}, "model.position is 't5'.*linear"),
    ({"attention_pattern": LINEAR, "position": "alibi"}, "model.position is 'alibi'.*linear"),
    ({"attention_pattern": LINEAR, "attention_softcap": 5.0}, "model.attention_softcap is 5.0.*linear"),
    ({"attention_pattern": LINEAR, "attention_dropout_rate": 0.1}, "model.attention_dropout_rate is 0.1.*linear"),
    ({"position": "rotary", "head_dim": 7}, "model.rotary_dim is 7.*even"),
    ({"position": "rotary", "rotary_dim": 66}, "model.rotary_dim is 66.*head_dim=64"),
    ({"rotary_scaling": RotaryScaling("linear", 2.0)}, "model.rotary_scaling is.*rotary"),
    ({"d_model": 9, "num_heads": 3}, "model.d_model is 9.*even"),
    ({"position": "t5", "t5_buckets": 7}, "model.t5_buckets is 7.*even"),
    ({"position": "t5", "t5_max_distance": 16}, "model.t5_max_distance is 16.*above"),
    ({"position_offset": -1}, "model.position_offset is -1"),
    ({"token_types": -2}, "model.token_types is -2"),
    ({"token_head": True}, "model.token_head.*encoder"),
    ({"pooler": True}, "model.pooler.*encoder"),
    ({"source_vocab_size": 100}, "model.source_vocab_size is 100.*share"),
    ({"parallel_residual": True}, "model.parallel_residual is True.*norm_position"),
    ({"position": "absolute"}, "model.position is 'absolute'.*sinusoidal.*rotary"),
    ({"norm": "batch"}, "model.norm is 'batch'.*layer.*rms"),
    ({"activation": "swish"}, "model.activation is 'swish'.*silu"),
    ({"tie_embeddings": True}, "model.tie_embeddings is True.*all"),
    ({"dtype": "float64"}, "model.dtype is 'float64'.*bfloat16"),
    ({"d_model": 512.0}, "model.d_model is 512.0.*whole number"),
    ({"num_kv_heads": "4"}, "model.num_kv_heads is '4'.*whole number or None"),
    ({"gated": "yes"}, "model.gated is 'yes'.*True or False"),
    ({"dropout_rate": "0.1"}, "model.dropout_rate is '0.1'.*finite number"),
    ({"logit_scale": float("nan")}, "model.logit_scale is nan.*finite number"),
    ({"norm_epsilon": float("inf")}, "model.norm_epsilon is inf.*finite number"),
    ({"init_std": -1.0}, "model.init_std is -1.0"),
    ({"attention_pattern": ("window",)}, "model.attention_pattern is .*each item is AttentionPattern"),
    ({"rotary_scaling": "yarn", "position": "rotary"}, "model.rotary_scaling is 'yarn'.*RotaryScaling or None"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_MODELS, ids=lambda x: str(x) if isinstance(x, str) else "")
def test_models_that_make_no_sense_are_refused_by_field(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        ModelConfig(**{"vocab_size": 100, **changes})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: AttentionPattern("window", window=0), r"model.attention_pattern.window is 0"),
    (lambda: AttentionPattern("longformer", window=5), r"model.attention_pattern.window is 5.*even"),
    (lambda: AttentionPattern("bigbird", block_size=-1), r"model.attention_pattern.block_size is -1"),
    (lambda: AttentionPattern("local"), r"model.attention_pattern.kind is 'local'.*window"),
    (lambda: RotaryScaling("linear", 0.5), r"model.rotary_scaling.factor is 0.5"),
    (lambda: RotaryScaling("llama3", 8.0, low_freq_factor=4.0), "high_freq_factor is 4.0, .*above low_freq_factor=4.0"),
    (lambda: RotaryScaling("yarn", 8.0, beta_slow=40.0), "beta_fast is 32.0, .* at least beta_slow=40.0"),
    (lambda: DataConfig(source="text"), r"data.train is \(\)"),
    (lambda: DataConfig(source="tfds"), r"data.tfds_name is ''"),
    (lambda: DataConfig(tokens_per_batch=10), r"data.tokens_per_batch is 10.*max_length=128"),
    (lambda: DataConfig(tokenizer="file"), r"data.tokenizer_path is None"),
    (lambda: DataConfig(tokenizer_path="x"), r"data.tokenizer_path is 'x'"),
    (lambda: DataConfig(mask_rate=1.0), r"data.mask_rate is 1.0"),
    (lambda: OptimizerConfig(warmup_steps=0), r"optimizer.warmup_steps is 0"),
    (lambda: OptimizerConfig(label_smoothing=1.0), r"optimizer.label_smoothing is 1.0"),
    (lambda: OptimizerConfig(ema_decay=1.0), r"optimizer.ema_decay is 1.0"),
    (lambda: OptimizerConfig(clip_norm=0.0), r"optimizer.clip_norm is 0.0"),
    (lambda: OptimizerConfig(learning_rate=float("inf")), r"optimizer.learning_rate is inf.*finite"),
    (lambda: OptimizerConfig(name="adamw", weight_decay=-0.1), r"optimizer.weight_decay is -0.1"),
    (lambda: OptimizerConfig(final_learning_rate=-1.0), r"optimizer.final_learning_rate is -1.0"),
    (lambda: TrainConfig(steps=0), r"train.steps is 0"),
    (lambda: TrainConfig(steps=1e5), r"train.steps is 100000.0.*whole number"),
    (lambda: TrainConfig(steps="100"), r"train.steps is '100'.*whole number"),
    (lambda: TrainConfig(seed=-1), r"train.seed is -1"),
    (lambda: TrainConfig(seed=2**63), r"train.seed is 9223372036854775808"),
    (lambda: DataConfig(train=3), r"data.train is 3.*a tuple, of which each item is a string"),
    (lambda: DataConfig(train=("a.en", "a.de")), r"data.train is .*source='generated' reads no files"),
    (lambda: DataConfig(valid="a.en"), r"data.valid is .*source='generated' reads no files"),
    (lambda: DataConfig(labels=("a", "b")), r"data.labels is .*classify"),
    (lambda: TrainConfig(samples=-1), r"train.samples is -1"),
    (lambda: DecodeConfig(n_best=5), r"decode.n_best is 5.*beam_size=4"),
    (lambda: DecodeConfig(alpha=-1.0), r"decode.alpha is -1.0"),
])
def test_other_parts_are_refused_by_field(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_defaults_are_the_papers_base_model():
    config = ModelConfig(vocab_size=37000)
    assert (config.d_model, config.d_ff, config.num_heads, config.encoder_layers) == (512, 2048, 8, 6)
    assert (config.dropout_rate, config.norm_position, config.position) == (0.1, "post", "sinusoidal")
    assert config.resolved_head_dim == config.resolved_value_dim == 64
    optimizer = OptimizerConfig()
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.98, 1e-9)
    assert (optimizer.warmup_steps, optimizer.label_smoothing) == (4000, 0.1)
    assert (DecodeConfig().beam_size, DecodeConfig().alpha) == (4, 0.6)


def test_kinds_of_model():
    kinds = [(True, False, False), (False, True, False), (False, False, True)]
    layers = [{}, {"encoder_layers": 0}, {"decoder_layers": 0}]
    for expected, changes in zip(kinds, layers, strict=True):
        config = ModelConfig(vocab_size=8, **changes)
        assert (config.is_encoder_decoder, config.is_decoder_only, config.is_encoder_only) == expected


def test_the_decoder_may_have_other_sizes():
    config = ModelConfig(vocab_size=8, d_model=64, num_heads=4, decoder_num_heads=8, decoder_d_ff=10)
    decoder = config.for_decoder()
    assert (decoder.num_heads, decoder.resolved_head_dim, decoder.d_ff) == (8, 8, 10)
    assert (config.num_heads, config.resolved_head_dim, config.d_ff) == (4, 16, 2048)
    fixed = ModelConfig(vocab_size=8, d_model=64, num_heads=4, head_dim=5, decoder_num_heads=8).for_decoder()
    assert fixed.resolved_head_dim == 5


def test_patterns_repeat_over_the_layers():
    config = ModelConfig(vocab_size=8, attention_pattern=[AttentionPattern("window"), AttentionPattern()])
    assert [config.pattern_of(i).kind for i in range(5)] == ["window", "full", "window", "full", "window"]
    assert hash(config) == hash(dataclasses.replace(config))


def test_a_single_string_is_one_item_of_a_tuple():
    config = ModelConfig(vocab_size=8, lora_rank=1, lora_targets="attention/key$")
    assert config.lora_targets == ("attention/key$",)
    assert DataConfig(source="text", train="a.txt").train == ("a.txt",)


def test_configs_are_frozen_and_replaced_by_parts():
    config = Config(ModelConfig(vocab_size=8))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.d_model = 3
    assert config.replace(train=TrainConfig(steps=7)).train.steps == 7


def test_numbers_of_numpy_are_taken_as_python_s():
    config = ModelConfig(vocab_size=np.int64(40), dropout_rate=np.float32(0.5), scan_layers=np.bool_(True))
    assert config == ModelConfig(vocab_size=40, dropout_rate=0.5, scan_layers=True)
    assert [type(getattr(config, name)) for name in ("vocab_size", "dropout_rate", "scan_layers")] == [int, float, bool]
    with pytest.raises(ValueError, match=r"model.vocab_size is 40.0, but it must be a whole number"):
        ModelConfig(vocab_size=np.float32(40))


def test_a_whole_number_too_great_for_a_float_is_a_whole_number():
    with pytest.raises(ValueError, match=r"train.seed is 1000.*must lie in"):
        TrainConfig(seed=10**400)
