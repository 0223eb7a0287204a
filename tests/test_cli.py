"""The command line: what it prints where, exit codes, and a paragraph for every bad input."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.cli import main
from autoshard.cli_input import read_annotations, read_integers, read_mesh

FACTORIES = '''
    import jax, jax.numpy as jnp

    STEP = 3

    def _shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    def product():
        """Two products with a bend between."""
        def fn(params, x):
            return jnp.tanh(x @ params["up"]) @ params["down"]
        return fn, ({"up": _shape(256, 1024), "down": _shape(1024, 256)}, _shape(512, 256))

    def updated():
        return (lambda x, y: (x + y, y)), (_shape(64, 64), _shape(64, 64)), (0,)

    def needs(size):
        return product()

    def fails():
        shapes = {"x": 3}
        return shapes["y"]

    def branches():
        def fn(x):
            if x.sum() > 0:
                return x
            return -x
        return fn, (_shape(8),)

    def nothing():
        return None

    def single():
        return (lambda x: x), _shape(8)

    def uncallable():
        return 3, (_shape(8),)

    def odd_donation():
        return (lambda x: x), (_shape(8),), "0"
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    before, modules = list(sys.path), set(sys.modules)
    path = tmp_path / "programs.py"
    path.write_text(textwrap.dedent(FACTORIES))
    yield path
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        if name.startswith("autoshard_input_"):
            del sys.modules[name]


@pytest.fixture
def plan_path(file: Path) -> Path:
    result = _run(
        "suggest", "programs.py:product", "--topology", "v3:2x2", "--mesh", "data=8", "--out", "p.json"
    )
    assert result.exit_code == 0, result.output
    return file.parent / "p.json"


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


# Commands ----------------------------------------------------------------------------------------------


def test_suggest_prints_the_plan_and_writes_it(file: Path) -> None:
    arguments = ["suggest", "programs.py:product", "--topology", "v3", "--mesh", "data=4,model=2"]
    result = _run(*arguments, "--out", "plan.json", "--timings")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.startswith("Plan: suggested\n  slice   v3:2x2: 4 chips x 2 cores = 8 devices\n")
    assert "Time to plan" in result.stdout
    plan = autoshard.Plan.from_json((file.parent / "plan.json").read_text())
    assert dict(plan.mesh) == {"data": 4, "model": 2}
    assert not list(file.parent.glob("*.part"))


def test_json_is_all_that_stands_on_standard_output(file: Path) -> None:
    result = _run("suggest", "programs.py:product", "--topology", "v3:2x2", "--json", "--model-flops", "1e9")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["name"] == "suggested"
    assert [leaf["path"] for leaf in found["inputs"]] == ["[0]['down']", "[0]['up']", "[1]"]
    assert found["mfu"] > 0


def test_why_names_the_rivals(plan_path: Path) -> None:
    arguments = ["why", "programs.py:product", "p.json", "[0]['up']", "--rivals", "2"]
    result = _run(*arguments)
    assert result.exit_code == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "[0]['up'] float32[256, 1024]"
    assert len([line for line in lines[2:] if line.startswith("  P(")]) == 3
    found = json.loads(_run(*arguments, "--json").stdout)
    (decision,) = found["decisions"]
    assert len(decision["rivals"]) == 2
    assert all(rival["step_seconds"] >= found["step_seconds"] for rival in decision["rivals"])


def test_why_of_nothing(plan_path: Path) -> None:
    result = _run("why", "programs.py:product", "p.json", "[0]['upp']")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: nothing in the program is called \"[0]['upp']\"; near it: [0]['up']"
    )


def test_alternatives_follow_the_plan(plan_path: Path) -> None:
    arguments = ["alternatives", "programs.py:product", "p.json", "--count", "2", "--among", "[0]"]
    result = _run(*arguments)
    assert result.exit_code == 0 and result.stderr == ""
    assert result.stdout.startswith("Plans\n")
    assert "\nalternative 1\n" in result.stdout and "\nalternative 2\n" in result.stdout
    rows = json.loads(_run(*arguments, "--json").stdout)
    assert [row["plan"] for row in rows] == ["suggested", "alternative 1", "alternative 2"]
    refused = _run("alternatives", "programs.py:updated", "p.json")
    assert refused.exit_code == 2 and refused.stderr.startswith("error: p.json: the arguments are not those")


def test_pareto_prints_the_front(file: Path) -> None:
    arguments = ["pareto", "programs.py:product", "--topology", "v3:2x2", "--mesh", "data=8", "--points", "4"]
    result = _run(*arguments)
    assert result.exit_code == 0 and result.stderr == ""
    assert result.stdout.startswith("Step time against memory\n")
    rows = json.loads(_run(*arguments, "--json").stdout)
    steps, peaks = ([row[c] for row in rows] for c in ("step_ms", "peak_gib"))
    assert steps == sorted(steps) and peaks == sorted(peaks, reverse=True)


def test_annotations_may_name_what_the_function_makes() -> None:
    assert read_annotations(["name:attn=out=data", "model.py:42:dot_general=?,model"]) == {
        "name:attn=out": P("data"),
        "model.py:42:dot_general": P(P.UNCONSTRAINED, "model"),
    }


def test_annotations_and_donation_reach_the_plan(file: Path) -> None:
    arguments = ["suggest", "programs.py:updated", "--topology", "v3:2x2", "--mesh", "data=4,model=2"]
    result = _run(
        *arguments, "--annotate", "[0]=None,(model,data)", "--annotate", "[1]=?,model", "--out", "a.json"
    )
    assert result.exit_code == 0
    plan = autoshard.Plan.from_json((file.parent / "a.json").read_text())
    assert plan.spec("[0]") == P(None, ("model", "data"))
    assert tuple(plan.spec("[1]"))[1] == "model"
    assert [leaf.donated for leaf in plan.inputs] == [True, False]
    assert _run(*arguments, "--donate", "1", "--out", "b.json").exit_code == 0
    plan = autoshard.Plan.from_json((file.parent / "b.json").read_text())
    assert [leaf.donated for leaf in plan.inputs] == [False, True]


def test_a_plan_that_does_not_fit_is_printed_with_exit_code_1(file: Path) -> None:
    arguments = ["suggest", "programs.py:product", "--topology", "v3:2x2", "--mesh", "data=8"]
    result = _run(*arguments, "--memory-limit-gib", "1e-6")
    assert result.exit_code == 1
    assert "DOES NOT FIT" in result.stdout
    assert "note      does not fit: " in result.stdout


def test_show_prints_what_suggest_printed(plan_path: Path) -> None:
    plan = autoshard.Plan.from_json(plan_path.read_text())
    result = _run("show", "p.json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == str(plan) + "\n"
    assert json.loads(_run("show", "p.json", "--json").stdout)["step_seconds"] == plan.step_seconds
    assert len(_run("show", "p.json", "--full").stdout) >= len(result.stdout)


def test_compare_puts_a_plan_beside_the_baselines(plan_path: Path) -> None:
    result = _run(
        "compare", "programs.py:product", "--plan", "p.json", "--baselines", "replicated,data_parallel"
    )
    assert result.exit_code == 0, result.output
    names = [line.split()[0] for line in result.stdout.splitlines()[1:] if not line.startswith("left out")]
    assert sorted(names) == ["data_parallel", "replicated", "suggested"]
    arguments = ["compare", "programs.py:product", "--topology", "v3:2x2", "--mesh", "data=8"]
    result = _run(*arguments, "--baselines", "replicated", "--json")
    found = json.loads(result.stdout)
    assert [row["plan"] for row in found["plans"]] == ["suggested", "replicated"]
    assert all(row["step_ms"] > 0 for row in found["plans"])


def test_validate_says_whether_the_plan_holds(plan_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Report:
        ok = True

        def __str__(self) -> str:
            return "numerics: as predicted"

        def to_dict(self) -> dict[str, Any]:
            return {"ok": self.ok}

    levels = []

    def validate(plan: autoshard.Plan, fn: Any, *args: Any, level: str) -> Report:
        levels.append((plan.name, len(args), level))
        return Report()

    monkeypatch.setattr(autoshard.Plan, "validate", validate)
    result = _run("validate", "programs.py:product", "p.json", "--level", "numerics")
    assert (result.exit_code, result.stdout) == (0, "numerics: as predicted\n")
    assert levels == [("suggested", 2, "numerics")]
    Report.ok = False
    result = _run("validate", "programs.py:product", "p.json", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (1, {"ok": False})
    assert levels[1] == ("suggested", 2, "compile")


def test_validate_names_a_missing_compiler(plan_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoshard.validate import MissingLibtpuError

    def validate(*_: Any, **__: Any) -> None:
        raise MissingLibtpuError

    monkeypatch.setattr(autoshard.Plan, "validate", validate)
    result = _run("validate", "programs.py:product", "p.json")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: The plan could not be validated at the level 'compile': ")
    assert 'pip install "autoshard[tpu]"' in result.stderr


def test_topologies_lists_the_slices() -> None:
    text = _run("topologies").stdout
    assert "v3: 2 devices per chip" in text and "v3:32x32" in text
    assert "v5e: 1 device per chip" in text
    assert "h100: GPUs, each 74.5 GiB usable HBM and 989 TFLOP/s (bf16)" in text and "h100:8 (8)" in text
    assert "4*h100:8" in text and "2*v5e:16x16 (two slices over DCN)" in " ".join(text.split())
    found = json.loads(_run("topologies", "--json").stdout)
    assert dict(zip(found["v3"]["slices"], found["v3"]["devices"], strict=True))["v3:4x4"] == 4 * 4 * 2
    assert found["h100"]["platform"] == "gpu" and "h100:8" in found["h100"]["slices"]


@pytest.mark.parametrize("command", [[], ["suggest"], ["show"], ["compare"], ["validate"], ["topologies"]])
def test_help_is_there(command: list[str]) -> None:
    result = _run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout
    if command and command[0] in ("suggest", "compare", "validate"):
        assert "(fn, args, donate_argnums)" in " ".join(result.stdout.split())


def test_every_option_has_help() -> None:
    for name, command in main.commands.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} {parameter.opts}"


# Bad input ---------------------------------------------------------------------------------------------

ALL = "product, updated, fails, branches, nothing, single, uncallable, odd_donation"
WANTED = (
    "a factory returns (fn, args) or (fn, args, donate_argnums), args a tuple with one entry per argument"
)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            "absent.py:f",
            "absent.py does not exist. Give the Python file that holds the factory, as FILE.py:f",
        ),
        (".:f", ". is a folder. Give the Python file that holds the factory"),
        ("absent.module:f", "There is no file and no module 'absent.module'. Give FILE.py:factory, or"),
        (
            "programs.py",
            f"'programs.py' names no factory. Give FILE.py:factory, with one of those in programs.py: {ALL}.",
        ),
        ("programs.py:step", f"programs.py has no factory 'step'. There are: {ALL}."),
        (
            "programs.py:STEP",
            "STEP in programs.py is of type int, no factory: it should be a function without",
        ),
        (
            "programs.py:nothing",
            f"The factory nothing in programs.py returned something of type NoneType; {WANTED}.",
        ),
        (
            "programs.py:single",
            f"The factory single in programs.py returned args of type ShapeDtypeStruct; {WANTED}",
        ),
        ("programs.py:uncallable", "returned something of type int as fn, which cannot be called; a factory"),
        ("programs.py:odd_donation", "returned '0' as donate_argnums; a factory returns"),
        (
            "programs.py:needs",
            "The factory needs in programs.py failed:\nTypeError: needs() missing 1 required",
        ),
    ],
)
def test_a_wrong_program_is_explained(file: Path, program: str, expected: str) -> None:
    result = _run("suggest", program, "--topology", "v3:2x2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_a_failing_factory_shows_the_users_own_lines(file: Path) -> None:
    result = _run("suggest", "programs.py:fails", "--topology", "v3:2x2")
    assert result.exit_code == 2
    line = file.read_text().splitlines().index('    return shapes["y"]') + 1
    assert result.stderr == (
        "error: The factory fails in programs.py failed:\n"
        f'  File "{file}", line {line}, in fails\n'
        '    return shapes["y"]\n'
        "KeyError: 'y'\n"
    )


def test_a_file_that_does_not_import_shows_the_users_own_lines(file: Path) -> None:
    (file.parent / "broken.py").write_text("x = 1\ny = x / 0\n")
    result = _run("suggest", "broken.py:f", "--topology", "v3:2x2")
    assert result.exit_code == 2
    assert "broken.py failed while it was imported:\n" in result.stderr
    assert (
        'broken.py", line 2, in <module>\n    y = x / 0\nZeroDivisionError: division by zero\n'
        in result.stderr
    )
    (file.parent / "wrong.py").write_text("def f(:\n")
    result = _run("suggest", "wrong.py:f", "--topology", "v3:2x2")
    assert result.exit_code == 2
    assert "SyntaxError: invalid syntax" in result.stderr


def test_a_function_that_does_not_trace_shows_the_users_own_lines(file: Path) -> None:
    result = _run("suggest", "programs.py:branches", "--topology", "v3:2x2")
    assert result.exit_code == 2
    assert "fn failed while it was traced with 1 array argument(s) ([0]: float32[8]):" in result.stderr
    assert "It failed at:\n" in result.stderr
    assert "in fn\n    if x.sum() > 0:\n" in result.stderr


def test_a_factory_imports_its_neighbours(file: Path) -> None:
    (file.parent / "neighbour_of_programs.py").write_text("SIZE = 64\n")
    (file.parent / "importing.py").write_text(
        "import jax\n"
        "from neighbour_of_programs import SIZE\n"
        "def factory():\n"
        "    return (lambda x: x + 1), (jax.ShapeDtypeStruct((SIZE, SIZE), 'float32'),)\n"
    )
    assert _run("suggest", "importing.py:factory", "--topology", "v3:2x2", "--mesh", "data=8").exit_code == 0


def test_a_module_can_be_named_instead_of_a_file() -> None:
    result = _run("suggest", "autoshard.zoo.dense:nope", "--topology", "v3:2x2")
    assert result.exit_code == 2
    assert "autoshard.zoo.dense has no factory 'nope'. There are: " in result.stderr
    assert "dense_8b" in result.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--topology", "v9:2x2"], "Cannot read 'v9:2x2' as a topology: 'v9' is no known generation."),
        (
            ["--topology", "v3:2x2", "--mesh", "data"],
            "--mesh 'data': 'data' is no axis. Give names and sizes",
        ),
        (["--topology", "v3:2x2", "--mesh", "a=2,a=4"], "--mesh 'a=2,a=4' names the axis 'a' twice."),
        (["--topology", "v3:2x2", "--mesh", "a=0"], "mesh {'a': 0}: axis 'a' has size 0; names are text"),
        (["--topology", "v3:2x2", "--mesh", "a=16"], "needs 16 devices, but v3:2x2 has 8"),
        (
            ["--topology", "v3:2x2", "--donate", "x"],
            "--donate 'x': 'x' is no number. Give positions, such as",
        ),
        (["--topology", "v3:2x2", "--donate", "2"], "--donate donates argument 2, and the function takes 2."),
        (
            ["--topology", "v3:2x2", "--annotate", "[1]"],
            "--annotate '[1]' has no spec. Give a path and an entry",
        ),
        (
            ["--topology", "v3:2x2", "--annotate", "[1]=a b"],
            "--annotate '[1]=a b': 'a b' is no entry. An entry is",
        ),
        (
            ["--topology", "v3:2x2", "--annotate", "[1]=a", "--annotate", "[1]=b"],
            "--annotate gives '[1]' two specs. Give one per path.",
        ),
        (
            ["--topology", "v3:2x2", "--mesh", "data=8", "--annotate", "[3]=data"],
            "annotations name no such array:\n  '[3]'; near it: [1]",
        ),
        (
            ["--topology", "v3:2x2", "--mesh", "data=8", "--annotate", "[1]=data,None,None"],
            "has 3 entries but the array has 2 dims",
        ),
        (["--topology", "v3:2x2", "--out", "absent/p.json"], "--out absent/p.json: there is no folder"),
    ],
)
def test_wrong_options_are_explained(file: Path, options: list[str], expected: str) -> None:
    result = _run("suggest", "programs.py:product", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_wrong_plan_files_are_named(plan_path: Path) -> None:
    folder = plan_path.parent
    (folder / "cut.json").write_text(plan_path.read_text()[:500])
    (folder / "image.json").write_bytes(b"\x89PNG\xff\xfe")
    for name, expected in [
        ("cut.json", "error: cut.json: The plan file is cut off: "),
        ("image.json", "error: image.json: The file is no plan: it is not text."),
        ("absent.json", "error: absent.json cannot be read: No such file or directory. Give a plan file.\n"),
    ]:
        result = _run("show", name)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(expected)


@pytest.mark.parametrize("command", [["validate", "p.json"], ["compare", "--plan", "p.json"]])
def test_a_plan_for_another_program_is_refused(plan_path: Path, command: list[str]) -> None:
    result = _run(command[0], "programs.py:updated", *command[1:])
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: p.json: the arguments are not those that the plan was made for:\n"
    )
    assert "[0]['up']: missing; the plan has float32[256, 1024]" in result.stderr


def test_compare_asks_for_slice_and_mesh(file: Path) -> None:
    result = _run("compare", "programs.py:product", "--topology", "v3:2x2")
    assert result.exit_code == 2
    assert "compare needs a slice and a mesh. Give --topology and --mesh, or a --plan." in result.stderr


def test_compare_lists_the_baselines_for_a_wrong_name(file: Path) -> None:
    arguments = ["compare", "programs.py:product", "--topology", "v3:2x2", "--mesh", "data=8"]
    result = _run(*arguments, "--baselines", "zero")
    assert result.exit_code == 2
    assert "'zero'" in result.stderr and "data_parallel" in result.stderr


# Readers of options ------------------------------------------------------------------------------------


def test_options_are_read() -> None:
    assert read_mesh(None) is None
    assert list((read_mesh(" b=8, a=4") or {}).items()) == [("b", 8), ("a", 4)]
    assert read_integers(None, "--donate") is None
    assert read_integers("0, -1", "--donate") == (0, -1)
    assert read_integers("", "--donate") == ()


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("data,None", P("data", None)),
        ("(data,model),None,x", P(("data", "model"), None, "x")),
        ("?,data", P(P.UNCONSTRAINED, "data")),
        ("P('data', ('a', 'b'))", P("data", ("a", "b"))),
        ("", P()),
    ],
)
def test_specs_are_read(text: str, spec: P) -> None:
    assert read_annotations([f"[0]['a=b']={text}"]) == {"[0]['a=b']": spec}


# As a process ------------------------------------------------------------------------------------------


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "autoshard", *arguments]


def _environment() -> dict[str, str]:
    root = str(Path(autoshard.__file__).parent.parent)
    return {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"} | {
        "PYTHONPATH": root
    }


def test_in_a_pipe_there_is_text_and_no_progress(file: Path) -> None:
    """Nor does JAX look for accelerators, which is slow and says so on standard error."""
    result = subprocess.run(
        _command("suggest", "programs.py:product", "--topology", "v3:2x2", "--mesh", "data=8"),
        cwd=file.parent,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    assert result.stdout.startswith("Plan: suggested\n")


def test_an_interrupt_ends_cleanly(file: Path) -> None:
    file.write_text(
        "import time, jax\ndef factory():\n    print('started', flush=True)\n    time.sleep(60)\n"
    )
    heard = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # a job in the background ignores it
    run = f"import runpy, signal; {heard}; runpy.run_module('autoshard', run_name='__main__')"
    process = subprocess.Popen(
        [sys.executable, "-c", run, "suggest", "programs.py:factory", "--topology", "v3:2x2"],
        cwd=file.parent,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, "interrupted\n")


def test_an_interrupted_search_gives_its_best_plan(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = autoshard.suggest

    def interrupted(*args: Any, progress: Any, **options: Any) -> autoshard.Plan:
        plan = real(*args, **options)
        try:  # as the search does: it keeps the interrupt to itself
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass
        return plan

    monkeypatch.setattr(autoshard, "suggest", interrupted)
    arguments = ["suggest", "programs.py:product", "--topology", "v3:2x2", "--mesh", "data=8"]
    result = _run(*arguments, "--out", "best.json")
    assert result.exit_code == 130
    assert result.stdout.startswith("Plan: suggested\n")
    assert result.stderr == "interrupted: the plan is the best one so far\n"
    assert (file.parent / "best.json").exists()


def test_an_interrupt_ends_the_search_over_meshes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def interrupted(*args: Any, progress: Any, **options: Any) -> None:
        for mesh in ("mesh 1", "mesh 2", "mesh 3"):
            progress(mesh)
            tried.append(mesh)
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                pass

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(autoshard, "suggest", interrupted)
    result = _run("suggest", "programs.py:product", "--topology", "v3:2x2")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")
    assert tried == ["mesh 1"]
    assert signal.getsignal(signal.SIGINT) is before
