"""States between memory and registers. In memory they are [N, HV, K, V], or [N, HV, V, K] where the problem is state_v_first."""

from ..language import T, macro


def state_shape(problem, N):
    HV, K, V = problem.HV, problem.K, problem.V
    return (N, HV, V, K) if problem.state_v_first else (N, HV, K, V)


def state_block(block, problem, block_v):
    """(sequence, value head, first value) of a block that owns block_v columns of S for a whole sequence.

    Value blocks vary fastest: they share in L2 what all values need. Only x may exceed 65,535 blocks, so it carries n too."""
    value_blocks = problem.V // block_v
    return block // (value_blocks * problem.HV), block // value_blocks % problem.HV, block % value_blocks * block_v


@macro
def read_state(problem, source, n, head, first_v, state):
    # S, keys by values. It may have more rows than there are keys; they are left as they are.
    for i, j in T.Parallel(*state.shape):
        if i < problem.K:
            if problem.state_v_first:
                state[i, j] = T.cast(source[n, head, first_v + j, i], "float32")
            else:
                state[i, j] = T.cast(source[n, head, i, first_v + j], "float32")


@macro
def write_state(problem, n, head, first_v, state, target):
    for i, j in T.Parallel(*state.shape):
        if i < problem.K:
            if problem.state_v_first:
                target[n, head, first_v + j, i] = state[i, j]
            else:
                target[n, head, i, first_v + j] = state[i, j]


def is_inside(problem, memory, v, key):
    """Whether a state in memory has this element: True if it is as large as the problem's, which may count in whole tiles."""
    rows, columns = (int(size) for size in memory.shape[2:])
    V, K = (rows, columns) if problem.state_v_first else (columns, rows)
    return True if (problem.V, problem.K) == (V, K) else (v < V) & (key < K)


@macro
def read_transposed_state(problem, source, n, head, first_v, state):
    # S transposed, values by keys; zeros where the problem's state is larger than that in memory
    for a, b in T.Parallel(*state.shape):
        if is_inside(problem, source, first_v + a, b):
            if problem.state_v_first:
                state[a, b] = T.cast(source[n, head, first_v + a, b], "float32")
            else:
                state[a, b] = T.cast(source[n, head, b, first_v + a], "float32")
        else:
            state[a, b] = 0.0


@macro
def write_transposed_state(problem, n, head, first_v, state, target):
    for a, b in T.Parallel(*state.shape):
        if is_inside(problem, target, first_v + a, b):
            if problem.state_v_first:
                target[n, head, first_v + a, b] = state[a, b]
            else:
                target[n, head, b, first_v + a] = state[a, b]
