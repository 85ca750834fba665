"""The inverse that turns the writes of one chunk into a single matrix product (Yang et al. 2024, arXiv:2412.06464).

With N = strictly lower part of K K^T, Gamma_ij = exp(g_sum_i - g_sum_j) for i >= j and 0 above the diagonal:

    A = Gamma o ((I + diag(beta) N)^-1 diag(beta))          [slots, HV, C, C]

Gates may stay out of the inverse because Gamma o (D X D^-1) scales a lower triangle exactly (D = diag(exp(g_sum))). N is
formed once per key head. Then one thread per column c solves (I + diag(beta) N) x = e_c in float32 registers:

    x_i = delta_ic - beta_i sum_{j<i} N_ij x_j

right-looking, so that the products of one step are independent; N is symmetric, so that row j serves for column j.
Rows and columns of tokens behind the end of a sequence are zero.
"""

from dataclasses import dataclass

from .arch import ARCHES, Arch
from .contract import Buffer, Rejection, Role, Template, knob
from .language import T, macro
from .macros.gates import LOG2E
from .macros.sequences import locate_chunk


@dataclass(frozen=True)
class Problem:
    H: int
    HV: int
    K: int
    C: int
    dtype: str
    packed: bool
    index_dtype: str


@dataclass(frozen=True)
class Config:
    heads: int = knob(1, 2, 4, why="value heads solved side by side, one thread a column each; 2 fill the warps that form K K^T")
    blocks_per_sm: int = knob(2, 3, 4, 5, why="blocks in flight hide latency; registers are capped to fit them, 72 B spill at 5")


def arguments(problem: Problem) -> tuple[str, ...]:
    return ("k", "g_sum", "beta_chunks", "cu_seqlens", "A")


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    C = problem.C
    return (
        Buffer("k_tile", (C, problem.K), problem.dtype),
        Buffer("kk", (C, C), "float32"),
        Buffer("decay", (config.heads, C), "float32"),
        Buffer("strength", (config.heads, C), "float32"),
        Buffer("A_tile", (config.heads, C, C), problem.dtype),
    )


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    return (Role("columns", threads_of(problem, config), registers=problem.C + 40),)     # the column, addresses, one row of N


def threads_of(problem: Problem, config: Config) -> int:
    # A warp multiplies 16 x 8 at least, so a chunk of 16 keeps two busy; Hopper's product for 64 wants four.
    return max(64 if problem.C == 16 else 128, config.heads * problem.C)


def default_config(problem: Problem, arch: Arch) -> Config:
    return Config(heads=2 if problem.HV // problem.H >= 2 else 1, blocks_per_sm=4)


def heads_in_group(problem: Problem, config: Config, arch: Arch) -> Rejection | None:
    if config.heads > problem.HV // problem.H:
        return Rejection(f"heads={config.heads} is more than the {problem.HV // problem.H} value heads of a key head")
    return None


@macro
def eliminate(first, count, C, kk, strength, head, column, x):
    # x_i for i in [first, first + count), and their part in the sums of the rows below
    for step in T.unroll(count):
        x[first + step] = T.if_then_else(column == first + step, 1.0, 0.0) - strength[head, first + step] * x[first + step]
        for j in T.unroll(C):
            if j > first + step:
                x[j] = x[j] + kk[first + step, j] * x[first + step]


@macro
def solve_columns(C, kk, strength, head, column, x):
    # x <- column of (I + diag(beta) N)^-1; x_i holds sum_j N_ij x_j until its turn comes
    for i in T.unroll(C):
        x[i] = 0.0
    # A column of the right half is zero in the upper rows: its warp skips three quarters of the products.
    if column < C // 2:
        eliminate(0, C // 2, C, kk, strength, head, column, x)
    eliminate(C // 2, C // 2, C, kk, strength, head, column, x)


def build(problem: Problem, config: Config):
    H, HV, K, C, heads = problem.H, problem.HV, problem.K, problem.C, config.heads
    group = HV // H
    threads = threads_of(problem, config)
    B, tokens, slots, bounds = (T.dynamic(name) for name in ("B", "tokens", "slots", "bounds"))

    @T.prim_func
    def triangular_solve(
        k: T.Tensor((B, tokens, H, K), problem.dtype),
        g_sum: T.Tensor((slots, HV, C), "float32"),
        beta_chunks: T.Tensor((slots, HV, C), "float32"),
        cu_seqlens: T.Tensor((bounds,), problem.index_dtype),
        A: T.Tensor((slots, HV, C, C), problem.dtype),
    ):
        with T.Kernel(slots, H, threads=threads) as (slot, key_head):
            k_tile, kk, decay, strength, A_tile = (T.alloc_shared(b.shape, b.dtype) for b in buffers(problem, config))
            products = T.alloc_fragment((C, C), "float32")
            x = T.alloc_local((C,), "float32")
            T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            thread = T.get_thread_binding()
            n, start, valid = locate_chunk(problem.packed, cu_seqlens, bounds - 1, tokens, slot, C)
            row = T.alloc_var("int32")
            row = 0 if problem.packed else n
            if valid > 0:
                T.copy(k[row, start : start + C, key_head, 0:K], k_tile)
                T.gemm(k_tile, k_tile, products, transpose_B=True, clear_accum=True)
                T.copy(products, kk)
                for step in T.serial(T.ceildiv(group, heads)):
                    first = key_head * group + step * heads
                    for head, i in T.Parallel(heads, C):
                        decay[head, i] = T.if_then_else(step * heads + head < group, g_sum[slot, first + head, i] * LOG2E, 0.0)
                        strength[head, i] = T.if_then_else(step * heads + head < group, beta_chunks[slot, first + head, i], 0.0)
                    T.sync_threads()
                    if thread < heads * C:
                        head = thread // C
                        column = thread % C
                        solve_columns(C, kk, strength, head, column, x)
                        for i in T.unroll(C):
                            # Rows behind the end may hold NaN from foreign tokens: chosen away, not multiplied away.
                            A_tile[head, i, column] = T.if_then_else(
                                i >= column and i < valid,
                                x[i] * strength[head, column] * T.exp2(T.min(decay[head, i] - decay[head, column], 0.0)),
                                0.0,
                            )
                    T.sync_threads()
                    for head in T.unroll(heads):
                        if step * heads + head < group:
                            T.copy(A_tile[head, :, :], A[slot, first + head, :, :])

    return triangular_solve


TEMPLATE = Template(
    name="triangular_solve",
    problem=Problem,
    config=Config,
    arches=tuple(ARCHES),
    arguments=arguments,
    buffers=buffers,
    roles=roles,
    default_config=default_config,
    build=build,
    constraints=(heads_in_group,),
    pass_configs={"tl.enable_fast_math": True},
)
