"""What a family of foreign checkpoints is: how its config reads and writes, and the table of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

from tfm.config import ModelConfig
from tfm.interop.attributes import Attributes
from tfm.interop.table import Entry


def _no_aliases(config: ModelConfig) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Family:
    """One kind of foreign checkpoint.

    Attributes:
        model_types: values of the foreign `model_type` that it reads; the first is the one it writes.
        read: (attributes, names of the tensors) -> config; the names tell which heads are there.
        write: config -> the foreign config, `architectures` included.
        entries: config -> the table.
        aliases: config -> tensors that may be there as copies of another one: name -> name of that one.
        unused: regular expressions of tensors without a counterpart: buffers, and heads that no config describes.
        copies_untied: whether the aliases of a model whose logits have a matrix of their own are written, too, because
            a reader then takes no tensor for a copy of another.
        prefix: what all names begin with, and may be missing in checkpoints without a head.
        renamed: older endings of names -> those of the table.
    """

    model_types: tuple[str, ...]
    read: Callable[[Attributes, Set[str]], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    entries: Callable[[ModelConfig], list[Entry]]
    aliases: Callable[[ModelConfig], dict[str, str]] = _no_aliases
    unused: tuple[str, ...] = ()
    copies_untied: bool = False
    prefix: str = ""
    renamed: dict[str, str] = field(default_factory=dict)

    def table_name(self, name: str, names: Set[str]) -> str:
        """The name in the table of a tensor of a checkpoint that has `names`."""
        if self.prefix and not any(other.startswith(self.prefix) for other in names):
            name = self.prefix + name
        for old, new in self.renamed.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        return name
