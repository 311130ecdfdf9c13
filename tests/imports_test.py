"""Which way the package depends on itself, and what `import tfm` loads."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "tfm"

ALLOWED = {
    "ops": {"ops"},
    "nn": {"nn", "ops", "config", "parallel"},
    "parallel": {"parallel", "config", "config_json"},
    "models": {"models", "nn", "ops", "config", "parallel"},
    "decoding": {"decoding"},
    "data": {"data", "config", "config_checks"},
    "training": {"training", "models", "nn", "ops", "parallel", "config", "config_json"},
    "interop": {"interop", "models", "nn", "ops", "config", "data"},
}
"""folder -> parts of tfm that its files may import; those above (bundle, inference, analysis, cli) may import all."""


def imported_parts(path):
    """Names of the parts of tfm that a file imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" if node.module == "tfm" else node.module for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.split(".")[0] == "tfm" and "." in name:
                yield name.split(".")[1]


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_imports_go_down_only(folder):
    files = list((PACKAGE / folder).rglob("*.py"))
    assert files
    for path in files:
        assert set(imported_parts(path)) <= ALLOWED[folder], path


def test_ops_need_nothing_but_jax_and_numpy():
    for path in (PACKAGE / "ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
            for name in names:
                root = (name or "").split(".")[0]
                assert root in sys.stdlib_module_names or root in ("tfm", "jax", "numpy"), (path, name)


def test_importing_tfm_loads_no_data_plotting_or_interop_library():
    heavy = ("grain", "matplotlib", "orbax", "tensorflow", "tensorflow_datasets", "sentencepiece", "transformers",
             "torch", "sacrebleu", "tyro", "rich", "tensorboardX", "safetensors", "tokenizers", "flax")
    code = f"import sys, json, tfm; print(json.dumps([name for name in {heavy!r} if name in sys.modules]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(found) == []


def test_what_completion_offers_is_there():
    """In a new process, where nothing has been imported yet."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"cli"}
    code = ("import json, tfm; names = dir(tfm); "
            "print(json.dumps([names, [name for name in names if not hasattr(tfm, name)]]))")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    names, absent = json.loads(found)
    assert {"load", "build", "init_params", "presets", "ModelConfig", *folders} <= set(names) and not absent
