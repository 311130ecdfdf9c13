"""A small GPT-2 (Radford et al., 2019): causal language model over packed documents.

    python train.py configs/gpt_small.py --workdir runs/gpt_small
    python eval.py runs/gpt_small

It learns from documents that are generated; for your own text, a file of documents:

    python train.py configs/gpt_small.py --workdir runs/gpt_small \
        --data.source text --data.train train.txt.gz --data.valid valid.txt.gz \
        --data.test test.txt.gz --data.document-separator "<|doc|>"

eval.py reports the perplexity per token and the bits per byte.
"""

from tfm import Config, DataConfig, OptimizerConfig, TrainConfig, presets


def get_config() -> Config:
    return Config(
        model=presets.gpt2(vocab_size=4000, d_model=256, d_ff=1024, num_heads=4, decoder_layers=4, max_positions=128),
        data=DataConfig(source="generated", generated_size=20_000, vocab_size=4000, max_length=128,
                        tokens_per_batch=4096, task="causal_lm", batching="pack"),
        optimizer=OptimizerConfig(name="adamw", schedule="warmup_cosine", learning_rate=1e-3, warmup_steps=200,
                                  weight_decay=0.01, label_smoothing=0.0, clip_norm=1.0),
        train=TrainConfig(steps=2000, eval_every=500, checkpoint_every=500, log_every=50),
    )
