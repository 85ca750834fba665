"""Device helpers for tiles that live in the registers of a warpgroup: CUDA text to put before a kernel.

A wgmma accumulator of 64 rows gives thread t of the warpgroup, in register r(a, b), element (a, b) with
a = 16 (t / 32) + t % 32 / 4 (+ 8) and b = 2 (t % 4) (+ 1) + 8 i. The helpers take such registers as plain arrays, work on
them in place, and move them to and from shared tiles of 64 columns with the 128-byte swizzle by ldmatrix and stmatrix.

Shared pointers come in as access_ptr(..., "r") even where they are written: for "w" TileLang adds a proxy fence of its own
before the next product, 200 to 500 cycles that any barrier operation behind it waits for (measured on an H200).
"""

from ..language import T, macro


def accumulator_register(a, b):
    """Register of element (a, b) of a 64-row accumulator, in the thread that holds it."""
    return (b // 8) * 4 + ((a % 16) // 8) * 2 + b % 2


def row_lane_offset(thread):
    """Byte offset of a lane's row, for ldmatrix and stmatrix of a swizzled 64 x 64 tile whose rows are the accumulator's."""
    warp, lane = thread % 128 // 32, thread % 32
    return (16 * warp + 8 * (lane // 8 % 2) + lane % 8) * 128 + ((lane // 16) ^ (lane % 8)) * 16


def transposed_lane_offset(thread):
    """The same for a tile whose columns are the accumulator's rows; 2048 more for every 16 of its rows."""
    warp, lane = thread // 32 % 4, thread % 32
    return (8 * (lane // 16) + lane % 8) * 128 + ((2 * warp + lane // 8 % 2) ^ (lane % 8)) * 16


@macro
def to_registers(rows, columns, fragment, registers):
    for a, b in T.Parallel(rows, columns):
        registers[accumulator_register(a, b)] = fragment[a, b]


@macro
def from_registers(rows, columns, registers, fragment):
    for a, b in T.Parallel(rows, columns):
        fragment[a, b] = registers[accumulator_register(a, b)]


PRELUDE = r"""
#define QLA_DEVICE static __device__ __forceinline__
#define QLA_UNROLL _Pragma("unroll")

QLA_DEVICE unsigned qla_pack(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
QLA_DEVICE float qla_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
QLA_DEVICE unsigned qla_shared(const void* tile, int offset) {
  return (unsigned)__cvta_generic_to_shared(tile) + offset;
}
QLA_DEVICE void qla_store_matrix(void* tile, int offset, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(qla_shared(tile, offset)), "r"(a), "r"(b), "r"(c), "r"(d));
}
QLA_DEVICE void qla_load_pair(float* to, const float* from) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(qla_shared(from, 0)));
}
QLA_DEVICE void qla_load_one(float* to, const float* from) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(to[0]) : "r"(qla_shared(from, 0)));
}
// The factors of this thread's 16 columns, from an array over columns that begins at its first column.
QLA_DEVICE void qla_load_columns(float* to, const float* from) {
  QLA_UNROLL for (int i = 0; i < 8; ++i) qla_load_pair(to + 2 * i, from + 8 * i);
}
// The same, the first 8 only: the others are loaded where they are used.
QLA_DEVICE void qla_load_first_columns(float* to, const float* from) {
  QLA_UNROLL for (int i = 0; i < 4; ++i) qla_load_pair(to + 2 * i, from + 8 * i);
}
// The values of this thread's two rows, 8 apart, from each of two arrays over rows that lie `distance` floats apart.
QLA_DEVICE void qla_load_rows(float* to, const float* from, int distance) {
  qla_load_one(to, from); qla_load_one(to + 1, from + 8);
  qla_load_one(to + 2, from + distance); qla_load_one(to + 3, from + distance + 8);
}

// tile[row] = factor[row] * accumulator[row] for 64 columns; scales in place: a copy would cost 8 to 12 registers.
QLA_DEVICE void qla_scale_rows_and_store(float* x, void* tile, int offset, float upper, float lower) {
  QLA_UNROLL for (int i = 0; i < 4; ++i) {
    float* v = x + 8 * i;
    v[0] *= upper; v[1] *= upper; v[4] *= upper; v[5] *= upper;
    v[2] *= lower; v[3] *= lower; v[6] *= lower; v[7] *= lower;
    qla_store_matrix(tile, offset ^ (i << 5), qla_pack(v[0], v[1]), qla_pack(v[2], v[3]), qla_pack(v[4], v[5]), qla_pack(v[6], v[7]));
  }
}
// The lower triangle of a 64 x 64 accumulator in bf16. Only the 16 x 16 block on the diagonal needs a mask of its own.
QLA_DEVICE void qla_lower_triangle(const float* x, void* out, int warp, unsigned diagonal) {
  unsigned* pairs = (unsigned*)out;
  QLA_UNROLL for (int i = 0; i < 4; ++i) {
    const float* v = x + 8 * i;
    unsigned edge = i < warp ? ~0u : (i == warp ? diagonal : 0u), right = i < warp ? ~0u : 0u, left = i <= warp ? ~0u : 0u;
    pairs[4 * i] = qla_pack(v[0], v[1]) & edge; pairs[4 * i + 1] = qla_pack(v[2], v[3]) & left;
    pairs[4 * i + 2] = qla_pack(v[4], v[5]) & right; pairs[4 * i + 3] = qla_pack(v[6], v[7]) & edge;
  }
}
// tile = exp2(row - column + log_scale) o accumulator on and below the diagonal, 0 above it, in bf16.
QLA_DEVICE void qla_decay_and_store(float* x, void* tile, int offset, const float* row, const float* column, float log_scale, int warp,
                                    unsigned diagonal) {
  float upper = row[0] + log_scale, lower = row[1] + log_scale;
  QLA_UNROLL for (int i = 0; i < 4; ++i) {
    float* v = x + 8 * i;
    const float* c = column + 4 * i;
    unsigned edge = i < warp ? ~0u : (i == warp ? diagonal : 0u), right = i < warp ? ~0u : 0u, left = i <= warp ? ~0u : 0u;
    v[0] *= qla_exp2(upper - c[0]); v[1] *= qla_exp2(upper - c[1]); v[2] *= qla_exp2(lower - c[0]); v[3] *= qla_exp2(lower - c[1]);
    v[4] *= qla_exp2(upper - c[2]); v[5] *= qla_exp2(upper - c[3]); v[6] *= qla_exp2(lower - c[2]); v[7] *= qla_exp2(lower - c[3]);
    qla_store_matrix(tile, offset ^ (i << 5), qla_pack(v[0], v[1]) & edge, qla_pack(v[2], v[3]) & left,
                     qla_pack(v[4], v[5]) & right, qla_pack(v[6], v[7]) & edge);
  }
}
// w = v - factor o u in bf16; the first 8 column factors are in registers, the others still in shared memory.
QLA_DEVICE void qla_subtract_scaled(const float* u, const void* values, void* out, const float* factor, const float* shared_factor) {
  const unsigned* v = (const unsigned*)values;
  unsigned* w = (unsigned*)out;
  QLA_UNROLL for (int i = 0; i < 8; ++i) {
    float f[2];
    if (i < 4) { f[0] = factor[2 * i]; f[1] = factor[2 * i + 1]; } else qla_load_pair(f, shared_factor + 8 * i);
    QLA_UNROLL for (int h = 0; h < 2; ++h) {
      unsigned x = v[2 * i + h];
      const float* a = u + 4 * i + 2 * h;
      w[2 * i + h] = qla_pack(__uint_as_float(x << 16) - f[0] * a[0], __uint_as_float(x & 0xffff0000u) - f[1] * a[1]);
    }
  }
}
// A 64 x 64 tile, tokens by values, to and from an accumulator of values by tokens.
QLA_DEVICE void qla_load_transposed(void* to, const void* tile, int offset) {
  unsigned* v = (unsigned*)to;
  QLA_UNROLL for (int i = 0; i < 4; ++i)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[4 * i]), "=r"(v[4 * i + 1]), "=r"(v[4 * i + 2]), "=r"(v[4 * i + 3]) : "r"(qla_shared(tile, offset + 2048 * i)));
}
QLA_DEVICE void qla_store_transposed(const void* from, void* tile, int offset) {
  const unsigned* v = (const unsigned*)from;
  QLA_UNROLL for (int i = 0; i < 4; ++i)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(qla_shared(tile, offset + 2048 * i)), "r"(v[4 * i]), "r"(v[4 * i + 1]), "r"(v[4 * i + 2]), "r"(v[4 * i + 3]));
}

// What single warps do. Inclusive sums of 64 values, lane l holding those of l and l + 32; the total in x[2].
QLA_DEVICE void qla_scan64(float* x) {
  int lane = threadIdx.x & 31;
  QLA_UNROLL for (int step = 1; step < 32; step *= 2) {
    float a = __shfl_up_sync(~0u, x[0], step), b = __shfl_up_sync(~0u, x[1], step);
    if (lane >= step) { x[0] += a; x[1] += b; }
  }
  x[1] += __shfl_sync(~0u, x[0], 31);
  x[2] = __shfl_sync(~0u, x[1], 31);
}
// Zero the rows from `first` on of a 64-row tile, kept in parts of 64 columns with 128 bytes a row.
QLA_DEVICE void qla_zero_rows(void* tile, int first, int parts) {
  int lane = threadIdx.x & 31;
  for (int at = first * 128 + lane * 16; at < 64 * 128; at += 512)
    for (int part = 0; part < parts; ++part)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(qla_shared(tile, at + 8192 * part)), "r"(0) : "memory");
}
// The first `rows` rows of a swizzled 64 x 64 tile to global memory, `stride` elements apart.
QLA_DEVICE void qla_store_first_rows(const void* tile, void* global, long long stride, int rows) {
  int lane = threadIdx.x & 31, piece = lane & 7;
  for (int row = lane >> 3; row < rows; row += 4) {
    unsigned a, b, c, d;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(qla_shared(tile, row * 128 + ((piece ^ (row & 7)) << 4))));
    *(uint4*)((char*)global + 2 * row * stride + 16 * piece) = make_uint4(a, b, c, d);
  }
}
// Zero `columns` columns, 64 or 128, of `rows` rows in global memory.
QLA_DEVICE void qla_zero_first_rows(void* global, long long stride, int rows, int columns) {
  int lane = threadIdx.x & 31, lanes = columns / 8;
  for (int row = lane / lanes; row < rows; row += 32 / lanes)
    *(uint4*)((char*)global + 2 * row * stride + 16 * (lane % lanes)) = make_uint4(0, 0, 0, 0);
}
"""
