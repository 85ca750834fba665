"""Unit length along K for the rows of q and k: y = x / sqrt(sum(x^2) + eps), both tensors in one launch."""

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
    return ("q", "k", "eps", "q_unit", "k_unit")


def buffers(problem: Problem, config: Config) -> tuple[Buffer, ...]:
    return ()


def roles(problem: Problem, config: Config) -> tuple[Role, ...]:
    return (Role("rows", THREADS, registers=2 * config.rows * width(problem) // THREADS + 24),)


def default_config(problem: Problem, arch: Arch) -> Config:
    return Config(rows=16 if problem.K <= 128 else 8)


def build(problem: Problem, config: Config):
    K, rows, columns = problem.K, config.rows, width(problem)
    total = T.dynamic("total")

    @T.prim_func
    def l2norm(
        q: T.Tensor((total, K), problem.dtype),
        k: T.Tensor((total, K), problem.dtype),
        eps: T.float32,
        q_unit: T.Tensor((total, K), problem.dtype),
        k_unit: T.Tensor((total, K), problem.dtype),
    ):
        with T.Kernel(T.ceildiv(total, rows), 2, threads=THREADS) as (block, which):
            x = T.alloc_fragment((rows, columns), "float32")
            squares = T.alloc_fragment((rows, columns), "float32")
            length = T.alloc_fragment((rows,), "float32")
            if which == 0:
                T.copy(q[block * rows : (block + 1) * rows, 0:columns], x)
            else:
                T.copy(k[block * rows : (block + 1) * rows, 0:columns], x)
            for i, j in T.Parallel(rows, columns):
                squares[i, j] = x[i, j] * x[i, j]
            T.reduce_sum(squares, length, dim=1)
            for i, j in T.Parallel(rows, columns):
                x[i, j] = x[i, j] * T.rsqrt(length[i] + eps)
            if which == 0:
                T.copy(x, q_unit[block * rows : (block + 1) * rows, 0:columns])
            else:
                T.copy(x, k_unit[block * rows : (block + 1) * rows, 0:columns])

    return l2norm


TEMPLATE = Template(
    name="l2norm",
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
