"""Hooks of MkDocs: links out of docs/, and pages that only some versions have.

On a code host, pages link to files of the repository, such as `../SECURITY.md`. The website has
only docs/. There, such a link becomes the link's text, followed by the path in the repository.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
OPTIONAL = {"questions-to-the-planner.md": ("Questions to the planner", "Own model")}
"""Pages that are in the navigation if they exist: (title, title of the page before it)."""


def on_config(config: Any) -> Any:
    """Adds the optional pages that exist to the navigation."""
    for page, (title, before) in OPTIONAL.items():
        if (Path(config["docs_dir"]) / page).exists():
            titles = [next(iter(entry)) for entry in config["nav"]]
            config["nav"].insert(titles.index(before) + 1, {title: page})
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Returns the text of a page without links that leave docs/."""
    folder = PurePosixPath(page.file.src_uri).parent

    def replaced(found: re.Match[str]) -> str:
        is_picture, text, target, _ = found.groups()
        parts: list[str] = []
        outside = 0
        for part in (folder / target).parts:
            if part != "..":
                parts.append(part)
            elif parts:
                parts.pop()
            else:
                outside += 1
        if not outside:
            return found[0]
        path = "/".join(parts)
        return f"`{path}`" if is_picture or text in (path, f"`{path}`") else f"{text} (`{path}`)"

    return LINK.sub(replaced, markdown)
