"""Gradients through l2norm, both tensors in one launch: y = x r with r = 1 / sqrt(sum(x^2) + eps), dx = r (dy - y sum(y dy))."""

from dataclasses import dataclass

from .arch import ARCHES, Arch
from .contract import Buffer, Role, Template, knob
from .language import T
from .macros.unit_rows import THREADS, row_pieces_are_whole, width


@dataclass(frozen=True)
class Problem:
    K: int
    dtype: str


@dataclass(frozen=True)
class Config:
    rows: int = knob(4, 8, 16, 32, why="rows of q and of k per block; the kernel only waits for memory")


def arguments(problem: Problem) -> tuple[str, ...]:
    return ("q", "k", "eps", "dq_unit", "dk_unit", "dq", "dk")


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    return ()


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    return (Role("rows", THREADS, registers=3 * config.rows * width(problem) // THREADS + 24),)


def default_config(problem: Problem, arch: Arch) -> Config:
    return Config(rows=16 if problem.K <= 128 else 8)


def build(problem: Problem, config: Config):
    K, rows, columns = problem.K, config.rows, width(problem)
    total = T.dynamic("total")

    @T.prim_func
    def l2norm_backward(
        q: T.Tensor((total, K), problem.dtype),
        k: T.Tensor((total, K), problem.dtype),
        eps: T.float32,
        dq_unit: T.Tensor((total, K), problem.dtype),
        dk_unit: T.Tensor((total, K), problem.dtype),
        dq: T.Tensor((total, K), problem.dtype),
        dk: T.Tensor((total, K), problem.dtype),
    ):
        with T.Kernel(T.ceildiv(total, rows), 2, threads=THREADS) as (block, which):
            x = T.alloc_fragment((rows, columns), "float32")
            dy = T.alloc_fragment((rows, columns), "float32")
            products = T.alloc_fragment((rows, columns), "float32")
            length = T.alloc_fragment((rows,), "float32")
            along = T.alloc_fragment((rows,), "float32")
            if which == 0:
                T.copy(q[block * rows : (block + 1) * rows, 0:columns], x)
                T.copy(dq_unit[block * rows : (block + 1) * rows, 0:columns], dy)
            else:
                T.copy(k[block * rows : (block + 1) * rows, 0:columns], x)
                T.copy(dk_unit[block * rows : (block + 1) * rows, 0:columns], dy)
            for i, j in T.Parallel(rows, columns):
                products[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(products, length, dim=1)
            for i, j in T.Parallel(rows, columns):
                products[i, j] = x[i, j] * dy[i, j]
            T.reduce_sum(products, along, dim=1)
            for i, j in T.Parallel(rows, columns):
                # sum(y dy) y r = x r^3 sum(x dy)
                dy[i, j] = T.rsqrt(length[i] + eps) * (dy[i, j] - x[i, j] * (along[i] / (length[i] + eps)))
            if which == 0:
                T.copy(dy, dq[block * rows : (block + 1) * rows, 0:columns])
            else:
                T.copy(dy, dk[block * rows : (block + 1) * rows, 0:columns])

    return l2norm_backward


TEMPLATE = Template(
    name="l2norm_backward",
    problem=Problem,
    config=Config,
    arches=tuple(ARCHES),
    arguments=arguments,
    buffers=buffers,
    roles=roles,
    default_config=default_config,
    build=build,
    constraints=(row_pieces_are_whole,),
)
