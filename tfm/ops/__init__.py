"""Pure functions of arrays: the formulas of the papers, one short function each."""

from tfm.ops.attention import attention as attention
from tfm.ops.attention import attention_weights as attention_weights
from tfm.ops.dropout import dropout as dropout
from tfm.ops.dropout import hash_bits as hash_bits
from tfm.ops.dropout import keep_mask as keep_mask
from tfm.ops.losses import fused_cross_entropy as fused_cross_entropy
from tfm.ops.losses import fused_cross_entropy_sum as fused_cross_entropy_sum
from tfm.ops.losses import label_smoothed_cross_entropy as label_smoothed_cross_entropy
from tfm.ops.projection import projection as projection
