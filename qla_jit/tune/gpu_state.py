"""Ask the driver's management library (NVML) what state a GPU is in: clocks, throttling, other processes, MIG, MPS.

Through ctypes: libnvidia-ml comes with the driver, its Python packages do not come with anything. Whatever it does not tell
is None, "not known", which is recorded as such and never stops a tuning run.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_char_p, c_uint, c_ulonglong, c_void_p, create_string_buffer
from dataclasses import dataclass
from typing import Any

from .measure import Clock

# nvml.h: clock domains, and the reasons for a lower clock that are faults (heat, hardware) and not the normal power limit.
SM_CLOCK, MEMORY_CLOCK = 1, 2
FAULTS = 0x8 | 0x20 | 0x40 | 0x80        # hardware slowdown, software thermal, hardware thermal, hardware power brake


@dataclass(frozen=True)
class GpuState:
    """What a person has to know to believe the times that were taken on a GPU."""

    driver: str | None = None
    max_sm_mhz: int | None = None
    max_memory_mhz: int | None = None
    memory_bytes_per_us: float | None = None         # peak bandwidth
    other_processes: tuple[int, ...] | None = None   # their process ids
    mig: bool | None = None
    mps: bool | None = None
    throttled: bool | None = None


class _ProcessInfo(ctypes.Structure):
    _fields_ = (("pid", c_uint), ("used", c_ulonglong), ("gpu_instance", c_uint), ("compute_instance", c_uint))


class Nvml:
    """One GPU, by its UUID."""

    def __init__(self, uuid: str) -> None:
        self._device = c_void_p()
        try:
            self._library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self._library = None
        self._works = self._library is not None and (
            self._library.nvmlInit_v2() == 0
            and self._library.nvmlDeviceGetHandleByUUID(c_char_p(uuid.encode()), byref(self._device)) == 0
        )

    def clock(self) -> Clock:
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", c_ulonglong())
        return Clock(
            self._ask("nvmlDeviceGetClockInfo", c_uint(), SM_CLOCK), None if reasons is None else bool(reasons & FAULTS)
        )

    def state(self) -> GpuState:
        memory_mhz = self._ask("nvmlDeviceGetMaxClockInfo", c_uint(), MEMORY_CLOCK)
        bus_bits = self._ask("nvmlDeviceGetMemoryBusWidth", c_uint())
        mig = self._mig()
        mps_clients = self._processes("nvmlDeviceGetMPSComputeRunningProcesses_v3")
        return GpuState(
            driver=self._driver(),
            max_sm_mhz=self._ask("nvmlDeviceGetMaxClockInfo", c_uint(), SM_CLOCK),
            max_memory_mhz=memory_mhz,
            memory_bytes_per_us=memory_mhz * 2 * bus_bits / 8 if memory_mhz and bus_bits else None,      # double data rate
            other_processes=self._others(),
            mig=mig,
            mps=None if mps_clients is None else bool(mps_clients),
            throttled=self.clock().throttled,
        )

    def _ask(self, function: str, answer: Any, *arguments: int) -> Any:
        if not self._works or not hasattr(self._library, function):
            return None
        status = getattr(self._library, function)(self._device, *map(c_uint, arguments), byref(answer))
        return answer.value if status == 0 else None

    def _driver(self) -> str | None:
        text = create_string_buffer(96)
        if not self._works or self._library.nvmlSystemGetDriverVersion(text, c_uint(len(text))) != 0:
            return None
        return text.value.decode()

    def _mig(self) -> bool | None:
        current, pending = c_uint(), c_uint()
        if not self._works or self._library.nvmlDeviceGetMigMode(self._device, byref(current), byref(pending)) != 0:
            return None
        return bool(current.value)

    def _others(self) -> tuple[int, ...] | None:
        found = self._processes("nvmlDeviceGetComputeRunningProcesses_v3")
        if found is None:
            return None
        if os.getpid() in found:
            # The tuner that started this worker waits while the worker times; a notebook that tunes has used the GPU before.
            return tuple(pid for pid in found if pid not in (os.getpid(), os.getppid()))
        # In a container this process may be listed under another number; it has a CUDA context, so one of them is it.
        return tuple(found[1:])

    def _processes(self, function: str) -> list[int] | None:
        if not self._works or not hasattr(self._library, function):
            return None
        count = c_uint(256)
        infos = (_ProcessInfo * count.value)()
        if getattr(self._library, function)(self._device, byref(count), infos) != 0:
            return None
        return [info.pid for info in infos[: count.value]]
