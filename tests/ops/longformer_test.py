"""The Longformer rule against the hub library's Longformer attention with the same weights."""

import numpy as np
import pytest

from tfm.masks import Padding, longformer
from tfm.ops import attention

LENGTH, WINDOW, HEADS, WIDTH = 48, 8, 2, 16
GLOBAL = [0, 19]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [[], GLOBAL])
def test_against_hugging_face(tokens):
    torch = pytest.importorskip("torch")
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    torch.manual_seed(0)
    config = LongformerConfig(
        hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, attention_window=[WIDTH // 2], num_hidden_layers=1
    )
    config.attention_window = [WINDOW]
    theirs = LongformerSelfAttention(config, 0).eval()
    for name in ("query", "key", "value"):  # theirs has a second projection for global tokens; here it is the same
        getattr(theirs, f"{name}_global").load_state_dict(getattr(theirs, name).state_dict())
    hidden = torch.randn(2, LENGTH, HEADS * WIDTH)
    valid = np.ones((2, LENGTH), bool)
    valid[1, 40:] = False
    kind = torch.zeros(2, LENGTH)
    kind[:, tokens] = 10_000
    kind[torch.from_numpy(~valid)] = -10_000
    with torch.no_grad():
        want = theirs(
            hidden,
            attention_mask=kind,
            is_index_masked=kind < 0,
            is_index_global_attn=kind > 0,
            is_global_attn=bool(tokens),
        )[0]
        query, key, value = (
            getattr(theirs, name)(hidden).view(2, LENGTH, HEADS, WIDTH).numpy() for name in ("query", "key", "value")
        )
    rule = longformer(WINDOW, tokens=tokens) & Padding(valid)
    for implementation in ("dense", "blockwise"):
        got = attention(query, key, value, mask=rule, implementation=implementation, block_size=8)
        got = np.asarray(got).reshape(2, LENGTH, -1)
        np.testing.assert_allclose(got[valid], want.numpy()[valid], atol=2e-6)
