"""Attention against other libraries': torch's flex_attention, and layers of the hub library with the same weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm import masks
from tfm.masks import Blocks, Causal, Padding, Prefix, Segments, Window
from tfm.ops import attention
from tfm.positions import Alibi, T5Bias, alibi_slopes, rotary

torch = pytest.importorskip("torch")
BOTH = pytest.mark.parametrize("implementation", ["dense", "blockwise"])


def values_and_gradients(attend, cotangent, *inputs):
    """Our output in float32, and the gradients of its product with a cotangent."""

    @jax.jit
    def run(cotangent, *inputs):
        output, pull = jax.vjp(attend, *inputs)
        return output, pull(cotangent)

    return run(*(jnp.asarray(x, jnp.float32) for x in (cotangent, *inputs)))


def compare(attend, theirs: torch.Tensor, inputs: list[torch.Tensor], shown: np.ndarray | float = 1.0) -> None:
    """Values and gradients of some arrays against torch's, at the places that count."""
    cotangent = np.random.default_rng(5).standard_normal(theirs.shape).astype(np.float32) * np.float32(shown)
    theirs.backward(torch.from_numpy(cotangent))
    output, gradients = values_and_gradients(attend, cotangent, *(x.detach().numpy() for x in inputs))
    np.testing.assert_allclose(output * shown, theirs.detach().numpy() * shown, atol=3e-6)
    for got, x in zip(gradients, inputs, strict=True):
        np.testing.assert_allclose(got, x.grad.numpy(), atol=2e-5, rtol=1e-4)


LENGTH = 40
IDS = np.sort(np.random.default_rng(2).integers(0, 4, (2, LENGTH)), 1)
TOKENS = [3, 30]
CELLS = np.random.default_rng(4).random((4, 10, 10)) < 0.4
SLOPES = np.array(alibi_slopes(4))
THEIR_IDS, THEIR_TOKENS, THEIR_CELLS, THEIR_SLOPES = (torch.tensor(x) for x in (IDS, TOKENS, CELLS, SLOPES))

# name: our mask, bias and soft cap; torch's mask and score functions
RULES = {
    "causal": (Causal(), lambda b, h, q, k: k <= q),
    "window": (Window(6, 2), lambda b, h, q, k: (k >= q - 6) & (k <= q + 2)),
    "dilated": (Window(4, 4, 3), lambda b, h, q, k: ((k - q).abs() <= 12) & ((k - q) % 3 == 0)),
    "prefix": (Causal() | Prefix(9), lambda b, h, q, k: (k <= q) | (k < 9)),
    "documents": (
        Causal() & Segments(IDS, IDS),
        lambda b, h, q, k: (k <= q) & (THEIR_IDS[b, q] == THEIR_IDS[b, k]),
    ),
    "global": (
        masks.longformer(8, tokens=TOKENS),
        lambda b, h, q, k: ((k - q).abs() <= 4) | torch.isin(q, THEIR_TOKENS) | torch.isin(k, THEIR_TOKENS),
    ),
    "blocks by head": (Blocks(CELLS, 4), lambda b, h, q, k: THEIR_CELLS[h, q // 4, k // 4]),
}
SCORES = {
    "plain": ({}, lambda score, b, h, q, k: score),
    "alibi": (dict(bias=Alibi(SLOPES)), lambda score, b, h, q, k: score - THEIR_SLOPES[h] * (q - k).abs()),
    "soft cap": (dict(soft_cap=2.0), lambda score, b, h, q, k: 2 * torch.tanh(score / 2)),
}
CASES = [("documents", "alibi"), ("window", "soft cap")]
ALL = [(rule, score) for rule in RULES for score in SCORES]


def against_flex_attention(rule: str, score: str, implementation: str) -> None:
    """Values, and derivatives along a random direction by differences, for theirs has no backward pass on the CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    (mask, seen), (options, change) = RULES[rule], SCORES[score]
    random = np.random.default_rng(0)
    inputs, directions = ([random.standard_normal((2, LENGTH, n, 8)) for n in (4, 2, 2)] for _ in range(2))
    cotangent = random.standard_normal((2, LENGTH, 4, 8))

    def score_mod(s, b, h, q, k):
        return torch.where(seen(b, h, q, k), change(s, b, h, q, k), -torch.inf)

    def flex(step: float) -> np.ndarray:
        moved = (torch.from_numpy(x + step * d).swapaxes(1, 2) for x, d in zip(inputs, directions, strict=True))
        output = flex_attention(*moved, score_mod=score_mod, enable_gqa=True).swapaxes(1, 2).numpy()
        return np.where(rows, output, 0)

    rows = np.asarray(mask.dense(np.arange(LENGTH), np.arange(LENGTH)).any(-1)).swapaxes(1, 2)[..., None]
    attend = functools.partial(attention, mask=mask, implementation=implementation, block_size=8, **options)
    output, gradients = values_and_gradients(attend, cotangent, *inputs)
    np.testing.assert_allclose(output, flex(0.0), atol=3e-6)
    slope = sum((np.asarray(g, np.float64) * d).sum() for g, d in zip(gradients, directions, strict=True))
    differences = ((flex(1e-4) - flex(-1e-4)) * cotangent).sum() / 2e-4
    assert slope == pytest.approx(differences, rel=2e-5, abs=2e-4)


@pytest.mark.parametrize(("rule", "score"), CASES)
def test_flex_attention(rule, score):
    against_flex_attention(rule, score, "blockwise")


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "score"), [case for case in ALL if case not in CASES])
def test_flex_attention_with_every_pair(rule, score):
    against_flex_attention(rule, score, "blockwise")


def projected(layer, hidden: torch.Tensor, names: tuple[str, str, str], width: int) -> list[torch.Tensor]:
    """Queries, keys and values of a layer as arrays of our layout that keep their gradients."""
    with torch.no_grad():
        made = [getattr(layer, name)(hidden).unflatten(-1, (-1, width)) for name in names]
    return [x.requires_grad_() for x in made]


class Given(torch.nn.Module):
    """Stands in for a projection: gives an array that is there already."""

    def __init__(self, array: torch.Tensor) -> None:
        super().__init__()
        self.array = array

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.array.flatten(-2)


def give(layer, names: tuple[str, str, str], arrays: list[torch.Tensor]) -> None:
    for name, array in zip(names, arrays, strict=True):
        setattr(layer, name, Given(array))


@pytest.mark.slow
@BOTH
def test_big_bird_layer(implementation):
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    torch.manual_seed(0)
    heads, width, block, count, seed, names = 2, 8, 4, 12, 3, ("query", "key", "value")
    config = BigBirdConfig(
        hidden_size=heads * width,
        num_attention_heads=heads,
        block_size=block,
        num_random_blocks=3,
        max_position_embeddings=64,
    )
    layer = BigBirdBlockSparseAttention(config, seed=seed).train()  # it has random blocks in training only
    hidden = torch.randn(2, count * block, heads * width)
    valid = torch.ones(2, count * block)
    valid[1, 37:] = 0
    arrays = projected(layer, hidden, names, width)
    give(layer, names, arrays)
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(valid, block)
    theirs, _ = layer(hidden, band, rows, columns, blocked, blocked)
    np.random.seed(seed)
    plan = layer._get_rand_attn_plan(count * block, block, 3)
    chosen = layer._bigbird_block_rand_mask_with_head(count * block, count * block, block, block, heads, *plan)
    index = np.arange(count)
    cells = np.repeat((np.abs(index[:, None] - index) <= 1)[None], heads, 0)
    cells[:, [0, -1]] = cells[:, :, [0, -1]] = True
    for head, picks in enumerate(chosen):
        for row, columns_of_row in enumerate(picks, start=1):
            assert not cells[head, row, columns_of_row].any()
            cells[head, row, columns_of_row] = True
    mask = Blocks(cells, block) & Padding(valid.numpy() > 0)
    attend = functools.partial(attention, mask=mask, implementation=implementation)
    compare(attend, theirs.unflatten(-1, (heads, width)), arrays, valid[:, :, None, None].numpy())


@BOTH
def test_mistral_layer(implementation):
    """Sliding window, grouped heads and rotations."""
    from transformers import MistralConfig
    from transformers.masking_utils import create_sliding_window_causal_mask
    from transformers.models.mistral.modeling_mistral import MistralAttention, MistralRotaryEmbedding

    torch.manual_seed(0)
    length, names = 24, ("q_proj", "k_proj", "v_proj")
    config = MistralConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=5,
        attn_implementation="eager",
    )
    layer = MistralAttention(config, 0)
    layer.o_proj = torch.nn.Identity()
    hidden, places = torch.randn(2, length, 32), torch.arange(length)[None]
    arrays = projected(layer, hidden, names, 8)
    give(layer, names, arrays)
    seen = create_sliding_window_causal_mask(
        config=config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=places
    )
    theirs, _ = layer(hidden, MistralRotaryEmbedding(config)(hidden, places), seen)

    def attend(query, key, value):
        query, key = (rotary(x, np.arange(length)) for x in (query, key))
        return attention(query, key, value, mask=masks.sliding_window(5), implementation=implementation, block_size=8)

    compare(attend, theirs.unflatten(-1, (4, 8)), arrays)


@BOTH
@pytest.mark.parametrize("causal", [False, True])
def test_t5_layer(implementation, causal):
    """The learned bias per bucket of distances, and no scale; gradients of the table too."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    torch.manual_seed(0)
    length, names = 40, ("q", "k", "v")
    config = T5Config(
        d_model=32,
        d_kv=8,
        num_heads=4,
        dropout_rate=0.0,
        is_decoder=causal,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        attn_implementation="eager",
    )
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    layer.o = torch.nn.Identity()
    hidden = torch.randn(2, length, 32)
    arrays = projected(layer, hidden, names, 8)
    give(layer, names, arrays)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    theirs = layer(hidden, mask=torch.zeros(later.shape).masked_fill(later, -torch.inf) if causal else None)[0]

    def attend(query, key, value, table):
        return attention(
            query,
            key,
            value,
            mask=Causal() if causal else None,
            bias=T5Bias(table, not causal, 20),
            scale=1.0,
            implementation=implementation,
            block_size=16,
        )

    compare(attend, theirs.unflatten(-1, (4, 8)), [*arrays, layer.relative_attention_bias.weight])
