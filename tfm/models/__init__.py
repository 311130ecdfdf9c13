"""Encoder, decoder and encoder-decoder, built from one config."""

from tfm.models.build import build as build
from tfm.models.build import count_params as count_params
from tfm.models.build import init_params as init_params
from tfm.models.decoder import DecoderLM as DecoderLM
from tfm.models.encoder import Encoder as Encoder
from tfm.models.output import output_matrix as output_matrix
from tfm.models.transformer import Transformer as Transformer
