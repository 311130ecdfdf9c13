"""A small Transformer that learns to translate our generated English-German sentences.

    python train.py configs/quickstart.py --workdir runs/quickstart
"""

from tfm import Config, DataConfig, DecodeConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config() -> Config:
    return Config(
        model=ModelConfig(vocab_size=1600, d_model=128, d_ff=512, num_heads=4, encoder_layers=2, decoder_layers=2,
                          norm_position="pre", dropout_rate=0.0),
        data=DataConfig(source="generated", generated_size=100_000, vocab_size=1600, max_length=64,
                        tokens_per_batch=2048, buckets=3),
        optimizer=OptimizerConfig(schedule="warmup_cosine", learning_rate=3e-3, warmup_steps=100,
                                  label_smoothing=0.1),
        train=TrainConfig(steps=1000, eval_every=250, checkpoint_every=250, log_every=20, eval_sentences=100),
        decode=DecodeConfig(beam_size=4, batch_size=64),
    )
