"""Recipes: what is read, what is refused, and that every refusal names the right line (marked `# <-`)."""

import dataclasses
import json
import re
import shlex
import sys
import typing
from importlib import resources
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from equipoise.lab.data import DATA_SETS
from equipoise.lab.data.catalogue import ABOUT
from equipoise.lab.recipes.build import build_model, build_task, check, load_data, one_cycle_schedule
from equipoise.lab.recipes.reading import (
    RecipeError,
    RecipeFile,
    Where,
    budget_changes,
    kind_of,
    open_recipe,
    parse_override,
    recipe_names,
    recipes_folder,
)
from equipoise.lab.recipes.schema import (
    Data,
    Failures,
    FigureSpec,
    Jacobian,
    Named,
    Paper,
    Phase,
    Recipe,
    TableSpec,
    Training,
)
from equipoise.lab.results.reproduce import figure_functions, rows, trainings
from equipoise.lab.runs.folder import create
from equipoise.lab.trust import ANYTHING

TITLE = 'title = "A recipe"'
DATA = '[data]\nname = "digits"'
MODEL = '[model]\nname = "conv-equilibrium"'
PHASES = "[[phases]]\nepochs = 3"
PARTS = {"title": TITLE, "data": DATA, "model": MODEL, "phases": PHASES}


def recipe(more="", **parts):
    """The text of a recipe, with parts replaced, and more of it at the end."""
    return "\n\n".join([*{**PARTS, **parts}.values(), more]) + "\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, name="mine.toml"):
        Path(name).write_text(text, encoding="utf-8")
        return name

    return write


def mistake(name, budget=None, overrides=(), look=check):
    """What is said of a recipe that must be refused."""
    with pytest.raises(RecipeError) as error:
        look(open_recipe(name, budget, overrides))
    return str(error.value)


def marked(text):
    """The number of the line with the mark, and the place that sentences give."""
    (number,) = [n for n, line in enumerate(text.split("\n"), 1) if "# <-" in line]
    return f"mine.toml, line {number}: "


class forgetting:
    """Modules of a test are forgotten after it, and so are the folders that were looked in."""

    def __init__(self, *names):
        self.names, self.path = names, list(sys.path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        sys.path[:] = self.path
        for name in self.names:
            sys.modules.pop(name, None)


def as_recipe(source):
    return source.read(Recipe)


# What is read


def test_a_recipe_is_read_into_dataclasses(write):
    text = recipe(
        """
        [paper]
        system = "mine"

        [optimizer]
        name = "sgd"
        lr = 1
        momentum = 0.9

        [training]
        batch_size = 32
        clip = 2
        test = "epoch"
        """,
        phases='[[phases]]\nepochs = 3\n[phases.task]\nshift = 1\n[[phases]]\nepochs = 1\nname = "end"',
    )
    read = open_recipe(write(text)).read(Recipe)
    assert read == Recipe(
        title="A recipe",
        data=Data("digits"),
        model=Named("conv-equilibrium"),
        phases=(Phase(3, task={"shift": 1}), Phase(1, name="end")),
        paper=Paper(system="mine"),
        optimizer=Named("sgd", {"lr": 1, "momentum": 0.9}),
        training=Training(batch_size=32, clip=2.0, test="epoch"),
    )
    assert isinstance(read.training.clip, float)  # written as a whole number


def test_what_is_not_given_has_its_default(write):
    read = open_recipe(write(recipe())).read(Recipe)
    assert (read.training, read.failures, read.seed, read.seeds) == (Training(), Failures(), 0, 1)
    assert (read.solver, read.tolerance, read.gradient) == (None, None, None)


def test_options_go_to_their_section(write):
    text = recipe(data='[data]\nname = "cifar100"\nvalidation = 10\nlabels = "coarse"')
    assert open_recipe(write(text)).read(Recipe).data == Data("cifar100", 10.0, None, {"labels": "coarse"})


def test_the_file_is_named_and_its_folder_known(write, tmp_path):
    source = open_recipe(write(recipe()))
    assert (source.name, source.folder) == ("mine", str(tmp_path.resolve()))
    shipped = open_recipe("core/digits")
    assert (shipped.name, shipped.folder) == ("core/digits", "")


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_files_of_other_editors_are_read(tmp_path, monkeypatch, mark, end):
    monkeypatch.chdir(tmp_path)
    text = recipe("[training]\nbatch_sise = 3  # <-")
    Path("mine.toml").write_bytes((mark + text.replace("\n", end)).encode())
    assert mistake("mine.toml").startswith(marked(text))


# What is refused: files


def test_a_file_that_is_not_there_is_named(write):
    with pytest.raises(RecipeError, match=r"there is no file absent\.toml\."):
        open_recipe("absent.toml")


def test_an_unknown_recipe_is_answered_with_the_nearest():
    with pytest.raises(RecipeError) as error:
        open_recipe("core/digit")
    assert str(error.value) == (
        "there is no recipe 'core/digit'; did you mean 'core/digits'? `equipoise recipes` lists all. "
        "For your own file, give its path, ending in .toml."
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("table1", "; did you mean 'jiio/table1' or 'mondeq/table1'?"),
        ("camvid", "; did you mean 'mdeq/camvid-small'?"),
        ("nonsense", "."),
        ("", "."),
    ],
)
def test_a_name_without_its_folder_and_a_part_of_a_name_find_recipes(name, meant):
    with pytest.raises(RecipeError) as error:
        open_recipe(name)
    assert str(error.value).startswith(f"there is no recipe {name!r}{meant} `equipoise recipes` lists all.")


@pytest.mark.parametrize(
    "text",
    [
        'title = "A\nseed = 1',
        "title = A recipe",
        "[data\nname = 3",
        "seed = 1\nseed = 2",
        "[data]\n[data]",
        "seed 3",
    ],
)
def test_a_syntax_error_is_named_with_file_and_line(write, text):
    assert re.fullmatch(r"mine\.toml: .*\(at line \d+, column \d+\)\.", mistake(write(f"{text}\n\n")))


def test_the_line_of_a_syntax_error_is_right(write):
    text = recipe("[training]\nbatch_size 32")
    assert f"(at line {text.split(chr(10)).index('batch_size 32') + 1}, column 12)" in mistake(write(text))


def test_a_file_that_is_no_text_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_bytes(b'title = "\xff\xfe"\n')
    assert mistake("mine.toml").startswith("mine.toml is not a UTF-8 text file")


# What is refused: values

WRONG = {
    int: ['"3"', "3.0", "true", "[3]", "{ a = 3 }"],
    float: ['"0.1"', "true", "[0.1]"],
    str: ["3", "true", '["a"]', "{ a = 3 }"],
    bool: ["1", '"yes"', "[true]"],
}
SENTENCES = {int: "a whole number", float: "a number", str: "a string in quotes", bool: "true or false"}
TABLES = {"paper": Paper, "data": Data, "training": Training, "jacobian": Jacobian, "failures": Failures}


def simple_fields(kind):
    """Fields that hold one value, with the type of it."""
    for name, hint in typing.get_type_hints(kind).items():
        one = typing.get_args(hint)[0] if type(None) in typing.get_args(hint) else hint
        if one in WRONG or typing.get_origin(one) is typing.Literal:
            yield name, one


def wrong_values():
    """(path of the key, text of a recipe in which its value is of a wrong type, what must be said)"""
    for section, kind in {"": Recipe, **TABLES, "phases": Phase}.items():
        for name, hint in simple_fields(kind):
            literal = typing.get_origin(hint) is typing.Literal
            for value in ['"float23"', "3", "true"] if literal else WRONG[hint]:
                line = f"{name} = {value}  # <-"
                if section == "":
                    text = recipe(title=line if name == "title" else f"{TITLE}\n{line}")
                elif section == "data":
                    text = recipe(data=f"[data]\n{line}" if name == "name" else f"{DATA}\n{line}")
                elif section == "phases":
                    text = recipe(phases=f"[[phases]]\n{line}" if name == "epochs" else f"{PHASES}\n{line}")
                else:
                    text = recipe(f"[{section}]\n{line}")
                path = ".".join(filter(None, [section, "0" if section == "phases" else "", name]))
                yield path, text, f"allowed: {', '.join(typing.get_args(hint))}" if literal else SENTENCES[hint]


def test_every_value_of_a_wrong_type_is_refused_on_its_line(write):
    cases = list(wrong_values())
    assert len(cases) > 60
    for path, text, words in cases:
        said = mistake(write(text), look=as_recipe)
        assert said.startswith(marked(text) + f"{path} is "), said
        assert words in said


def misspelt():
    """(section, a key with a letter too many, the key that was meant)"""
    for section, kind in {
        "": Recipe,
        "paper": Paper,
        "training": Training,
        "failures": Failures,
        "phases": Phase,
    }.items():
        for field in dataclasses.fields(kind):
            yield section, field.name[:-1] + "x" + field.name[-1], field.name


@pytest.mark.parametrize(("section", "key", "meant"), list(misspelt()))
def test_every_misspelt_key_is_refused_on_its_line_with_the_one_meant(write, section, key, meant):
    line = f"{key} = 3  # <-"
    if section == "":
        text = recipe(title=f"{TITLE}\n{line}")
    else:
        text = recipe(phases=f"{PHASES}\n{line}") if section == "phases" else recipe(f"[{section}]\n{line}")
    said = mistake(write(text), look=as_recipe)
    inside = {"": "", "phases": "in phases.0, "}.get(section, f"in {section}, ")
    assert said.startswith(f"{marked(text)}{inside}there is no key {key!r}; did you mean {meant!r}? known: ")


def test_a_misspelt_section_is_refused_on_its_line(write):
    for heading in ("[modle]", "[trainin]", "[[phase]]", "[budgets.smoke]", "[phases.solvers]"):
        text = recipe(f"{heading}  # <-\nname = 3")
        assert mistake(write(text), look=as_recipe).startswith(
            marked(text) + ("in phases.0, " * ("phases." in heading))
        )


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_section_is_named(write, part):
    assert mistake(write(recipe(**{part: ""}))) == f"mine.toml: {part} is missing; it must be given."


@pytest.mark.parametrize(
    ("parts", "path"),
    [
        ({"data": "[data]  # <-\nvalidation = 0.1"}, "data.name"),
        ({"model": "[model]  # <-\nchannels = 3"}, "model.name"),
        ({"phases": '[[phases]]\nepochs = 1\n[[phases]]  # <-\nname = "x"'}, "phases.1.epochs"),
        ({"more": "[solver]  # <-\nmemory = 3"}, "solver.name"),
    ],
)
def test_a_missing_key_is_named_at_its_section(write, parts, path):
    text = recipe(**parts)
    assert mistake(write(text), look=as_recipe) == marked(text) + f"{path} is missing; it must be given."


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"data": 'data = "digits"  # <-'}, "data is 'digits'; it must be a table of keys and values."),
        ({"model": '[[model]]  # <-\nname = "conv-equilibrium"'}, "it must be a table of keys and values."),
        ({"title": f'{TITLE}\nsolver = "anderson"  # <-'}, "solver is 'anderson'; it must be a table"),
        ({"title": f"{TITLE}\ntolerance = 1e-3  # <-"}, "tolerance is 0.001; it must be a table"),
        (
            {"title": f"{TITLE}\nphases = []  # <-", "phases": ""},
            "phases is []; it must be a list with at least",
        ),
        (
            {"title": f"{TITLE}\nphases = 3  # <-", "phases": ""},
            "phases is 3; it must be a list with at least",
        ),
        ({"phases": "[phases]  # <-\nepochs = 3"}, "it must be a list with at least one entry."),
        ({"title": f"{TITLE}\nphases = [3]  # <-", "phases": ""}, "phases.0 is 3; it must be a table"),
        ({"phases": "[[phases]]\nepochs = 3\ntask = 3  # <-"}, "phases.0.task is 3; it must be a table"),
        ({"more": "[budget]\nsmoke = 3  # <-"}, "budget.smoke is 3; it must be a table"),
        ({"title": f"{TITLE}\nbudget = 3  # <-"}, "budget is 3; it must be a table"),
    ],
)
@pytest.mark.parametrize("budget", [None, "smoke"])
def test_tables_and_lists_of_another_shape_are_refused_on_their_line(write, parts, words, budget):
    text = recipe(**parts) + ("" if "budget" in str(parts) else "[budget.smoke]\nseed = 3\n")
    said = mistake(write(text), budget)
    assert said.startswith(marked(text))
    assert words in said


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"title": f"{TITLE}\nseeds = 0  # <-"}, "seeds is 0; it must be a "),
        ({"title": f"{TITLE}\nseed = -1  # <-"}, "seed is -1; it must be a "),
        ({"data": f"{DATA}\nvalidation = -0.1  # <-"}, "data.validation is -0.1; it must be a "),
        ({"data": f"{DATA}\nvalidation = nan  # <-"}, "data.validation is nan; it must be"),
        ({"data": f"{DATA}\nvalidation = inf  # <-"}, "data.validation is inf; it must be"),
        ({"data": f"{DATA}\nlimit = 0  # <-"}, "data.limit is 0; it must be a "),
        ({"more": "[training]\nbatch_size = 0  # <-"}, "training.batch_size is 0; it must be a "),
        ({"more": "[training]\nevaluation_batch_size = -1  # <-"}, "training.evaluation_batch_size is -1"),
        ({"more": "[training]\nclip = 0  # <-"}, "training.clip is 0.0; it must be a "),
        ({"more": "[training]\nlog_every = 0  # <-"}, "training.log_every is 0; it must be a "),
        ({"more": "[training]\ncheckpoint_every = -2  # <-"}, "training.checkpoint_every is -2"),
        ({"more": "[failures]\nshare = 1.5  # <-"}, "failures.share is 1.5; it must be a "),
        ({"more": "[failures]\nstop_after = -1  # <-"}, "failures.stop_after is -1; it must be a "),
        (
            {"phases": "[[phases]]\nepochs = 1\n[[phases]]\nepochs = 0  # <-"},
            "phases.1.epochs is 0; it must be a ",
        ),
    ],
)
def test_numbers_that_make_no_sense_are_refused_on_their_line(write, parts, words):
    text = recipe(**parts)
    said = mistake(write(text))
    assert said.startswith(marked(text))
    assert words in said


def test_an_infinite_clip_means_no_clipping(write):
    assert check(open_recipe(write(recipe()), overrides=["training.clip=inf"])).training.clip == float("inf")


# The right line, however it is written

LOOKALIKE = '"""\n[training]\nbatch_size = 3\n[[phases]]\nsead = 4\n"""'


@pytest.mark.parametrize(
    "text",
    [
        # keys
        recipe(title='"title" = 3  # <-'),
        recipe(title="'title' = 3  # <-"),
        recipe(title="   title   =   3  # <-"),
        recipe(title=f"{TITLE}\ntraining.batch_size = true  # <-"),
        recipe(title=f"{TITLE}\ntraining . batch_size = true  # <-"),
        recipe(title=f'{TITLE}\ntraining."batch_size" = true  # <-'),
        recipe(title=f'{TITLE}\n"training".batch_size = true  # <-'),
        recipe("[training]\nlog_every = 3\n\n# batch_size = 1\n\nbatch_size = true  # <-"),
        recipe("[training]\nbatch_size=true # <-"),
        # headings
        recipe("[ training ]\nbatch_size = true  # <-"),
        recipe('["training"]\nbatch_size = true  # <-'),
        recipe("  [training]  # a comment ] [data]\n  batch_size = true  # <-"),
        recipe('[budget."odd.name"]\n[training]\nbatch_size = true  # <-'),
        # inline tables: what is wrong in them is on their line
        recipe(title=f"{TITLE}\ntraining = {{ log_every = 3, batch_size = true }}  # <-"),
        recipe(title=f"{TITLE}\nphases = [{{ epochs = 1 }}, {{ epochs = true }}]  # <-", phases=""),
        # phases and what is in them
        recipe(phases="[[phases]]\nepochs = 1\n[[phases]]\nepochs = true  # <-\n[[phases]]\nepochs = 1"),
        recipe(phases="[[phases]]\nepochs = 1\n[phases.task]\nshift = 1\n[[phases]]\nepochs = 1\ntask = 3  # <-"),
        recipe(phases="[[phases]]\nepochs = 1\n[[ phases ]]\nepochs = 2\nmodel = 3  # <-"),
        recipe(phases='[["phases"]]\nepochs = 1\n[["phases"]]\nepochs = true  # <-'),
        recipe(phases="[[phases]]\nepochs = 1\n[phases.model]\nx = 1\n[phases.modle]  # <-\nx = 1"),
        # texts of several lines, with lines that look like keys and headings
        recipe(title=f"title = {LOOKALIKE}\nsead = 3  # <-"),
        recipe(title="title = '''\n[data]\n\"'''\nsead = 3  # <-"),
        recipe(title=f"title = {LOOKALIKE}", more="[training]\nbatch_size = true  # <-"),
        recipe(f"[paper]\nnote = {LOOKALIKE}\naim = 3  # <-"),
        recipe('[paper]\nnote = """one \\"""\n[data]\n"""\naim = 3  # <-'),
        # lists of several lines, with lines that look like headings
        recipe(model=f"{MODEL}\ngrid = [\n  [1, 2],\n  [3, 4],\n]", more="[training]\nbatch_size = true  # <-"),
        recipe(model=f"{MODEL}\ngrid = [\n  [1],\n]\nmore = 3\n[failures]\nshare = true  # <-"),
        recipe('[paper]\naim = "]"\nnote = 3  # <-'),
        recipe('[paper]\naim = "# no comment"\nnote = 3  # <-'),
        recipe('[paper]\naim = "a = b"\nnote = 3  # <-'),
        # characters at which Python, but not TOML, ends a line
        recipe('[paper]\naim = "a\u2028b\x85c"\n# \u2029 \x85\nnote = 3  # <-'),
    ],
)
def test_the_line_is_right_however_it_is_written(write, text):
    assert mistake(write(text), look=as_recipe).startswith(marked(text))


def test_a_list_of_several_lines_is_named_by_its_first(write):
    text = recipe(title=f"{TITLE}\nphases = [  # <-\n  {{ epochs = 1 }},\n  {{ epochs = true }},\n]", phases="")
    assert mistake(write(text), look=as_recipe).startswith(marked(text) + "phases.1.epochs is True")


KEYS = st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=6
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["[data]", 'a\n[x]\nb = 3\n"""', "'''", "#", "\\", "k = 1\n[[phases]]\n"]
)
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()
VALUES = st.recursive(
    NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


class Toml:
    """Writes tables as TOML in many ways, and remembers the line on which each key begins."""

    def __init__(self, draw):
        self.draw = draw
        self.lines: list[str] = []
        self.begins: dict[tuple[str, ...], int] = {}

    def choose(self, *ways):
        return self.draw(st.sampled_from(ways))

    def key(self, key):
        return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) and self.choose(True, False) else self.quoted(key)

    def quoted(self, text, keep=""):
        def escaped(character):
            if character in keep or (character.isprintable() and character not in '"\\') or character == "\u2028":
                return character
            return f"\\U{ord(character):08x}"

        return '"' + "".join(map(escaped, text)) + '"'

    def value(self, value, broken=True):
        """One value; ``broken`` over several lines where TOML allows it."""
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, int | float):
            return repr(value)
        if isinstance(value, str):
            if broken and self.choose(True, False):
                return '""' + "\n".join(self.quoted(value, keep="\n").split("\n")).replace('"', '"\n', 1) + '""'
            return self.quoted(value)
        if isinstance(value, list):
            comma = self.choose(", ", ",\n  ", ",  # [not.a.heading]\n") if broken else ", "
            return (
                "["
                + (comma.lstrip(",") if "\n" in comma else "")
                + comma.join(self.value(v, broken) for v in value)
                + "]"
            )
        return "{ " + ", ".join(f"{self.key(k)} = {self.value(v, broken=False)}" for k, v in value.items()) + " }"

    def statement(self, text, path):
        self.begins[path] = len(self.lines) + 1
        self.lines += text.split("\n")

    def tables(self, tables):
        for name, value in tables.items():
            if not isinstance(value, dict):
                self.statement(f"{self.key(name)} = {self.value(value)}", (name,))
        for name, value in tables.items():
            if isinstance(value, dict):
                self.lines += self.choose([], ["", "# a = comment"])
                self.statement(f"[{self.key(name)}]", (name,))
                for key, entry in value.items():
                    if isinstance(entry, dict) and entry and self.choose(True, False):
                        for inner, leaf in entry.items():
                            self.statement(
                                f"{self.key(key)}.{self.key(inner)} = {self.value(leaf)}", (name, key, inner)
                            )
                    else:
                        self.statement(f"  {self.key(key)} = {self.value(entry)}", (name, key))


@given(st.data(), st.dictionaries(KEYS, VALUES | st.dictionaries(KEYS, VALUES, max_size=3), max_size=4))
def test_random_tables_are_read_back_and_every_line_is_known(tmp_path_factory, data, tables):
    toml = Toml(data.draw)
    toml.tables(tables)
    path = tmp_path_factory.getbasetemp() / "random.toml"
    path.write_text("\n".join(toml.lines) + "\n", encoding="utf-8", newline="")
    source = open_recipe(str(path))
    defaults = {"task": "classification", "optimizer": "adam", "schedule": "constant"}
    assert source.tables == tables | {key: {"name": name} for key, name in defaults.items()}
    for key, number in toml.begins.items():
        assert source.where(key) == f"{path}, line {number}"
        assert source.where((*key, "deeper", "still")) == f"{path}, line {number}"
    assert source.where(("nowhere at all",)) == str(path)


def test_options_may_be_given_without_the_name_of_the_default_thing(write):
    text = recipe("[task]\nshift = 1", phases="[[phases]]\nepochs = 1\noptimizer = { lr = 0.5 }")
    source = open_recipe(write(text), overrides=["schedule.name=cosine", "schedule.final=0.1"])
    read = check(source)
    assert (read.task, read.optimizer) == (Named("classification", {"shift": 1}), Named("adam"))
    assert read.schedule == Named("cosine", {"final": 0.1})
    assert source.phase(0).optimizer == Named("adam", {"lr": 0.5})


# Budgets

BUDGETS = """
[budget.smoke]
"phases.0.epochs" = 1
"training.batch_size" = 8

[budget.odd]
"phases.7.epochs" = 1  # <-
"""


def test_a_budget_changes_what_it_names(write):
    read = open_recipe(write(recipe(BUDGETS)), "smoke").read(Recipe)
    assert (read.phases, read.training.batch_size) == ((Phase(1),), 8)


@pytest.mark.parametrize("budget", [None, "paper"])
def test_the_budget_of_the_paper_is_the_recipe_as_written(write, budget):
    assert open_recipe(write(recipe(BUDGETS)), budget).read(Recipe).phases == (Phase(3),)


def test_the_command_line_comes_after_the_budget_and_the_budget_after_the_file(write):
    name = write(recipe(BUDGETS))
    read = open_recipe(name, "smoke", ["phases.0.epochs=7"]).read(Recipe)
    assert (read.phases, read.training.batch_size) == ((Phase(7),), 8)
    assert open_recipe(name, "smoke", ["seed=1", "seed=2"]).read(Recipe).seed == 2


def test_keys_of_a_budget_may_be_written_without_quotes(write):
    read = open_recipe(write(recipe(BUDGETS.replace('"', ""))), "smoke").read(Recipe)
    assert (read.phases, read.training, read.data.name) == ((Phase(1),), Training(batch_size=8), "digits")


def test_an_unknown_budget_is_answered_with_the_nearest(write):
    name = write(recipe(BUDGETS))
    assert (
        mistake(name, "smok") == "mine.toml: there is no budget 'smok'; did you mean 'smoke'? known: smoke, odd, paper."
    )
    assert mistake(write(recipe()), "smoke") == "mine.toml: there is no budget 'smoke'; known: paper."


def test_a_budget_of_what_is_not_there_is_refused_on_its_line(write):
    text = recipe(BUDGETS)
    assert mistake(write(text), "odd") == marked(text) + "phases.7 does not exist; phases has the entries 0 to 0."


@pytest.mark.parametrize(
    "line",
    [
        '"training.batch_size" = 0  # <-',
        '"training.batch_sise" = 3  # <-',
        '"trainin.batch_size" = 3  # <-',
        '"training" = 3  # <-',
        '"model.name" = "conv-equilibrum"  # <-',
        '"solver" = { name = "anderson", memmory = 3 }  # <-',
        '"model" = { name = 3 }  # <-',
        '"solver.memory" = 3  # <-',  # the recipe names no solver
    ],
)
def test_what_a_budget_makes_wrong_is_named_on_the_line_of_the_budget(write, line):
    text = recipe(f"[budget.smoke]\n{line}")
    name = write(text)
    check(open_recipe(name))
    assert mistake(name, "smoke").startswith(marked(text))


# The command line


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("seed=3", "seed", 3),
        ("seed = 3", "seed", 3),
        ("optimizer.lr=1e-2", "optimizer.lr", 0.01),
        ("task.flip=true", "task.flip", True),
        ("optimizer.betas=[0.9, 0.99]", "optimizer.betas", [0.9, 0.99]),
        ("phases.0.epochs=2", "phases.0.epochs", 2),
        ("model.name=my_module:MyNet", "model.name", "my_module:MyNet"),
        ("title=A new title", "title", "A new title"),
        ('title="quoted = too"', "title", "quoted = too"),
        ("title='single'", "title", "single"),
        ("data.folder=/some/where", "data.folder", "/some/where"),
        ("data.folder=a=b", "data.folder", "a=b"),
        ("title=a = b", "title", "a = b"),
        ("title=", "title", ""),
        ("title=run #3", "title", "run #3"),
        ('title="unfinished', "title", '"unfinished'),
        ("title=[unfinished", "title", "[unfinished"),
        ("solver={name = 'anderson', memory = 3}", "solver", {"name": "anderson", "memory": 3}),
        ("task.flip=True", "task.flip", "True"),
        ("radius=8/255", "radius", 8 / 255),
        ("amount=.1", "amount", 0.1),
        ("amount=-2.", "amount", -2.0),
        ("title=.", "title", "."),
        ("radius=0.5/255", "radius", 0.5 / 255),
        ("title=1/0", "title", "1/0"),
        ("title=1.2.3/4", "title", "1.2.3/4"),
        ("title=a/255", "title", "a/255"),
        ("title=one\nseed = 3", "title", "one\nseed = 3"),
        ("title=1\nseed = 3", "title", "1\nseed = 3"),
    ],
)
def test_a_change_is_toml_where_it_reads_as_toml_or_a_fraction_and_else_a_text(text, key, value):
    parsed = parse_override(text)
    assert parsed == (key, value)
    assert type(parsed[1]) is type(value)


@given(NUMBERS | st.lists(NUMBERS, max_size=3))
def test_numbers_and_lists_come_through_the_command_line(value):
    assert parse_override(f"key={json.dumps(value)}") == ("key", value)


@given(st.text(st.characters(exclude_categories=["C"]), max_size=12).map(str.strip))
def test_any_text_in_quotes_comes_through_the_command_line(text):
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    assert parse_override(f'key="{escaped}"') == ("key", text)


@pytest.mark.parametrize("text", ["seed", "", "=3", ".seed=3", "seed.=3", "a..b=3", "a b=3", "a[0]=3"])
def test_what_is_no_change_is_refused(text):
    with pytest.raises(RecipeError) as error:
        parse_override(text)
    assert str(error.value) == f"{text!r} is not a change of a recipe; write key=value, such as optimizer.lr=0.01."


def test_changes_make_what_is_not_there(write):
    read = open_recipe(write(recipe()), overrides=["solver.name=anderson", "solver.memory=3", "phases.0.task.shift=1"])
    assert read.read(Recipe).solver == Named("anderson", {"memory": 3})
    assert read.read(Recipe).phases[0].task == {"shift": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("seed=x", "seed is 'x'; it must be a whole number."),
        ("seed=1.0", "seed is 1.0; it must be a whole number."),
        ("seed=true", "seed is True; it must be a whole number."),
        ("training.batch_size=0", "training.batch_size is 0; it must be a "),
        (
            "training.precision=float23",
            "training.precision is 'float23'; did you mean",
        ),
        ("training.batch_sise=3", "in training, there is no key 'batch_sise'; did you mean 'batch_size'?"),
        ("modle.name=x", "there is no key 'modle'; did you mean 'model'?"),
        ("modle.deep.name=x", "there is no key 'modle'; did you mean 'model'?"),
        ("phases.0.epoch=3", "in phases.0, there is no key 'epoch'; did you mean 'epochs'?"),
        ("phases.0.tsak.shift=3", "in phases.0, there is no key 'tsak'; did you mean 'task'?"),
        ("phases.7.epochs=1", "phases.7 does not exist; phases has the entries 0 to 0."),
        ("phases.1=3", "phases.1 does not exist; phases has the entries 0 to 0."),
        ("phases.-1.epochs=1", "phases.-1 does not exist; phases has the entries 0 to 0."),
        ("phases.first.epochs=1", "phases.first does not exist; phases has the entries 0 to 0."),
        ("phases.0=5", "phases.0 is 5; it must be a table of keys and values."),
        ("phases=[]", "phases is []; it must be a list with at least one entry."),
        ("title.x=1", "title is 'A recipe'; it has no keys to set."),
        ("phases.0.epochs.x=1", "phases.0.epochs is 3; it has no keys to set."),
        ("model={name=5}", "model.name is 5; it must be a string in quotes."),
        ("model=5", "model is 5; it must be a table of keys and values."),
        ("model.name=conv-equilibrum", "there is no model 'conv-equilibrum'; did you mean 'conv-equilibrium'?"),
        ("solver.memory=1", "solver.name is missing; it must be given."),
        ("solver={name='anderson', memmory=3}", "solver 'anderson' has no option 'memmory'; did you mean 'memory'?"),
    ],
)
def test_what_the_command_line_makes_wrong_is_named_so(write, change, words):
    assert mistake(write(recipe()), overrides=[change]).startswith(f"command line, {change}: {words}")


def test_what_the_command_line_does_not_touch_keeps_its_line(write):
    text = recipe("[training]\nlog_every = 3\nbatch_size = 0  # <-")
    assert mistake(write(text), overrides=["training.log_every=2", "seed=1"]).startswith(marked(text))


# Phases


def phase_of(write, more, phases, number):
    return open_recipe(write(recipe(more, phases=phases))).phase(number)


OPTIMIZER = '[optimizer]\nname = "sgd"\nlr = 0.1\nmomentum = 0.9'


def test_options_of_a_phase_are_laid_over_those_of_the_recipe(write):
    phases = "[[phases]]\nepochs = 1\n[[phases]]\nepochs = 1\noptimizer = { lr = 0.01 }"
    assert phase_of(write, OPTIMIZER, phases, 0).optimizer == Named("sgd", {"lr": 0.1, "momentum": 0.9})
    assert phase_of(write, OPTIMIZER, phases, 1).optimizer == Named("sgd", {"lr": 0.01, "momentum": 0.9})


def test_the_same_name_again_changes_nothing_else(write):
    phases = '[[phases]]\nepochs = 1\noptimizer = { name = "sgd", lr = 0.01 }'
    assert phase_of(write, OPTIMIZER, phases, 0).optimizer == Named("sgd", {"lr": 0.01, "momentum": 0.9})


def test_another_name_brings_its_own_options(write):
    phases = '[[phases]]\nepochs = 1\noptimizer = { name = "adam", lr = 0.01 }'
    assert phase_of(write, OPTIMIZER, phases, 0).optimizer == Named("adam", {"lr": 0.01})


def test_one_phase_does_not_change_the_next(write):
    phases = "[[phases]]\nepochs = 1\noptimizer = { lr = 0.01 }\ntolerance = { relative = 0.5 }\n[[phases]]\nepochs = 1"
    source = open_recipe(write(recipe(OPTIMIZER, phases=phases)))
    before = json.dumps(source.tables)
    source.phase(0)
    assert source.phase(1).optimizer == Named("sgd", {"lr": 0.1, "momentum": 0.9})
    assert source.phase(1).tolerance is None
    assert json.dumps(source.tables) == before


def test_a_phase_has_sections_that_the_recipe_has_not(write):
    phases = (
        '[[phases]]\nepochs = 1\n[phases.solver]\nname = "anderson"\nmemory = 3\n[phases.tolerance]\nrelative = 0.1'
    )
    read = phase_of(write, "", phases, 0)
    assert (read.solver, read.tolerance) == (Named("anderson", {"memory": 3}), {"relative": 0.1})
    assert phase_of(write, "[tolerance]\nmax_steps = 9", phases, 0).tolerance == {"max_steps": 9, "relative": 0.1}


def test_the_whole_recipe_is_the_same_in_a_phase_that_says_nothing(write):
    source = open_recipe(write(recipe(OPTIMIZER)))
    assert source.phase(0) == source.read(Recipe)


# Mistakes that show when things are made


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('[solver]\nname = "andersn"  # <-', "there is no solver 'andersn'; did you mean 'anderson'?"),
        ('[solver]\nname = "anderson"\n\nmemmory = 3  # <-', "solver 'anderson' has no option 'memmory'; did you mean"),
        ('[solver]  # <-\nname = "anderson"\nmemory = 0', "solver: Anderson.memory is 0; it must be a whole number"),
        ("[tolerance]\nrelativ = 1  # <-", "tolerance has no option 'relativ'; did you mean 'relative'?"),
        ("[tolerance]  # <-\nrelative = -1", "tolerance: Tolerance.relative is -1; it must be a number of at least 0"),
        ('[gradient]\nname = "implicit"\nsolvr = 3  # <-', "gradient 'implicit' has no option 'solvr'; did you mean"),
        ('[gradient]  # <-\nname = "phantom"\nsteps = 0', "gradient: PhantomGradient.steps is 0"),
        (
            '[gradient]\nname = "implicit"\nsolver = { name = "gmre" }  # <-',
            "there is no solver 'gmre'; did you mean 'gmres'?",
        ),
        (
            '[gradient]\nname = "implicit"\n[gradient.solver]\nname = "gmre"  # <-',
            "there is no solver 'gmre'; did you mean 'gmres'?",
        ),
        (
            '[gradient]\nname = "implicit"\ntolerance = { relativ = 1e-3 }  # <-',
            "gradient.tolerance has no option 'relativ'; did you mean 'relative'?",
        ),
        (
            '[gradient]\nname = "implicit"\n[gradient.tolerance]\nmax_steps = 3\nrelativ = 1e-3  # <-',
            "gradient.tolerance has no option 'relativ'; did you mean 'relative'?",
        ),
        ('[gradient]\nname = "implicit"\n[gradient.tolerance]  # <-\nrelative = -1', "Tolerance.relative is -1"),
        ('[optimizer]\nname = "adm"  # <-', "there is no optimizer 'adm'; did you mean 'adam'?"),
        ('[optimizer]\nname = "adam"\nlearning_rate = 3  # <-', "optimizer 'adam' has no option 'learning_rate'"),
        ('[optimizer]  # <-\nname = "adam"\nlr = -1', "optimizer: Invalid learning rate: -1"),
        ('[schedule]\nname = "cosin"  # <-', "there is no schedule 'cosin'; did you mean 'cosine'?"),
        ('[schedule]\nname = "step"\nevry = 3  # <-', "schedule 'step' has no option 'evry'; did you mean 'every'?"),
        ('[schedule]  # <-\nname = "step"', "schedule: a step schedule needs one of every = EPOCHS"),
        ('[schedule]  # <-\nname = "step"\nevery = 0', "schedule: every is 0; it must be at least 1 epoch."),
        ('[schedule]  # <-\nname = "one-cycle"\nstart = 0', "schedule: start is 0"),
        ('[schedule]  # <-\nname = "one-cycle"\nend = 0', "schedule: start is 25.0 and end is 0"),
        (
            '[schedule]  # <-\nname = "one-cycle"\nmomentum = [0.9]',
            "schedule: momentum is [0.9]; it must be two numbers",
        ),
        ('[task]\nname = "clasification"  # <-', "there is no task 'clasification'; did you mean 'classification'?"),
        (
            '[task]\nname = "classification"\nflop = true  # <-',
            "task 'classification' has no option 'flop'; did you mean",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_on_its_line(write, more, words):
    text = recipe(more)
    said = mistake(write(text))
    assert said.startswith(marked(text))
    assert words in said


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"data": '[data]\nname = "digit"  # <-'}, "there is no data set 'digit'; did you mean 'digits'?"),
        (
            {"data": '[data]\nname = "cifar100"\nlabel = "coarse"  # <-'},
            "has no option 'label'; did you mean 'labels'?",
        ),
        ({"data": '[data]\nname = "digits"\nfolders = ["here"]  # <-'}, "data set 'digits' has no option 'folders'"),
        ({"model": '[model]\nname = "conv-equilibrum"  # <-'}, "there is no model 'conv-equilibrum'; did you mean"),
        (
            {"model": '[model]\nname = "conv-equilibrium"\nchanels = 3  # <-'},
            "model 'conv-equilibrium' has no option 'chanels'; did you mean 'channels'? options: bound, channels, pool",
        ),
        ({"model": '[model]\nname = "no_such_module:Net"  # <-'}, "there is no module 'no_such_module'"),
    ],
)
def test_data_and_model_are_looked_up_before_anything_is_loaded(write, parts, words):
    text = recipe(**parts)
    said = mistake(write(text))
    assert said.startswith(marked(text))
    assert words in said


@pytest.mark.parametrize(
    ("more", "phase", "words"),
    [
        ("", '[phases.solver]\nname = "anderson"\nmemmory = 3  # <-', "solver 'anderson' has no option 'memmory'"),
        ("", "[phases.solver]  # <-\nmemory = 3", "solver.name is missing"),
        ("", '[phases.schedule]\nname = "cosin"  # <-', "there is no schedule 'cosin'"),
        (OPTIMIZER, "[phases.optimizer]\nlrr = 3  # <-", "optimizer 'sgd' has no option 'lrr'"),
        (OPTIMIZER, "[phases.optimizer]  # <-\nlr = -3", "optimizer: Invalid learning rate: -3"),
        (f"{OPTIMIZER}\nlrr = 3  # <-", "[phases.optimizer]\nlr = 3", "optimizer 'sgd' has no option 'lrr'"),
        ("[tolerance]\nrelative = 1e-3", "tolerance = { relativ = 3 }  # <-", "tolerance has no option 'relativ'"),
        ("", '[phases.gradient]\nname = "implicit"\nsolver = { name = "gmre" }  # <-', "there is no solver 'gmre'"),
        ("", "[phases.model]\nchanels = 3  # <-", "model 'conv-equilibrium' has no option 'chanels'"),
        ("", "[phases.model]\nname = 3  # <-", "model.name is 3"),
    ],
)
@pytest.mark.parametrize("second", [False, True])
def test_what_a_phase_makes_wrong_is_named_on_the_line_of_the_phase(write, more, phase, words, second):
    first = "[[phases]]\nepochs = 1\n" * second
    text = recipe(more, phases=f"{first}[[phases]]\nepochs = 3\n{phase}")
    said = mistake(write(text))
    assert said.startswith(marked(text))
    assert words in said


def test_solvers_and_tolerances_are_made_inside_a_gradient(write):
    text = recipe('[gradient]\nname = "implicit"\nsolver = { name = "gmres" }\n[gradient.tolerance]\nrelative = 1e-2')
    source = open_recipe(write(text))
    model = build_model(check(source), facts_of("digits"), source.where)
    gradient = model.get_submodule("equilibrium").gradient
    assert repr(gradient) == "ImplicitGradient(solver=GMRES(), tolerance=Tolerance(relative=0.01))"


def test_settings_of_an_equilibrium_need_one(write):
    text = recipe('[solver]  # <-\nname = "anderson"', model='[model]\nname = "plain_net:Net"')
    Path("plain_net.py").write_text(
        "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self): super().__init__(1, 1)"
    )
    source = open_recipe(write(text))
    with forgetting("plain_net"):
        recipe_read = check(source)
        with pytest.raises(RecipeError) as error:
            build_model(recipe_read, {}, source.where)
    assert str(error.value) == (
        marked(text) + "solver: the model 'plain_net:Net' has no equipoise.Equilibrium to set it for."
    )


def test_names_are_found_beside_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "beside_net.py").write_text("from torch import nn\nclass Net(nn.Identity): ...")
    file = tmp_path / "there" / "mine.toml"
    file.write_text(recipe(model='[model]\nname = "beside_net:Net"'))
    monkeypatch.chdir(tmp_path)
    with forgetting("beside_net"):
        source = open_recipe(str(file))
        assert type(build_model(check(source), {}, source.where)).__name__ == "Net"


@pytest.mark.parametrize(
    ("part", "name", "words"),
    [
        ("model", "odd_things:number", "it must be a class derived from torch.nn.modules.module.Module."),
        ("task", "odd_things:number", "it must be a class derived from equipoise.tasks.base.Task."),
        ("optimizer", "odd_things:Thing", "it must be a class derived from torch.optim.optimizer.Optimizer."),
        ("solver", "odd_things:Thing", "it must be a class derived from equipoise.solvers.base.Solver."),
        ("gradient", "odd_things:Thing", "it must be a class derived from equipoise.gradients.base.GradientRule."),
    ],
)
def test_things_of_another_kind_are_refused_on_their_line(write, part, name, words):
    """Before they are called."""
    Path("odd_things.py").write_text("def number(): 1 / 0\nclass Thing:\n    def __init__(self): 1 / 0")
    section = f'[{part}]\nname = "{name}"  # <-'
    text = recipe(model=section) if part == "model" else recipe(section)
    source = open_recipe(write(text))
    with forgetting("odd_things"), pytest.raises(RecipeError) as error:
        check(source)
    assert str(error.value).startswith(f"{marked(text)}{part} {name!r} is <")
    assert str(error.value).endswith(words)


@pytest.mark.parametrize(
    ("line", "kind"), [("{}['width']", KeyError), ("[][3]", IndexError), ("1 / 0", ZeroDivisionError)]
)
def test_a_defect_in_a_users_model_is_not_taken_for_a_mistake_in_the_recipe(write, line, kind):
    """Its traceback is what helps; "mine.toml, line 6: 'width'" does not."""
    module = f"broken_{kind.__name__.lower()}"
    Path(f"{module}.py").write_text(f"from torch import nn\nclass Net(nn.Module):\n    def __init__(self): {line}")
    source = open_recipe(write(recipe(model=f'[model]\nname = "{module}:Net"')))
    with forgetting(module):
        read = check(source)
        with pytest.raises(kind):
            build_model(read, {}, source.where)


# Tables and figures

TABLE = """title = "A table"

[[rows]]
label = "digits"
recipe = "core/digits"
paper = 0.9
spread = 0.1

[[rows]]
label = "digits, quickly"
recipe = "core/digits"
metric = "loss"
[rows.changes]
"phases.0.epochs" = 1
"""


def test_a_table_is_read(write):
    source = open_recipe(write(TABLE))
    assert kind_of(source) is TableSpec
    table = source.read(TableSpec)
    assert [row.label for row in table.rows] == ["digits", "digits, quickly"]
    assert (table.rows[0].paper, table.rows[0].spread, table.rows[0].metric) == (0.9, 0.1, "accuracy")
    assert table.rows[1].changes == {"phases.0.epochs": 1}


def test_changes_of_a_row_come_between_the_budget_and_the_command_line(write):
    source = open_recipe(write(TABLE))

    def second(budget, changes):
        return rows(source, budget, changes)[1][1].read(Recipe)

    assert second(None, []).phases[0].epochs == 1
    assert second("smoke", ["phases.0.epochs=5"]).phases[0].epochs == 5
    assert second("smoke", []).data.limit == 256


def test_a_section_with_a_name_keeps_what_belongs_to_the_section(write):
    """Options of another thing go; validation and limit, which are the section's own, stay."""
    file = write(recipe(data="[data]\nname = 'cifar100'\nlabels = 'coarse'\nvalidation = 5"))

    def changed(change):
        return open_recipe(file, overrides=[change]).read(Recipe)

    other = changed("data={name='cifar10', limit=3}").data
    assert (other.name, other.validation, other.limit, other.options) == ("cifar10", 5, 3, {})
    same = changed("data={name='cifar100', limit=3}").data
    assert (same.name, same.validation, same.limit, same.options) == ("cifar100", 5, 3, {"labels": "coarse"})


def test_evaluation_can_be_limited_alone(write):
    file = write(recipe(data="[data]\nname = 'digits'\nvalidation = 50\nevaluation_limit = 20"))
    data = load_data(open_recipe(file).read(Recipe), (), ANYTHING)
    assert (len(data.train), len(data.val), len(data.test)) == (1387, 20, 20)
    both = load_data(open_recipe(file, overrides=["data.limit=30"]).read(Recipe), (), ANYTHING)
    assert (len(both.train), len(both.val), len(both.test)) == (30, 20, 20)


def test_the_radius_of_table_8_follows_the_size_of_its_images():
    for budget, radius in ((None, 0.5), ("small", 0.25)):
        found = [row.read(Recipe).task.options["radius"] for _, row in rows(open_recipe("jiio/table8"), budget, [])]
        assert set(found) == {radius}


def test_a_row_that_names_another_data_set_keeps_the_budget():
    source = open_recipe("opteq/table2a")
    data = rows(source, "smoke", [])[0][1].read(Recipe).data
    assert (data.name, data.limit, data.validation) == ("cifar100", 32, 32)


def test_changes_of_the_budget_of_a_table_come_after_those_of_its_rows(write):
    source = open_recipe(write(TABLE + "[budget.smoke]\nseeds = 2\n[budget.smoke.phases.0]\nepochs = 3\n"))
    (_, first), (_, second) = rows(source, "smoke", [])
    assert [first.read(Recipe).seeds, second.read(Recipe).seeds] == [2, 2]
    assert second.read(Recipe).phases[0].epochs == 3
    assert rows(source, "smoke", ["seeds=1"])[0][1].read(Recipe).seeds == 1
    assert rows(source, None, [])[0][1].read(Recipe).seeds == 1


def smoke_recipes(name):
    """All that a recipe, table or figure trains within the budget "smoke"."""
    source = open_recipe(name)
    if kind_of(source) is TableSpec:
        return [recipe for _, recipe in rows(source, "smoke", [])]
    return trainings(source, "smoke", []) if kind_of(source) is FigureSpec else [open_recipe(name, "smoke")]


@pytest.mark.parametrize("name", recipe_names())
def test_a_smoke_budget_is_small_and_its_title_claims_no_size(name):
    for source in smoke_recipes(name):
        found = source.read(Recipe)
        assert found.data.limit is not None
        assert found.data.limit <= 256
        assert found.seeds == 1
        assert all(phase.epochs == 1 for phase in found.phases)
        if any(key.startswith("model.") for key in source.budgeted):
            assert not re.search(r"\d[KM]\b|channels|large|small|XL", found.title), found.title


def test_what_a_budget_shrinks_is_said_on_one_line(write):
    sources = [open_recipe("core/mnist", "smoke"), open_recipe("mondeq/mnist-conv", "smoke")]
    assert budget_changes(sources) == (
        "data.limit 256, 32; data.validation 5000 -> 256, 32; phases.0.epochs 10, 40 -> 1"
    )
    assert budget_changes([open_recipe("opteq/figure4a", "smoke")]) == (
        "samples 32 -> 4; batch_size 16 -> 4; evaluations 60 -> 10"
    )
    omniglot = budget_changes([open_recipe("jiio/omniglot", "small")])
    assert "-> [prototypes in a shallow weight-tied stack, prototypes at the equilibrium, made contractive," in omniglot
    assert "paper.note" not in omniglot


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TABLE.replace('metric = "loss"', "metrik = 3  # <-"), "in rows.1, there is no key 'metrik'; did you mean"),
        (TABLE.replace("paper = 0.9", 'paper = "0.9"  # <-'), "rows.0.paper is '0.9'; it must be a number."),
        (TABLE.replace('[[rows]]\nlabel = "digits"\n', "[[rows]]  # <-\n"), "rows.0.label is missing"),
        (TABLE.replace("[rows.changes]", "[rows.chanegs]  # <-"), "in rows.1, there is no key 'chanegs'"),
        (TABLE + "[tilte]  # <-\n", "there is no key 'tilte'; did you mean 'title'?"),
        ('title = "A table"\nrows = []  # <-\n', "rows is []; it must be a list with at least one entry."),
    ],
)
def test_mistakes_in_a_table_are_named_on_their_line(write, text, words):
    assert mistake(write(text), look=lambda source: source.read(TableSpec)).startswith(marked(text) + words)


FIGURE = 'title = "A figure"\nfigure = "convergence"\nrecipes = ["core/digits"]\nsteps = 30\n'


def test_a_figure_is_read_with_its_options(write):
    source = open_recipe(write(FIGURE))
    assert kind_of(source) is FigureSpec
    assert source.read(FigureSpec) == FigureSpec("A figure", "convergence", ("core/digits",), options={"steps": 30})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FIGURE.replace('["core/digits"]', '"core/digits"  # <-'), "recipes is 'core/digits'; it must be a list"),
        (FIGURE.replace('["core/digits"]', "[3]  # <-"), "recipes.0 is 3; it must be a string in quotes."),
        (FIGURE.replace('"convergence"', "3  # <-"), "figure is 3; it must be a string in quotes."),
    ],
)
def test_mistakes_in_a_figure_are_named_on_their_line(write, text, words):
    assert mistake(write(text), look=lambda source: source.read(FigureSpec)).startswith(marked(text) + words)


def test_a_recipe_is_neither_a_table_nor_a_figure(write):
    assert kind_of(open_recipe(write(recipe()))) is Recipe


# What a run keeps


def kept(source):
    """The recipe as a run has it: its tables through JSON."""
    return RecipeFile(
        source.name, json.loads(json.dumps(source.tables, allow_nan=False)), Where("run.json"), source.folder
    )


@pytest.mark.parametrize("name", [n for n in recipe_names() if kind_of(open_recipe(n)) is Recipe])
@pytest.mark.parametrize("budget", [None, "smoke", "small"])
def test_a_recipe_is_the_same_after_a_run_has_kept_it(name, budget):
    source = open_recipe(name, budget, ["training.clip=1", "seed=3", "optimizer.weight_decay=1e-30"])
    assert kept(source) == source
    assert kept(source).read(Recipe) == source.read(Recipe)
    for number in range(len(source.read(Recipe).phases)):
        assert kept(source).phase(number) == source.phase(number)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "[1.0, inf]", "{ a = nan }"])
def test_a_run_keeps_numbers_that_json_does_not_know(write, tmp_path, value):
    """`schedule.end = inf` is a sensible thing to write, and a run that is resumed must find it."""
    source = open_recipe(write(recipe(model=f"{MODEL}\nwidth = {value}")))
    assert repr(create(tmp_path / "run", source).source.tables) == repr(source.tables)


@pytest.mark.parametrize("value", ["2024-01-31", "12:00:00", "[2024-01-31T12:00:00Z]", "{ a = 12:00:00 }"])
def test_dates_are_refused_for_a_run_could_not_keep_them(write, value):
    text = recipe(model=f"{MODEL}\nwidth = {value}  # <-")
    assert mistake(write(text)).startswith(marked(text) + "model.width")
    assert mistake(write(recipe()), overrides=[f"model.width={value}"]).startswith("command line, model.width=")


# What the package brings

FACTS = {
    **{name: (tuple(about.shape), about.classes) for name, about in ABOUT.items() if about.shape},
    "omniglot": ((1, 105, 105), 964),
    "omniglot-episodes": ((1, 32, 32), 5),
    "celeba": ((3, 64, 64), 0),
    "unlabelled-images": ((3, 256, 256), 0),
    "imagenette": ((3, 160, 160), 10),
    "imagenet": ((3, 224, 224), 1000),
    "camvid": ((3, 360, 480), 11),
    "cityscapes": ((3, 512, 1024), 19),
}


def facts_of(data):
    shape, classes = FACTS[data]
    channels = (0.5,) * shape[0]
    names = tuple(map(str, range(classes)))
    return {"shape": shape, "classes": classes, "class_names": names, "mean": channels, "std": channels}


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_of_the_package_is_right(name):
    source = open_recipe(name)
    kind = kind_of(source)
    read = source.read(kind)
    assert read.title
    assert read.paper.system
    if kind is TableSpec:
        for budget in (None, "smoke", "small"):
            assert len(rows(source, budget, [])) == len(read.rows)
    elif kind is FigureSpec:
        assert callable(figure_functions()[read.figure])
        for entry in read.recipes:
            recipe, *changes = shlex.split(entry)
            assert recipe in recipe_names()
            check(open_recipe(recipe, "small", changes))
    else:
        assert read.data.name in DATA_SETS
        assert {"smoke", "small"} <= read.budget.keys()
        epochs = []
        for budget in (None, "small", "smoke"):
            cheaper = open_recipe(name, budget)
            epochs.append(sum(phase.epochs for phase in check(cheaper).phases))
            for number in range(len(cheaper.recipe.phases)):  # a budget may replace them
                build_task(cheaper.phase(number), facts_of(read.data.name), cheaper.where)
                with torch.device("meta"):
                    model = build_model(cheaper.phase(number), facts_of(read.data.name), cheaper.where)
                assert isinstance(model, nn.Module)
                assert all(parameter.is_meta for parameter in model.parameters())
        assert epochs[0] >= epochs[1] >= epochs[2]


def test_recipes_are_where_an_installed_package_looks_for_them():
    assert "core/digits" in recipe_names()
    for name in recipe_names():
        file = resources.files("equipoise").joinpath("papers", f"{name}.toml")
        assert file.is_file()
        assert Path(str(file)) == recipes_folder() / f"{name}.toml"


def test_the_wheel_has_every_recipe():
    """As hatch sees it: what is ignored by git would be left out."""
    wheel = pytest.importorskip("hatchling.builders.wheel")
    root = Path(__file__).parents[3]
    included = {file.distribution_path for file in wheel.WheelBuilder(str(root)).recurse_included_files()}
    for path in (root / "src" / "equipoise").rglob("*"):
        if path.suffix in (".toml", ".py", ".jinja", ".safetensors"):
            assert path.relative_to(root / "src").as_posix() in included
    assert any(path.endswith("papers/core/digits.toml") for path in included)


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.3])
def test_one_cycle_needs_no_long_training(steps, warmup):
    """torch divides by the number of warm-up steps after the first, which was 0 for 10 steps and warmup 0.1."""
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule = one_cycle_schedule(optimizer, steps, 1, warmup=warmup)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert all(0 < rate <= 0.1 + 1e-12 for rate in rates)
    assert rates[0] == pytest.approx(0.1 / 25)
