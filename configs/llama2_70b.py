"""Llama 2 70B (Touvron et al., 2023, sections 2.1 and 2.2) on a text of your own, for very many accelerators.

    python -m tfm plan configs/llama2_70b.py --mesh data=2,fsdp=64,tensor=8 --optimizer.accumulate 8 --device h100
    python train.py configs/llama2_70b.py --workdir runs/llama2_70b --mesh data=2,fsdp=64,tensor=8 \
        --optimizer.accumulate 8

The paper: 2e12 tokens in steps of 4 million, 1,720,320 hours of A100; a loss of about 1.5 nats a token (Figure 5).
Not trained by us: it needs accelerators. docs/scaling.md says which mesh to choose.
"""

from tfm import Config, DataConfig, OptimizerConfig, TrainConfig, presets


def get_config() -> Config:
    return Config(
        model=presets.llama(d_model=8192, d_ff=28672, num_heads=64, num_kv_heads=8, decoder_layers=80,
                            dtype="bfloat16", scan_layers=True, remat="full"),
        data=DataConfig(source="text", train=("train.txt.gz",), valid=("valid.txt.gz",), task="causal_lm",
                        batching="pack", max_length=4096, tokens_per_batch=2**22, tokenizer="file",
                        tokenizer_path="tokenizer.model"),
        optimizer=OptimizerConfig(name="adamw", schedule="warmup_cosine", learning_rate=1.5e-4,
                                  final_learning_rate=1.5e-5, warmup_steps=2000, beta2=0.95, epsilon=1e-5,
                                  weight_decay=0.1, label_smoothing=0.0, clip_norm=1.0),
        train=TrainConfig(steps=500_000, eval_every=5000, checkpoint_every=1000, log_every=10),
    )
