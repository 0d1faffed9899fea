# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803 (sizes are in capitals)
"""The kernel of `Draws`: a dozen operations at once. Imported where Triton is installed."""

import triton
from triton import language as tl

# As in `kondo.sampling`, which is where they are explained.
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))


@triton.jit
def _mix(bits):
    """Return what `kondo.sampling.mix_bits` does."""
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * _MIX_1
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["name", "count"])
def draw(keys, step, result, name, count, BLOCK: tl.constexpr, UNIFORM: tl.constexpr):
    """Write [P, count] bits, or numbers uniform on (0, 1) that are made of them."""
    member = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    state = _mix(_mix(tl.load(keys + member) + name) + tl.load(step))
    bits = _mix(state + (place + 1) * _GOLDEN)
    if UNIFORM:
        drawn = ((bits >> 41 & 0x7FFFFF).to(tl.float32) + 0.5) * 0.00000011920928955078125
    else:
        drawn = bits
    tl.store(result + member * count + place, drawn, mask=place < count)
