import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from marvin.export.__main__ import main

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("words", [["--to", "packed"], ["--to", "onnx", "--weights", "last"]])
def test_the_folder_of_a_run_is_exported_by_its_trainer(words, tmp_path):
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path), *words])
    message = str(caught.value.code)
    assert message.endswith(f"write python -m train.export {shlex.join([str(tmp_path), *words])}")
    assert "\n" not in message


def test_importing_the_command_loads_no_trainer_and_no_extra():
    code = (
        "import sys, marvin, marvin.export.__main__; "
        "print(*{'train', 'onnx', 'onnxruntime', 'qonnx', 'hls4ml'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert found.stdout.split() == []
