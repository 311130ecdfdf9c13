"""Masks as rules: the public door to `tfm.ops.masks` and `tfm.ops.patterns`, and `draw`."""

from tfm.ops.masks import Causal as Causal
from tfm.ops.masks import Global as Global
from tfm.ops.masks import Matrix as Matrix
from tfm.ops.masks import Padding as Padding
from tfm.ops.masks import Prefix as Prefix
from tfm.ops.masks import Rule as Rule
from tfm.ops.masks import Segments as Segments
from tfm.ops.masks import Window as Window
from tfm.ops.patterns import Blocks as Blocks
from tfm.ops.patterns import bigbird as bigbird
from tfm.ops.patterns import longformer as longformer
from tfm.ops.patterns import sliding_window as sliding_window
