"""Names of the package and of the user, and their options: lookups, rejections and messages."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.lab.data import DATA_SETS
from equipoise.lab.recipes.build import GRADIENTS, OPTIMIZERS, SCHEDULES, SOLVERS, located
from equipoise.lab.recipes.reading import Where
from equipoise.lab.results.reproduce import figure_functions
from equipoise.lab.trust import Trust, look_in
from equipoise.models import MODELS, create_model, list_models
from equipoise.registry import MissingPackage, Registry, UnknownOption, call, parameters, unknown
from equipoise.tasks import TASKS
from equipoise.tasks.robustness import ATTACKS

PARTS = Registry("part", {"counter": "collections:Counter", "path": "pathlib:Path", "odd": "collections:NoSuchThing"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder; what is imported from it, and from folders looked in, is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


NET = "from torch import nn\nclass Net(nn.Module):\n    __slots__ = ()"


def found_by_recipe_in(folder: Path, name: str) -> type:
    """The model that a recipe in a folder names."""
    with located(Where("mine.toml", trust=Trust(None, (str(folder), "."))), "model"):
        return MODELS[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# Names of the package


def test_a_name_stands_for_what_its_entry_says():
    assert PARTS["path"] is Path
    assert list(PARTS) == ["counter", "path", "odd"]
    assert "path" in PARTS
    assert "paht" not in PARTS


@pytest.mark.parametrize(
    "registry", [MODELS, TASKS, ATTACKS, SOLVERS, GRADIENTS, OPTIMIZERS, SCHEDULES, DATA_SETS, figure_functions()]
)
def test_every_entry_of_the_package_exists(registry):
    for name in registry:
        assert callable(registry[name])


def test_an_entry_is_imported_only_when_asked_for():
    code = (
        "import sys, equipoise.registry as r; parts = r.Registry('part', {'a': 'wave:open'}); "
        "assert 'wave' not in sys.modules; parts['a']; assert 'wave' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_table_of_names_is_its_own():
    entries = {"path": "pathlib:Path"}
    registry = Registry("part", entries)
    entries["counter"] = "collections:Counter"
    assert list(registry) == ["path"]


def test_an_unknown_name_is_answered_with_the_nearest_all_of_them_and_a_way_out():
    with pytest.raises(LookupError) as error:
        PARTS["cuonter"]
    assert str(error.value) == (
        "there is no part 'cuonter'; did you mean 'counter'? known: counter, path, odd. "
        "Your own: part = 'my_module:MyName'."
    )


def test_a_name_like_no_other_gets_no_suggestion():
    with pytest.raises(LookupError, match="there is no part 'xyz'; known: counter, path, odd"):
        PARTS["xyz"]


@pytest.mark.parametrize("name", [3, None, ["path"], {"name": "path"}])
def test_a_name_that_is_not_a_string_is_rejected(name):
    with pytest.raises(TypeError, match=r"the name of a part is .*; it must be a string\."):
        PARTS[name]


def test_suggestions_take_the_nearest_of_several():
    assert "did you mean 'batch_size'?" in unknown("key", "bach_size", ["seed", "batch_size", "evaluation_batch_size"])
    assert unknown("key", "q", iter(["seed", "title"])) == "there is no key 'q'; known: seed, title."


# Names from outside


def test_two_runs_may_each_have_a_module_of_the_same_name(folder):
    for place in ("one", "two"):
        write(folder / place / "mine_same.py", f"from mine_help import which\n{NET}\n    place = which")
        write(folder / place / "mine_help.py", f"which = {place!r}")
        assert found_by_recipe_in(folder / place, "mine_same:Net").place == place


def test_a_module_in_the_current_folder_is_found(folder):
    write(folder / "mine_here.py", NET)
    look_in(".")
    assert MODELS["mine_here:Net"].__module__ == "mine_here"


def test_a_module_beside_the_recipe_is_found(folder):
    write(folder / "elsewhere" / "mine_beside.py", NET)
    assert found_by_recipe_in(folder / "elsewhere", "mine_beside:Net").__name__ == "Net"


def test_the_folder_of_the_recipe_comes_before_the_current_one(folder):
    write(folder / "elsewhere" / "mine_twice.py", f"{NET}\n    place = 'recipe'")
    write(folder / "mine_twice.py", f"{NET}\n    place = 'current'")
    assert found_by_recipe_in(folder / "elsewhere", "mine_twice:Net").place == "recipe"


def test_the_current_folder_is_followed(folder, monkeypatch):
    """A notebook changes its folder between two calls."""
    for place in ("first", "second"):
        write(folder / place / f"mine_{place}.py", NET)
        monkeypatch.chdir(folder / place)
        look_in(".")
        assert MODELS[f"mine_{place}:Net"].__name__ == "Net"


def test_a_module_written_a_moment_ago_is_found(folder):
    """Python remembers what a folder holds, and looks again only once the folder's time stamp has moved on."""
    for name in ("mine_old", "mine_new"):
        write(folder / f"{name}.py", NET)
        os.utime(folder, (1e9, 1e9))
        look_in(folder)
        assert MODELS[f"{name}:Net"].__name__ == "Net"


def test_what_is_installed_comes_before_the_users_folders(folder):
    write(folder / "colorsys.py", "def rgb_to_hsv(): return 'mine'")
    look_in(folder)
    assert PARTS["colorsys:rgb_to_hsv"](1, 1, 1) == (0, 0, 1)


def test_looking_twice_adds_a_folder_once(folder):
    look_in(folder, folder)
    look_in(folder)
    assert sys.path.count(str(folder)) == 1


def test_a_module_in_a_package_is_found(folder):
    write(folder / "mine_pack" / "__init__.py", "")
    write(folder / "mine_pack" / "nets.py", NET)
    look_in(folder)
    assert MODELS["mine_pack.nets:Net"].__name__ == "Net"


@pytest.mark.parametrize("name", ["mine_nowhere:Net", "mine_nowhere.nets:Net", "json.mine_nowhere:Net"])
def test_a_missing_module_is_named_with_the_places_looked_in(name):
    module = name.partition(":")[0]
    with pytest.raises(LookupError) as error:
        MODELS[name]
    assert str(error.value).startswith(
        f"model {name!r}: there is no module {module!r}; looked in the folder of the recipe"
    )
    assert "current folder" in str(error.value)


@pytest.mark.parametrize("name", [":Net", ".relative:Net", "..:Net", ":"])
def test_an_invalid_module_name_is_named_too(name):
    with pytest.raises(LookupError, match=r"model .*: there is no module"):
        MODELS[name]


def test_a_missing_attribute_is_answered_with_the_nearest(folder):
    write(folder / "mine_names.py", "class MyNet: ...\nclass Other: ...\ndef _hidden(): ...\nNUMBER = 3")
    look_in(folder)
    with pytest.raises(LookupError) as error:
        MODELS["mine_names:MyNett"]
    assert str(error.value) == (
        "module mine_names: there is no attribute 'MyNett'; did you mean 'MyNet'? known: MyNet, Other."
    )
    with pytest.raises(LookupError, match="module mine_names: there is no attribute ''"):
        MODELS["mine_names:"]


def test_an_entry_whose_attribute_is_gone_says_so():
    with pytest.raises(LookupError, match="module collections: there is no attribute 'NoSuchThing'"):
        PARTS["odd"]


@pytest.mark.parametrize("line", ["import no_such_package", "from no_such_package.sub import thing"])
def test_a_package_that_a_users_module_needs_is_the_one_that_is_named(folder, line):
    write(folder / "mine_needs.py", line)
    look_in(folder)
    with pytest.raises(MissingPackage) as error:
        MODELS["mine_needs:Net"]
    assert "model 'mine_needs:Net' needs the package 'no_such_package', which is not installed" in str(error.value)
    assert error.value.name == "no_such_package"
    assert isinstance(error.value, ImportError)


def test_the_extra_is_suggested_only_for_what_the_package_itself_needs(folder):
    """`equipoise[lab]` does not bring what a user's own module imports."""
    write(folder / "mine_wants.py", "import no_such_package")
    look_in(folder)
    with pytest.raises(MissingPackage) as error:
        MODELS["mine_wants:Net"]
    assert "equipoise[lab]" not in str(error.value)
    with pytest.raises(MissingPackage, match=r"pip install 'equipoise\[lab\]'"):
        Registry("part", {"own": "mine_wants:Net"})["own"]


def test_a_module_missing_inside_a_users_package_is_not_taken_for_the_package(folder):
    write(folder / "mine_half" / "__init__.py", "from mine_half import gone")
    write(folder / "mine_whole" / "__init__.py", "import mine_whole.gone")
    look_in(folder)
    with pytest.raises(ImportError, match="cannot import name 'gone'"):
        MODELS["mine_half:Net"]
    with pytest.raises(MissingPackage, match="needs the package 'mine_whole.gone'"):
        MODELS["mine_whole:Net"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("1 / 0", ZeroDivisionError),
        ("{}['here']", KeyError),
        ("raise ValueError('mine')", ValueError),
        ("from json import no_such_name", ImportError),
        ("def broken(:", SyntaxError),
    ],
)
def test_an_error_inside_a_users_module_is_not_changed(folder, text, kind):
    module = f"mine_raises_{kind.__name__.lower()}"
    write(folder / f"{module}.py", text)
    look_in(folder)
    with pytest.raises(kind) as error:
        MODELS[f"{module}:Net"]
    assert type(error.value) is kind


# Options


def takes(width, depth=2, *, bias=True):
    return width, depth, bias


def takes_anything(width, **rest):
    return width, rest


def test_options_and_facts_are_given_by_name():
    assert call(takes, {"depth": 5}, {"width": 3, "classes": 10}, "part 'takes'") == (3, 5, True)


def test_an_option_comes_before_a_fact():
    assert call(takes, {"width": 4}, {"width": 3}, "part 'takes'") == (4, 2, True)


def test_a_fact_fills_a_parameter_that_has_a_default():
    assert call(takes, {"width": 1}, {"depth": 9}, "part 'takes'") == (1, 9, True)


def test_options_and_facts_are_not_changed():
    options, facts = {"width": 1}, {"depth": 9, "classes": 3}
    call(takes, options, facts, "part 'takes'")
    assert (options, facts) == ({"width": 1}, {"depth": 9, "classes": 3})


def test_an_unknown_option_is_rejected_with_the_nearest_name():
    with pytest.raises(UnknownOption) as error:
        call(takes, {"width": 1, "dept": 3}, {}, "part 'takes'")
    assert str(error.value) == "part 'takes' has no option 'dept'; did you mean 'depth'? options: bias, depth, width."
    assert error.value.option == "dept"
    assert isinstance(error.value, TypeError)


def test_what_the_data_set_gives_is_not_listed_among_the_options():
    with pytest.raises(UnknownOption, match=r"has no option 'x'; options: bias, depth\.$"):
        call(takes, {"x": 1}, {"width": 3}, "part 'takes'")


def test_a_part_without_options_says_none():
    with pytest.raises(UnknownOption, match=r"part 'bare' has no option 'x'; options: none\.$"):
        call(lambda: None, {"x": 1}, {}, "part 'bare'")


def test_a_constructor_that_takes_anything_is_given_the_options_but_not_the_facts():
    assert call(takes_anything, {"width": 1, "colour": "red"}, {"classes": 10}, "part") == (1, {"colour": "red"})
    assert call(takes_anything, {"colour": "red"}, {"width": 2}, "part") == (2, {"colour": "red"})


def test_missing_arguments_are_all_named():
    with pytest.raises(TypeError) as error:
        call(lambda b, a, c=1: None, {}, {"classes": 10}, "model 'mine:Net'")
    assert str(error.value) == "model 'mine:Net' needs a, b, which neither the recipe nor the data set gives."


def test_parameters_of_functions_classes_and_partials():
    class Net:
        def __init__(self, width, *layers, depth=2, **rest): ...

    assert parameters(takes) == ({"width", "depth", "bias"}, {"width"}, False)
    assert parameters(Net) == ({"width", "depth"}, {"width"}, True)


@pytest.mark.parametrize("thing", [3, "text", None])
def test_what_is_not_callable_is_rejected(thing):
    with pytest.raises(TypeError, match="not a callable"):
        call(thing, {}, {}, "part")


def test_an_error_of_the_constructor_itself_is_kept():
    def refuses(width):
        raise ValueError(f"width is {width}")

    with pytest.raises(ValueError, match="width is 3"):
        call(refuses, {"width": 3}, {}, "part")


# Models by name

BASELINES = ("neural-ode", "plain-deq", "unrolled", "resnet", "hrnet")


def test_models_are_created_by_name():
    assert "conv-equilibrium" in list_models()
    model = create_model("conv-equilibrium", shape=(1, 8, 8), classes=3, channels=4)
    assert isinstance(model, nn.Module)
    assert eq.create_model is create_model


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("conv-equilibrum", {}, LookupError, "there is no model 'conv-equilibrum'; did you mean 'conv-equilibrium'?"),
        ("conv-equilibrium", {"shape": (1, 8, 8)}, TypeError, "model 'conv-equilibrium' needs classes"),
        (
            "conv-equilibrium",
            {"shape": (1, 8, 8), "classes": 3, "chanels": 4},
            UnknownOption,
            "model 'conv-equilibrium' has no option 'chanels'; did you mean 'channels'? options: bound, channels",
        ),
        *(
            (name, {"shape": (1, 8, 8), "classes": 3, **wrong}, ValueError, words)
            for name in ("conv-equilibrium", "mondeq", "mdeq", "opteq", "popteq", "mopteq", *BASELINES)
            for wrong, words in (
                ({"classes": 1}, "classes is 1; a classifier needs"),
                ({"classes": 4.0}, "classes is 4.0; a classifier needs at least 2 (a whole number"),
                ({"shape": (8, 8)}, "shape is (8, 8); it must be the shape of one image, (channels, height, width)"),
                ({"shape": (784,)}, "shape is (784,); it must be the shape of one image"),
                ({"shape": (1, 8.0, 8)}, "shape is (1, 8.0, 8); it must be"),
                ({"shape": (0, 8, 8)}, "shape is (0, 8, 8); it must be"),
                ({"shape": (3, 8, 8), "mean": (0, 0), "std": (1, 1)}, "mean has 2 entries; it must have 1, or 3"),
            )
        ),
    ],
)
def test_a_model_that_cannot_be_made_says_why(name, options, error, words):
    with pytest.raises(error) as raised:
        create_model(name, **options)
    assert words in str(raised.value)


IMAGES = {
    "bytes": (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), "images are torch.uint8; they must be numbers in [0, 1]"),
    "one": (torch.zeros(3, 16, 16), "images have shape (3, 16, 16); it must be (batch, 3, height, width)"),
    "channels": (torch.zeros(2, 4, 16, 16), "images have shape (2, 4, 16, 16); it must be (batch, 3, height, width)"),
}


@pytest.mark.parametrize("name", ["conv-equilibrium", "mondeq", "mdeq", "mopteq", *BASELINES])
@pytest.mark.parametrize(("images", "words"), IMAGES.values(), ids=IMAGES)
def test_invalid_images_are_rejected(name, images, words):
    options = {"size": "reduced"} if name == "mopteq" else {}
    model = create_model(name, shape=(3, 16, 16), classes=3, mean=(0.5,) * 3, std=(0.5,) * 3, **options)
    with pytest.raises((TypeError, ValueError)) as raised:
        model(images)
    assert words in str(raised.value)
    gray = create_model(name, shape=(1, 16, 16), classes=3, **options)  # one mean for any number of channels
    with pytest.raises(ValueError, match=r"images have shape \(2, 3, 16, 16\); it must be \(batch, 1, height, width\)"):
        gray(torch.zeros(2, 3, 16, 16))
