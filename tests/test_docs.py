"""Every Python block of the documentation runs; every file it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALONE = (
    "README.md",
    "docs/migration.md",
    "docs/recipes.md",
)  # each block of these runs when pasted alone
WITH_CODE = [
    page
    for page in PAGES
    if "```python" in page.read_text() and page.relative_to(ROOT).as_posix() not in ALONE
]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """The blocks of a page continue each other."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(code, page.name, "exec"), names)


BLOCKS = [(page, i) for page in ALONE for i in range((ROOT / page).read_text().count("```python"))]


@pytest.mark.parametrize(("page", "number"), BLOCKS)
def test_a_block_runs_when_pasted_alone(page, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[number]
    exec(compile(code, page, "exec"), {"__name__": "__main__"})


def test_the_first_example_prints_a_format(capsys):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    exec(compile(code[1], "README.md", "exec"), {})
    assert "0.weight" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_a_page_names_exist(page):
    for name in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_commands_run_exist(page):
    for module in re.findall(r"python -m ((?:\w+\.?)+)", page.read_text()):
        path = ROOT.joinpath(*module.split("."))
        if (ROOT / module.split(".")[0]).is_dir():
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_the_site_builds(tmp_path):
    build = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config").load_config(
        str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site")
    )
    build.build(config)  # strict: a broken link or a missing name raises
    assert "MSGD" in (tmp_path / "site/api/marvin/index.html").read_text()
