"""Compile the CUDA text of device helpers for the CPU, with a thread for each lane; they meet where lanes exchange something.

Inline PTX becomes calls of functions below, with the operands in the order in which the instruction names them.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

HOST = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <pthread.h>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline

static char* shared;
static thread_local struct { int x; } threadIdx;
static inline size_t __cvta_generic_to_shared(const void* p) { return (const char*)p - shared; }
template <class To, class From> static inline To bits(From x) { To y; memcpy(&y, &x, sizeof(y)); return y; }
static inline float __uint_as_float(unsigned x) { return bits<float>(x); }
static inline int atomicAdd(int* to, int x) { return __atomic_fetch_add(to, x, __ATOMIC_RELAXED); }
struct uint4 { unsigned x, y, z, w; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// What the lanes of the one warp that runs bring to a meeting; nobody leaves before all have looked.
static pthread_barrier_t meeting;
static unsigned brought[32][5];
static inline int own_lane() { return threadIdx.x % 32; }
template <class Look> static void meet(unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, Look look) {
  unsigned mine[5] = {a, b, c, d, e};
  memcpy(brought[own_lane()], mine, sizeof(mine));
  pthread_barrier_wait(&meeting);
  look();
  pthread_barrier_wait(&meeting);
}
static inline float from_lane(float x, int lane) {
  float y;
  meet(bits<unsigned>(x), 0, 0, 0, 0, [&] { y = lane < 0 || lane > 31 ? x : bits<float>(brought[lane][0]); });
  return y;
}
static inline float __shfl_sync(unsigned, float x, int lane) { return from_lane(x, lane); }
static inline float __shfl_up_sync(unsigned, float x, int step) { return from_lane(x, own_lane() - step); }
static inline float __shfl_down_sync(unsigned, float x, int step) { return from_lane(x, own_lane() + step); }
static inline float __shfl_xor_sync(unsigned, float x, int mask) { return from_lane(x, own_lane() ^ mask); }

static inline unsigned bf16(float x) {   // to nearest, to even
  unsigned u = bits<unsigned>(x);
  return std::isnan(x) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static inline void cvt_rn_bf16x2_f32(unsigned& to, float high, float low) { to = bf16(high) << 16 | bf16(low); }
static inline void ex2_approx_ftz_f32(float& y, float x) { y = exp2f(x); }
static inline void ld_shared_f32(float& x, unsigned at) { memcpy(&x, shared + at, 4); }
static inline void ld_shared_v2_f32(float& x, float& y, unsigned at) { ld_shared_f32(x, at); ld_shared_f32(y, at + 4); }
static inline void ld_shared_v4_b32(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned at) {
  uint4 x;
  memcpy(&x, shared + at, 16);
  a = x.x, b = x.y, c = x.z, d = x.w;
}
static inline void st_shared_f32(unsigned at, float x) { memcpy(shared + at, &x, 4); }
static inline void st_shared_v4_b32(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
  uint4 x = {a, b, c, d};
  memcpy(shared + at, &x, 16);
}
// Where element e of this lane's pair of matrix m is: lane 8 m + r has brought the address of row r.
static inline char* matrix_element(int m, int e, bool transposed) {
  int row = own_lane() / 4, column = own_lane() % 4 * 2 + e;
  return shared + brought[8 * m + (transposed ? column : row)][0] + 2 * (transposed ? row : column);
}
static void ldmatrix(unsigned* to[4], unsigned at, bool transposed) {
  meet(at, 0, 0, 0, 0, [&] {
    for (int m = 0; m < 4; ++m)
      for (int e = 0; e < 2; ++e) memcpy((char*)to[m] + 2 * e, matrix_element(m, e, transposed), 2);
  });
}
static void stmatrix(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d, bool transposed) {
  meet(at, a, b, c, d, [&] {
    for (int m = 0; m < 4; ++m)
      for (int e = 0; e < 2; ++e) memcpy(matrix_element(m, e, transposed), (char*)&brought[own_lane()][1 + m] + 2 * e, 2);
  });
}
static void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned at) {
  unsigned* to[4] = {&a, &b, &c, &d};
  ldmatrix(to, at, false);
}
static void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& a, unsigned& b, unsigned& c, unsigned& d, unsigned at) {
  unsigned* to[4] = {&a, &b, &c, &d};
  ldmatrix(to, at, true);
}
static void stmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
  stmatrix(at, a, b, c, d, false);
}
static void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
  stmatrix(at, a, b, c, d, true);
}

template <class Call> static void run_warps(char* shared_memory, int warps, Call call) {
  shared = shared_memory;
  pthread_barrier_init(&meeting, nullptr, 32);
  for (int warp = 0; warp < warps; ++warp) {
    std::vector<std::thread> lanes;
    for (int lane = 0; lane < 32; ++lane)
      lanes.emplace_back([=] { threadIdx.x = 32 * warp + lane; call(32 * warp + lane); });
    for (auto& lane : lanes) lane.join();
  }
  pthread_barrier_destroy(&meeting);
}
"""


def without_ptx(text: str) -> str:
    """The text with calls in the place of inline PTX."""
    while found := re.search(r"\basm( volatile)?\(", text):
        end = closing(text, found.end())
        parts = split(text[found.end() : end], ":")
        instruction, _, template = "".join(re.findall(r'"([^"]*)"', parts[0])).partition(" ")
        operands = [part[part.index("(") + 1 : -1] for group in parts[1:3] for part in split(group, ",") if part]
        given = ", ".join(operands[int(number)] for number in re.findall(r"%(\d)", template))
        text = f"{text[: found.start()]}{instruction.replace('.', '_')}({given}){text[end + 1 :]}"
    return text


def closing(text: str, start: int) -> int:
    """Where the parenthesis that is open at `start` is closed."""
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    raise AssertionError("a parenthesis is not closed")


def split(text: str, separator: str) -> list[str]:
    """At separators outside of parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


class DeviceHelpers:
    """The functions of a text that return nothing, to be called by all threads of some warps."""

    def __init__(self, text: str, folder: Path) -> None:
        self.parameters = {
            name: [parameter.rpartition(" ")[0] for parameter in re.sub(r"\s+", " ", parameters).split(", ")]
            for name, parameters in re.findall(r"QLA_DEVICE void (qla_\w+)\(([^)]*)\)", text)
        }
        calls = []
        for name, types in self.parameters.items():
            given = ", ".join(
                f"bits<float>((unsigned)of[{i}])" if kind == "float" else f"({kind})of[{i}]" for i, kind in enumerate(types)
            )
            calls.append(
                f'extern "C" void run_{name}(char* shared_memory, int warps, const int64_t* arguments) {{\n'
                f"  run_warps(shared_memory, warps, [=](int thread) {{\n"
                f"    const int64_t* of = arguments + {len(types)} * thread;\n    {name}({given});\n  }});\n}}\n"
            )
        source, library = folder / "helpers.cpp", folder / "helpers.so"
        source.write_text(HOST + without_ptx(text) + "\n".join(calls))
        command = [COMPILER, "-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-pthread", "-o", library, source]
        subprocess.run(command, check=True, timeout=120)
        self.library = ctypes.CDLL(str(library))

    def call(self, name: str, shared_memory: np.ndarray, arguments: Sequence[np.ndarray]) -> None:
        """Arguments by thread: numbers, and pointers as numbers."""
        table = []
        for kind, values in zip(self.parameters[name], arguments, strict=True):
            table.append(values.astype(np.float32).view(np.uint32) if kind == "float" else values)
        table = np.ascontiguousarray(np.stack(table, axis=1).astype(np.int64))
        function = self.library[f"run_{name}"]
        function(ctypes.c_void_p(shared_memory.ctypes.data), len(table) // 32, ctypes.c_void_p(table.ctypes.data))
