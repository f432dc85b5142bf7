"""What the pages say is true: code runs and prints what is shown, commands parse, names, links and paths exist.

    python tests/test_docs.py --update

runs all code of the pages and writes into them what it prints now. The blocks of a page are one program, run in order
with seed 0; one that begins with ``# file: NAME`` is written to that file instead. A ``text`` block after a ``python``
block shows its output; numbers in it may differ a little from machine to machine, and are not compared at all in a
block that begins with three backticks and ``text (numbers vary)``.
What stands between ``<!-- output of: COMMAND -->`` and ``<!-- end of output -->`` is compared exactly.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pkgutil
import re
import runpy
import shlex
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch

import equipoise as eq
from equipoise.cli import main, parser
from equipoise.lab.recipes.build import check
from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.recipes.schema import FigureSpec
from equipoise.lab.results.reproduce import figure_functions, rows

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
HAVE_TORCHDEQ = importlib.util.find_spec("torchdeq") is not None
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
GENERATED = re.compile(r"(<!-- output of: (.+?) -->\n(?:```text\n)?)(.*?)((?:```\n)?<!-- end of output -->)", re.S)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: what stands after the backticks, its content, and where the content is."""

    language: str
    content: str
    start: int
    end: int


def blocks(text: str) -> list[Block]:
    fences = re.finditer(r"^```([^\n`]+)\n(.*?)^```$", text, re.M | re.S)
    return [Block(match[1].strip(), match[2], match.start(2), match.end(2)) for match in fences]


# --- code and what it prints ------------------------------------------------------------------------------------------


def outputs(page: Path) -> Iterator[tuple[Block, str]]:
    """Run the code of a page in an empty folder; yield every block that shows an output with what was printed."""
    names = {"__name__": "docs"}
    text = page.read_text()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if "runs/denoise-001" in text:
            train_example()
        for block, after in pairwise([*blocks(text), Block("", "", 0, 0)]):
            if named := re.match(r"# file: (\S+)\n", block.content):
                Path(named[1]).write_text(block.content)
                continue
            if block.language != "python" or ("torchdeq" in block.content and not HAVE_TORCHDEQ):
                continue
            printed = io.StringIO()
            source = "\n" * text.count("\n", 0, block.start) + block.content  # so that errors name the page's line
            with contextlib.redirect_stdout(printed):
                exec(compile(source, str(page), "exec", dont_inherit=True), names)
            generated = any(match.start() < after.start < match.end() for match in GENERATED.finditer(text))
            if after.language.startswith("text") and not generated:
                yield after, printed.getvalue()


def train_example() -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(["train", str(ROOT / "examples" / "outside" / "denoise.toml"), "--budget", "smoke"]) in (0, None)


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text()], ids=name_of)
def test_code_runs_and_prints_what_is_shown(page):
    if page.name == "from-torchdeq.md" and not HAVE_TORCHDEQ:
        pytest.skip("torchdeq is not installed")
    if HAVE_TORCHDEQ:
        with warnings.catch_warnings(action="ignore"):
            importlib.import_module("torchdeq")
    for block, printed in outputs(page):
        shown, real = words(block.content), words(printed)
        assert skeleton(shown) == skeleton(real)
        if block.language == "text":
            for said, measured in zip(NUMBER.findall(shown), NUMBER.findall(real), strict=True):
                assert close(said, measured), f"the page says {said} where the code prints {measured}: {real}"


def words(text: str) -> str:
    """The text without its line breaks, since pages wrap long lines, and with rules of one length."""
    return " ".join(re.sub("---+", "---", text).split())


def skeleton(text: str) -> str:
    return NUMBER.sub("N", words(text))


def close(said: str, measured: str) -> bool:
    """Whether rounding on another machine explains the difference."""
    a, b = float(said), float(measured)
    if "e" in said + measured:
        return max(a, b) < 1e-5 or max(a, b) <= 10 * min(a, b)
    return abs(a - b) <= 0.1 * max(abs(a), abs(b)) + (0.02 if "." in said else 2)


def generated(page: Path) -> list[tuple[str, str]]:
    return [(match[2], match[3]) for match in GENERATED.finditer(page.read_text())]


def run(command: str) -> str:
    """The output of a command such as "python docs/import_graph.py"."""
    _, script, *arguments = shlex.split(command)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.chdir(ROOT), mock.patch("sys.argv", [script, *arguments]):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("page", [page for page in PAGES if generated(page)], ids=name_of)
def test_generated_parts_are_up_to_date(page):
    for command, shown in generated(page):
        assert shown == run(command), f"{command} prints something else now: python tests/test_docs.py --update"


def update(page: Path) -> None:
    """Write the present outputs into a page."""
    text = page.read_text()
    for block, printed in sorted(outputs(page), key=lambda pair: -pair[0].start):  # from the end, so that places hold
        if block.language != "text" and skeleton(block.content) == skeleton(printed):
            continue
        lines = [
            piece
            for line in printed.rstrip().splitlines()
            for piece in textwrap.wrap(
                line, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
            or [""]
        ]
        text = text[: block.start] + "\n".join(lines) + "\n" + text[block.end :]
    text = GENERATED.sub(lambda match: match[1] + run(match[2]) + match[4], text)
    if text != page.read_text():
        page.write_text(text)
        print(f"updated {name_of(page)}")


def test_the_picture_of_the_readme_can_be_drawn():
    example = runpy.run_path(str(ROOT / "examples" / "settling.py"))
    path, solution = example["settle"]()
    assert solution.converged.all()
    assert torch.allclose(path[-1], solution.value, atol=1e-3)
    assert len(example["draw"](path, solution).axes) == 3


def test_walks_are_as_long_as_said():
    walks = Path(__file__).with_name("test_walks.py")
    if not walks.exists():
        pytest.skip("nothing counts the files yet")
    counted = re.findall(r"^(?:FIXED_POINT|TRAINING)_FILES = (\d+)", walks.read_text(), re.M)
    assert re.findall(r"at most (\d+) files", (ROOT / "docs" / "design.md").read_text()) == counted


# --- commands ---------------------------------------------------------------------------------------------------------

COMMANDS = sorted(
    {
        command.partition(" #")[0].strip()
        for page in PAGES
        for command in [
            *(
                line
                for block in blocks(page.read_text())
                if block.language == "sh"
                for line in block.content.splitlines()
                if line.startswith("equipoise ")
            ),
            *re.findall(r"^\| .*`(equipoise (?:train|reproduce|figure) [^`]+)`", page.read_text(), re.M),
        ]
    }
)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse_and_name_recipes_that_can_be_made(line):
    asked, more = parser().parse_known_args(shlex.split(line)[1:])
    assert all("=" in change for change in more)
    changes = [*getattr(asked, "changes", []), *more]
    if asked.command == "train" and not asked.recipe.endswith(".toml"):
        check(open_recipe(asked.recipe, asked.budget, changes))
    elif asked.command == "reproduce":
        assert rows(open_recipe(asked.recipe), asked.budget, changes)
    elif asked.command == "figure":
        assert figure_functions()[open_recipe(asked.recipe).read(FigureSpec).figure]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.M):
        assert re.search(rf"^{target}\b.*:", makefile, re.M), target


# --- names, links, paths ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", eq.__all__)
def test_every_public_name_is_in_the_reference(name):
    assert re.search(rf"^\|.*`eq\.{name}\b", (ROOT / "docs" / "api.md").read_text(), re.M)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_exist(page):
    for name in set(re.findall(r"\beq\.([A-Za-z_][A-Za-z_0-9]*(?:\.[A-Z][A-Za-z_0-9]*)?)", page.read_text())):
        value = eq
        for part in name.split("."):
            value = getattr(value, part)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_full_names_exist(page):
    for name in set(re.findall(r"`(equipoise\.[A-Za-z_0-9.]+)`", page.read_text())):
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if anchor:
            assert anchor in {slug(title) for title in re.findall(r"^#+ (.*)$", target.read_text(), re.M)}, link


def slug(title: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name_of)
def test_paths_exist(page):
    package = ROOT / "src" / "equipoise"
    places = (ROOT, page.parent, package, package / "lab", ROOT / "results")
    for path in re.findall(
        r"`([a-z_0-9.-]+(?:/[a-z_0-9.-]+)*/(?:[a-z_0-9.-]+\.(?:py|md|toml|json|png))?)`", page.read_text()
    ):
        if not path.startswith(("runs/", "checkpoints/", "tensorboard/")):
            assert any((place / path).exists() for place in places), path


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit("usage: python tests/test_docs.py --update")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for page in PAGES:
        update(page)
