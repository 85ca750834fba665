"""Invert a unit lower triangular 64 x 64 matrix with one warp: (I + diag(beta) N)^-1 diag(beta) from N in shared memory.

The matrix is cut into 16 x 16 blocks. D_i, the inverse of the i-th diagonal block, comes from substitution in float32, a
column per lane. With M = -diag(beta) N, the blocks below follow from products of 16 x 16 blocks in float16 with float32
accumulators:

    X_10 = D_1 M_10 D_0                                X_32 = D_3 M_32 D_2
    X_2j = D_2 Z_2j                                    Z_i0 = M_i0 D_0 + M_i1 X_10
    X_3j = X_32 Z_2j + D_3 Z_3j    for j = 0, 1        Z_i1 = M_i1 D_1

The registers that hold a block as left operand of mma.sync hold its transpose as right operand. So Z is computed
transposed, Z_21^T = D_1^T M_21^T, and is a right operand as it comes: no block ever moves between lanes.

float16 holds every block as long as the factors I - beta k k^T of the inverse do not grow: |X_ij| <= beta_i |k_i| |k_j| for
0 <= beta |k|^2 <= 2. A warp that meets a beta outside of [0, 2], or a longer key, solves in float32 from end to end instead.
"""

from ..language import T, macro

WARPS = 4                                # one warpgroup forms N, then its warps invert on their own
THREADS = 32 * WARPS
SIZE = 64

# Blocks of N on and below the diagonal, in float32. The four floats between blocks put the rows that the two halves of a
# warp read together, of two diagonal blocks, into different banks.
BLOCK_FLOATS = 16 * 16 + 4
PRODUCTS_FLOATS = 10 * BLOCK_FLOATS

# Keys normalised in bf16 reach |k|^2 = 1.008. With beta = 2 a factor then stretches by at most 2 * 1.02 - 1, and all 63 of them
# by 12, which float16 holds easily.
LONGEST_SQUARE = 1.02

PRELUDE = (
    r"""
// Stands before TileLang's includes: no half and no bfloat16 type, hence the PTX.
#define QLA_DEVICE static __device__ __forceinline__
namespace warp_inverse {

// A 16 x 16 block over a warp, as mma.m16n8k16 wants its left operand and leaves its accumulators. Register i of a lane holds
// row lane / 4 + 8 (i % 2), columns 2 (lane % 4) + 8 (i / 2) and the next one.
struct Operand { unsigned pair[4]; };        // float16
struct Block { float value[8]; };            // float32; pair[i] is value[2 i] and value[2 i + 1]

QLA_DEVICE int lane() { return threadIdx.x % 32; }
QLA_DEVICE int row_of(int i) { return lane() / 4 + 8 * (i % 2); }
QLA_DEVICE int column_of(int i) { return 2 * (lane() % 4) + 8 * (i / 2); }

// One accumulator, into an array of registers
QLA_DEVICE void put(float* registers, int i, float value) { registers[i] = value; }

QLA_DEVICE unsigned shared_address(const void* pointer) { return (unsigned)__cvta_generic_to_shared(pointer); }
QLA_DEVICE unsigned half_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
QLA_DEVICE unsigned bfloat_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
QLA_DEVICE float2 floats_of(unsigned pair) {
  float2 f;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(f.x), "=f"(f.y) : "r"(pair));
  return f;
}

QLA_DEVICE Operand half(const Block& block) {
  Operand operand;
  #pragma unroll
  for (int i = 0; i < 4; ++i) operand.pair[i] = half_pair(block.value[2 * i], block.value[2 * i + 1]);
  return operand;
}
QLA_DEVICE Block widen(const Operand& operand) {
  Block block;
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 f = floats_of(operand.pair[i]);
    block.value[2 * i] = f.x;
    block.value[2 * i + 1] = f.y;
  }
  return block;
}

// sum + left right; the right operand is given as the left operand of its transpose
QLA_DEVICE Block multiply_add(const Operand& left, const Operand& right_transposed, Block sum) {
  #pragma unroll
  for (int n = 0; n < 2; ++n)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum.value[4 * n]), "+f"(sum.value[4 * n + 1]), "+f"(sum.value[4 * n + 2]), "+f"(sum.value[4 * n + 3])
        : "r"(left.pair[0]), "r"(left.pair[1]), "r"(left.pair[2]), "r"(left.pair[3]),
          "r"(right_transposed.pair[n]), "r"(right_transposed.pair[n + 2]));
  return sum;
}
QLA_DEVICE Block multiply(const Operand& left, const Operand& right_transposed) {
  return multiply_add(left, right_transposed, Block{});
}

// Where N_(16 I + row, 16 J + column) lies. Odd pairs of rows swap their halves, so that the 8-byte accesses of an operand's
// eight rows, 64 bytes apart, meet every bank once.
QLA_DEVICE int block_at(int I, int J) { return (I * (I + 1) / 2 + J) * BLOCK_FLOATS; }
QLA_DEVICE int element_at(int row, int column) { return row * 16 + (column ^ (row / 2 % 2 * 8)); }

// N <- strictly lower part of the accumulators of K K^T, warp w with rows 16 w to 16 w + 15. Tokens behind the end may have any
// product, NaN included: chosen away, not multiplied away. Returns whether this lane saw |k|^2 above LONGEST_SQUARE, or NaN.
QLA_DEVICE int store_products(const float* accumulators, int valid, float* products) {
  const int warp = threadIdx.x / 32;
  int has_long_key = 0;
  #pragma unroll
  for (int J = 0; J < 4; ++J) {
    if (J > warp) continue;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row_of(i), column = column_of(i);
      const bool is_token = 16 * warp + row < valid;
      const float x = accumulators[8 * J + 2 * i], y = accumulators[8 * J + 2 * i + 1];
      if (J == warp && is_token)
        has_long_key |= (row == column && !(x <= LONGEST_SQUARE)) || (row == column + 1 && !(y <= LONGEST_SQUARE));
      *(float2*)(products + block_at(warp, J) + element_at(row, column)) =
          make_float2(is_token && (J < warp || column < row) ? x : 0.f, is_token && (J < warp || column + 1 < row) ? y : 0.f);
    }
  }
  return has_long_key;
}

// The tile of the result: 64 rows of 128 bytes, whose 16-byte pieces TMA's 128-byte swizzle permutes.
QLA_DEVICE unsigned piece_at(unsigned tile, int row, int piece) { return tile + row * 128 + ((piece ^ (row % 8)) << 4); }

// The address that this lane gives to a matrix load or store of a block: row lane % 8 of the 8 x 8 matrix lane / 8
QLA_DEVICE int matrix_row() { return lane() % 8 + lane() / 8 % 2 * 8; }
QLA_DEVICE int matrix_piece() { return lane() / 16; }

QLA_DEVICE void store_pairs(unsigned tile, int I, int J, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
      :: "r"(piece_at(tile, 16 * I + matrix_row(), 2 * J + matrix_piece())), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// tile_IJ <- X_IJ diag(beta)_J
QLA_DEVICE void store_block(unsigned tile, int I, int J, const Block& block, const float* strength) {
  unsigned pair[4];
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 beta = *(const float2*)(strength + 16 * J + column_of(i));
    pair[i] = bfloat_pair(block.value[2 * i] * beta.x, block.value[2 * i + 1] * beta.y);
  }
  store_pairs(tile, I, J, pair[0], pair[1], pair[2], pair[3]);
}

// M_IJ = -diag(beta)_I N_IJ
QLA_DEVICE Operand load_minus_product(const float* products, int I, int J, const float* strength) {
  Operand operand;
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 n = *(const float2*)(products + block_at(I, J) + element_at(row_of(i), column_of(i)));
    const float beta = strength[16 * I + row_of(i)];
    operand.pair[i] = half_pair(-beta * n.x, -beta * n.y);
  }
  return operand;
}

// Inverses of the diagonal blocks pass through shared memory to become operands: a column of D_b is a row of 32 bytes there.
QLA_DEVICE unsigned column_at(unsigned columns, int b, int column, int piece) {
  return columns + b * 512 + column * 32 + ((piece ^ (column / 4 % 2)) << 4);
}
QLA_DEVICE Operand load_inverse(unsigned columns, int b) {                 // D_b
  Operand d;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(d.pair[0]), "=r"(d.pair[1]), "=r"(d.pair[2]), "=r"(d.pair[3])
      : "r"(column_at(columns, b, lane() % 8 + lane() / 16 * 8, lane() / 8 % 2)) : "memory");
  return d;
}
QLA_DEVICE Operand load_inverse_transposed(unsigned columns, int b) {      // D_b^T
  Operand d;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(d.pair[0]), "=r"(d.pair[1]), "=r"(d.pair[2]), "=r"(d.pair[3])
      : "r"(column_at(columns, b, matrix_row(), matrix_piece())) : "memory");
  return d;
}

// columns <- D_0 to D_3, two at a time, a column per lane:  x_i = delta_ic - beta_i sum_{j<i} N_ij x_j
QLA_DEVICE void invert_diagonal(const float* products, const float* strength, unsigned columns) {
  const int column = lane() % 16;
  #pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    const int b = 2 * pass + lane() / 16;
    const float* n = products + block_at(b, b);
    float x[16];
    #pragma unroll
    for (int i = 0; i < 16; ++i) {
      float even = 0.f, odd = 0.f;           // two chains of additions: a dependent one waits four cycles
      #pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 v = *(const float4*)(n + element_at(i, j));
        even += v.x * x[j];
        if (j + 1 < i) odd += v.y * x[j + 1];
        if (j + 2 < i) even += v.z * x[j + 2];
        if (j + 3 < i) odd += v.w * x[j + 3];
      }
      x[i] = (column == i ? 1.f : 0.f) - strength[16 * b + i] * (even + odd);
    }
    #pragma unroll
    for (int piece = 0; piece < 2; ++piece)
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" :: "r"(column_at(columns, b, column, piece)),
          "r"(half_pair(x[8 * piece], x[8 * piece + 1])), "r"(half_pair(x[8 * piece + 2], x[8 * piece + 3])),
          "r"(half_pair(x[8 * piece + 4], x[8 * piece + 5])), "r"(half_pair(x[8 * piece + 6], x[8 * piece + 7])) : "memory");
  }
}

QLA_DEVICE void invert_by_blocks(const float* products, const float* strength, unsigned tile) {
  const unsigned columns = tile;             // the head of the tile, which holds nothing yet
  invert_diagonal(products, strength, columns);
  __syncwarp();
  const Operand D_0 = load_inverse(columns, 0), D_1 = load_inverse(columns, 1);
  const Operand D_2 = load_inverse(columns, 2), D_3 = load_inverse(columns, 3);
  const Operand D_0t = load_inverse_transposed(columns, 0), D_1t = load_inverse_transposed(columns, 1);
  const Operand D_2t = load_inverse_transposed(columns, 2);
  __syncwarp();                              // all lanes have read: from here on the tile is written

  #pragma unroll
  for (int I = 0; I < 3; ++I)
    #pragma unroll
    for (int J = I + 1; J < 4; ++J) store_pairs(tile, I, J, 0u, 0u, 0u, 0u);
  store_block(tile, 0, 0, widen(D_0), strength);
  store_block(tile, 1, 1, widen(D_1), strength);
  store_block(tile, 2, 2, widen(D_2), strength);
  store_block(tile, 3, 3, widen(D_3), strength);

  // multiply(P, Q) is P Q^T
  const Operand Z_32t = half(multiply(D_2t, load_minus_product(products, 3, 2, strength)));
  const Block X_32 = multiply(D_3, Z_32t);
  store_block(tile, 3, 2, X_32, strength);
  const Operand X_32h = half(X_32);

  const Operand Z_10t = half(multiply(D_0t, load_minus_product(products, 1, 0, strength)));
  store_block(tile, 1, 0, multiply(D_1, Z_10t), strength);
  const Operand X_10t = half(multiply(Z_10t, D_1));

  const Operand M_20 = load_minus_product(products, 2, 0, strength), M_21 = load_minus_product(products, 2, 1, strength);
  const Operand Z_20t = half(multiply_add(X_10t, M_21, multiply(D_0t, M_20)));
  const Operand Z_21t = half(multiply(D_1t, M_21));
  const Operand M_30 = load_minus_product(products, 3, 0, strength), M_31 = load_minus_product(products, 3, 1, strength);
  const Operand Z_30t = half(multiply_add(X_10t, M_31, multiply(D_0t, M_30)));
  const Operand Z_31t = half(multiply(D_1t, M_31));

  store_block(tile, 2, 0, multiply(D_2, Z_20t), strength);
  store_block(tile, 2, 1, multiply(D_2, Z_21t), strength);
  store_block(tile, 3, 0, multiply_add(D_3, Z_30t, multiply(X_32h, Z_20t)), strength);
  store_block(tile, 3, 1, multiply_add(D_3, Z_31t, multiply(X_32h, Z_21t)), strength);
}

// Substitution over all 64 rows in float32, columns lane and lane + 32. Ten times the instructions, and any range: the columns
// are in local memory, so that the registers of the other branch suffice.
QLA_DEVICE void invert_by_rows(const float* products, const float* strength, unsigned tile) {
  alignas(16) float x[2][64] = {};
  #pragma unroll 1
  for (int i = 0; i < 64; ++i) {
    float sum[2] = {};
    #pragma unroll 1
    for (int j = 0; j < i; j += 4) {         // N_ij is zero from the diagonal on
      const float4 n = *(const float4*)(products + block_at(i / 16, j / 16) + element_at(i % 16, j % 16));
      #pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 y = *(const float4*)(x[h] + j);
        sum[h] += n.x * y.x + n.y * y.y + n.z * y.z + n.w * y.w;
      }
    }
    #pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = lane() + 32 * h;
      x[h][i] = (column == i ? 1.f : 0.f) - strength[i] * sum[h];
      const float result = column <= i ? x[h][i] * strength[column] : 0.f;
      asm volatile("{.reg .b16 b; cvt.rn.bf16.f32 b, %1; st.shared.b16 [%0], b;}"
          :: "r"(piece_at(tile, i, column / 8) + column % 8 * 2), "f"(result) : "memory");
    }
  }
}

// tile <- (I + diag(beta) N)^-1 diag(beta), bf16, by one warp
QLA_DEVICE void invert(const float* products, const float* strength, int has_long_key, void* tile) {
  const float a = strength[lane()], b = strength[lane() + 32];
  const bool is_wide = has_long_key || !(a >= 0.f && a <= 2.f && b >= 0.f && b <= 2.f);
  if (__any_sync(0xffffffffu, is_wide)) invert_by_rows(products, strength, shared_address(tile));
  else invert_by_blocks(products, strength, shared_address(tile));
}

}  // namespace warp_inverse
#undef QLA_DEVICE
""".replace("BLOCK_FLOATS", str(BLOCK_FLOATS)).replace("LONGEST_SQUARE", f"{LONGEST_SQUARE}f")
)


@macro
def take_accumulators(fragment, accumulators):
    """accumulators, local to the thread, <- a 64 x 64 fragment of wgmma, in the order of the registers."""
    for i, j in T.Parallel(SIZE, SIZE):
        register = j // 8 * 4 + i % 16 // 8 * 2 + j % 2
        # Through a call, because TileLang forbids to index a local buffer by T.Parallel's variables; it folds to a move.
        T.call_extern("handle", "warp_inverse::put", T.address_of(accumulators[0]), register, fragment[i, j])


@macro
def store_products(accumulators, valid, products):
    """products <- N, from the accumulators of all four warps; a barrier. Returns whether a key is too long for float16."""
    mine = T.call_extern(
        "int32", "warp_inverse::store_products", T.address_of(accumulators[0]), valid, T.access_ptr(products[0], "r", 1)
    )
    has_long_key = T.alloc_var("int32")
    has_long_key = T.call_extern("int32", "__syncthreads_or", mine)
    return has_long_key


@macro
def invert(products, strength, has_long_key, tile, warp, head):
    """tile[warp] <- (I + diag(beta) N)^-1 diag(beta), beta = strength[head]; by one warp, and without any barrier."""
    # Announced as reads: after an announced write TileLang would fence where it is expensive.
    T.call_extern(
        "handle",
        "warp_inverse::invert",
        T.access_ptr(products[0], "r", 1),
        T.access_ptr(strength[head, 0], "r", 1),
        has_long_key,
        T.access_ptr(tile[warp, 0, 0], "r", SIZE * SIZE),
    )
