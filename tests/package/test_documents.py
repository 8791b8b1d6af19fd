"""Every document renders without a warning, and every link between them leads somewhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from docutils import nodes
from docutils.core import publish_doctree, publish_string

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.rst"), *ROOT.glob("docs/**/*.rst")])

# From level 2, warnings, on a document is refused. No colours in code: that would need one more
# package and tells nothing.
SETTINGS = {"halt_level": 2, "report_level": 2, "syntax_highlight": "none"}


@cache
def tree(document: Path) -> nodes.document:
    return publish_doctree(
        document.read_text(encoding="utf-8"),
        source_path=str(document),
        settings_overrides=SETTINGS,
    )


def anchors(document: Path) -> set[str]:
    return {name for node in tree(document).findall(nodes.Element) for name in node["ids"]}


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_document_renders(document: Path) -> None:
    publish_string(
        document.read_text(encoding="utf-8"),
        source_path=str(document),
        writer="html5",
        settings_overrides=SETTINGS,
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    dead = []
    for reference in tree(document).findall(nodes.reference):
        link = urlsplit(reference.get("refuri", ""))
        if link.scheme or not link.path:
            continue
        target = document.parent / unquote(link.path)
        found = target.exists()
        if found and link.fragment and target.suffix == ".rst":
            found = link.fragment in anchors(target)
        if not found:
            dead.append(reference["refuri"])
    assert not dead
