"""The README and the pages say what is so: their links, commands, settings, snippets and figures."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import distconv.__main__
import distconv.settings
import mucudnn.__main__
import mucudnn.settings
from mucudnn.runtime import decision
from tests.pages import rows

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("C*.md"))]
RESULTS = ROOT / "benchmarks" / "results"


def identifier(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=identifier)


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The code blocks of a page, of the given languages ("" for none)."""
    for indent, language, code in re.findall(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", page.read_text(), re.M | re.S):
        if language in languages:
            yield textwrap.dedent(code) if indent else code


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.M | re.S)


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len(README.read_text().splitlines()) <= 130, "a stranger reads no more before the first command"


# Links.


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


def test_the_site_is_searched_and_breaks_no_names() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    assert re.search(r"^  - search$", settings, re.M)
    (style,) = re.findall(r"^extra_css: \[(.*)\]$", settings, re.M)
    assert "word-break: normal" in (ROOT / "docs" / style).read_text()


@every_page
def test_code_and_diagrams_are_not_cut_off(page: Path) -> None:
    """What the site shows beside its navigation: so many columns."""
    shown = [line for block in blocks(page, "", "python", "py", "sh", "console", "toml") for line in block.splitlines()]
    assert [line for line in shown if len(line) > 132] == []


def test_every_folder_is_described() -> None:
    told = (ROOT / "docs" / "architecture.md").read_text()
    for package in ("mucudnn", "distconv"):
        for folder in (ROOT / package).iterdir():
            if folder.is_dir() and not folder.is_symlink() and (folder / "__init__.py").exists():
                assert f"`{package}/{folder.name}/`" in told, folder


# Commands.


def parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


OURS = {
    "mucudnn": parsers(mucudnn.__main__._parser()),
    "distconv": parsers(distconv.__main__._parser()),
}


def commands(page: Path) -> list[list[str]]:
    """The command lines of a page, as words: those of its code blocks and those between backticks."""
    lines = [line for block in blocks(page, "", "sh", "bash", "console") for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", prose(page))
    found = []
    for line in lines:
        match = re.search(r"(?:(?:^|\s)-m (mucudnn|distconv) .*)|(?:^(mucudnn|distconv) [a-z]+ .*)", line)
        benchmark = re.search(r"python (?:benchmarks|docs|tests/gpu)/\w+\.py.*", line)
        target = re.match(r"make [a-z-]+", line)
        for words in (match, benchmark, target):
            if words:
                found.append(shlex.split(words[0].replace("[", "").replace("]", ""), comments=True))
    return found


def check(words: list[str]) -> None:
    """Whether a command line could be run: its command, file or target exists, and its options do."""
    if words[0] == "-m":
        words = words[1:]
    if words[0] == "make":
        phony = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.M)
        assert phony and words[1] in phony[1].split(), words
    elif words[0] == "python":
        source = ROOT / words[1]
        assert source.is_file(), words
        for option in (word for word in words[2 : words.index("--") if "--" in words else None] if word[:2] == "--"):
            assert f'"{option}"' in source.read_text(), words
    else:
        known = OURS[words[0]]
        assert words[1] in known or words[1] in ("COMMAND", "--help", "--version"), words
        options = known[words[1]]._option_string_actions if words[1] in known else {}
        for word in words[2:]:
            if re.search(r"\.py$|^SCRIPT", word) and words[1] in ("run", "check"):
                break  # what follows is the script's
            assert not word.startswith("--") or word.partition("=")[0] in options, (words, word)


@every_page
def test_commands_exist(page: Path) -> None:
    for words in commands(page):
        check(words)


def test_the_commands_of_the_readme_are_found() -> None:
    found = {tuple(words[:3]) for words in commands(README)}
    assert ("-m", "mucudnn", "run") in found and ("-m", "distconv", "run") in found
    assert {words for words in found if words[0] == "make"} >= {("make", "test"), ("make", "demo")}


@pytest.mark.parametrize(
    "line",
    ["-m mucudnn train x.py", "-m mucudnn run --limits 1 x.py", "-m distconv run --rank 2 x.py", "make tea"],
)
def test_a_command_that_does_not_exist_is_noticed(line: str) -> None:
    with pytest.raises(AssertionError):
        check(line.split())


# Snippets. Those of CONTRIBUTING.md are run by a test of their own.


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CONTRIBUTING.md"], ids=identifier)
def test_snippets_compile_and_use_what_there_is(page: Path) -> None:
    for code in blocks(page, "python", "py"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                package = node.value.id
                if package in ("mucudnn", "distconv"):
                    assert hasattr(importlib.import_module(package), node.attr), f"{package}.{node.attr}"


# Settings.


@pytest.mark.parametrize(
    ("page", "settings", "spelled"),
    [
        ("mucudnn.md", mucudnn.settings.SETTINGS, lambda name: name),
        ("distconv.md", distconv.settings.SETTINGS, distconv.settings.flag),
    ],
)
def test_the_table_of_settings(page: str, settings: dict[str, Any], spelled: Any) -> None:
    told = rows((ROOT / "docs" / page).read_text(), "variable")
    assert [(row[0], row[1]) for row in told] == [
        (f"`{setting.variable}`", f"`{spelled(name)}`") for name, setting in settings.items()
    ]
    for row, setting in zip(told, settings.values(), strict=True):
        default = setting.default()
        if default is not None and "/" not in default:
            assert row[2] == f"`{default}`", setting.variable


def test_the_table_of_options() -> None:
    told = {row[0].strip("`").split()[0] for row in rows((ROOT / "docs" / "distconv.md").read_text(), "option")}
    options = OURS["distconv"]["run"]._option_string_actions
    known = {name for name in options if name.startswith("--") and not name.startswith("--no-")}
    assert told == known - {"--help", *map(distconv.settings.flag, distconv.settings.SETTINGS)}


def test_the_table_of_extras() -> None:
    told = rows((ROOT / "docs" / "index.md").read_text(), "extra")
    with (ROOT / "pyproject.toml").open("rb") as file:
        known = tomllib.load(file)["project"]["optional-dependencies"]
    assert {name for row in told for name in re.findall(r"`([^`]+)`", row[0])} == set(known)


def test_the_table_of_make_targets() -> None:
    told = {row[0].strip("`") for row in rows((ROOT / "docs" / "index.md").read_text(), "command")}
    phony = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert phony and told == {f"make {target}" for target in phony[1].split()}


# Messages.


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    told = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    code = "".join(path.read_text() for folder in ("mucudnn", "distconv") for path in (ROOT / folder).rglob("*.py"))
    assert len(told) > 15
    assert [message for message in told if message not in code] == []


# Figures.


def test_the_table_of_states_is_that_of_the_code() -> None:
    table = "\n".join(line for line in (decision.__doc__ or "").splitlines() if line.startswith("|"))
    assert table.count("\n") > 5 and table in (ROOT / "docs" / "how-it-decides.md").read_text()
