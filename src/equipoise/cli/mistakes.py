"""What the command line says about mistakes: suggestions for misspelled words, and which errors need a traceback."""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from equipoise.lab.printable import printable_text
from equipoise.options import did_you_mean


class Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest known word for a misspelled one."""

    def error(self, message: str) -> NoReturn:
        if match := re.search(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)", message):
            known = [word.strip("' ") for word in match[2].split(",")]
            nearest = did_you_mean(match[1], known, cutoff=0.65)
            message = f"{message[: match.start()]}invalid choice {match[1]!r}; {nearest}known: {', '.join(known)}."
        if match := re.match(r"argument (\S+): invalid (int|float) value: (.*)", message):
            message = f"{match[1]} is {match[3]}; it must be a {'whole ' if match[2] == 'int' else ''}number."
        print(f"{self.prog}: {printable_text(message)}\nSee {self.prog} --help.", file=sys.stderr)
        raise SystemExit(2)

    def options(self) -> list[str]:
        return [option for option in self._option_string_actions if option.startswith("--")]


def no_such_argument(arguments: argparse.Namespace, words: Sequence[str]) -> str:
    """Return the message for unknown arguments; for ``--epochs 3``, it suggests the change to the recipe."""
    options: list[str] = arguments.parser.options()
    word, equals, value = words[0].partition("=")
    if not equals and len(words) > 1 and not words[1].startswith("-"):
        value = words[1]
    key, nearest = word.lstrip("-").replace("-", "_"), did_you_mean(word, options, cutoff=0.65)
    if word.startswith("--") and not nearest and hasattr(arguments, "changes"):
        if not hasattr(arguments, "recipe"):
            return (
                f"there is no argument {words[0]!r}; give options of the task as key=value: {key}={value or 'VALUE'}."
            )
        if keys := meant_keys(arguments.recipe, key):
            either = " or ".join(f"{key}={value or 'VALUE'}" for key in keys)
            return f"there is no argument {words[0]!r}; change a recipe with key=value: {either}."
    return f"there is no argument {words[0]!r}; {nearest}options: {', '.join(options)}."


def meant_keys(name: str, word: str) -> list[str]:
    """Return the full keys of a recipe, or of the first recipe of a table or figure, that end in a word."""
    from equipoise.lab.recipes.reading import RecipeError, full_keys, open_recipe

    try:
        tables = open_recipe(name).tables
        inside = [*(row["recipe"] for row in tables.get("rows", [])), *tables.get("recipes", [])]
        return full_keys(word, open_recipe(inside[0].split()[0]).tables if inside else tables)
    except (RecipeError, AttributeError, KeyError, IndexError, TypeError):
        return full_keys(word, {})


def is_a_defect(error: Exception) -> bool:
    """Return whether an error needs a traceback, because its message alone would not help a user."""
    from equipoise.solution import ConvergenceError

    if isinstance(error, KeyError | IndexError | UnicodeDecodeError):
        return True
    ours = isinstance(error, ConvergenceError) or type(error).__module__.startswith("equipoise.")
    return isinstance(error, RuntimeError) and not ours and not isinstance(error, NotImplementedError)
