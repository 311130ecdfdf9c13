"""Pure functions of arrays: the formulas of the papers, one short function each."""

from tfm.ops.additive import additive_attention as additive_attention
from tfm.ops.attention import attention as attention
from tfm.ops.attention import attention_weights as attention_weights
from tfm.ops.attention import merge as merge
from tfm.ops.dropout import dropout as dropout
from tfm.ops.dropout import hash_bits as hash_bits
from tfm.ops.dropout import keep_mask as keep_mask
from tfm.ops.linear import LinearState as LinearState
from tfm.ops.linear import elu_plus_one as elu_plus_one
from tfm.ops.linear import init_linear_state as init_linear_state
from tfm.ops.linear import linear_attention as linear_attention
from tfm.ops.linear import linear_attention_step as linear_attention_step
from tfm.ops.losses import fused_cross_entropy as fused_cross_entropy
from tfm.ops.losses import fused_cross_entropy_sum as fused_cross_entropy_sum
from tfm.ops.losses import label_smoothed_cross_entropy as label_smoothed_cross_entropy
from tfm.ops.projection import projection as projection
from tfm.ops.ring import ring_attention as ring_attention
