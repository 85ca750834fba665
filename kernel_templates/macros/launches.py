"""How the kernels of a call follow one another: programmatic dependent launch, from compute capability 9.0 on."""

from ..language import T, macro


@macro
def wait_for_the_kernel_before():
    """First thing in a kernel: its blocks may have come onto the SMs before the kernel before has ended.

    All threads wait here, before they read or write global memory. So all that was launched earlier is complete behind this line,
    also where the kernel before had come early itself, and memory that it used can be used again.
    """
    T.pdl_sync()


@macro
def let_the_next_kernel_come():
    """Not before this one has waited: what the next one relies on is that all before it is complete."""
    T.pdl_trigger()
