"""The page on the architecture: its picture is drawn from the import layers, and its files exist.

``python tests/test_architecture.py`` draws the picture again after a change of the layers.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "layers.svg"
ENGINES = ROOT / "src" / "kedge" / "engines"
ROW, BOX, GAP = 34, 26, 8
WIDTH = 620
STYLE = (
    "text{font:13px monospace;fill:#1f2328;text-anchor:middle} .b{fill:#fff;stroke:#57606a} "
    ".s{fill:#dbeafe;stroke:#1d4ed8}"
)
PURE = {"errors", "turns", "planning", "events", "wire"}


def read_layers() -> list[list[str]]:
    """Return the packages of each layer, from top to bottom."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = settings["tool"]["importlinter"]["contracts"][0]
    return [layer.split(" | ") for layer in contract["layers"]]


def draw_layers(layers: list[list[str]]) -> str:
    """Return the picture of the layers as SVG; pure packages are blue."""
    height = ROW * len(layers) + 2 * GAP
    title = "The packages of Kedge as layers, each of which imports only from those below it"
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    frame = f'width="{WIDTH - 1}" height="{height - 1}" rx="6" fill="#f6f8fa" stroke="#d0d7de"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="t">',
        f'<title id="t">{title}</title>',
        f"<style>{STYLE}</style>",
        f'<rect x="0.5" y="0.5" {frame}/>',
    ]
    for row, packages in enumerate(layers):
        width = (WIDTH - 2 * GAP - GAP * (len(packages) - 1)) / len(packages)
        for column, package in enumerate(packages):
            x, y = GAP + column * (width + GAP), GAP + row * ROW + (ROW - BOX) / 2
            kind = "s" if package in PURE else "b"
            lines.append(
                f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{BOX}" rx="4"/>'
                f'<text x="{x + width / 2:g}" y="{y + 18:g}">{package}</text>'
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


def test_the_picture_shows_the_layers_of_the_code() -> None:
    """The picture is the one that is drawn from the layers, and they list every package."""
    layers = read_layers()
    assert PICTURE.read_text() == draw_layers(layers)
    packages = {path.parent.name for path in (ROOT / "src" / "kedge").glob("*/__init__.py")}
    files = {path.stem for path in (ROOT / "src" / "kedge").glob("*.py")}
    listed = {package for layer in layers for package in layer}
    assert packages <= listed <= packages | files


def test_every_file_on_the_page_exists() -> None:
    """Each file and folder that the page names is part of the package."""
    names = re.findall(r"`((?!src)[a-z_]+/[\w/.]+)`", PAGE.read_text())
    assert len(names) > 40
    assert [name for name in names if not (ROOT / "src" / "kedge" / name).exists()] == []


def list_definitions(page: str) -> list[tuple[str, str]]:
    """Return the names on the page with the files that define them, from its picture and its text."""
    row = r"^[ |+->]*([\w.]+)(?: / \w+| \.{3})? {2,}([a-z_.]+),? "
    engines = {each.stem for each in ENGINES.glob("*.py")}
    shown: list[tuple[str, str]] = []
    for name, module in re.findall(row, page[page.index("```text") :], re.MULTILINE):
        dotted = f"engines.{module}" if module in engines else module
        shown.append((name, dotted.replace(".", "/") + ".py"))
    return [*shown, *re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", page)]


def test_every_function_on_the_page_is_defined_in_its_file() -> None:
    """Each class and function is in the file that the page names for it."""
    definitions = list_definitions(PAGE.read_text())
    assert len(definitions) > 20
    wrong = [
        (name, file)
        for name, file in definitions
        for part in name.split(".")
        if not re.search(rf"(def|class) {part}\b", (ROOT / "src" / "kedge" / file).read_text())
    ]
    assert wrong == []


if __name__ == "__main__":
    PICTURE.write_text(draw_layers(read_layers()))
