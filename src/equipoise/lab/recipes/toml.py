"""A recipe as the TOML file that would give it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from equipoise.lab.recipes.recipe import Recipe


def toml(recipe: Recipe) -> str:
    """A recipe as the file that would give it, defaults included and budgets left out: they have been applied."""
    tables = {name: value for name, value in plain(recipe).items() if name != "budget"}
    phases = tables.pop("phases")
    sections = [(f"[{name}]", value) for name, value in tables.items() if isinstance(value, dict)]
    lines = [f"{key(name)} = {literal(value)}" for name, value in tables.items() if not isinstance(value, dict)]
    for heading, section in [*sections, *(("[[phases]]", phase) for phase in phases)]:
        lines += ["", heading, *(f"{key(name)} = {literal(value)}" for name, value in section.items())]
    return "\n".join(lines) + "\n"


def plain(value: Any) -> Any:
    """Dataclasses as tables, options among their other keys; what is not set is left out."""
    if isinstance(value, tuple):
        return [plain(entry) for entry in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    options = fields.pop("options", {})
    return {**{name: entry for name, entry in fields.items() if entry is not None and entry != ""}, **options}


def key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else literal(name)


def literal(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key(name)} = {literal(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, str):  # JSON's escapes are TOML's, which wants one more
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
