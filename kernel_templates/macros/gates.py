"""Decays in the log domain."""

LOG2E = 1.4426950408889634  # exp(x) == exp2(x * LOG2E)

# A gate below this resets the state: exp(-1e4) is 0 in float32, and so is every decay across the token. It stands in for
# -inf, whose differences would be NaN, and bounds the rounding of the in-chunk sums (2e-4 relative in later decays).
RESET = -1.0e4
