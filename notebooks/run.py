"""Runs the notebooks in place and stores their outputs without what differs from machine to machine.

    python notebooks/run.py [NAME.ipynb ...]

The tests run copies of the notebooks through `execute`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path, *, timeout_seconds: int = 300) -> nbformat.NotebookNode:
    """Run a notebook in its folder, with this Python, and return it with outputs; it is not written.

    Args:
      path: the notebook.
      timeout_seconds: of each cell.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell fails; the message holds the cell and the traceback.

    """
    notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook,
        timeout=timeout_seconds,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--Application.log_level=ERROR"],
    )
    client.execute()
    notebook.metadata = nbformat.from_dict(_METADATA)  # type: ignore[no-untyped-call]
    return notebook


def main(names: list[str]) -> None:
    """Run the notebooks of these names, or all, and write them back."""
    for path in [FOLDER / name for name in names] or sorted(FOLDER.glob("*.ipynb")):
        notebook = execute(path)
        nbformat.validate(notebook)
        nbformat.write(notebook, path)  # type: ignore[no-untyped-call]
        print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
