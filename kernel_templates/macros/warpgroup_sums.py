"""Device helpers of warpgroup_gradients: masked score gradients, sums over rows and columns of accumulators, and dg from them."""

from .register_tiles import PRELUDE as TILES

# Rows of the sums tile, over tokens: Z by row, Z by column from each of four warps, the diagonal, Q o dQ_S, K o (dK_U - dK_S),
# K o dK_S; behind them sum(S o dS') of each of four warps.
BY_ROW, BY_COLUMN, DIAGONAL, QUERIES, KEYS, KEYS_STATE, OVERLAP = 0, 1, 5, 6, 7, 8, 9

PRELUDE = TILES + r"""
QLA_DEVICE void qla_store_one(float* to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(qla_shared(to, 0)), "f"(x) : "memory");
}
QLA_DEVICE void qla_load_four(unsigned* to, const void* tile, int offset) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(qla_shared(tile, offset)));
}
// x = factor exp2(row - column) o x below the diagonal, 0 elsewhere and from row `valid` on. It goes into a swizzled 64 x 64 tile
// in bf16, there with its diagonal unless strict. What is not wanted is chosen away: it may be NaN.
QLA_DEVICE void qla_score_gradient(float* x, void* tile, int offset, const float* row, const float* column, float factor,
                                   int strict, int valid) {
  int lane = threadIdx.x & 31, upper = 16 * ((threadIdx.x >> 5) & 3) + (lane >> 2), first = 2 * (lane & 3);
  QLA_UNROLL for (int i = 0; i < 4; ++i) {
    float *v = x + 8 * i, stored[8];
    QLA_UNROLL for (int e = 0; e < 8; ++e) {
      int a = upper + 8 * ((e >> 1) & 1), b = 16 * i + first + (e & 1) + 8 * (e >> 2);
      float y = v[e] * factor * qla_exp2(row[(e >> 1) & 1] - column[4 * i + 2 * (e >> 2) + (e & 1)]);
      stored[e] = a >= b + strict && a < valid ? y : 0.0f;
      v[e] = !strict && a == b ? 0.0f : stored[e];
    }
    qla_store_matrix(tile, offset ^ (i << 5), qla_pack(stored[0], stored[1]), qla_pack(stored[2], stored[3]),
                     qla_pack(stored[4], stored[5]), qla_pack(stored[6], stored[7]));
  }
}
// The diagonal of a 64 x 64 accumulator.
QLA_DEVICE void qla_store_diagonal(const float* x, float* to) {
  int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  QLA_UNROLL for (int i = 0; i < 4; ++i) QLA_UNROLL for (int e = 0; e < 8; ++e) {
    int a = (lane >> 2) + 8 * ((e >> 1) & 1), b = 2 * (lane & 3) + (e & 1) + 8 * (e >> 2);
    if (i == warp && a == b) qla_store_one(to + 16 * i + a, x[8 * i + e]);
  }
}
// The sums of x o y by row and by column, for this thread's two rows and 16 columns. x has no diagonal: that would add the same
// to both, and where gates are closed it is all that there is.
QLA_DEVICE void qla_add_products(const float* x, const float* y, float* rows, float* columns) {
  QLA_UNROLL for (int i = 0; i < 4; ++i) QLA_UNROLL for (int e = 0; e < 8; ++e) {
    float z = x[8 * i + e] * y[8 * i + e];
    rows[(e >> 1) & 1] += z;
    columns[4 * i + 2 * (e >> 2) + (e & 1)] += z;
  }
}
QLA_DEVICE void qla_store_rows(float* rows, float* to) {
  int lane = threadIdx.x & 31, upper = 16 * ((threadIdx.x >> 5) & 3) + (lane >> 2);
  QLA_UNROLL for (int h = 0; h < 2; ++h) {
    rows[h] += __shfl_xor_sync(~0u, rows[h], 1);
    rows[h] += __shfl_xor_sync(~0u, rows[h], 2);
    if ((lane & 3) == 0) qla_store_one(to + upper + 8 * h, rows[h]);
  }
}
// A lane keeps half of its columns and gives the others away. In a loop over `half` x lay in memory: 1,000 cycles a head.
QLA_DEVICE void qla_add_half(float* x, int half) {
  bool upper = threadIdx.x & 2 * half;
  QLA_UNROLL for (int c = 0; c < half; ++c) {
    float kept = upper ? x[c + half] : x[c], given = upper ? x[c] : x[c + half];
    x[c] = kept + __shfl_xor_sync(~0u, given, 2 * half);
  }
}
// One row of `to` for each of the four warps.
QLA_DEVICE void qla_store_columns(const float* columns, float* to) {
  int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  float x[16];
  QLA_UNROLL for (int c = 0; c < 16; ++c) x[c] = columns[c];
  qla_add_half(x, 8);
  qla_add_half(x, 4);
  qla_add_half(x, 2);
  QLA_UNROLL for (int e = 0; e < 2; ++e) qla_store_one(to + 64 * warp + 2 * lane + e, x[e]);
}
// total += factor(row) x for 64 columns, and rows += what was added times a swizzled tile of the same shape.
QLA_DEVICE void qla_add_scaled_rows(const float* x, float* total, const void* tile, int offset, float upper, float lower,
                                    float* rows) {
  float sums[2] = {0.0f, 0.0f};
  QLA_UNROLL for (int i = 0; i < 4; ++i) {
    unsigned pairs[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3]) : "r"(qla_shared(tile, offset ^ (i << 5))));
    QLA_UNROLL for (int p = 0; p < 4; ++p) {
      const float* v = x + 8 * i + 2 * p;
      float f = p & 1 ? lower : upper;
      total[8 * i + 2 * p] += f * v[0];
      total[8 * i + 2 * p + 1] += f * v[1];
      sums[p & 1] += v[0] * __uint_as_float(pairs[p] << 16);
      sums[p & 1] += v[1] * __uint_as_float(pairs[p] & 0xffff0000u);
    }
  }
  rows[0] += upper * sums[0];
  rows[1] += lower * sums[1];
}
// The first `rows` rows of a 64 x 64 accumulator in bf16 to memory, where they are `stride` elements apart.
QLA_DEVICE void qla_store_accumulator(const float* x, void* global, long long stride, int rows) {
  int lane = threadIdx.x & 31, upper = 16 * ((threadIdx.x >> 5) & 3) + (lane >> 2);
  unsigned* to = (unsigned*)((char*)global + 2 * (upper * stride + 2 * (lane & 3)));
  QLA_UNROLL for (int h = 0; h < 2; ++h) QLA_UNROLL for (int i = 0; i < 8; ++i)
    if (upper + 8 * h < rows) to[4 * h * stride + 4 * i] = qla_pack(x[4 * i + 2 * h], x[4 * i + 2 * h + 1]);
}
// The sum of x o y over two tiles of 128 x 128 in bf16 that are swizzled alike; one number for each warp of the warpgroup. Four
// loads at once and four sums hide latency. A loop: the instructions of three roles are more than their cache holds.
QLA_DEVICE void qla_store_overlap(const void* x, const void* y, float* to) {
  int thread = threadIdx.x & 127;
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  _Pragma("unroll 1") for (int i = 0; i < 16; i += 2) {
    unsigned a[2][4], b[2][4];
    QLA_UNROLL for (int e = 0; e < 2; ++e) {
      qla_load_four(a[e], x, 16 * thread + 2048 * (i + e));
      qla_load_four(b[e], y, 16 * thread + 2048 * (i + e));
    }
    QLA_UNROLL for (int e = 0; e < 2; ++e) QLA_UNROLL for (int j = 0; j < 4; ++j) {
      sums[j] += __uint_as_float(a[e][j] << 16) * __uint_as_float(b[e][j] << 16);
      sums[j] += __uint_as_float(a[e][j] & 0xffff0000u) * __uint_as_float(b[e][j] & 0xffff0000u);
    }
  }
  float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  QLA_UNROLL for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if ((thread & 31) == 0) qla_store_one(to + (thread >> 5), sum);
}
// x < 0 for those of the tokens `lane` and `lane + 32` whose gate is below a bound, from the gates summed up to each.
QLA_DEVICE void qla_mark_resets(const float* sums, float* x, float bound) {
  int lane = threadIdx.x & 31;
  float a = __shfl_up_sync(~0u, sums[0], 1), b = __shfl_up_sync(~0u, sums[1], 1), middle = __shfl_sync(~0u, sums[0], 31);
  if (sums[0] - (lane > 0 ? a : 0.0f) < bound) x[0] = -x[0];
  if (sums[1] - (lane > 0 ? b : middle) < bound) x[1] = -x[1];
}
// dg of tokens `lane` and `lane + 32` of the chunk, from the sums tile.
QLA_DEVICE void qla_gate_gradient(float* dg, const float* sums, float last_gamma, int valid) {
  int lane = threadIdx.x & 31;
  float at_end = 0.0f, d[2];
  QLA_UNROLL for (int h = 0; h < 2; ++h) {
    const float* s = sums + lane + 32 * h;
    float z = s[0] - (s[64] + s[128] + s[192] + s[256]);
    d[h] = lane + 32 * h < valid ? z + s[384] + s[448] : 0.0f;
    at_end += lane + 32 * h < valid ? s[512] : 0.0f;
  }
  QLA_UNROLL for (int step = 1; step < 32; step *= 2) at_end += __shfl_xor_sync(~0u, at_end, step);
  at_end += last_gamma * (sums[576] + sums[577] + sums[578] + sums[579]);
  QLA_UNROLL for (int step = 1; step < 32; step *= 2) {
    float a = __shfl_down_sync(~0u, d[0], step), b = __shfl_down_sync(~0u, d[1], step);
    if (lane + step < 32) { d[0] += a; d[1] += b; }
  }
  dg[0] = d[0] + __shfl_sync(~0u, d[1], 0) + at_end;
  dg[1] = d[1] + at_end;
}
"""
