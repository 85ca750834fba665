"""How the kernels of a call follow one another: programmatic dependent launch, from compute capability 9.0 on.

A kernel's blocks come onto SMs that the kernel before has left free, once all of its blocks have let them come. Most kernels
wait there for its end. Some need nothing of it and may run beside it: they are launched with early = 1 then, and wait when their
own work is done, so that whoever waits for them has waited for both.

The launcher answers for early = 1: the kernel before was not early itself, and no memory that this one writes is of use to it,
not even memory that the allocator has taken back since. register_state_forward and register_gradient_scan are early in part: of
their roles only those wait that need what the kernel before makes, or write.
"""

from ..language import T, macro


@macro
def wait_for_the_kernel_before():
    """First thing in a kernel, or a role: its blocks may have come onto the SMs before the kernel before has ended.

    Threads wait here, before they read or write global memory. So all that was launched earlier is complete behind this line,
    also where the kernel before had come early itself, and memory that it used can be used again.
    """
    T.pdl_sync()


@macro
def wait_unless_early(early):
    """The same in a kernel that may run beside the one before. What was launched before that one is complete in any case."""
    if early == 0:
        T.pdl_sync()


@macro
def wait_if_early(early):
    """Last thing in such a kernel, for all threads."""
    if early != 0:
        T.pdl_sync()


@macro
def let_the_next_kernel_come():
    """Not before this one has waited, unless it is early: what the next one relies on is that all before it is complete."""
    T.pdl_trigger()
