"""Every Python block of the documentation runs; every file it names exists."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from fixedpoint_kernels import FixedPoint, Minifloat, quantize
from marvin.export import load_frozen, weight_formats
from train.arguments import parse
from train.config import Config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = [
    pytest.param(page, code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, code in enumerate(PYTHON.findall(page.read_text()))
]


@pytest.mark.parametrize(("page", "code"), BLOCKS)
def test_a_block_runs_when_pasted_alone(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page.name, "exec"), {"__name__": "__main__"})


def test_no_block_hides_behind_another_spelling():
    """Blocks that need a package of others are fenced by tildes, and run in test_integrations."""
    for page in PAGES:
        text = page.read_text()
        assert len(PYTHON.findall(text)) == len(re.findall(r"``` ?py", text, re.IGNORECASE)), page
        for code in re.findall(r"~~~python\n(.*?)~~~", text, re.DOTALL):
            assert re.search(r"(import|from) (accelerate|lightning|peft|transformers)", code), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_two_versions_of_a_paragraph(page):
    assert not re.findall(r"^(?:<<<<<<<|=======$|>>>>>>>).*", page.read_text(), re.MULTILINE)


def test_the_first_example_prints_a_format(capsys):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    exec(compile(code[1], "README.md", "exec"), {})
    assert "0.weight" in capsys.readouterr().out


def test_the_example_that_leads_to_an_export_ends_at_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, *_ = PYTHON.findall((ROOT / "docs/deploy.md").read_text())
    exec(compile(code, "deploy.md", "exec"), {"__name__": "__main__"})
    formats = weight_formats(load_frozen("net.pt"))
    assert {*formats} == {"0.weight", "2.weight"}
    assert all(fmt.wl <= 8 for fmt in formats.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_a_page_names_exist(page):
    for name in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / name).exists(), name


def slug(heading):
    """Return the anchor of a heading, as GitHub and mkdocs make it."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def headings(page, marks="#+"):
    return re.findall(rf"^{marks} (.+)$", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_headings_a_page_links_to_exist(page):
    for name, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        target = page.parent / name if name else page
        assert anchor in map(slug, headings(target)), f"{name}#{anchor}"


PLAIN = {"bound", "code", "exponent", "format", "layer", "network", "noise", "record", "switch"}


def without_a_link(text, terms):
    """Yield the terms of art whose first place in a text does not begin the words of a link."""
    prose = re.sub(r"```.*?```|^    .*?$|`[^`]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^#+ .*$|!\[.*?\]\(.*?\)|(?<=\])\(.*?\)", "", prose, flags=re.MULTILINE)
    for term in terms:
        words = r"\s+".join(map(re.escape, term.split()))
        first = re.search(rf"(\[?)\b{words}\b", prose, re.IGNORECASE)
        if first and not first[1]:
            yield term


def test_terms_of_art_in_the_readme_lead_to_the_glossary():
    glossary = headings(ROOT / "docs/glossary.md", "###")
    terms = {t.strip("` ").lower() for heading in glossary for t in heading.split(", ")}
    assert len(terms) > 40
    assert [*without_a_link((ROOT / "README.md").read_text(), terms - PLAIN)] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A word length.", ["word length"]),
        ("A word\nlength, then [word length](docs/glossary.md#word-length).", ["word length"]),
        ("[Word\nlength](docs/glossary.md#word-length): a word length.", []),
        ("[one](docs/glossary.md) word length", ["word length"]),
        ("`word length`", []),
    ],
)
def test_a_term_without_a_link_is_seen(text, found):
    assert [*without_a_link(text, ["word length"])] == found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_commands_run_exist(page):
    for module in re.findall(r"python -m ((?:\w+\.?)+)", page.read_text()):
        path = ROOT.joinpath(*module.split("."))
        if (ROOT / module.split(".")[0]).is_dir():
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_trainers_take_the_flags_that_pages_give_them():
    meant = {
        "S": "0",
        "$seed": "0",
        "$o": "msgd",
        "[FLAGS]": "",
    }  # what a reader puts in their place
    count = 0
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for model, rest in re.findall(
            r"python -m train\.(resnet20|alexnet|vit)\b([^`#\n)]*)", text
        ):
            words = [meant.get(word, word) for word in rest.split()]
            parse(
                Config(model=model), [word for word in words if word]
            )  # ends at a flag that is none
            count += 1
    assert count > 20


def test_the_pictures_of_the_concepts_are_drawn_by_their_script(tmp_path):
    page = (ROOT / "docs/concepts.md").read_text()
    script = runpy.run_path(str(ROOT / "docs/draw_concepts.py"))
    script["main"](tmp_path, steps=2)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == set(re.findall(r"images/(concepts-\w+\.png)", page))


def test_a_picture_of_formats_has_the_numbers_it_is_titled_with():
    """Of 6 bits: 32 codes from 0 up, of which a minifloat needs none for what is not a number."""
    for fmt in (FixedPoint(6, 2), FixedPoint(6, 4), Minifloat(3, 2)):
        numbers = quantize(torch.linspace(0, 100, 2**17 + 1), fmt, rounding="nearest").unique()
        assert len(numbers) == 32
    page = (ROOT / "docs/draw_concepts.py").read_text()
    assert set(re.findall(r"(?:FixedPoint|Minifloat|BlockFloat)\([36], [24]\)", page)) == {
        "FixedPoint(6, 2)",
        "FixedPoint(6, 4)",
        "Minifloat(3, 2)",
    }


def test_the_site_builds(tmp_path):
    build = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config").load_config(
        str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site")
    )
    build.build(config)  # strict: a broken link or a missing name raises
    assert "MSGD" in (tmp_path / "site/api/marvin/index.html").read_text()


def test_a_line_may_break_before_a_flag_and_not_inside():
    hook = runpy.run_path(str(ROOT / "docs/unbroken_flags.py"))["on_page_content"]
    html = (
        "<p><code>train --max-wl 8</code> a --b <code>x-y--z</code></p><pre><code>--c</code></pre>"
    )
    marked = html.replace("--max-wl", '<span class="flag">--max-wl</span>')
    assert hook(html, page=None) == marked
