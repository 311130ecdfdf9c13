"""Models whose logits have a matrix of their own, written by us and read by transformers, which then ties nothing."""

from __future__ import annotations

import pytest
import torch
import transformers

from tfm.interop import from_huggingface, to_huggingface

PAIR = {"vocab_size": 41, "d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 3,
        "decoder_attention_heads": 3, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "max_position_embeddings": 16,
        "pad_token_id": 1}
ENCODER = {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3,
           "intermediate_size": 20, "max_position_embeddings": 16}
MODELS = {
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**PAIR)),
    "mbart": lambda: transformers.MBartForConditionalGeneration(transformers.MBartConfig(**PAIR)),
    "marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**PAIR)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER)),
    "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**ENCODER)),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_they_can_untie_beside_the_output_is_refused(name, randomized, tmp_path):
    model = MODELS[name]()
    model = randomized(type(model)(type(model.config).from_dict({**model.config.to_dict(),
                                                                 "tie_word_embeddings": False})))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"(embed_tokens\.weight|decoder\.bias) and .* has one parameter for both$"):
        from_huggingface(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_missing(name, randomized, tmp_path):
    model = randomized(MODELS[name]())  # tied, so that all copies are equal
    model.get_output_embeddings().weight = torch.nn.Parameter(0.3 * torch.randn(41, 24))
    model.config.tie_word_embeddings = False
    ids = torch.tensor([[5, 9, 12]])
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}
    model.save_pretrained(tmp_path / "theirs")
    config, params = from_huggingface(tmp_path / "theirs")
    to_huggingface(config, params, tmp_path / "ours", extra={"pad_token_id": 1})
    back, said = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not said["missing_keys"] and config.tie_embeddings != "all"
    with torch.no_grad():
        torch.testing.assert_close(back.eval()(**inputs).logits, model(**inputs).logits)
