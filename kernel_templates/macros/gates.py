"""Decays in the log domain."""

from ..language import T

LOG2E = 1.4426950408889634  # exp(x) == exp2(x * LOG2E)

# A gate below this resets the state: exp(-1e4) is 0 in float32, and so is every decay across the token. It stands in for
# -inf, whose differences would be NaN, and bounds the rounding of the in-chunk sums (2e-4 relative in later decays).
RESET = -1.0e4

SOFTPLUS_LINEAR_FROM = 20.0        # above it softplus(x) - x < 2.1e-9, below float32 rounding


def gate_of_logit(logit, A_log):
    """-exp(A_log) softplus(logit), the log decay of a model that leaves its gate to the kernel."""
    return -T.exp(A_log) * T.if_then_else(logit > SOFTPLUS_LINEAR_FROM, logit, T.log1p(T.exp(logit)))


def decay_between(g_sum, i, j):
    """Gamma_ij = exp(g_sum_i - g_sum_j) on and below the diagonal; 1 above it, where it might overflow."""
    return T.exp2(T.if_then_else(i >= j, (g_sum[i] - g_sum[j]) * LOG2E, 0.0))


def at_least_reset(gate):
    """The gate, or RESET below it. A choice and not a maximum: a NaN must stay visible."""
    return T.if_then_else(gate < RESET, RESET, gate)
