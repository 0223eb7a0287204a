"""Every notebook runs, and is committed with the outputs of a whole run and nothing of the machine it ran on."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from autoshard.validate.process import is_libtpu_available  # noqa: E402

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NEED_TPU_COMPILER = {"03_validate_on_tpu.ipynb"}

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks_run", FOLDER / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _texts(cell: Any) -> list[str]:
    return [
        *(output.text for output in cell.outputs if output.output_type == "stream"),
        *(text for output in cell.outputs for text in output.get("data", {}).values()),
    ]


def _names(output: Any) -> set[str]:
    return {output.output_type, *output.get("data", {})}


def test_runs(path: Path, tmp_path: Path) -> None:
    if path.name in NEED_TPU_COMPILER and not is_libtpu_available():
        pytest.skip("libtpu is not installed")
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    ran = _runner().execute(copy)
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]  # leaves nothing behind
    for before, after in zip(_cells(nbformat.read(path, 4)), _cells(ran), strict=True):
        kinds = [[_names(output) for output in cell.outputs] for cell in (before, after)]
        assert kinds[0] == kinds[1], f"run notebooks/run.py again: other outputs of\n{before.source}"


def test_is_committed_with_the_outputs_of_a_whole_run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = _cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell.outputs) for cell in cells) > len(cells) // 2
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)


def test_holds_nothing_of_the_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata == _runner()._METADATA
    for cell in notebook.cells:
        assert not cell.metadata
    texts = [text for cell in _cells(notebook) for text in _texts(cell)]
    found = [re.search(r"(?<![\w.])/(?:home|root|tmp|work|opt|usr|Users|var)/\S+", text) for text in texts]
    assert not any(found), next(filter(None, found))[0]
