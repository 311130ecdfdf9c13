"""Checkpoints of other libraries, in and out."""

from tfm.interop.checkpoint import from_huggingface as from_huggingface
from tfm.interop.checkpoint import to_huggingface as to_huggingface
from tfm.interop.generation import GenerationSettings as GenerationSettings
from tfm.interop.generation import load_generation_settings as load_generation_settings
from tfm.interop.gguf import from_gguf as from_gguf
from tfm.interop.peft import to_peft as to_peft
