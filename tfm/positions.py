"""Position schemes: the public door to `tfm.ops.positions`."""

from tfm.ops.positions import Alibi as Alibi
from tfm.ops.positions import Bias as Bias
from tfm.ops.positions import MatrixBias as MatrixBias
from tfm.ops.positions import RotaryScaling as RotaryScaling
from tfm.ops.positions import Shaw as Shaw
from tfm.ops.positions import T5Bias as T5Bias
from tfm.ops.positions import alibi_slopes as alibi_slopes
from tfm.ops.positions import rotary as rotary
from tfm.ops.positions import sinusoidal as sinusoidal
from tfm.ops.positions import t5_bucket as t5_bucket
from tfm.ops.tokens import register_rule as register_rule
