"""The gates of the register-state kernels: one warp sums those of every chunk, and says when the state must be rescaled.

The state is kept as 2^c times the accumulators that hold it, c the sum of log2 decays; they are rescaled when c has fallen below
RESCALE_BELOW. A chunk turns c into c', and the factors of its tokens allow for both.
"""

from ..language import T, macro
from .gates import LOG2E, at_least_reset, gate_of_logit
from .register_roles import item_of, signal, wait_free

GATE_STAGES = 3
RESCALE_BELOW = -40.0                    # log2: 2^40 times a bf16 product is far inside float32

# Rows of the gates tile, over tokens i: gamma 2^c for W, (gamma_L / gamma) 2^-c' for X, scale gamma 2^c for O, log2 gamma.
GAMMA, TO_END, GAMMA_SCALED, LOG_GAMMA = range(4)

# The same rows where a scan runs backwards: gamma 2^-c' for dU, (gamma_L / gamma) 2^c for K dS', scale gamma 2^-c' for dO, and
# log2 gamma. Its state is 2^c times the accumulators before it goes through the chunk, and 2^c' times those afterwards.
ERASE, FROM_END, READ = GAMMA, TO_END, GAMMA_SCALED


@macro
def fetch_gate(row, token, end, head, g, gate):
    # As it is in memory: nothing may wait for the load here. No decay behind the end of the sequence.
    gate[0] = 0.0
    if token < end:
        gate[0] = T.cast(g[row, token, head], "float32")


@macro
def log2_decay(problem, token, end, head, A_log, dt_bias, gate, decay):
    # decay[0] <- log2 of the decay of a token, from what fetch_gate found
    decay[0] = gate[0]
    if problem.gate_in_kernel:
        if token < end:
            if problem.has_dt_bias:
                decay[0] = decay[0] + dt_bias[head]
            decay[0] = gate_of_logit(decay[0], A_log[head])
    decay[0] = at_least_reset(decay[0]) * LOG2E


@macro
def sum_gates(problem, row, first, end, chunks, head, lane, scale, g, A_log, dt_bias, tiles, i, backwards=False):
    """gamma and its relatives of the chunks of one item, the first or the last first. i counts chunks of the block.

    The gates of the next chunk are under way while this one is worked on."""
    C, gates, state_scale, barriers = problem.C, tiles.gates, tiles.state_scale, tiles.barriers
    c = T.alloc_var("float32")
    c_next = T.alloc_var("float32")
    sums = T.alloc_local((3,), "float32")
    upper = T.alloc_local((1,), "float32")
    low = T.alloc_local((1,), "float32")
    high = T.alloc_local((1,), "float32")
    c = 0.0
    if backwards:
        token = T.alloc_var("int32")
        token = first + (chunks - 1) * C + lane
        fetch_gate(row, token, end, head, g, low)
        fetch_gate(row, token + 32, end, head, g, high)
    else:
        fetch_gate(row, first + lane, end, head, g, low)
        fetch_gate(row, first + lane + 32, end, head, g, high)
    for j in T.serial(chunks):
        if not backwards:
            token = first + j * C + lane
        stage = (i + j) % GATE_STAGES
        log2_decay(problem, token, end, head, A_log, dt_bias, low, sums)
        log2_decay(problem, token + 32, end, head, A_log, dt_bias, high, upper)
        sums[1] = upper[0]
        if backwards:
            token = T.max(token - C, first + lane)       # in front of the first chunk it is not used
            fetch_gate(row, token, end, head, g, low)
            fetch_gate(row, token + 32, end, head, g, high)
        else:
            fetch_gate(row, token + C, end, head, g, low)
            fetch_gate(row, token + C + 32, end, head, g, high)
        T.call_extern("handle", "qla_scan64", T.address_of(sums[0]))
        wait_free(barriers, "gates", GATE_STAGES, i + j)
        c_next = c + sums[2]
        if lane == 0:
            state_scale[stage, 0] = T.if_then_else(c_next < RESCALE_BELOW, T.exp2(c_next), 1.0)
            state_scale[stage, 1] = T.if_then_else(c_next < RESCALE_BELOW, 1.0, T.exp2(c_next))
        c_next = T.if_then_else(c_next < RESCALE_BELOW, 0.0, c_next)
        for e in T.unroll(2):
            gates[stage, LOG_GAMMA, e * 32 + lane] = sums[e]
            if backwards:
                gates[stage, FROM_END, e * 32 + lane] = T.exp2(sums[2] - sums[e] + c)
                gates[stage, ERASE, e * 32 + lane] = T.exp2(sums[e] - c_next)
                gates[stage, READ, e * 32 + lane] = T.exp2(sums[e] - c_next) * scale
            else:
                gates[stage, GAMMA, e * 32 + lane] = T.exp2(sums[e] + c)
                gates[stage, TO_END, e * 32 + lane] = T.exp2(sums[2] - sums[e] - c_next)
                gates[stage, GAMMA_SCALED, e * 32 + lane] = T.exp2(sums[e] + c) * scale
        c = c_next
        signal(barriers, "gates_full", GATE_STAGES, i + j)


@macro
def prepare_gates(walk, tiles, lane, scale, g, A_log, dt_bias, backwards=False, item_at=item_of):
    i = T.alloc_var("int32")
    i = 0
    for step in T.serial(walk.steps):
        item = item_at(walk, step)
        chunks = T.alloc_var("int32")
        chunks = walk.chunks(item)
        sum_gates(
            walk.problem, item.row, item.first, item.first + item.length, chunks, item.head, lane, scale, g, A_log, dt_bias,
            tiles, i, backwards,
        )  # fmt: skip
        i = i + chunks


@macro
def scale_state(state, state_scale, which):
    for a, b in T.Parallel(*state.shape):
        state[a, b] *= state_scale[which]


def load_state_scale(tiles, stage, state_scale):
    return T.call_extern(
        "handle", "qla_load_pair", T.address_of(state_scale[0]), T.access_ptr(tiles.state_scale[stage, 0], "r", 2)
    )


def load_row_factors(gates, stage, which, row, factors, distance):
    """factors[0:2] of this thread's two rows, and factors[2:4] from `distance` floats behind."""
    return T.call_extern(
        "handle", "qla_load_rows", T.address_of(factors[0]), T.access_ptr(gates[stage, which, row], "r", 1), distance
    )


def load_column_factors(gates, stage, which, column, factors):
    """Those of this thread's 16 columns."""
    return T.call_extern(
        "handle", "qla_load_columns", T.address_of(factors[0]), T.access_ptr(gates[stage, which, column], "r", 1)
    )


def load_first_column_factors(gates, stage, which, column, factors):
    """Those of the first 8 of them: the others are loaded where they are used."""
    return T.call_extern(
        "handle", "qla_load_first_columns", T.address_of(factors[0]), T.access_ptr(gates[stage, which, column], "r", 1)
    )
