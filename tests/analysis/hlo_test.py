"""Reading compiled programs: numbers worked out by hand for programs small enough to do so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tfm.analysis.hlo import Collective, parse_program

PROGRAM = """HloModule example

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %state = (s32[], bf16[8,4]{1,0}) parameter(0)
  %x = bf16[8,4]{1,0} get-tuple-element(%state), index=1
  %gathered = bf16[32,4]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %part = bf16[8,4]{1,0} reduce-scatter(%gathered), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %sent = bf16[8,4]{1,0} collective-permute(%part), channel_id=3, source_target_pairs={{0,4},{4,0}}
  ROOT %next = (s32[], bf16[8,4]{1,0}) tuple(%sent)
}

%condition (state: (s32[], bf16[8,4])) -> pred[] {
  %state = (s32[], bf16[8,4]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (p: bf16[8,4]) -> f32[2,2] {
  %p = bf16[8,4]{1,0} parameter(0)
  %start = (s32[], bf16[8,4]{1,0}) tuple(%p)
  %loop = (s32[], bf16[8,4]{1,0}) while(%start), condition=%condition, body=%body, TURNS
  %y = f32[2,2]{1,0} convert(%p)
  %alone = f32[2,2]{1,0} all-reduce(%y), replica_groups={{0},{1}}, to_apply=%add
  ROOT %total = f32[2,2]{1,0} all-reduce(%alone), replica_groups=mesh['x'=4,'y'=2] {'y'}, to_apply=%add
}
""".replace("TURNS", 'backend_config={"known_trip_count":{"n":"5"}}')


def test_collectives_by_hand():
    assert parse_program(PROGRAM).collectives() == [
        Collective("all-reduce", 16, 2, 2, 1), Collective("all-gather", 256, 4, 7, 5),
        Collective("reduce-scatter", 64, 4, 4, 5), Collective("collective-permute", 64, 2, 5, 5)]


WIDENED = """HloModule example

%widen (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %narrow = bf16[8,4]{1,0} convert(%x)
  %wide = f32[8,4]{1,0} convert(%narrow)
  ROOT %turned = f32[8,4]{0,1} copy(%wide)
}

%take (a: s32[], sum: f32[8,4]) -> f32[2,4] {
  %sum = f32[8,4]{1,0} parameter(1)
  %a = s32[] parameter(0)
  ROOT %part = f32[2,4]{1,0} dynamic-slice(%sum, %a, %a), dynamic_slice_sizes={2,4}
}

ENTRY %main (p: f32[8,4], q: f32[8,4], i: s32[]) -> f32[2,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %q = f32[8,4]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %w = f32[8,4]{0,1} fusion(%p), kind=kLoop, calls=%widen
  %gathered = f32[32,4]{0,1} all-gather(%w), replica_groups={{0,1,2,3}}, dimensions={0}
  %both = (f32[8,4]{1,0}, f32[8,4]{1,0}) all-reduce(%p, %q), replica_groups={{0,1,2,3}}, to_apply=%add
  %one = f32[8,4]{1,0} get-tuple-element(%both), index=0
  %two = f32[8,4]{1,0} get-tuple-element(%both), index=1
  %mine = f32[2,4]{1,0} fusion(%i, %one), kind=kLoop, calls=%take
  ROOT %out = f32[2,4]{1,0} custom-call(%mine, %two, %gathered)
}
"""


def test_collectives_count_as_an_accelerator_has_them():
    """[32, 4] gathered in 16 bits; of two sums of [8, 4] one is taken in parts of a quarter."""
    assert parse_program(WIDENED).collectives() == [
        Collective("all-gather", 256, 4, 4, 1), Collective("reduce-scatter", 32, 4, 4, 1),
        Collective("all-reduce", 128, 4, 4, 1)]


@pytest.mark.parametrize(("kind", "sent"), [("all-reduce", 150), ("all-gather", 75), ("all-to-all", 75),
                                            ("reduce-scatter", 300), ("collective-permute", 100)])
def test_bytes_sent_round_a_ring_of_four(kind, sent):
    """all-reduce: reduce-scatter of 100 (3 parts of 25) and all-gather (3 parts of 25); a scattered result of 100
    comes from 400, of which 3 parts of 100 are sent."""
    assert Collective(kind, 100, 4, 4, 2).sent == 2 * sent


def test_traffic_of_a_product_is_its_operands_and_result():
    x, y = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 128), jnp.float32)
    text = jax.jit(jnp.matmul).lower(x, y).compile().as_text()
    assert parse_program(text).traffic() == 4 * (64 * 32 + 32 * 128 + 64 * 128)


def test_traffic_of_a_scan_reads_one_slice_in_each_turn():
    """100 turns over slices of [64, 64]: not 100 times the whole stack."""
    x, stack = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((100, 64, 64), jnp.float32)

    def run(x, stack):
        return jax.lax.scan(lambda x, y: (x @ y, None), x, stack)[0]

    slice_bytes = 64 * 64 * 4
    traffic = parse_program(jax.jit(run).lower(x, stack).compile().as_text()).traffic()
    assert 3 * 100 * slice_bytes <= traffic <= 9 * 100 * slice_bytes
