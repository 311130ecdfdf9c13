"""A small T5 (Raffel et al., 2020): span corruption.

    python train.py configs/t5_small_pretrain.py --workdir runs/t5_small_pretrain
    python eval.py runs/t5_small_pretrain

It learns from documents that are generated; for your own text, a file of documents:

    python train.py configs/t5_small_pretrain.py --workdir runs/t5_small_pretrain \
        --data.source text --data.train train.txt.gz --data.valid valid.txt.gz \
        --data.test test.txt.gz --data.document-separator "<|doc|>"

eval.py reports the perplexity and the share of examples that greedy search reconstructs exactly.
"""

from tfm import Config, DataConfig, OptimizerConfig, TrainConfig, presets


def get_config() -> Config:
    return Config(
        model=presets.t5_small(
            vocab_size=4000, d_model=256, d_ff=1024, num_heads=4, encoder_layers=3, decoder_layers=3,
            logit_scale=256**-0.5),
        data=DataConfig(source="generated", generated_size=20_000, vocab_size=4000, max_length=128,
                        tokens_per_batch=4096, task="span_corruption", batching="bucket", buckets=3),
        optimizer=OptimizerConfig(name="adamw", schedule="warmup_cosine", learning_rate=1e-3, warmup_steps=200,
                                  weight_decay=0.01, label_smoothing=0.0, clip_norm=1.0),
        train=TrainConfig(steps=2000, eval_every=500, checkpoint_every=500, log_every=50),
    )
