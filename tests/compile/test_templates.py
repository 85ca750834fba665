"""Every template becomes code for every arch it claims; with nvcc, what ptxas says of the code for Hopper."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from builds import lowered, ptxas_reports, serialised

from qla_jit.kernel_templates import (
    chunk_gradients,
    chunk_output,
    gate_cumsum,
    l2norm,
    l2norm_backward,
    register_gradient_scan,
    register_state_forward,
    register_state_scan,
    segment_plan,
    segment_scan,
    segment_state_gradients,
    segment_states,
    state_gradient_scan,
    state_scan,
    triangular_solve,
)
from qla_jit.kernel_templates.arch import ARCHES, SM90A, Arch
from qla_jit.kernel_templates.contract import Template
from qla_jit.ops.plan import KEY_DIMS, VALUE_DIMS

TEMPLATE_MODULES = [
    gate_cumsum,
    l2norm,
    triangular_solve,
    state_scan,
    chunk_output,
    state_gradient_scan,
    chunk_gradients,
    l2norm_backward,
]

CHUNKS = dict(C=64, dtype="bfloat16", packed=True, index_dtype="int32")

# Bytes of registers that one thread may spill. The solve keeps a column of 64 in registers and trades spills for blocks in
# flight; in every other kernel a spill would sit in the matrix loop.
# Single warps of the register-state kernels have 24 registers and spill outside of their loops, 40 to 310 bytes: where items lie
# and, in the backward, which of their chunks are in the band.
# chunk_gradients has seven accumulators: it spills between its products.
SPILL_BOUND = {
    "triangular_solve": 256,
    "register_state_forward": 288,       # the single warps, which have 24 registers, look for segments by rank
    "segment_scan": 80,
    "register_state_scan": 160,
    "register_gradient_scan": 320,
    "chunk_gradients": 256,
}


def gates(**changes: Any) -> gate_cumsum.Problem:
    plain = dict(gate_in_kernel=False, has_dt_bias=False, beta_sigmoid=False, negative_eigenvalues=False, beta_floor=None)
    chunks = {name: value for name, value in CHUNKS.items() if name != "dtype"}
    return gate_cumsum.Problem(HV=48, gate_dtype="float32", beta_dtype="bfloat16", **chunks | plain | changes)


def solve(K: int, **changes: Any) -> triangular_solve.Problem:
    return triangular_solve.Problem(H=2, HV=6, K=K, **CHUNKS | changes)


def scan(K: int, V: int, **changes: Any) -> state_scan.Problem:
    states = dict(initial_state_dtype="float32", has_final_state=True, state_v_first=False)
    return state_scan.Problem(H=2, HV=6, K=K, V=V, **CHUNKS | states | changes)


def output(K: int, V: int, **changes: Any) -> chunk_output.Problem:
    return chunk_output.Problem(H=2, HV=6, K=K, V=V, **CHUNKS | changes)


def gradient_scan(K: int, V: int, **changes: Any) -> state_gradient_scan.Problem:
    states = dict(has_final_state_gradient=True, has_initial_state=True, state_v_first=False)
    return state_gradient_scan.Problem(H=2, HV=6, K=K, V=V, **CHUNKS | states | changes)


def gradients(K: int, V: int, **changes: Any) -> chunk_gradients.Problem:
    return chunk_gradients.Problem(H=2, HV=6, K=K, V=V, **CHUNKS | dict(states_v_first=False) | changes)


GATES = dict(gate_dtype="float32", gate_in_kernel=True, has_dt_bias=True)
UNTYPED = {name: value for name, value in CHUNKS.items() if name != "dtype"}


def rest_of_forward(V: int = 128, K: int = 128, **changes: Any) -> register_state_forward.Problem:
    states = dict(initial_state_dtype="float32", has_final_state=True, state_v_first=False)
    return register_state_forward.Problem(H=2, HV=6, K=K, V=V, **CHUNKS | GATES | states | changes)


def states_again(V: int = 128, **changes: Any) -> register_state_scan.Problem:
    states = dict(initial_state_dtype="float32", state_v_first=False)
    return register_state_scan.Problem(H=2, HV=6, K=128, V=V, **CHUNKS | GATES | states | changes)


def states_backwards(V: int = 128, **changes: Any) -> register_gradient_scan.Problem:
    states = dict(has_final_state_gradient=True, has_initial_state=True, state_v_first=False)
    return register_gradient_scan.Problem(H=2, HV=6, K=128, V=V, **CHUNKS | GATES | states | changes)


def segments(V: int = 128, K: int = 128, **changes: Any) -> segment_scan.Problem:
    return segment_scan.Problem(H=2, HV=6, K=K, V=V, **CHUNKS | GATES | changes)


def boundaries(V: int = 128, K: int = 128, **changes: Any) -> segment_states.Problem:
    states = dict(initial_state_dtype="bfloat16", state_v_first=False)
    return segment_states.Problem(HV=6, K=K, V=V, **UNTYPED | states | changes)


def boundaries_backwards(V: int = 128, **changes: Any) -> segment_state_gradients.Problem:
    states = dict(has_final_state_gradient=True, state_v_first=False)
    return segment_state_gradients.Problem(HV=6, K=128, V=V, **UNTYPED | states | changes)


TRANSFERS = dict(split=True, transfers_only=True, has_initial_state=False)

# The Qwen3.5 family, OLMo-Hybrid and the default of FLA's layer.
MODEL_DIMS = [(128, 128), (96, 192), (256, 512)]
# On Hopper every head dim once: K decides the state's rows, V the blocks.
HOPPER_DIMS = [(64, 64), (64, 96), (96, 64), (128, 256), (192, 128), (192, 512), (256, 192)]
PROBLEMS: list[tuple[Template, Any, Arch]] = [
    (template, problem, arch)
    for arch in ARCHES.values()
    for template, problem in [
        (gate_cumsum.TEMPLATE, gates()),
        *((l2norm.TEMPLATE, l2norm.Problem(K, "bfloat16")) for K in (96, 128)),
        *((triangular_solve.TEMPLATE, solve(K)) for K in (96, 128)),
        *((state_scan.TEMPLATE, scan(K, V)) for K, V in MODEL_DIMS),
        *((chunk_output.TEMPLATE, output(K, V)) for K, V in MODEL_DIMS),
        (state_gradient_scan.TEMPLATE, gradient_scan(128, 128)),
    ]
] + [
    (chunk_gradients.TEMPLATE, gradients(128, 128), SM90A),
    *((state_gradient_scan.TEMPLATE, gradient_scan(K, V), SM90A) for K, V in ((96, 192), (256, 512))),
    *((chunk_gradients.TEMPLATE, gradients(K, V), SM90A) for K, V in ((96, 192), (192, 96), (256, 512))),
    (state_gradient_scan.TEMPLATE, gradient_scan(128, 128, state_v_first=True, packed=False, dtype="float16"), SM90A),
    (state_gradient_scan.TEMPLATE, gradient_scan(128, 128, has_initial_state=False, has_final_state_gradient=False), SM90A),
    (chunk_gradients.TEMPLATE, gradients(128, 128, packed=False, dtype="float16", index_dtype="int64"), SM90A),
    (l2norm_backward.TEMPLATE, l2norm_backward.Problem(96, "bfloat16"), SM90A),
    (
        gate_cumsum.TEMPLATE,
        gates(gate_in_kernel=True, has_dt_bias=True, beta_sigmoid=True, negative_eigenvalues=True, beta_floor=-24),
        SM90A,
    ),
    (triangular_solve.TEMPLATE, solve(128, C=16), SM90A),
    (triangular_solve.TEMPLATE, solve(128, C=32, dtype="float16", packed=False), SM90A),
    (state_scan.TEMPLATE, scan(128, 128, C=16), SM90A),
    (state_scan.TEMPLATE, scan(128, 128, C=32, dtype="float16", packed=False), SM90A),
    (state_scan.TEMPLATE, scan(128, 128, initial_state_dtype="bfloat16", state_v_first=True, index_dtype="int64"), SM90A),
    (state_scan.TEMPLATE, scan(128, 128, initial_state_dtype=None, has_final_state=False), SM90A),
    (register_state_forward.TEMPLATE, rest_of_forward(V=256, packed=False, initial_state_dtype=None), SM90A),
    (register_state_forward.TEMPLATE, rest_of_forward(K=64, V=64, state_v_first=True), SM90A),
    (segment_plan.TEMPLATE, segment_plan.Problem(HV=48, **UNTYPED | GATES), SM90A),
    (segment_plan.TEMPLATE, segment_plan.Problem(HV=48, **UNTYPED | GATES, backwards=True), SM90A),
    (segment_states.TEMPLATE, boundaries(V=256, packed=False, initial_state_dtype=None), SM90A),
    (segment_state_gradients.TEMPLATE, boundaries_backwards(V=256, packed=False, has_final_state_gradient=False), SM90A),
    (register_gradient_scan.TEMPLATE, states_backwards(V=256, packed=False, **TRANSFERS, has_final_state_gradient=False), SM90A),
    (register_gradient_scan.TEMPLATE, states_backwards(split=True, has_initial_state=False, state_v_first=True), SM90A),
    (chunk_output.TEMPLATE, output(128, 128, C=16), SM90A),
    (chunk_output.TEMPLATE, output(128, 128, C=32, dtype="float16", packed=False), SM90A),
]

COMPILED = [
    (gate_cumsum.TEMPLATE, gates(beta_floor=-24)),
    (l2norm.TEMPLATE, l2norm.Problem(128, "bfloat16")),
    (triangular_solve.TEMPLATE, solve(128)),
    (state_scan.TEMPLATE, scan(128, 128)),
    (state_scan.TEMPLATE, scan(256, 512)),
    (chunk_output.TEMPLATE, output(128, 128)),
    (chunk_output.TEMPLATE, output(256, 512)),
    (register_state_forward.TEMPLATE, rest_of_forward()),
    (register_state_forward.TEMPLATE, rest_of_forward(split=True, initial_state_dtype=None)),
    (register_state_forward.TEMPLATE, rest_of_forward(K=96, V=192)),
    (segment_scan.TEMPLATE, segments()),
    (segment_scan.TEMPLATE, segments(K=96, V=192)),
    (segment_states.TEMPLATE, boundaries()),
    (segment_states.TEMPLATE, boundaries(K=96, V=192)),
    (state_gradient_scan.TEMPLATE, gradient_scan(128, 128)),
    (chunk_gradients.TEMPLATE, gradients(128, 128)),
    (chunk_gradients.TEMPLATE, gradients(128, 128, states_v_first=True)),
    (l2norm_backward.TEMPLATE, l2norm_backward.Problem(128, "bfloat16")),
    (register_state_scan.TEMPLATE, states_again()),
    (register_gradient_scan.TEMPLATE, states_backwards()),
    (register_state_scan.TEMPLATE, states_again(split=True, initial_state_dtype=None)),
    (register_gradient_scan.TEMPLATE, states_backwards(split=True, has_final_state_gradient=False)),
    (register_gradient_scan.TEMPLATE, states_backwards(**TRANSFERS)),
    (segment_state_gradients.TEMPLATE, boundaries_backwards()),
]


def name_of(value: Any) -> str:
    if isinstance(value, Template | Arch):
        return value.name
    fields = dataclasses.asdict(value)
    parts = [f"{name}{fields[name]}" for name in ("HV", "K", "V", "C") if name in fields]
    return "-".join(parts + [flag for flag in ("split", "transfers_only") if fields.get(flag)])


@pytest.mark.parametrize(("template", "problem", "arch"), PROBLEMS, ids=name_of)
def test_template_lowers(template: Template, problem: Any, arch: Arch) -> None:
    source = lowered(template, problem, arch)
    assert f"{template.name}_kernel" in source


@pytest.mark.parametrize(("K", "V"), HOPPER_DIMS, ids=lambda dim: str(dim))
def test_head_dims_lower_to_warpgroup_products_on_hopper(K: int, V: int) -> None:
    for template, problem in ((state_scan.TEMPLATE, scan(K, V)), (chunk_output.TEMPLATE, output(K, V))):
        assert "wgmma" in lowered(template, problem, SM90A)


@pytest.mark.parametrize("arch", ARCHES.values(), ids=name_of)
@pytest.mark.parametrize("template", TEMPLATE_MODULES, ids=lambda module: module.TEMPLATE.name)
def test_default_config_is_allowed_for_every_head_dim(template: Any, arch: Arch) -> None:
    # Q and K of 64 tokens with K = 256 leave too little of 99 KiB.
    small = arch.shared_bytes_per_block < 128 * 1024
    backward_sizes = [(K, V, 32 if K == 256 and small else 64) for K, V in itertools.product(KEY_DIMS, VALUE_DIMS)]
    problems = {
        "gate_cumsum": [gates()],
        "l2norm": [l2norm.Problem(K, "float16") for K in KEY_DIMS],
        "triangular_solve": [solve(K, C=C) for K in KEY_DIMS for C in (16, 32, 64)],
        "state_scan": [scan(K, V) for K, V in itertools.product(KEY_DIMS, VALUE_DIMS)],
        "chunk_output": [output(K, V) for K, V in itertools.product(KEY_DIMS, VALUE_DIMS)],
        "state_gradient_scan": [gradient_scan(K, V, C=C) for K, V, C in backward_sizes],
        "chunk_gradients": [gradients(K, V, C=C) for K, V, C in backward_sizes],
        "l2norm_backward": [l2norm_backward.Problem(K, "float16") for K in KEY_DIMS],
    }[template.TEMPLATE.name]
    if arch.name not in template.TEMPLATE.arches:
        pytest.skip(f"{template.TEMPLATE.name} is not written for {arch.name}")
    for problem in problems:
        config = template.TEMPLATE.default_config(problem, arch)
        assert template.TEMPLATE.rejection(problem, config, arch) is None, f"{problem} {config}"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Template, Any], dict[str, Any]]:
    """What ptxas says of the builds for Hopper, by template and problem."""
    reports = ptxas_reports([(template, problem, None) for template, problem in COMPILED], tmp_path_factory.mktemp("cache"))
    return dict(zip(COMPILED, reports, strict=True))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("template", "problem"), COMPILED, ids=name_of)
def test_ptxas_serialises_no_product_and_spills_little(
    template: Template, problem: Any, compiled: dict[tuple[Template, Any], dict[str, Any]], record_property: Any
) -> None:
    ptxas = compiled[template, problem]
    for name, function in ptxas["functions"].items():
        record_property(name, function)
        print(f"{name}: {function['registers']} registers, {function['spill_store_bytes']} B of spill stores")
        assert function["spill_store_bytes"] <= SPILL_BOUND.get(template.name, 0)
    assert not serialised(ptxas)


def test_register_state_kernels_refuse_what_they_are_not_written_for() -> None:
    config = register_state_forward.default_config(rest_of_forward(), SM90A)
    for changes in (dict(C=32), dict(dtype="float16"), dict(V=96), dict(K=192), dict(K=100)):
        problem = rest_of_forward(**changes)
        rejection = register_state_forward.TEMPLATE.rejection(problem, config, SM90A)
        assert rejection is not None
        assert str(next(iter(changes.values()))) in rejection.reason
    assert register_state_forward.TEMPLATE.rejection(rest_of_forward(), config, ARCHES["sm_100a"]) is not None
