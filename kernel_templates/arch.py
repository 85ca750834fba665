"""The limits of each GPU architecture, as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """What one SM kind allows; values from the CUDA C++ programming guide, "Technical specifications per compute capability"."""

    name: str                            # what nvcc and TileLang call it, "sm_90a"
    compute_capability: tuple[int, int]
    shared_bytes_per_block: int          # dynamic shared memory that one block may opt in to
    registers_per_sm: int = 65_536
    registers_per_thread: int = 255
    threads_per_block: int = 1_024
    has_wgmma: bool = False              # warpgroup matrix instructions with shared-memory operands
    has_bulk_copy: bool = False          # tensor memory accelerator

    @property
    def target(self) -> dict[str, str]:
        """The explicit TileLang target. Never "auto": builder and server must agree without asking a GPU."""
        return {"kind": "cuda", "arch": self.name}


SM80 = Arch("sm_80", (8, 0), shared_bytes_per_block=166_912)
SM89 = Arch("sm_89", (8, 9), shared_bytes_per_block=101_376)
SM90A = Arch("sm_90a", (9, 0), shared_bytes_per_block=232_448, has_wgmma=True, has_bulk_copy=True)
SM100A = Arch("sm_100a", (10, 0), shared_bytes_per_block=232_448, has_bulk_copy=True)
SM120A = Arch("sm_120a", (12, 0), shared_bytes_per_block=101_376, has_bulk_copy=True)

ARCHES = {arch.name: arch for arch in (SM80, SM89, SM90A, SM100A, SM120A)}


def arch_for_capability(major: int, minor: int) -> Arch | None:
    """The Arch of a compute capability, or None where no template was written for it."""
    for arch in ARCHES.values():
        if arch.compute_capability == (major, minor):
            return arch
    return None
