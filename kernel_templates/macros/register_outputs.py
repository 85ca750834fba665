"""What the register-state scans of the backward add: states as outputs, and Gamma o Ab."""

from ..contract import Buffer
from ..language import T, macro
from .register_products import decay_and_store
from .register_roles import HALF, ROWS, WARP
from .register_tiles import PRELUDE as TILES
from .register_tiles import to_registers

PRELUDE = TILES + r"""
// A swizzled 64 x 64 tile of bf16 into the registers of an accumulator.
QLA_DEVICE void qla_load_tile(float* x, const void* tile, int offset) {
  QLA_UNROLL for (int i = 0; i < 4; ++i) {
    unsigned v[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(qla_shared(tile, offset ^ (i << 5))));
    QLA_UNROLL for (int j = 0; j < 4; ++j) {
      x[8 * i + 2 * j] = __uint_as_float(v[j] << 16);
      x[8 * i + 2 * j + 1] = __uint_as_float(v[j] & 0xffff0000u);
    }
  }
}
// x = factor(column) * x; the first 8 column factors are in registers, the others still in shared memory.
QLA_DEVICE void qla_scale_columns(float* x, const float* factor, const float* shared_factor) {
  QLA_UNROLL for (int i = 0; i < 8; ++i) {
    float f[2];
    if (i < 4) { f[0] = factor[2 * i]; f[1] = factor[2 * i + 1]; } else qla_load_pair(f, shared_factor + 8 * i);
    QLA_UNROLL for (int h = 0; h < 2; ++h) { x[4 * i + 2 * h] *= f[0]; x[4 * i + 2 * h + 1] *= f[1]; }
  }
}
// out = factor(column) * x, both bf16.
QLA_DEVICE void qla_scale_column_pairs(const void* from, void* to, const float* shared_factor) {
  const unsigned* x = (const unsigned*)from;
  unsigned* out = (unsigned*)to;
  QLA_UNROLL for (int i = 0; i < 8; ++i) {
    float f[2];
    qla_load_pair(f, shared_factor + 8 * i);
    QLA_UNROLL for (int h = 0; h < 2; ++h) {
      unsigned pair = x[2 * i + h];
      out[2 * i + h] = qla_pack(f[0] * __uint_as_float(pair << 16), f[1] * __uint_as_float(pair & 0xffff0000u));
    }
  }
}
// out = x in bf16, and x = -factor(column) * x in bf16.
QLA_DEVICE void qla_keep_and_erase(const float* x, void* kept, void* erased, const float* shared_factor) {
  unsigned *k = (unsigned*)kept, *e = (unsigned*)erased;
  QLA_UNROLL for (int i = 0; i < 8; ++i) {
    float f[2];
    qla_load_pair(f, shared_factor + 8 * i);
    QLA_UNROLL for (int h = 0; h < 2; ++h) {
      const float* v = x + 4 * i + 2 * h;
      k[2 * i + h] = qla_pack(v[0], v[1]);
      e[2 * i + h] = qla_pack(-f[0] * v[0], -f[1] * v[1]);
    }
  }
}
// factor * accumulator in bf16 into a swizzled 64 x 64 tile; the accumulator stays as it is.
QLA_DEVICE void qla_store_scaled(const float* x, void* tile, int offset, float factor) {
  QLA_UNROLL for (int i = 0; i < 4; ++i) {
    const float* v = x + 8 * i;
    qla_store_matrix(tile, offset ^ (i << 5), qla_pack(factor * v[0], factor * v[1]), qla_pack(factor * v[2], factor * v[3]),
                     qla_pack(factor * v[4], factor * v[5]), qla_pack(factor * v[6], factor * v[7]));
  }
}
"""


@macro
def decay_inverse(tiles, stage, product_stage, registers, lane_offset, row_factor, column_factor, warp, diagonal):
    # G = Gamma o Ab
    T.call_extern(
        "handle", "qla_load_tile", T.address_of(registers[0]), T.access_ptr(tiles.Ab[stage, 0, 0], "r", HALF * HALF), lane_offset
    )
    decay_and_store(registers, tiles.G, product_stage, lane_offset, row_factor, column_factor, 0.0, warp, diagonal)


STATE_STAGES = 2                         # so that the stores of a chunk may last into the next one


def state_buffer(dtype: str) -> Buffer:
    """States on their way to memory: two tiles for each state warpgroup."""
    return Buffer("s", (HALF, HALF), dtype, 4 * STATE_STAGES)


def state_barriers(warpgroup: int) -> dict[str, tuple[int, int]]:
    """Of those, by warpgroup and stage."""
    return {"s_full": (warpgroup, 2 * STATE_STAGES), "s_free": (WARP, 2 * STATE_STAGES)}


def state_stage(half, i):
    return 2 * (i % STATE_STAGES) + half


@macro
def emit_state(tiles, half, i, state, registers, lane_offset, factor):
    # The state as it is before the i-th chunk of the block, once the store of two chunks before has read the tiles. Who calls
    # this says state_is_emitted() where the matrix stores have long landed, behind a product: see docs/tilelang.md.
    to_registers(ROWS, 2 * HALF, state, registers)
    stage = state_stage(half, i)
    T.barrier_wait(tiles.barriers["s_free"][stage], (i // STATE_STAGES + 1) % 2)
    for part in T.unroll(2):
        T.call_extern(
            "handle", "qla_store_scaled", T.address_of(registers[part * 32]),
            T.access_ptr(tiles.s[2 * stage + part, 0, 0], "r", HALF * HALF), lane_offset, factor,
        )  # fmt: skip


def state_is_emitted(tiles, half, i):
    return T.barrier_arrive(tiles.barriers["s_full"][state_stage(half, i)])


STATE_COPIES = 4                         # that start_state_store leaves in flight


@macro
def start_state_store(tiles, i, states, row, head, part, is_kept=True):
    # what emit_state left in the tiles, to memory if it is kept
    for half in T.unroll(2):
        stage = state_stage(half, i)
        T.barrier_wait(tiles.barriers["s_full"][stage], i // STATE_STAGES % 2)
        T.fence_proxy_async()            # on the reader's side of the barrier: the writers would wait for it
        value = part * ROWS + half * HALF
        if is_kept:
            T.tma_copy(tiles.s[2 * stage, :, :], states[row, head, value : value + HALF, 0:HALF])
            T.tma_copy(tiles.s[2 * stage + 1, :, :], states[row, head, value : value + HALF, HALF : 2 * HALF])


@macro
def free_states(tiles, i):
    # once the copies of the i-th chunk have read their tiles
    for half in T.unroll(2):
        T.barrier_arrive(tiles.barriers["s_free"][state_stage(half, i)])
