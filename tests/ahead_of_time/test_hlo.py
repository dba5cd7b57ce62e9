"""Collectives read from programs: written by hand, compiled for CPUs, and compiled for TPUs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from bert_jax.ahead_of_time.hlo import Collective, Part, read_collectives, read_parts


def program(*lines: str) -> str:
    return "\n".join(["HloModule m", "", "ENTRY %main (p: f32[8]) -> f32[8] {", *(f"  {line}" for line in lines), "}"])


def only(text: str) -> Collective:
    (found,) = read_collectives(text, 8)
    return found


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", 2), ("{{0,2,4,6},{1,3,5,7}}", 4), ("[4,2]<=[2,4]T(1,0)", 2), ("[1,8]<=[8]", 8),
        ("mesh['a'=2,'b'=4] {'b'}", 4), ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a','b'}", 8),
        ("mesh['a'=8] {'a':(1)2}", 2), ("[2,2,2]<=[8]", 2), ("{}", 8),
    ],
)  # fmt: skip
def test_groups_have_as_many_devices_however_they_are_written(groups: str, devices: int):
    line = f"%x = f32[4,8]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}, use_global_device_ids=true"
    found = only(program(line))
    assert (found.devices, found.bytes) == (devices, 4 * 8 * 4)


@pytest.mark.parametrize(
    ("instruction", "kind", "dtype", "size"),
    [
        ("f32[16]{0:T(8)} all-reduce(%p)", "all-reduce", "f32", 64),
        ("bf16[16]{0} all-reduce(%p)", "all-reduce", "bf16", 32),
        ("(f32[16]{0}, f32[]) all-reduce(%p, %q)", "all-reduce", "f32", 68),
        ("f32[16]{0} all-reduce-start(%p)", "all-reduce", "f32", 64),
        ("pred[16]{0} all-gather(%p)", "all-gather", "pred", 16),
        ("(f32[8]{0}, f32[16]{0}) all-gather-start(%p)", "all-gather", "f32", 64),
        ("f32[16]{0} reduce-scatter(%p)", "reduce-scatter", "f32", 128),
        ("f32[16]{0} all-to-all(%p)", "all-to-all", "f32", 64),
        ("((f32[8], f32[4]), (f32[16], f32[8])) all-gather-start(%p, %q)", "all-gather", "f32", 96),
        ("((f32[16]{0}), f32[8]{0}) reduce-scatter-start(%p)", "reduce-scatter", "f32", 64),
        ("(f32[16]{0}, /*index=1*/f32[16]{0}, u32[], u32[]) all-to-all-start(%p)", "all-to-all", "f32", 64),
    ],
)
def test_kinds_types_and_sizes(instruction, kind, dtype, size):
    found = only(program(f"%x.1 = {instruction}, channel_id=1, replica_groups=[4,2]<=[8]"))
    assert (found.kind, found.dtype, found.bytes, found.devices) == (kind, dtype, size, 2)


def test_a_permutation_has_pairs():
    pairs = "source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}"
    found = only(program(f"%x = f32[16]{{0}} collective-permute(%p), channel_id=1, {pairs}"))
    assert (found.kind, found.devices, found.bytes) == ("collective-permute", 2, 64)


def test_what_stands_in_loops_runs_as_often_as_they_go_round():
    text = """HloModule m

%inner (a: f32[8]) -> f32[8] {
  %one = f32[8]{0} all-gather(%a), channel_id=1, replica_groups=[4,2]<=[8]
}

%inner_condition (a: f32[8]) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%outer (b: f32[8]) -> f32[8] {
  %two = f32[8]{0} all-gather(%b), channel_id=2, replica_groups=[4,2]<=[8]
  %w = (f32[8]{0}) while(%t), condition=%inner_condition, body=%inner, backend_config={"known_trip_count":{"n":"12"}}
}

%outer_condition (b: f32[8]) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%called (c: f32[8]) -> f32[8] {
  %three = f32[8]{0} all-gather(%c), channel_id=3, replica_groups=[4,2]<=[8]
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w = (f32[8]{0}) while(%t), condition=%outer_condition, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %f = f32[8]{0} fusion(%p), kind=kLoop, calls=%called
}
"""
    found = {one.loops: (one.instructions, one.count, one.bytes) for one in read_collectives(text, 8)}
    assert found == {2: (1, 60, 60 * 32), 1: (1, 5, 5 * 32), 0: (1, 1, 32)}


def test_what_is_called_twice_runs_twice_and_an_all_reduce_scatter_is_a_reduce_scatter():
    text = """HloModule m

%all-reduce-scatter.1 (a: f32[8]) -> f32[4] {
  %one = f32[8]{0} all-reduce(%a), channel_id=1, replica_groups=[4,2]<=[8]
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %f = f32[4]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
  %g = f32[4]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
  %h = f32[4]{0} add(%f, %g), metadata={op_name="all-reduce(all-reduce(x))"}
}
"""
    found = only(text)
    assert (found.kind, found.instructions, found.count, found.bytes) == ("reduce-scatter", 1, 2, 64)


def test_a_chain_of_pieces_is_one_collective_and_asynchronous_as_what_is_started():
    piece = '= f32[8]{0} all-gather(%p), channel_id=7, replica_groups=[4,2]<=[8], frontend_attributes={chain_id="3"}'
    text = program(
        f"%a.1 {piece}",
        f"%a.2 {piece}",
        "%b = f32[8]{0} all-gather(%p), channel_id=1, replica_groups=[4,2]<=[8]",
        "%c = (f32[4]{0}, f32[8]{0}) all-gather-start(%p), channel_id=2, replica_groups=[4,2]<=[8]",
    )
    alone, beside = sorted(read_collectives(text, 8), key=lambda one: one.asynchronous)
    assert (alone.asynchronous, alone.count, alone.bytes) == (False, 1, 32)
    assert (beside.asynchronous, beside.count, beside.bytes) == (True, 2, 64)


def test_programs_of_several_slices_count_devices_within_one_and_send_between():
    text = program(
        "%a = f32[16]{0} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3}}",
        "%b = (f32[4]{0:T(8)}, u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true, "
        'frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}',
    )
    within, between = read_collectives(text, 8, slices=2)
    assert (within.devices, within.between_slices, within.asynchronous) == (4, False, False)
    assert (between.kind, between.devices, between.bytes) == ("all-reduce", 2, 16)
    assert (between.between_slices, between.asynchronous) == (True, True)


PROFILED = """HloModule m

%fused (a: f32[8]) -> f32[8] {
  ROOT %m = f32[8]{0} multiply(%a, %a)
}

%body (a: f32[8]) -> f32[8] {
  %f.1 = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/shard_map/transpose(jvp(encoder))/while/body/closed_call/attention/attention/checkpoint/cond/branch_0_fun/transpose(jvp(td,df->tf))/dot_general"}, backend_config={"window_config":{"estimated_cycles":"100"}}
  %f.2 = f32[8]{0} fusion(%f.1), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/shard_map/transpose(jvp(encoder))/while/body/closed_call/attention/checkpoint/rematted_computation/td,df->tf/dot_general"}, backend_config={"window_config":{"estimated_cycles":"10"}}
  %k = f32[8]{0} custom-call(%f.2), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="jit(step)/jvp(encoder)/attention"}
  ROOT %r = f32[8]{0} all-reduce(%k), channel_id=1, replica_groups={{0,1}}
}

%condition (a: f32[8]) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %c = bf16[8]{0:T(8,128)(2,1)} convert(%p), backend_config={"window_config":{"estimated_cycles":"7"}}
  %w = f32[8]{0} while(%c), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"24"}}
  %s.1 = f32[8]{0} fusion(%w), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/optimizer/jit(_where)/select_n"}, backend_config={"window_config":{"estimated_cycles":"20"}}
  %s.2 = f32[8]{0} fusion(%s.1), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/optimizer/jit(_where)/select_n"}, backend_config={"window_config":{"estimated_cycles":"20"}}
  %s.3 = f32[8]{0} fusion(%s.2), kind=kCustom, calls=%fused, metadata={op_name="jit(step)/jvp(jit(_take))/scatter-add"}, backend_config={"window_config":{"estimated_cycles":"9223372036854775807"}}
  ROOT %t = f32[8]{0} fusion(%s.3), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/jvp(jit(take_along_axis))/gather.12"}, backend_config={"window_config":{"estimated_cycles":"3"}}
}
"""  # noqa: E501


def test_parts_sum_the_cycles_of_every_iteration_by_module_operation_and_direction():
    assert read_parts(PROFILED) == [
        Part("encoder/attention", "td,df->tf dot_general", "backward", 2400, 24),
        Part("encoder/attention", "td,df->tf dot_general", "recomputed", 240, 24),
        Part("optimizer", "select_n", "", 40, 2),
        Part("", "convert", "", 7, 1),
        Part("", "gather", "forward", 3, 1),
    ]


def test_iterations_that_xla_does_not_know_are_read_from_the_condition_of_a_scan():
    counted = PROFILED.replace(', backend_config={"known_trip_count":{"n":"24"}}', "")
    assert "known_trip_count" not in counted
    assert read_parts(counted)[0].count == 1
    counted = counted.replace("  ROOT %lt =", "  %n = s32[]{:T(128)} constant(24)\n  ROOT %lt =")
    assert read_parts(counted) == read_parts(PROFILED)


def test_what_is_no_program_is_an_error():
    with pytest.raises(ValueError, match="ENTRY"):
        read_collectives("HloModule m\n", 8)


def test_a_program_that_this_machine_compiles():
    """A sum over two of three axes in a loop of five, and one array gathered."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def body(x):
        def once(total, _):
            return jax.lax.pcast(jax.lax.psum(total, ("data", "tensor")), ("data", "tensor"), to="varying") * 0.5, None

        total, _ = jax.lax.scan(once, x, length=5)
        return jax.lax.all_gather(total, "fsdp", tiled=True)

    cut = PartitionSpec(("data", "fsdp", "tensor"))
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=cut, out_specs=cut))
    text = step.lower(jax.ShapeDtypeStruct((64,), jnp.float32)).compile().as_text()
    assert read_parts(text) == []  # a CPU estimates nothing
    found = {one.kind: one for one in read_collectives(text, 8)}
    total, gathered = found["all-reduce"], found["all-gather"]
    assert (total.devices, total.loops, total.count, total.bytes) == (4, 1, 5, 5 * 8 * 4)
    assert (gathered.devices, gathered.loops, gathered.count, gathered.bytes) == (2, 0, 1, 16 * 4)
