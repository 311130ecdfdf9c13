"""A small translation model on aligned text files, one pair a line, plain or .gz.

    python train.py configs/text_small.py --workdir runs/text \
        --data.train train.en.gz train.de.gz --data.valid valid.en.gz valid.de.gz --data.test test.en.gz test.de.gz

7.6 million parameters; about 40 minutes on 2 CPU cores for 250,000 pairs.
"""

from tfm import Config, DataConfig, DecodeConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(vocab_size=8000, d_model=256, d_ff=1024, num_heads=4, encoder_layers=3, decoder_layers=3,
                          norm_position="pre", dropout_rate=0.1),
        data=DataConfig(source="text", train=("train.en", "train.de"), valid=("valid.en", "valid.de"),
                        test=("test.en", "test.de"), vocab_size=8000, max_length=128, tokens_per_batch=3072),
        optimizer=OptimizerConfig(schedule="warmup_cosine", learning_rate=2e-3, warmup_steps=400,
                                  label_smoothing=0.1),
        train=TrainConfig(steps=3000, eval_every=1000, checkpoint_every=500, log_every=50, eval_sentences=200),
        decode=DecodeConfig(beam_size=4, alpha=0.6, batch_size=32),
    )
