"""Classification of a sentence with an encoder, from random weights or from a trained encoder.

    python train.py configs/classify_small.py --workdir runs/classify
    python train.py configs/classify_small.py --workdir runs/classify --init-from runs/bert_small
    python eval.py runs/classify
    echo "On Monday it rained, so she stayed at home and read a book." | python decode.py runs/classify

With `--init-from` the architecture and the tokenizer are those of that run, Hugging Face folder or .gguf file. It
learns which of four kinds a generated document is of; for your own text, lines `text TAB label`:

    python train.py configs/classify_small.py --workdir runs/classify --init-from FOLDER \
        --data.source text --data.train train.tsv --data.valid valid.tsv --data.test test.tsv

For adapters instead of all weights (Hu et al., 2021) add `--model.lora-rank 8 --optimizer.learning-rate 1e-3`.
eval.py reports the accuracy and F1. From random weights it takes half a minute on 2 CPU cores, and both are 1.00: the
four kinds of generated documents are easy to tell apart.
"""

from tfm import Config, DataConfig, OptimizerConfig, TrainConfig, presets


def get_config() -> Config:
    return Config(
        model=presets.bert_base(
            vocab_size=1000, d_model=128, d_ff=512, num_heads=4, encoder_layers=2, token_types=0, pooler=False,
            token_head=False, logit_bias=False, max_positions=128, class_pooling="mean"),
        data=DataConfig(source="generated", generated_size=4000, vocab_size=1000, max_length=128, too_long="cut",
                        tokens_per_batch=2048, task="classify", buckets=2),
        optimizer=OptimizerConfig(name="adamw", schedule="warmup_linear", learning_rate=3e-4, warmup_steps=20,
                                  weight_decay=0.01, label_smoothing=0.0, clip_norm=1.0),
        train=TrainConfig(steps=100, eval_every=50, checkpoint_every=100, log_every=20, init_model="source"),
    )
