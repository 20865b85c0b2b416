"""The documentation is what the program does: links, generated pages, every YAML block and every command."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from functools import cache

import pytest
import yaml

from megarl.cli.main import add_command, run
from megarl.config.document import Document, read_document
from megarl.config.load import validated
from megarl.config.recipe import Recipe
from megarl.env import update_environment
from scripts import docs_pages
from tests.repository import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```([a-z]*)[^\n]*\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
_NOT_RECIPES = {"monitoring.md", "operations.md"}
"""Pages whose YAML may be that of Prometheus or Kubernetes."""


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for language, text in _BLOCK.findall(page.read_text()):
            if language == kind:
                yield page.name, text


@pytest.mark.patient
def test_the_generated_pages_are_current_whatever_ran_before() -> None:
    add_command("schema")
    for path, text in {**docs_pages.pages(), docs_pages.DOCS / "llms.txt": docs_pages.llms_text()}.items():
        assert path.read_text() == text, f"write {path.name} with `python -m scripts.docs_pages`"


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert [
        page.name for page in PAGES[1:] if not re.search(rf"- (?:[^:\n]+: )?{page.name}$", text, re.MULTILINE)
    ] == []


@pytest.mark.parametrize(("page", "text"), [*blocks("yaml")])
def test_a_yaml_block_is_part_of_a_valid_recipe(page: str, text: str) -> None:
    shown = yaml.safe_load(text)
    if page in _NOT_RECIPES and not set(shown) <= set(Recipe.model_fields):
        return
    good = read_document(ROOT / "tests" / "config" / "good.yaml").tree
    tree = {name: _laid_over(good.get(name), value) for name, value in shown.items() if name != "extends"}
    validated(Document(tree={**good, **tree}, origins={}), source=page)  # type: ignore[dict-item]


def _laid_over(base: object, value: object) -> object:
    if not isinstance(base, dict) or not isinstance(value, dict):
        return value
    if "kind" in value and value["kind"] != base.get("kind"):
        return value
    return {**base, **{name: _laid_over(base.get(name), child) for name, child in value.items()}}


def commands() -> list[tuple[str, str]]:
    """Every command line of a block, without its output and without what stands for a value."""
    found = []
    for language in ("sh", "", "text", "bash"):
        for page, text in blocks(language):
            if page == "cli.md":
                continue
            for line in text.replace("\\\n", " ").splitlines():
                words = line.removeprefix("$ ").strip()
                if re.match(r"(?:\.venv/bin/)?megarl (?!is|was|:)", words):
                    found.append((page, words.partition("  #")[0].removeprefix(".venv/bin/")))
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_and_its_options_exist(page: str, line: str) -> None:
    words = [word for part in line.split(" && ")[:1] for word in shlex.split(part)][1:]
    names = []
    for word in words[:3]:
        if not re.fullmatch(r"[a-z][a-z-]*", word):
            break
        names.append(word)
    text = next((text for count in range(len(names), 0, -1) if (text := help_of(tuple(names[:count])))), None)
    assert text is not None or words[0].startswith("-"), f"{page}: no such command: {line}"
    for option in re.findall(r"(?<!\S)\[?(--[a-z-]+)", " ".join(words)):
        assert text is None or option in text, f"{page}: {option} is no option: {line}"


def lines_of_blocks() -> Iterator[tuple[str, str]]:
    for language in ("sh", "", "text", "bash"):
        for page, text in blocks(language):
            yield from ((page, line.removeprefix("$ ").strip()) for line in text.replace("\\\n", " ").splitlines())


def test_every_make_target_and_benchmark_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {(page, name) for page, line in lines_of_blocks() for name in re.findall(r"^make ([a-z-]+)", line)}
    assert targets
    assert {each for each in targets if not re.search(rf"^{each[1]}:", makefile, re.MULTILINE)} == set()
    pattern = r"^python3? -m (bench|scripts|megarl|tests)((?:\.\w+)*)(?: ([a-z]\w*))?"
    modules = {(page, *found[0]) for page, line in lines_of_blocks() if (found := re.findall(pattern, line))}
    for page, package, inner, name in modules:
        words = f"{package}{inner}" if package != "bench" or not name else "bench.__main__"
        path = ROOT / f"{words.replace('.', '/')}.py"
        assert path.is_file() or path.with_suffix("").is_dir(), f"{page}: python -m {words}"
        assert package != "bench" or not name or re.search(rf"\b{name}\b", path.read_text()), f"{page}: bench {name}"


@pytest.mark.parametrize(("page", "text"), [*blocks("python")])
def test_a_python_block_is_python(page: str, text: str) -> None:
    compile(text, page, "exec")


@pytest.mark.parametrize(("page", "text"), [*blocks("json")])
def test_a_json_block_is_json(page: str, text: str) -> None:
    assert json.loads(text)


@pytest.fixture(autouse=True)
def _own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the width that help is made for from the tests that follow in the same process."""
    for name in ("COLUMNS", "TERMINAL_WIDTH"):
        monkeypatch.setenv(name, "100")


@cache
def help_of(names: tuple[str, ...]) -> str | None:
    update_environment({"COLUMNS": "100", "TERMINAL_WIDTH": "100"})
    import io
    from contextlib import redirect_stderr, redirect_stdout

    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        code = run([*names, "--help"])
    return out.getvalue() if code == 0 else None
