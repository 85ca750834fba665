"""The ungated inverse of one chunk, fast on Hopper (Yang et al. 2024, arXiv:2412.06464).

With N = strictly lower part of K K^T, for every chunk slot and value head:

    Ab = (I + diag(beta) N)^-1 diag(beta)               [slots, HV, C, C]

What triangular_solve computes, without its gates, which the reader of Ab applies: A = Gamma o Ab. A block serves one key
head: its four warps form N once, then each of them inverts for every fourth value head (macros/warp_inverse.py), without a
barrier for all between heads.

The tile of K comes by bulk copy and may reach into the next sequence or behind the last one; such tokens are struck from N and
have beta = 0, so that rows and columns of Ab behind the end of a sequence are zero. So is its upper triangle.

|beta| of a token is at least 2 ** beta_floor, for a backward that divides by beta: as in gate_cumsum.
"""

from dataclasses import dataclass

from .arch import SM90A, Arch
from .contract import Buffer, Rejection, Role, Template, knob
from .language import T, macro
from .macros.launches import let_the_next_kernel_come, wait_if_early, wait_unless_early
from .macros.sequences import locate_chunk
from .macros.warp_inverse import PRELUDE, PRODUCTS_FLOATS, THREADS, WARPS, invert, store_products, take_accumulators


@dataclass(frozen=True)
class Problem:
    H: int
    HV: int
    K: int
    C: int
    dtype: str
    beta_dtype: str
    packed: bool                         # sequences are given by cu_seqlens
    index_dtype: str                     # of cu_seqlens
    beta_sigmoid: bool
    negative_eigenvalues: bool           # beta is twice the sigmoid
    beta_floor: int | None               # None: beta as it is


@dataclass(frozen=True)
class Config:
    blocks_per_sm: int = knob(3, 4, 5, why="blocks in flight hide latency; 5 leave 96 registers a thread, just enough")
    last_slot_first: bool = knob(False, True, why="the first slots are written last, and still in L2 when the next kernel begins")
    early_next: bool = knob(False, True, why="a next kernel that waits for this one by itself may start before this one ends")


def arguments(problem: Problem) -> tuple[str, ...]:
    return ("k", "beta", "cu_seqlens", "Ab", "early")


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    C, group = problem.C, problem.HV // problem.H
    return (
        # First the tile of K, 64 columns a panel, and when N has been formed from it, one tile of Ab for each warp: together
        # they would leave room for three blocks on an SM, not five.
        Buffer("panels", (max(key_panels(problem), min(WARPS, group)), C, C), problem.dtype),
        Buffer("products", (PRODUCTS_FLOATS,), "float32"),
        Buffer("strength", (group, C), "float32"),
    )


def key_panels(problem: Problem) -> int:
    """Panels of 64 columns, a swizzled row of 128 bytes each; the bulk copy fills K = 96 up with zeros."""
    return -(-problem.K // 64)


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    return (Role("warps", THREADS, registers=96),)


def has_warpgroup_products(problem: Problem, config: Config, arch: Arch) -> Rejection | None:
    if not arch.has_wgmma:
        return Rejection(f"K K^T is formed by a warpgroup matrix instruction, which {arch.name} lacks")
    return None


def chunk_is_four_blocks(problem: Problem, config: Config, arch: Arch) -> Rejection | None:
    if problem.C != 64:
        return Rejection(f"C={problem.C}; the inverse is written for chunks of 64, four blocks of 16 by 16")
    return None


def keys_are_bfloat16(problem: Problem, config: Config, arch: Arch) -> Rejection | None:
    if problem.dtype != "bfloat16":
        return Rejection(f"dtype={problem.dtype}; Ab is rounded to bfloat16")
    return None


def keys_are_aligned(problem: Problem, config: Config, arch: Arch) -> Rejection | None:
    if problem.K % 8:
        return Rejection(f"K={problem.K} makes rows of {problem.K * 2} bytes; a bulk copy needs multiples of 16")
    return None


def default_config(problem: Problem, arch: Arch) -> Config:
    return Config(blocks_per_sm=5, last_slot_first=False, early_next=True)


@macro
def load_strengths(problem, row, start, valid, first_head, thread, beta, strength):
    # beta of every head of the group, float32; 0 behind the end
    group, C = strength.shape
    loads = -(-group * C // THREADS)
    values = T.alloc_local((loads,), "float32")
    # All are asked for before the first is looked at: a block spends 15 % of its time on each wait for memory.
    for step in T.unroll(loads):
        element = step * THREADS + thread
        values[step] = 0.0
        if element < group * C and element // group < valid:
            values[step] = T.cast(beta[row, start + element // group, first_head + element % group], "float32")
    for step in T.unroll(loads):
        element = step * THREADS + thread
        if element < group * C:
            i = element // group
            head = element % group
            value = T.alloc_var("float32")
            value = values[step]
            if i < valid:
                if problem.beta_sigmoid:
                    value = T.sigmoid(value)
                    if problem.negative_eigenvalues:
                        value = 2.0 * value
                if problem.beta_floor is not None:
                    # A choice and not a maximum: a NaN must stay visible.
                    floor = 2.0**problem.beta_floor
                    nearest = T.if_then_else(value < 0.0, -floor, floor)
                    value = T.if_then_else(T.abs(value) < floor, nearest, value)
            strength[head, i] = value


@macro
def store_inverse(panels, warp, thread, slot, head, Ab):
    # Ab[slot, head] <- the tile of one warp. By range of threads: of copies under `if warp == ...` only the first would happen.
    C = panels.shape[1]
    if thread >= 32 * warp and thread < 32 * (warp + 1):
        T.copy(panels[warp, :, :], Ab[slot, head, 0:C, 0:C])


def build(problem: Problem, config: Config):
    from tilelang.layout import make_swizzled_layout

    H, HV, K, C, dtype = problem.H, problem.HV, problem.K, problem.C, problem.dtype
    group = HV // H
    B, tokens, slots, bounds = (T.dynamic(name) for name in ("B", "tokens", "slots", "bounds"))

    @T.prim_func
    def chunk_inverse(
        k: T.Tensor((B, tokens, H, K), dtype),
        beta: T.Tensor((B, tokens, HV), problem.beta_dtype),
        cu_seqlens: T.Tensor((bounds,), problem.index_dtype),
        Ab: T.Tensor((slots, HV, C, C), dtype),
        early: T.int32,
    ):
        # Heads vary fastest: the blocks in flight share the lines of beta. Only x may exceed 65,535 blocks.
        with T.Kernel(H * slots, threads=THREADS, prelude=PRELUDE) as block:
            key_head = block % H
            slot = slots - 1 - block // H if config.last_slot_first else block // H
            panels, products, strength = (T.alloc_shared(b.shape, b.dtype) for b in buffers(problem, config))
            T.annotate_layout({panels: make_swizzled_layout(panels)})
            T.annotate_min_blocks_per_sm(config.blocks_per_sm)
            fragment = T.alloc_fragment((C, C), "float32")
            accumulators = T.alloc_local((C * C // THREADS,), "float32")
            k_ready = T.alloc_barrier(arrive_count=[THREADS])
            thread = T.get_thread_binding()
            wait_unless_early(early)
            if config.early_next:
                let_the_next_kernel_come()
            warp = thread // 32
            n, start, valid = locate_chunk(problem.packed, cu_seqlens, bounds - 1, tokens, slot, C)
            row = T.alloc_var("int32")
            row = 0 if problem.packed else n

            if valid > 0:
                for panel in T.unroll(key_panels(problem)):
                    first_k = panel * C
                    columns = k[row, start : start + C, key_head, first_k : first_k + C]
                    T.tma_copy(columns, panels[panel, :, :], barrier=k_ready[0])
                T.barrier_arrive(k_ready[0])
                load_strengths(problem, row, start, valid, key_head * group, thread, beta, strength)
                T.barrier_wait(k_ready[0], 0)
                for panel in T.unroll(key_panels(problem)):
                    T.wgmma_gemm(panels[panel, :, :], panels[panel, :, :], fragment, transpose_B=True, clear_accum=panel == 0)
                T.wait_wgmma(0)
                take_accumulators(fragment, accumulators)
                has_long_key = store_products(accumulators, valid, products)
                for step in T.serial(T.ceildiv(group, WARPS)):
                    first = step * WARPS
                    if first + warp < group:
                        T.sync_warp()                  # the lane that stored the tile of the last step has seen it read
                        invert(products, strength, has_long_key, panels, warp, first + warp)
                        T.fence_proxy_async()
                        T.sync_warp()
                    for w in tuple(range(min(WARPS, group))):
                        if first + w < group:
                            store_inverse(panels, w, thread, slot, key_head * group + first + w, Ab)
            wait_if_early(early)

    return chunk_inverse


TEMPLATE = Template(
    name="chunk_inverse",
    problem=Problem,
    config=Config,
    arches=(SM90A.name,),
    arguments=arguments,
    buffers=buffers,
    roles=roles,
    default_config=default_config,
    build=build,
    constraints=(has_warpgroup_products, chunk_is_four_blocks, keys_are_bfloat16, keys_are_aligned),
    # The automatic barriers would wait for four warps where one works for itself.
    pass_configs={"tl.enable_fast_math": True, "tl.disable_thread_storage_sync": True},
)
