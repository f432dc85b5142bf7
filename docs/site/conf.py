"""Configuration of the documentation site. ``make docs`` builds it into ``docs/_build/html``.

The source folder is the root of the repository, so that the Markdown pages are read where they are and the links
between them hold both on the site and on a code host.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "src")]

import equipoise  # noqa: E402

project = "equipoise"
author = copyright = "the equipoise authors"
version = release = equipoise.__version__

root_doc = "docs/index"
include_patterns = ["docs/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md"]
exclude_patterns = ["docs/_build", "docs/site", "**/GALLERY_HEADER.rst", "docs/tutorials/sg_execution_times.rst"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
highlight_language = "text"  # an indented block is an equation or an output
suppress_warnings = ["misc.highlighting_failure"]  # a recipe that says "..." is not TOML

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_gallery.gen_gallery",
    "mathjax",
    "reference",
    "links",
]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # links such as lab.md#recipes, as on a code host

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures stay short; every docstring describes its arguments
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_use_rtype = False

mathjax_path = "mathjax/tex-svg.js"

sphinx_gallery_conf = {
    "examples_dirs": str(ROOT / "examples"),
    "gallery_dirs": str(ROOT / "docs" / "tutorials"),
    "filename_pattern": r"\.py$",
    "ignore_pattern": r"settling\.py$",  # the picture of the README
    "nested_sections": False,
    "within_subsection_order": "reference.TutorialOrder",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "parallel": True,
    "capture_repr": (),  # the scripts print what they show
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1e6,
    "plot_gallery": "True",
    "remove_config_comments": True,
    "write_computation_times": False,
}

html_theme = "furo"
html_title = "equipoise"
html_static_path = ["static"]
html_css_files = ["style.css"]
templates_path = ["templates"]
html_additional_pages = {"index": "start.html"}  # the front page is docs/index.html
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
