"""Imports go one way, autoshard -> {cost_models, search}, and nobody else's module takes our names."""

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOWER = ("cost_models", "search")


def _python(code: str, *, cwd: Path = ROOT, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter at `cwd`, with this checkout on its import path after `cwd`."""
    environment = os.environ | {"PYTHONPATH": str(path), "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (top-level package, line) of each absolute import, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.partition(".")[0], node.lineno


@pytest.mark.parametrize("package", LOWER)
def test_lower_layers_import_neither_jax_nor_one_another(package: str) -> None:
    result = _python(
        f"""
        import importlib, pkgutil, sys
        import {package}
        for module in pkgutil.walk_packages({package}.__path__, "{package}."):
            importlib.import_module(module.name)
        print(*sorted({{name.partition(".")[0] for name in sys.modules}}))
        """
    )
    assert result.returncode == 0, result.stderr
    forbidden = {"jax", "jaxlib", "autoshard", *LOWER} - {package}
    assert not forbidden & set(result.stdout.split())


@pytest.mark.parametrize("package", LOWER)
def test_lower_layers_name_nothing_above_them(package: str) -> None:
    forbidden = {"jax", "jaxlib", "autoshard", *LOWER} - {package}
    offenders = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for name, line in _imports(ast.parse(path.read_text()))
        if name in forbidden
    ]
    assert not offenders


def test_the_zoo_knows_only_jax() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{node.lineno} imports {node.module}"
        for path in sorted((ROOT / "autoshard" / "zoo").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").partition(".")[0] in {"autoshard", *LOWER}
        and not (node.module or "").startswith("autoshard.zoo")
    ]
    assert not offenders


def test_the_scan_sees_every_form_of_import() -> None:
    code = "import a.b, c\nfrom d.e import f\nfrom . import g\ndef h():\n    import i\n"
    assert sorted(_imports(ast.parse(code))) == [("a", 1), ("c", 1), ("d", 2), ("i", 5)]


GUARD = "from autoshard._guard import check_import_names; check_import_names()"


def _message(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    _, _, message = result.stderr.rpartition("ImportError: ")
    return message.strip()


def test_guard_is_silent_when_nothing_is_hidden(tmp_path: Path) -> None:
    result = _python(GUARD, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", LOWER)
@pytest.mark.parametrize("kind", ["module", "package"])
def test_guard_names_both_paths_and_the_cure(tmp_path: Path, name: str, kind: str) -> None:
    theirs = tmp_path / f"{name}.py" if kind == "module" else tmp_path / name
    source = theirs
    if kind == "package":
        theirs.mkdir()
        source = theirs / "__init__.py"
    source.write_text("raise SystemExit('the guard must not import this')")
    assert _message(_python(GUARD, cwd=tmp_path)) == (
        f"autoshard needs its own package {name!r} at {ROOT / name}, but the name would be imported from "
        f"{theirs}, which hides it. Rename that file or folder, or take its folder off the import path: "
        "run from another directory, or with `python -P` (PYTHONSAFEPATH=1)."
    )


def test_guard_lists_all_offenders(tmp_path: Path) -> None:
    for name in LOWER:
        (tmp_path / f"{name}.py").touch()
    message = _message(_python(GUARD, cwd=tmp_path))
    assert all(str(tmp_path / f"{name}.py") in message for name in LOWER)


def test_the_cure_works(tmp_path: Path) -> None:
    (tmp_path / "search.py").touch()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", GUARD]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_folder_without_code_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    result = _python(GUARD, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_guard_sees_what_is_already_imported(tmp_path: Path) -> None:
    (tmp_path / "search.py").touch()
    message = _message(_python(f"import search\n{GUARD}", cwd=tmp_path))
    assert f"has already been imported from {tmp_path / 'search.py'}, which hides it" in message


def test_guard_sees_a_module_made_by_hand(tmp_path: Path) -> None:
    code = f"import sys, types\nsys.modules['search'] = types.ModuleType('search')\n{GUARD}"
    message = _message(_python(code, cwd=tmp_path))
    assert "has already been imported from an unknown place (it has no file), which hides it" in message


def test_guard_accepts_ours_already_imported(tmp_path: Path) -> None:
    result = _python(f"import search, cost_models\n{GUARD}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_guard_tells_a_broken_installation(tmp_path: Path) -> None:
    code = """
    from pathlib import Path
    from autoshard._guard import check_import_names
    check_import_names(["no_such_package_of_ours"], beside=Path("/somewhere"))
    """
    assert _message(_python(code, cwd=tmp_path)) == (
        "autoshard needs its package 'no_such_package_of_ours' at /somewhere/no_such_package_of_ours, and no "
        "module of that name can be found: the installation is incomplete; install autoshard again."
    )
