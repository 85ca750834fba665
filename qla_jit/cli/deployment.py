"""The verbs for those who ship kernels: build, pack, install, doctor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import bundle, bundle_file, enumeration, record_store
from ..bundle_file import BundleManifest
from ..doctor import examine
from ..enumeration import Variants
from ..errors import InputError
from ..kernel_templates.arch import ARCHES
from ..models import ModelShape
from ..ops.inputs import GPU_DTYPES, INDEX_DTYPES, KERNEL_DTYPES
from ..settings import settings
from ..tune.session import Event
from ..tuning_records import Hardware
from .command import ExitCode, verb
from .options import AsJson, ChunkSize, Dims, Dtype, Heads, Models, Tp, dtype_of, shapes_of
from .output import print_json, print_table, progress


@verb
def build(
    arch: Annotated[str, typer.Option("--arch", help=f"Of the GPU that will run them: {', '.join(ARCHES)}.")],
    sm_count: Annotated[int, typer.Option("--sm-count", min=1, help="Of that GPU; with --arch it says whose records count.")],
    out: Annotated[Path, typer.Option("--out", help="A directory, to be named by QLA_JIT_BUNDLE_PATH.")],
    l2_mib: Annotated[
        int | None, typer.Option("--l2-mib", min=1, help="L2 of that GPU; by default records for any size of it count.")
    ] = None,
    heads: Heads = None,
    dims: Dims = None,
    models_: Models = None,
    tp: Tp = None,
    dtype: Dtype = "bfloat16",
    chunk_size: ChunkSize = 64,
    packed: Annotated[bool | None, typer.Option("--packed/--not-packed", help="Only calls with, or without, cu_seqlens.")] = None,
    index_dtypes: Annotated[
        list[str] | None, typer.Option("--index-dtype", help="Of cu_seqlens: int32 or int64; by default both.")
    ] = None,
    initial_state: Annotated[
        bool | None, typer.Option("--initial-state/--no-initial-state", help="Only calls with, or without, an initial state.")
    ] = None,
    final_state: Annotated[
        bool | None, typer.Option("--final-state/--no-final-state", help="Only calls that want, or do not, the final state.")
    ] = None,
    state_dtype: Annotated[str, typer.Option("--state-dtype", help="Of the initial state.")] = "float32",
    gate_dtype: Annotated[str, typer.Option("--gate-dtype", help="Of g.")] = "float32",
    beta_dtype: Annotated[str, typer.Option("--beta-dtype", help="Of beta.")] = "float32",
    state_v_first: Annotated[bool, typer.Option("--state-v-first", help="States are [N, HV, V, K].")] = False,
    l2norm: Annotated[bool, typer.Option("--l2norm/--no-l2norm", help="Also for calls that normalise q and k.")] = True,
    gate_in_kernel: Annotated[bool, typer.Option("--gate-in-kernel", help="Only calls whose g holds logits.")] = False,
    dt_bias: Annotated[bool, typer.Option("--dt-bias/--no-dt-bias", help="With --gate-in-kernel.")] = True,
    beta_sigmoid: Annotated[bool, typer.Option("--beta-sigmoid", help="Only calls whose beta holds logits.")] = False,
    neg_eigval: Annotated[bool, typer.Option("--neg-eigval", help="With --beta-sigmoid: allow_neg_eigval.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Also for calls that need gradients.")] = False,
    as_json: AsJson = False,
) -> ExitCode:
    """Compile what calls on a GPU that need not be here will ask for, into a directory that is shipped with the model."""
    if arch not in ARCHES:
        raise InputError(f"--arch must be one of {', '.join(ARCHES)}; got {arch!r}")
    if bool(heads or dims) == bool(models_ or tp):
        raise InputError("what to build must be given by --heads and --dims, or by --model and --tp")
    variants = Variants(
        dtype=dtype_of(dtype, "--dtype", KERNEL_DTYPES),
        chunk_size=chunk_size,
        packed=packed,
        index_dtypes=tuple(dtype_of(text, "--index-dtype", INDEX_DTYPES) for text in index_dtypes or ("int32", "int64")),
        initial_state=initial_state,
        output_final_state=final_state,
        state_dtype=dtype_of(state_dtype, "--state-dtype", GPU_DTYPES),
        g_dtype=dtype_of(gate_dtype, "--gate-dtype", GPU_DTYPES),
        beta_dtype=dtype_of(beta_dtype, "--beta-dtype", GPU_DTYPES),
        state_v_first=state_v_first,
        use_qk_l2norm_in_kernel=l2norm,
        use_gate_in_kernel=gate_in_kernel,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=beta_sigmoid,
        allow_neg_eigval=neg_eigval,
        backward=backward,
    )
    gpus = _gpus_with_records(arch, sm_count, l2_mib)
    shapes = [ModelShape(*of_heads, *of_dims) for of_heads, of_dims in shapes_of(heads, dims, models_, tp)]
    needed = {
        f"{shape.H}:{shape.HV} {shape.K}:{shape.V}": enumeration.kernels(shape, variants, ARCHES[arch], gpus) for shape in shapes
    }
    records = [record for shape in shapes for record in bundle.records_of(shape, variants, gpus)]
    results = {}
    with progress() as on_event:
        for problem, requests in needed.items():

            def on_kernel(done: int, total: int, problem: str = problem) -> None:
                on_event(Event("compile", problem, f"{done} of {total} kernels", done, total))

            results[problem] = bundle.build(requests, out, on_kernel=on_kernel)
    bundle.add_records(records, out)
    if as_json:
        rows = [{"problem": problem, **dataclasses.asdict(built)} for problem, built in results.items()]
        print_json({"directory": str(out.absolute()), "problems": rows, "records": len(records)})
    else:
        print_table(
            ("problem", "kernels", "bytes", "seconds"),
            [(problem, built.kernels, built.bytes, f"{built.seconds:.1f}") for problem, built in results.items()],
        )
        typer.echo(f"{len(records)} tuned records for such calls are in the bundle")
    failures = [failure for built in results.values() for failure in built.failures]
    for failure in failures:
        typer.echo(f"not built: {failure}", err=True)
    return ExitCode.PARTIAL if failures else ExitCode.OK


@verb
def pack(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What was --out of qla-tune build.")],
    out: Annotated[Path, typer.Option("--out", help="The file, as in qla_jit-sm_90a.tar.gz.")],
    signing_key: Annotated[
        Path | None, typer.Option("--sign", help="A PEM file with an ed25519 private key without a passphrase.")
    ] = None,
    as_json: AsJson = False,
) -> ExitCode:
    """Make one file of a bundle, always the same for the same bundle, with sums of everything in it."""
    packed = bundle_file.pack(directory, out, signing_key=signing_key)
    told = _described(packed.manifest) | {
        "file": str(out.absolute()),
        "bytes": packed.stamp.size,
        "sha256": packed.stamp.sha256,
        "signed": packed.signed,
    }
    _print_facts(told, as_json)
    return ExitCode.OK


@verb
def install(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What was --out of qla-tune pack.")],
    into: Annotated[Path, typer.Option("--into", help="A new directory, to be named by QLA_JIT_BUNDLE_PATH.")],
    public_keys: Annotated[
        list[Path] | None,
        typer.Option("--public-key", help="PEM file of an ed25519 public key; instead of QLA_JIT_BUNDLE_KEYS; repeatable."),
    ] = None,
    allow_unsigned: Annotated[
        bool, typer.Option("--allow-unsigned", help="Take native code that no key vouches for.")
    ] = False,
    as_json: AsJson = False,
) -> ExitCode:
    """Check a file that pack made, and put what it holds into a directory: all of it, or nothing."""
    installed = bundle_file.install(
        file, into, public_keys=public_keys or settings().bundle_keys, allow_unsigned=allow_unsigned
    )
    told = _described(installed.manifest) | {
        "directory": str(into.absolute()),
        "usable": installed.usable,
        "signed": installed.signed,
        "was_there": installed.was_there,
    }
    _print_facts(told, as_json)
    return ExitCode.OK


@verb
def doctor(as_json: AsJson = False) -> ExitCode:
    """Check whether this machine can compile, run and tune kernels, and say what to do about it."""
    findings = examine()
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        print_table(("check", "", "found", "what to do"), [(f.check, f.status, f.found, f.advice) for f in findings])
    return ExitCode.ENVIRONMENT if any(finding.status == "failed" for finding in findings) else ExitCode.OK


def _described(manifest: BundleManifest) -> dict[str, Any]:
    versions = {name: value for name, value in manifest.model_dump().items() if name not in ("format", "files")}
    return versions | {"kernels": manifest.kernels, "record_files": manifest.record_files}


def _print_facts(facts: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        typer.echo(f"{name}: {', '.join(value) if isinstance(value, list) else value}")


def _gpus_with_records(arch: str, sm_count: int, l2_mib: int | None) -> set[Hardware]:
    """The kinds of GPU that the options may mean, as far as there are records for them."""
    return {
        hardware
        for hardware in (stored.record.hardware for stored in record_store.everything())
        if (hardware.arch, hardware.sm_count) == (arch, sm_count) and l2_mib in (None, hardware.l2_bytes >> 20)
    }
