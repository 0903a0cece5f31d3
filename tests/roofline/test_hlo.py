"""Parsing of HLO, and its flops, HBM bytes and collectives against numbers found by hand."""

import re

import jax
import jax.numpy as jnp
import pytest

from ldm_jax.roofline.counts import collectives, hbm_bytes, matmul_flops
from ldm_jax.roofline.hlo import parse_program

PARTITIONED = """HloModule jit_step

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (carry: (s32[], bf16[8,64])) -> (s32[], bf16[8,64]) {
  %carry = (s32[], bf16[8,64]{1,0}) parameter(0)
  %counter = s32[] get-tuple-element(%carry), index=0
  %h = bf16[8,64]{1,0} get-tuple-element(%carry), index=1
  %w = bf16[64,32]{1,0} constant({...})
  %gathered = bf16[64,64]{1,0} all-gather(%w), channel_id=1,
      replica_groups=[4,2]<=[8], dimensions={1}
  ROOT %product = bf16[8,64]{1,0} dot(%h, %gathered), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%condition (carry: (s32[], bf16[8,64])) -> pred[] {
  %carry.1 = (s32[], bf16[8,64]{1,0}) parameter(0)
  %counter.1 = s32[] get-tuple-element(%carry.1), index=0
  %turns = s32[] constant(12)
  ROOT %less = pred[] compare(%counter.1, %turns), direction=LT
}

ENTRY %main (argument: bf16[8,64]) -> f32[64] {
  %argument = bf16[8,64]{1,0} parameter(0)
  %start = (s32[], bf16[8,64]{1,0}, /*index=2*/f32[2]{0}) tuple(%argument)
  %loop = (s32[], bf16[8,64]{1,0}) while(%start), condition=%condition, body=%body
  %listed = f32[64]{0} all-reduce(%start), channel_id=2, replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  %named = f32[64]{0} all-reduce(%listed), channel_id=3,
      replica_groups=mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1','axis_2'}, to_apply=%add
  %halved = f32[64]{0} all-reduce(%named), channel_id=4,
      replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}, to_apply=%add
  %own = f32[16]{0} dynamic-slice(%halved, %counter), dynamic_slice_sizes={16}
  %alone = f32[64]{0} all-reduce(%named), channel_id=5, replica_groups=[8,1]<=[8], to_apply=%add
  ROOT %moved = f32[64]{0} collective-permute(%alone), channel_id=6, source_target_pairs={{0,0},{1,2},{2,1}}
}
"""


def test_collectives():
    found = list(collectives(parse_program(PARTITIONED), devices_per_slice=4))
    assert found == [
        ("all-reduce", 2, True, 256, 1),  # devices 0 and 4
        ("all-reduce", 4, False, 256, 1),  # 0 to 3
        ("reduce-scatter", 4, False, 256, 1),  # an all-reduce whose result is sliced
        ("collective-permute", 2, False, 256, 1),
        ("all-gather", 2, False, 8192, 12),
    ]
    assert [each.sent for each in found] == [256, 2 * 192, 192, 256, 12 * 4096]


def test_a_group_after_a_transposition():
    text = PARTITIONED.replace("[4,2]<=[8]", "[4,2]<=[2,4]T(1,0)")  # devices 0 and 4, 1 and 5, ..
    assert next(each for each in collectives(parse_program(text), 4) if each.kind == "all-gather").spans_slices


def test_unparsable_groups_are_an_error():
    with pytest.raises(ValueError, match="gathered"):
        list(collectives(parse_program(PARTITIONED.replace("[4,2]<=[8]", "?")), 4))


def test_an_array_counts_in_the_type_that_is_sent():
    compiled = PARTITIONED.replace(
        "bf16[64,64]{1,0} all-gather(", "(f8e4m3fn[64,32]{1,0}, f8e4m3fn[64,64]{1,0}) all-gather-start("
    )
    found = list(collectives(parse_program(PARTITIONED), 4, parse_program(compiled)))
    assert found[-1].bytes == 4096
    started = PARTITIONED.replace(
        "bf16[64,64]{1,0} all-gather(", "(bf16[64,32]{1,0}, bf16[64,64]{1,0}) all-gather-start("
    )
    assert list(collectives(parse_program(started), 4))[-1].bytes == 8192  # the result without the operand


def test_an_unknown_type_is_an_error():
    with pytest.raises(ValueError, match="q7"):
        list(collectives(parse_program(PARTITIONED.replace("f32[64]{0} all-reduce", "q7[64]{0} all-reduce")), 4))


def test_matmuls_of_a_loop_count_once_per_iteration():
    assert matmul_flops(parse_program(PARTITIONED)) == 12 * 2 * 8 * 64 * 64


def test_matmuls_of_splash_attention():
    text = """ENTRY %main (q: bf16[2,8,512,128], k: bf16[2,4,512,128]) -> bf16[2,8,512,128] {
  %q = bf16[2,8,512,128]{3,2,1,0} parameter(0)
  %k = bf16[2,4,512,128]{3,2,1,0} parameter(1)
  %call = (f32[2,512,128]{2,1,0}, bf16[2,8,512,128]{3,2,1,0}) custom-call(%q, %k, %k),
      custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="jit(step)/splash_mha_fwd_no_residuals"}
  ROOT %out = bf16[2,8,512,128]{3,2,1,0} get-tuple-element(%call), index=1
}
"""
    forward = 2 * 2 * (2 * 8 * 512 * 512 * 128) / 2
    assert matmul_flops(parse_program(text)) == forward
    assert matmul_flops(parse_program(text.replace("mha_fwd_no_residuals", "mha_dkv"))) == 2.5 * forward


def test_matmuls_of_a_nested_scan():
    def run(x, ws):
        def outer(x, w):
            return jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0], None

        return jax.lax.scan(outer, x, ws)[0]

    lowered = jax.jit(run).lower(jnp.ones((3, 7)), jnp.ones((4, 7, 7)))
    text = lowered.compiler_ir("hlo").as_hlo_text(print_large_constants=False)
    names = "\n".join("%" + line if line and line[0] not in " }HE" else line for line in text.splitlines())
    assert matmul_flops(parse_program(_with_percent_signs(names))) == 4 * 5 * 2 * 3 * 7 * 7


def _with_percent_signs(text):
    """JAX prints names without the % of the compilers' texts."""
    defined = set(re.findall(r"^\s*(?:ROOT )?([\w.-]+) = ", text, re.MULTILINE)) | set(
        re.findall(r"^%?(?:ENTRY )?([\w.-]+) .*\{$", text, re.MULTILINE)
    )
    return re.sub(
        r"(?<![\w.%-])(" + "|".join(map(re.escape, sorted(defined, key=len, reverse=True))) + r")(?![\w.=-])",
        r"%\1",
        text,
    )


COMPILED = """HloModule jit_step

%take (p0: f32[24,16,128], p1: s32[]) -> f32[16,128] {
  %p0 = f32[24,16,128]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %one = f32[1,16,128]{2,1,0} dynamic-slice(%p0, %p1), dynamic_slice_sizes={1,16,128}
  ROOT %flat = f32[16,128]{1,0} bitcast(%one)
}

%put (q0: f32[24,16,128], q1: f32[1,16,128], q2: s32[]) -> f32[24,16,128] {
  %q0 = f32[24,16,128]{2,1,0} parameter(0)
  %q1 = f32[1,16,128]{2,1,0} parameter(1)
  %q2 = s32[] parameter(2)
  ROOT %after = f32[24,16,128]{2,1,0} dynamic-update-slice(%q0, %q1, %q2)
}

ENTRY %main (stack: f32[24,16,128], place: s32[]) -> f32[24,16,128] {
  %stack = f32[24,16,128]{2,1,0:T(8,128)} parameter(0)
  %place = s32[] parameter(1)
  %layer = f32[16,128]{1,0:T(8,128)S(1)} fusion(%stack, %place), kind=kLoop, calls=%take
  %on_chip = f32[16,128]{1,0:T(8,128)S(1)} add(%layer, %layer)
  %copy-start = (f32[16,128]{1,0:T(8,128)}, f32[16,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%on_chip)
  %copy-done = f32[1,16,128]{2,1,0:T(8,128)} copy-done(%copy-start)
  ROOT %stacked = f32[24,16,128]{2,1,0:T(8,128)} fusion(%stack, %copy-done, %place), kind=kLoop, calls=%put
}
"""


def test_hbm_bytes():
    # A slice is read and the sum is written; then the slice is read and written into the stack.
    assert hbm_bytes(parse_program(COMPILED)) == pytest.approx(4 * 16 * 128 * 4, abs=16)
