"""Sphinx's configuration of the site that docs/build_site.py builds."""

from pathlib import Path

import te_inductor

project = "te_inductor"
author = "te_inductor maintainers"
copyright = author
version = release = te_inductor.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 4
exclude_patterns = [".trees"]
default_role = "literal"  # docstrings write `names` in single quotes, as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
maximum_signature_line_length = 100
highlight_language = "text"
suppress_warnings = ["misc.highlighting_failure"]  # a shell's line in a block of Python, as "…"

html_theme = "furo"
# On each page, the version and its date, or that it is not released: the newest heading of the changelog.
_headings = Path(__file__).with_name("changelog.md").read_text().splitlines()
html_title = f"te_inductor {next(line[3:] for line in _headings if line.startswith('## '))}"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sphinx = False
