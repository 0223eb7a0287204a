"""The program that runs in a process of its own: it compiles an artifact, or runs artifacts, and reports.

`autoshard.validate.process` starts this file as a script with one argument, a folder that holds
`request.json` and the artifacts; the report is `report.json` in the same folder. It imports nothing from
autoshard, so that it starts fast and so that a failure here can only come from JAX or the compiler.

A failure of the compiler is a report with `status` "error" or "out_of_memory"; an abort leaves no report.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# These carry no annotations in JAX.
_SPEC: Any = PartitionSpec
_STRUCT: Any = jax.ShapeDtypeStruct
_WAIT: Any = jax.block_until_ready

_POLL_SECONDS = 0.05


def main(folder: Path) -> None:
    """Do what `folder/request.json` asks and leave the process without running destructors."""
    request = json.loads((folder / "request.json").read_text())
    try:
        if request["task"] == "run":
            report = _run(folder, request)
        elif request["task"] == "compile_each":
            report = _compile_each(folder, request)
        else:
            report = _compile(folder, request)
    except Exception as error:
        report = {"status": "error", "type": type(error).__name__, "message": str(error)}
    _finish(folder, report)


def _finish(folder: Path, report: dict[str, Any]) -> None:
    partial = folder / "report.partial"
    partial.write_text(json.dumps(report))
    partial.replace(folder / "report.json")
    sys.stderr.flush()
    # A plugin may crash while it is torn down; the report is complete, so skip that.
    os._exit(0)


def _devices(request: dict[str, Any]) -> list[Any]:
    """Return the devices in the order of the physical grid: z, y, x, core, which is the order of the ids."""
    if request["platform"] == "cpu":
        return list(jax.devices("cpu"))
    options = dict(request["topology_options"])
    try:
        topology = topologies.get_topology_desc(request["topology"], "tpu", **options)
    except Exception as error:
        if "chips_per_host_bounds" not in str(error) or "chips_per_host_bounds" in options:
            raise
        # The default host of 2x2 chips does not tile this slice; single-chip hosts tile any.
        options["chips_per_host_bounds"] = (1, 1, 1)
        topology = topologies.get_topology_desc(request["topology"], "tpu", **options)
    return sorted(topology.devices, key=lambda device: device.id)


def _mesh(request: dict[str, Any], devices: list[Any]) -> Any:
    shape = dict(request["mesh_shape"]) or {"_": 1}
    count = int(np.prod(list(shape.values())))
    order = request["device_order"] if request["device_order"] is not None else range(count)
    if count > len(devices) or max(order) >= len(devices):
        raise ValueError(
            f"mesh {shape} needs {count} devices, up to number {max(order)}; {request['topology'] or 'cpu'} "
            f"has {len(devices)}"
        )
    grid = np.array([devices[i] for i in order]).reshape(tuple(shape.values()))
    return Mesh(grid, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def _jitted(exported: Any, mesh: Any, donated: list[int]) -> Any:
    """Return a jitted function of the flat inputs of an exported program, sharded as it was exported."""
    kept = set(exported.module_kept_var_idx)

    def call(*leaves: Any) -> Any:
        # An input that the program does not use must not become a parameter of the executable.
        used = [leaf if i in kept else _placeholder(exported.in_avals[i]) for i, leaf in enumerate(leaves)]
        args, kwargs = jax.tree.unflatten(exported.in_tree, used)
        return exported.call(*args, **kwargs)

    replicated = NamedSharding(mesh, _SPEC()) if exported.nr_devices == 1 else None
    inputs = tuple(s if s is not None else replicated for s in exported.in_shardings_jax(mesh))
    return jax.jit(
        call,
        in_shardings=inputs,
        out_shardings=list(exported.out_shardings_jax(mesh)),
        donate_argnums=tuple(donated),
    )


def _placeholder(aval: Any) -> Any:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.zeros(*_key_data(aval)), impl=_key_impl(aval.dtype))
    return jnp.zeros(aval.shape, aval.dtype)


def _key_impl(dtype: Any) -> str:
    for name in ("threefry2x32", "rbg", "unsafe_rbg"):
        if jax.eval_shape(lambda name=name: jax.random.key(0, impl=name)).dtype == dtype:
            return name
    raise ValueError(f"no built-in random generator has keys of type {dtype}")


def _key_data(aval: Any) -> tuple[tuple[int, ...], Any]:
    data = jax.eval_shape(jax.random.key_data, _STRUCT(aval.shape, aval.dtype))
    return data.shape, data.dtype


def _compile_each(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Compile each program in the folder that its number names, and stop at the first that fails."""
    reports = []
    for number, program in enumerate(request["programs"]):
        try:
            reports.append(_compile(folder / str(number), {**request, **program}))
        except Exception as error:
            raise RuntimeError(f"{program['name']}: {type(error).__name__}: {error}") from error
    return {"status": "ok", "reports": reports}


def _compile(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    exported = export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    devices = _devices(request)
    jitted = _jitted(exported, _mesh(request, devices), request["donated"])
    shapes = [_STRUCT(aval.shape, aval.dtype) for aval in exported.in_avals]
    lowered = jitted.lower(*shapes)
    facts = {"devices": len(devices), "lower_seconds": time.perf_counter() - started}

    dump = {"xla_dump_to": str(folder / "dump")}
    # Held by whoever writes the report: this thread or the one that stops it early.
    reporting = threading.Lock()
    options = dict(request["compiler_options"])
    started = time.perf_counter()
    if request["stop_early"] and request["platform"] == "tpu":
        options |= dump
        threading.Thread(target=_stop_early, args=(folder, facts, started, reporting), daemon=True).start()
    try:
        compiled = lowered.compile(options or None)
        reporting.acquire()
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reporting.acquire()
        seconds = time.perf_counter() - started
        if "xla_dump_to" not in options:
            # The message does not say what fills the memory; the dump does.
            try:
                lowered.compile(options | dump)
            except Exception:
                pass
        _save_dump(folder)
        return {"status": "out_of_memory", "message": str(error), "compile_seconds": seconds, **facts}
    seconds = time.perf_counter() - started
    try:
        text = compiled.as_text()
    except Exception:
        # Some modules with SparseCore offload cannot be printed through the client; a dump can.
        lowered.compile(options | dump)
        text = _newest(folder / "dump", "after_codegen").read_text()
    (folder / "hlo.txt").write_text(text)
    memory = compiled.memory_analysis()
    fields = ("argument", "output", "alias", "temp", "generated_code")
    return {
        "status": "ok",
        "complete": True,
        "compile_seconds": seconds,
        "memory": {name: int(getattr(memory, f"{name}_size_in_bytes")) for name in fields},
        **facts,
    }


def _stop_early(folder: Path, facts: dict[str, Any], started: float, reporting: threading.Lock) -> None:
    """Report as soon as the optimised module and its memory plan are on disk, before code generation."""
    while not list((folder / "dump").glob("*after_optimizations_after_buffer_assignment.txt")):
        time.sleep(_POLL_SECONDS)
    reporting.acquire()
    if not _save_dump(folder):
        reporting.release()
        return
    seconds = time.perf_counter() - started
    _finish(folder, {"status": "ok", "complete": False, "compile_seconds": seconds, **facts})


def _newest(dump: Path, stage: str) -> Path:
    found = sorted(dump.glob(f"*.{stage}.txt"), key=lambda path: path.stat().st_size)
    if not found:
        raise FileNotFoundError(f"the compiler wrote no {stage} file")
    return found[-1]


def _save_dump(folder: Path) -> bool:
    """Copy the module and its memory plan out of the dump; of several modules the largest is the program."""
    dump = folder / "dump"
    for stage, target in (
        ("after_optimizations", "hlo.txt"),
        ("after_optimizations-buffer-assignment", "buffers.txt"),
        ("after_optimizations-memory-usage-report", "usage.txt"),
    ):
        try:
            (folder / target).write_bytes(_newest(dump, stage).read_bytes())
        except FileNotFoundError:
            return False
    return True


def _run(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Run each program on the same inputs and save its outputs to `<number>.npz`."""
    provided = dict(np.load(folder / "inputs.npz", allow_pickle=False))
    devices = list(jax.devices("cpu"))
    seconds: list[float] = []
    inputs: list[Any] | None = None
    for number, program in enumerate(request["programs"]):
        exported = export.deserialize(bytearray((folder / f"{number}.bin").read_bytes()))
        if inputs is None:
            inputs = [
                _input(
                    aval,
                    provided.get(str(i)),
                    request["int_bounds"][i],
                    request["float_scale"],
                    request["seed"] + i,
                )
                for i, aval in enumerate(exported.in_avals)
            ]
        mesh = _mesh({**request, **program, "topology": None}, devices)
        jitted = _jitted(exported, mesh, [])
        started = time.perf_counter()
        outputs = _WAIT(jitted(*_wrapped(inputs, exported.in_avals)))
        seconds.append(time.perf_counter() - started)
        np.savez(folder / f"{number}.npz", **{str(i): _plain(x) for i, x in enumerate(outputs)})
    return {"status": "ok", "seconds": seconds}


def _input(aval: Any, given: Any, int_bound: int, float_scale: float, seed: int) -> Any:
    generator = np.random.default_rng(seed)
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        shape, dtype = _key_data(aval)
        return given if given is not None else generator.integers(0, 2**31, shape).astype(dtype)
    dtype = np.dtype(aval.dtype)
    if given is not None:
        # NumPy's files know bfloat16 only as two raw bytes.
        return given.view(dtype) if given.dtype.kind == "V" else given.astype(dtype)
    if dtype == np.bool_:
        return generator.integers(0, 2, aval.shape).astype(dtype)
    if jnp.issubdtype(dtype, np.integer):
        return generator.integers(0, int_bound, aval.shape).astype(dtype)
    values = generator.standard_normal(aval.shape) * float_scale
    if jnp.issubdtype(dtype, np.complexfloating):
        values = values + 1j * generator.standard_normal(aval.shape) * float_scale
    return values.astype(dtype)


def _wrapped(inputs: list[Any], avals: Any) -> list[Any]:
    return [
        jax.random.wrap_key_data(value, impl=_key_impl(aval.dtype))
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
        else value
        for value, aval in zip(inputs, avals, strict=True)
    ]


def _plain(output: Any) -> Any:
    """Return an output as NumPy can store it without loss; narrow floats become float32."""
    if jnp.issubdtype(output.dtype, jax.dtypes.prng_key):
        output = jax.random.key_data(output)
    array = np.asarray(output)
    return array.astype(np.float32) if array.dtype.kind == "V" or array.dtype.num > 24 else array


if __name__ == "__main__":
    main(Path(sys.argv[1]))
