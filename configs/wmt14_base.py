"""The base model of "Attention Is All You Need" (Vaswani et al., 2017) on WMT 2014 English-German.

    pip install "tfm[tfds]"
    python train.py configs/wmt14_base.py --workdir runs/base
    python eval.py runs/base --average 5

The paper: 100,000 steps of 25,000 source and 25,000 target tokens, 12 hours on 8 P100 GPUs, 3.3e18 FLOPs; 27.3 BLEU on
newstest2014 with the mean of the last 5 checkpoints, beam 4 and alpha 0.6 (Table 2, section 5.2).
Not trained by us: it needs accelerators.
"""

from tfm import Config, DataConfig, DecodeConfig, OptimizerConfig, TrainConfig, presets


def get_config() -> Config:
    return Config(
        model=presets.transformer_base(vocab_size=37000),
        data=DataConfig(source="tfds", tfds_name="wmt14_translate/de-en", tfds_features=("en", "de"),
                        train=("train",), valid=("validation",), test=("test",), vocab_size=37000, max_length=256,
                        tokens_per_batch=25_000),
        optimizer=OptimizerConfig(schedule="warmup_inverse_sqrt", warmup_steps=4000, label_smoothing=0.1),
        train=TrainConfig(steps=100_000, eval_every=2000, checkpoint_every=1000, log_every=100, keep=5,
                          eval_sentences=500),
        decode=DecodeConfig(beam_size=4, alpha=0.6),
    )
