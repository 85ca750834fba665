"""Can a person who was not there read the page, with nothing but the page?"""

import dataclasses
import re

import planted
import pytest
from planted import PlantedMachine

from qla_jit.ops.plan import BACKWARD
from qla_jit.tune import report
from qla_jit.tune.report import HEIGHT, WIDTH
from qla_jit.tune.session import TuneProblem, TuneRequest, tune
from qla_jit.tune.worker import Failure

pytestmark = pytest.mark.usefixtures("strategies")

REQUEST = TuneRequest((TuneProblem(planted.facts(), ((8192,), (32768,), (2048,), (4096,) * 8)),))


def page_of(machine, tmp_path):
    return report.html(tune(REQUEST, open_machine=lambda: machine, journal_dir=tmp_path / "journal"))


def racy(stage, candidate):
    if stage == "verify" and {"block_v": 32, "stages": 1} in candidate["configs"].values():
        return Failure("racy", "launch 3 of 8 gives another o <script>")
    return None


def test_page_shows_curves_rejections_constants_and_conditions(tmp_path):
    page = page_of(PlantedMachine(planted=racy), tmp_path)
    assert "split fused.block_v=128 fused.stages=2" in page              # the winner
    assert "4096x8" in page
    assert "plain scan.block_v=32" in page
    assert "launch 3 of 8 gives another o" in page
    assert "with λ from" in page
    assert "driver" in page.lower()
    assert "590.48" in page
    assert "The default against itself" in page


def test_page_says_in_one_sentence_what_came_of_it(tmp_path):
    page = page_of(PlantedMachine(), tmp_path)
    assert re.search(r"At 4 of 4 batches a candidate beats the default beyond doubt, by \d+\.\d\dx to \d+\.\d\dx", page)
    page = page_of(PlantedMachine(cost=lambda candidate, facts, extents: 100.0), tmp_path)
    assert "The default is confirmed at all 4 batches" in page


def test_page_tells_the_operations_apart(tmp_path):
    (problem,) = REQUEST.problems
    both = TuneRequest((problem, dataclasses.replace(problem, op=BACKWARD)))
    page = report.html(tune(both, open_machine=PlantedMachine, journal_dir=tmp_path))
    assert re.findall("<h2>(.*?),", page) == ["2 key heads", "Gradients: 2 key heads"]


def test_page_needs_nothing_else_and_nothing_in_it_is_run(tmp_path):
    page = page_of(PlantedMachine(planted=racy), tmp_path)
    assert not re.search(r"<script|https?:|src=|href=|@import|url\(", page)
    assert "&lt;script&gt;" in page      # what a failure said is text


def test_page_is_readable_in_the_dark(tmp_path):
    page = page_of(PlantedMachine(), tmp_path)
    assert "prefers-color-scheme: dark" in page
    assert "var(--series-1)" in page


def test_marks_lie_inside_of_their_chart(tmp_path):
    page = page_of(PlantedMachine(), tmp_path)
    marks = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', page)]
    assert len(marks) >= 8
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in marks)


def test_page_of_a_single_batch(tmp_path):
    only_one = TuneRequest((TuneProblem(planted.facts(), ((64,),)),))
    page = report.html(tune(only_one, open_machine=PlantedMachine, journal_dir=tmp_path))
    assert "<svg" in page


def test_page_of_a_session_without_times_says_why(tmp_path):
    page = page_of(PlantedMachine(interrupt_at=2), tmp_path)
    assert "Ctrl-C" in page
    assert "<svg" not in page
