# ruff: noqa: E501 (HLO text has long lines)
"""The reading of optimised HLO text: shapes, loops, replica groups, collectives, flops, memory."""

import doctest
import importlib

import pytest

from autoshard.validate import collectives, memory
from autoshard.validate.collectives import find_collectives, parse_replica_groups, step_bytes_by_kind
from autoshard.validate.hlo import HloParseError, element_bits, parse_module, parse_shape
from autoshard.validate.loops import schedule
from autoshard.validate.work import measure

MESH = {"x": 2, "y": 4}

COLLECTIVES = """\
HloModule snippets, is_scheduled=true, num_partitions=8

FileNames
1 "model.py"

FunctionNames
1 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (input: f32[64,32]) -> f32[16,32] {
  %input = f32[64,32]{1,0:T(8,128)} parameter(0)
  %inner = f32[64,32]{1,0:T(8,128)} all-reduce(%input), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %slice = f32[16,32]{1,0:T(8,128)} dynamic-slice(%inner, %zero, %zero), dynamic_slice_sizes={16,32}
}

%chain.1 (p: bf16[8,16]) -> bf16[32,16] {
  %p = bf16[8,16]{1,0} parameter(0)
  ROOT %part.1 = bf16[32,16]{1,0} all-gather(%p), channel_id=9, replica_groups=[2,4]<=[8], dimensions={0}, \
frontend_attributes={chain_id="1"}
}

%chain.2 (q: bf16[8,16]) -> bf16[32,16] {
  %q = bf16[8,16]{1,0} parameter(0)
  ROOT %part.2 = bf16[32,16]{1,0} all-gather(%q), channel_id=9, replica_groups=[2,4]<=[8], dimensions={0}, \
frontend_attributes={chain_id="1"}
}

%exchange (e: s4[64]) -> s4[64] {
  %e = s4[64]{0} parameter(0)
  ROOT %swap = s4[64]{0} all-to-all(%e), channel_id=5, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
}

ENTRY %main (p0: f32[64,32], p1: bf16[8,16], p2: s4[64]) -> f32[64,32] {
  %p0 = f32[64,32]{1,0:T(8,128)} parameter(0)
  %p1 = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(1)
  %p2 = s4[64]{0} parameter(2)
  %pair = (f32[64,32]{1,0}, bf16[8,16]{1,0}) all-reduce(%p0, %p1), channel_id=1, \
replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}, to_apply=%add, \
metadata={op_name="jit(call)/call_exported/jit(autoshard_artifact)/jit(f)/psum" stack_frame_id=1}
  %scattered = f32[16,32]{1,0:T(8,128)} fusion(%p0), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="jit(f)/dot"}
  %gather-start = (bf16[8,16]{1,0}, bf16[16,16]{1,0}) all-gather-start(%p1), channel_id=2, \
replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}
  %gather-done = bf16[16,16]{1,0} all-gather-done(%gather-start)
  %f1 = bf16[32,16]{1,0} fusion(%p1), kind=kCustom, calls=%chain.1
  %f2 = bf16[32,16]{1,0} fusion(%p1), kind=kCustom, calls=%chain.2
  %permute-start = (f32[64,32]{1,0}, f32[64,32]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p0), \
channel_id=4, source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}
  %permute-done = f32[64,32]{1,0} collective-permute-done(%permute-start)
  %async = ((s4[64]{0}), s4[64]{0}) async-start(%p2), calls=%exchange
  %async-done = s4[64]{0} async-done(%async)
  %half = f32[64,32]{1,0} all-reduce(%p0), channel_id=6, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  ROOT %out = f32[64,32]{1,0:T(8,128)} add(%permute-done, %half)
}
"""


def _loop(start: int, limit: int, direction: str, update: str) -> str:
    return f"""\
HloModule loop

%cond (c: (s32[], f32[4], s32[])) -> pred[] {{
  %c = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=2
  ROOT %go = pred[] compare(%i, %n), direction={direction}
}}

%body (p: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %p = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%p), index=0
  %x = f32[4]{{0}} get-tuple-element(%p), index=1
  %m = s32[] get-tuple-element(%p), index=2
  %k = s32[] constant(3)
  %next = s32[] {update}
  %y = f32[4]{{0}} all-reduce(%x), channel_id=1, replica_groups={{}}, to_apply=%body
  ROOT %t = (s32[], f32[4]{{0}}, s32[]) tuple(%next, %y, %m)
}}

ENTRY %main (a: f32[4]) -> f32[4] {{
  %a = f32[4]{{0}} parameter(0)
  %s = s32[] constant({start})
  %s.copy = s32[] copy(%s)
  %l = s32[] constant({limit})
  %init = (s32[], f32[4]{{0}}, s32[]) tuple(%s.copy, %a, %l)
  %w = (s32[], f32[4]{{0}}, s32[]) while(%init), condition=%cond, body=%body
  ROOT %r = f32[4]{{0}} get-tuple-element(%w), index=1
}}
"""


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("pred", 8), ("s4", 4), ("u2", 2), ("bf16", 16), ("f8e4m3fn", 8), ("c64", 64), ("token", 0)],
)
def test_element_bits(dtype: str, bits: int) -> None:
    assert element_bits(dtype) == bits


def test_unknown_element_type_lists_the_known() -> None:
    with pytest.raises(HloParseError, match="unknown HLO element type 'q7'; known: pred, "):
        element_bits("q7")


def test_shapes() -> None:
    arrays = parse_shape("((bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/s4[3]), pred[], f32[<=5,2])")
    assert [array.bytes for array in arrays] == [2 * 8 * 128, 2, 1, 4 * 5 * 2]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'b','a'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh[a=2,b=4] {b:(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]<=[2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
    ],
)
def test_replica_groups(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert parse_replica_groups(text, 8) == groups


def test_unknown_replica_groups() -> None:
    with pytest.raises(HloParseError, match="unknown spelling of replica groups: '<odd>'"):
        parse_replica_groups("<odd>", 8)


def test_collectives_of_every_spelling() -> None:
    module = parse_module(COLLECTIVES)
    found = find_collectives(module, schedule(module), MESH)
    matrix, rows = 4 * 64 * 32, 2 * 8 * 16
    assert [
        (c.kind, c.bytes, c.result_bytes, c.group_size, c.axes, c.whole_axes, c.is_async) for c in found
    ] == [
        ("all-reduce", matrix + rows, matrix + rows, 8, ("x", "y"), True, False),
        ("reduce-scatter", matrix, matrix // 4, 4, ("y",), True, False),
        ("all-gather", 2 * rows, 2 * rows, 2, ("x",), True, True),
        ("all-gather", 4 * rows, 4 * rows, 4, ("y",), True, True),
        ("collective-permute", matrix, matrix, 4, ("y",), True, True),
        ("all-to-all", 64 // 2, 64 // 2, 2, ("x",), True, True),
        ("all-reduce", matrix, matrix, 2, ("y",), False, False),
    ]
    assert [c.count * c.trips for c in found] == [1] * len(found)
    assert (found[0].op_name, found[0].source) == ("jit(f)/psum", "model.py:12")
    assert found[1].op_name == "jit(f)/dot"
    assert str(found[6]).startswith(f"all-reduce over y (part) [2]: {matrix:,} B x 1")
    assert step_bytes_by_kind(found)["all-gather"] == 6 * rows


TRANSFERS = """HloModule slices, num_partitions=4

ENTRY %main (x: f32[512,1024]) -> f32[1024,1024] {
  %x = f32[512,1024]{1,0} parameter(0)
  %token = token[] after-all()
  %recv = (f32[1024,1024]{1,0}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="gather.3_0",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="KIND"}
  %send = (f32[512,1024]{1,0}, u32[], token[]) send(%x, %token), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="gather.3_0",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="KIND"}
  %print = (f32[512,1024]{1,0}, u32[], token[]) send(%x, %token), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="print_0"}
  %done = (f32[1024,1024]{1,0}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %result = f32[1024,1024]{1,0} get-tuple-element(%done), index=0
}
"""


@pytest.mark.parametrize(
    ("mesh", "axes", "whole"), [({"pod": 2, "x": 4}, "pod", True), ({"d": 8}, "d", False)]
)
def test_a_transfer_between_slices_is_a_collective(mesh: dict[str, int], axes: str, whole: bool) -> None:
    module = parse_module(TRANSFERS.replace("KIND", "ALL_GATHER"))
    (found,) = find_collectives(module, schedule(module), mesh, 2)
    assert (found.kind, found.bytes, found.slices, found.group_size) == ("all-gather", 4 * 1024 * 1024, 2, 2)
    assert (found.axes, found.whole_axes, found.name) == ((axes,), whole, "gather.3")


def test_an_unknown_transfer_between_slices_is_refused() -> None:
    module = parse_module(TRANSFERS.replace("KIND", "SHUFFLE"))
    with pytest.raises(HloParseError, match="unknown transfer between slices: SHUFFLE; known: ALL_REDUCE, "):
        find_collectives(module, schedule(module), {"d": 8}, 2)


def test_without_a_mesh_there_are_groups_but_no_axes() -> None:
    module = parse_module(COLLECTIVES)
    found = find_collectives(module, schedule(module), {})
    assert {c.axes for c in found} == {()}
    assert found[1].group_size == 4


@pytest.mark.parametrize(
    ("start", "limit", "direction", "update", "trips"),
    [
        (0, 5, "LT", "add(%j, %k)", 2),
        (0, 6, "LE", "add(%j, %k)", 3),
        (0, 3_000_000_000, "LT", "add(%j, %k)", 1_000_000_000),
        (12, 0, "GT", "subtract(%j, %k)", 4),
        (9, 3, "NE", "subtract(%j, %k)", 2),
        (7, 3, "LT", "add(%j, %k)", 0),
        # Not affine: 1, 3, 9, 27, 81, 243.
        (1, 100, "LT", "multiply(%j, %k)", 5),
        (0, 3, "LT", "add(%k, %k)", 1),
        (0, 5, "LT", "custom-call(%j)", None),
    ],
)
def test_trip_counts(start: int, limit: int, direction: str, update: str, trips: int | None) -> None:
    module = parse_module(_loop(start, limit, direction, update))
    steps = schedule(module)
    assert steps.trip_counts == ({} if trips is None else {"w": trips})
    assert steps.unknown_loops == (("w",) if trips is None else ())
    (collective,) = find_collectives(module, steps, {"x": 2})
    assert collective.trips == (1 if trips is None else trips)


def test_a_stated_trip_count_is_believed() -> None:
    text = _loop(0, 5, "LT", "custom-call(%j)").replace(
        "body=%body\n", 'body=%body, backend_config={"known_trip_count":{"n":"11"}}\n'
    )
    assert schedule(parse_module(text)).trip_counts == {"w": 11}


def test_flops_cycles_and_traffic() -> None:
    text = """\
HloModule work

%fused (a: bf16[1000,64], i: s32[]) -> bf16[8,64] {
  %a = bf16[1000,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %rows = bf16[8,64]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={8,64}
}

ENTRY %main (p: bf16[1000,64], w: bf16[64,32], i: s32[], g: f32[4,16,64], h: f32[4,64,8]) -> bf16[8,32] {
  %p = bf16[1000,64]{1,0} parameter(0)
  %w = bf16[64,32]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %g = f32[4,16,64]{2,1,0} parameter(3)
  %h = f32[4,64,8]{2,1,0} parameter(4)
  %f = bf16[8,64]{1,0} fusion(%p, %i), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"40"}
  %batched = f32[4,16,8]{2,1,0} dot(%g, %h), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, \
rhs_contracting_dims={1}
  %window = f32[4,16,8]{2,1,0} convolution(%g, %h), window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf
  ROOT %o = bf16[8,32]{1,0} convolution(%f, %w), dim_labels=bf_io->bf, backend_config={"estimated_cycles":"70"}
}
"""
    module = parse_module(text)
    work = {w.name: w for w in measure(module, schedule(module))}
    assert work["f"].bytes == 2 * (2 * 8 * 64) + 4
    assert work["o"].flops == 2 * 8 * 64 * 32
    # A batch of four products, as TPU modules write it: one tap of the dilated window meets an element.
    assert work["window"].flops == work["batched"].flops == 2 * 4 * 16 * 64 * 8
    assert (work["f"].cycles, work["batched"].cycles, work["o"].cycles) == (40, None, 70)


def test_operands_with_shapes_and_without_percent_signs() -> None:
    text = "HloModule m\n\nENTRY main {\n  a = f32[8]{0} parameter(0)\n  ROOT b = f32[8]{0} add(f32[8]{0} a, f32[8]{0} a)\n}\n"
    assert parse_module(text).entry.root.operands == ("a", "a")


def test_text_that_is_not_hlo() -> None:
    with pytest.raises(HloParseError, match="no HLO computation in a text of 1 lines that starts 'hello'"):
        parse_module("hello")
    with pytest.raises(HloParseError, match="line 4 of the HLO text has no opcode: 'ROOT %a = f32'"):
        parse_module("HloModule m\n\nENTRY %main {\n  ROOT %a = f32\n}\n")


def test_memory_of_a_stopped_compilation() -> None:
    plan = memory.memory_of_buffers(
        "allocation 0: size 4096, page 0, parameter 0, shape |f32[1024]| at ShapeIndex {}, maybe-live-out:\n"
        "allocation 1: size 100, page 0, parameter 1, shape |s32[25]| at ShapeIndex {}:\n"
        "allocation 2: size 7, page 0, constant:\n"
        "allocation 3: size 50, page 0, maybe-live-out:\n"
        "allocation 4: size 64, color 6, page 0, preallocated-temp:\n"
        "allocation 5: size 1000, page 0, preallocated-temp:\n"
    )
    assert (plan.argument_bytes, plan.output_bytes, plan.alias_bytes) == (4196, 4146, 4096)
    assert plan.total_bytes == 4096 + 100 + 50 + 1000


def test_out_of_memory_message() -> None:
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (16.38G) exceeds available HBM (15.48G). HLO module: jit_f."
    )
    found = memory.parse_out_of_memory(message)
    assert found.required_bytes == round(16.38 * 2**30)
    assert str(found) == "out of memory: needs 16.38 of 15.48 GiB"
    usage = "Memory Space: default (color=0)\nTotal bytes: 17592186044 (16.38GiB)\n"
    assert memory.parse_out_of_memory(message, usage).required_bytes == 17592186044
    assert str(memory.parse_out_of_memory("odd")) == "out of memory: odd"


@pytest.mark.parametrize("module", ["hlo", "collectives", "memory"])
def test_docstring_examples(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"autoshard.validate.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_kinds_are_opcodes() -> None:
    assert len(set(collectives.KINDS)) == len(collectives.KINDS)
