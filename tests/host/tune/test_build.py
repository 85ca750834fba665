"""Is each candidate built for itself, and ruled out for what the compiler said of it?"""

import itertools
import json

import planted
import pytest
from planted import SM_COUNT, OutputConfig, ScanConfig

from qla_jit import kernel_cache
from qla_jit.compiler import BUILD_REPORT, DEVICE_SOURCE
from qla_jit.errors import CompileError, EnvironmentUnsuitable, KernelNotCachedError
from qla_jit.kernel_templates.arch import SM90A
from qla_jit.launch import LoadedKernel
from qla_jit.tune.build import build, compile_all
from qla_jit.tune.search_space import Candidate, SearchSpace
from qla_jit.tune.worker import Failure

SERIALISED = "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a branch"


class FakeCache:
    """In the place of kernel_cache.get: artefacts with what a test wants of them."""

    def __init__(self, directory):
        self.directory, self.numbers = directory, itertools.count()
        self.errors, self.remarks, self.spills, self.sources = {}, {}, {}, {}
        self.asked = []

    def get(self, requests):
        (request,) = requests
        self.asked.append(request)
        if request.config in self.errors:
            raise self.errors[request.config]
        entry = self.directory / str(next(self.numbers))
        entry.mkdir(parents=True)
        (entry / DEVICE_SOURCE).write_text(self.sources.get(request.config, f"{request.template.name} {request.config}"))
        spilled = self.spills.get(request.config, 0)
        function = dict(registers=100, stack_bytes=0, spill_store_bytes=spilled, spill_load_bytes=spilled)
        report = {"functions": {"main": function}, "remarks": self.remarks.get(request.config, [])}
        (entry / BUILD_REPORT).write_text(json.dumps({"ptxas": report}))
        return [LoadedKernel(lambda: None, "main", (), "0" * 64, entry)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    fake = FakeCache(tmp_path / "kernels")
    monkeypatch.setattr(kernel_cache, "get", fake.get)
    return fake


@pytest.fixture
def space(strategies):
    return SearchSpace(planted.facts(), SM90A, SM_COUNT)


def plain(block_v=64, stages=2, threads=128, split=None):
    return Candidate("plain", (("scan", ScanConfig(block_v, stages)), ("output", OutputConfig(threads))), split)


def test_a_kernel_that_does_not_build_leaves_the_others(cache, space):
    log = f"scan for sm_90a did not compile: exit status 1. Its log ends:\n{'line ' * 3}\nRuntimeError: no layout for S"
    cache.errors[ScanConfig(32, 2)] = CompileError(log)
    good, bad = build(space, [plain(128), plain(32)])
    assert isinstance(good, str)
    assert bad.reason == "compile"
    assert bad.detail == "scan for sm_90a did not compile: exit status 1. Its log ends: RuntimeError: no layout for S"


def test_candidates_of_the_same_code_have_the_same_hash(cache, space):
    cache.sources[OutputConfig(256)] = cache.sources[OutputConfig(128)] = "the same"
    one, same, other = build(space, [plain(), plain(threads=256), plain(32)])
    assert one == same != other


def test_each_kernel_is_built_once(cache, space):
    build(space, [plain(), plain(32), plain(32, threads=256)])
    assert len(cache.asked) == len(set(cache.asked)) == 4


@pytest.mark.parametrize(("spilled", "default", "out"), [(100, 0, True), (60, 0, False), (100, 100, False), (120, 100, True)])
def test_spilling_more_than_a_little_and_more_than_the_default_is_out(cache, space, spilled, default, out):
    cache.spills = {ScanConfig(32, 2): spilled, ScanConfig(64, 2): default}
    (outcome,) = build(space, [plain(32)])
    assert isinstance(outcome, Failure) is out
    if out:
        assert outcome == Failure("static", f"scan spills {2 * spilled} bytes a thread; 128 are tolerated")


@pytest.mark.parametrize("default_too", [False, True])
def test_serialised_matrix_instructions_are_out_unless_the_default_has_them(cache, space, default_too):
    cache.remarks = {ScanConfig(32, 2): [SERIALISED], ScanConfig(64, 2): [SERIALISED] * default_too}
    (outcome,) = build(space, [plain(32)])
    assert isinstance(outcome, Failure) is not default_too


def test_where_compiling_is_forbidden_only_what_is_built_is_a_candidate(cache, space):
    cache.errors[ScanConfig(32, 2)] = KernelNotCachedError("not there")
    good, missing = build(space, [plain(), plain(32)])
    assert isinstance(good, str)
    assert missing == Failure("static", "it is not built, and QLA_JIT_MODE=require forbids compiling")


def test_without_a_place_for_kernels_nothing_is_built(cache, space, monkeypatch):
    monkeypatch.setattr("qla_jit.tune.build.writable_cache_dir", lambda: None)
    with pytest.raises(EnvironmentUnsuitable, match="set QLA_JIT_CACHE_DIR"):
        build(space, [plain()])


def test_trouble_with_the_environment_is_not_the_candidates(cache, space):
    cache.errors[ScanConfig(32, 2)] = EnvironmentUnsuitable("no nvcc")
    with pytest.raises(EnvironmentUnsuitable, match="no nvcc"):
        build(space, [plain(32)])


def test_progress_counts_kernels(cache, space):
    seen = []
    compile_all([*space.requests(plain()), *space.requests(plain(32))], on_kernel=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
