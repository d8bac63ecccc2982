import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_example_runs(capsys):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    exec(compile(code[1], "README.md", "exec"), {})
    assert "0.weight" in capsys.readouterr().out


def test_the_files_it_names_exist():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / name).exists(), name
