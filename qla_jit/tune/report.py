"""Render a tuning session as one HTML page that needs nothing else: for a person who was not there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape

from ..ops.plan import BACKWARD, Extents
from .choose import unit
from .measure import PROTOCOL, RACE_BLOCKS, TIE, estimate
from .session import ProblemResult, SessionResult
from .tuner import Batch, Finalist, Trial, at_batch, batch_name

COLOURS = 6                              # of --series-0 to --series-5, the default's first
WIDTH, HEIGHT, MARGIN = 720, 320, 56     # of a chart

STYLE = """
:root { color-scheme: light dark; --text: #1c1f23; --dim: #5b6470; --back: #ffffff; --line: #d5dae0; --good: #146c43;
  --series-0: #6b7280; --series-1: #0b62c4; --series-2: #b4460b; --series-3: #0a7f5a; --series-4: #8a3ffc; --series-5: #a3195b; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7eb; --dim: #9aa4b0; --back: #14171a; --line: #343b43; --good: #5fd39a;
  --series-0: #9ca3af; --series-1: #6db1ff; --series-2: #ff9d5c; --series-3: #4fd1a1; --series-4: #c2a1ff; --series-5: #ff85b8;
} }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; margin: 0.5rem 0 1rem; } caption { text-align: left; color: var(--dim); }
th, td { border-bottom: 1px solid var(--line); padding: 0.2rem 0.8rem 0.2rem 0; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } .won { color: var(--good); font-weight: 600; }
svg { width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 12px; } .axis { stroke: var(--line); }
.dim { color: var(--dim); } h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
"""


def html(result: SessionResult) -> str:
    """The page of a session."""
    machine, state = result.machine, result.machine.state
    disturbances = (None if state.other_processes is None else bool(state.other_processes), state.mig, state.mps, state.throttled)
    conditions = [
        ("GPU", f"{machine.name}, {machine.arch}, {machine.sm_count} SMs, {machine.l2_bytes / 2**20:.0f} MiB of L2"),
        ("Driver", state.driver or "unknown"),
        ("Highest clocks", f"{_known(state.max_sm_mhz)} MHz SM, {_known(state.max_memory_mhz)} MHz memory"),
        ("Other processes, MIG, MPS, throttling", ", ".join(map(_known, disturbances))),
        ("Protocol", f"{PROTOCOL}: CUDA-graph replays over inputs that hold twice the L2, the candidates of a race in turn and "
                     f"in alternating order, {RACE_BLOCKS} blocks. A speed-up is the median over blocks of default / candidate"
                     f" with its 95 % interval; an interval that touches 1 +- {TIE:.0%} is a tie, and ties go to the default"),
        ("Session", f"{result.outcome}, {result.seconds:.0f} s, written {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"),
    ]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>qla-tune on {escape(machine.name)}</title><style>{STYLE}</style></head><body><h1>Tuning report</h1>",
        "<p>Each candidate below computed the whole gated delta rule, or all of its gradients. It was built, checked against "
        "float64, and only then timed beside the template default. What failed a check is listed with the reason and was never "
        "ranked.</p>",
        _table("How it was measured", ("", ""), [(escape(name), escape(text)) for name, text in conditions]),
        *(_problem(problem) for problem in result.problems),
        "</body></html>",
    ]
    return "\n".join(parts)


def _problem(result: ProblemResult) -> str:
    facts, findings = result.space.facts, result.findings
    dtype = str(facts.dtype).removeprefix("torch.")
    parts = [
        f"<h2>{'Gradients: ' if result.space.op == BACKWARD else ''}{facts.H} key heads, {facts.HV} value heads, "
        f"K = {facts.K}, V = {facts.V}, {dtype}</h2>",
        f"<p>Chunks of {facts.chunk_size} tokens, {'packed' if facts.varlen else 'equal'} sequences, gates "
        f"“{escape(result.problem.gates)}”. Outcome: {result.outcome}"
        f"{', ' + escape(result.reason) if result.reason else ''}. Rigor: {findings.rigor.value}.</p>",
    ]
    if findings.null_test is not None:
        null = findings.null_test
        parts.append(f"<p>The default against itself, which is what cannot be told apart: {null.speedup:.3f}x "
                     f"[{null.low:.3f}, {null.high:.3f}].</p>")
    if findings.races:
        parts += [_summary(result), _chart(result), _curves(result)]
    parts += [_splits(result), _rejected(findings.trials), _screened(findings.trials)]
    return "\n".join(part for part in parts if part)


def _summary(result: ProblemResult) -> str:
    """What came of it, in one sentence."""
    races = result.findings.races.values()
    won = [estimate(race.timing.blocks, race.winner).speedup for race in races if race.winner]
    if not won:
        return f"<p>The default is confirmed at all {len(races)} batches: nothing beat it beyond doubt.</p>"
    return (f"<p>At {len(won)} of {len(races)} batches a candidate beats the default beyond doubt, "
            f"by {min(won):.2f}x to {max(won):.2f}x.</p>")


def _curves(result: ProblemResult) -> str:
    """Times and speed-ups by batch; the winner stands out."""
    findings = result.findings
    head = ["Batch", "Default, µs", *(_name(result, finalist) for finalist in findings.finalists[1:]), "SM clock, MHz", "Dropped"]
    rows = []
    for batch, race in findings.races.items():
        row = [escape(batch_name(batch.lengths)), _number(f"{estimate(race.timing.blocks, 0).median_us:.1f}")]
        for finalist in findings.finalists[1:]:
            column = _column(result, batch, finalist)
            if column is None:
                row.append("not timed")
                continue
            timed = estimate(race.timing.blocks, column)
            text = f"{timed.median_us:.1f} µs, {timed.speedup:.3f}x [{timed.low:.3f}, {timed.high:.3f}]"
            row.append(f'<span class="won">{text}</span>' if column == race.winner and column else text)
        clocks = race.timing.sm_mhz
        row += ["unknown" if clocks is None else f"{clocks[0]} to {clocks[1]}", _number(str(race.timing.dropped))]
        rows.append(row)
    return _table("Times; a winner is in colour, without one the default is confirmed", [escape(cell) for cell in head], rows)


def _splits(result: ProblemResult) -> str:
    """What each segment length took, and the constant that the rule got, by strategy."""
    parts, shown = [], set()
    for finalist in result.findings.finalists:
        times = result.findings.split_times.get(finalist.candidate.strategy, [])
        if not times or finalist.rule is None or finalist.candidate.strategy in shown:
            continue
        shown.add(finalist.candidate.strategy)
        lengths = sorted({split for point in times for split in point.us}, key=lambda split: math.inf if split is None else split)
        rows = []
        for point in times:
            cells = [_number(f"{point.us[split]:.1f}" if split in point.us else "") for split in lengths]
            rows.append([escape(_extents(point.extents)), *cells])
        low, high = finalist.rule.low, finalist.rule.high
        facts = result.problem.facts
        example = unit(facts.HV, times[0].extents, result.space.sm_count)
        parts.append(_table(
            f"Segment lengths of {escape(finalist.candidate.strategy)}, µs. Segments have "
            f"2**round(log2(λ sqrt(HV · chunks / SMs))) chunks with λ from {low:.3g} to {high:.3g}; at the first batch the root "
            f"is {example:.3g}. One λ for all batches costs at most {finalist.rule.regret:.1%} against the best length of each.",
            ["Batch", *("whole" if split is None else f"{split} chunks" for split in lengths)], rows,
        ))
    return "\n".join(parts)


def _rejected(trials: Iterable[Trial]) -> str:
    rows = [
        [escape(trial.label), trial.stage, escape(trial.failure.reason), escape(trial.failure.detail)]
        for trial in trials if trial.failure is not None
    ]
    if not rows:
        return "<p>No candidate was thrown out.</p>"
    return _table("Thrown out, and why", ["Candidate", "Stage", "Reason", "Detail"], rows)


def _screened(trials: Iterable[Trial]) -> str:
    rows = [
        [escape(trial.label), escape(batch_name(trial.lengths)), _number(f"{trial.estimate.median_us:.1f}"),
         f"{trial.estimate.speedup:.3f}x [{trial.estimate.low:.3f}, {trial.estimate.high:.3f}]", escape(trial.over)]
        for trial in trials if trial.estimate is not None and trial.stage in ("screen", "split") and trial.label != trial.over
    ]
    if not rows:
        return ""
    table = _table("In the order in which they were timed", ["Candidate", "Batch", "µs", "Speed-up", "Over"], rows)
    return f"<details><summary>All {len(rows)} screening times</summary>{table}</details>"


def _chart(result: ProblemResult) -> str:
    """Microseconds over tokens, both logarithmic; lines join batches of as many sequences."""
    races = result.findings.races
    marks = []                           # (series, batch, microseconds)
    for batch, race in races.items():
        for series, finalist in enumerate(result.findings.finalists):
            column = _column(result, batch, finalist)
            if column is not None:
                marks.append((series, batch, estimate(race.timing.blocks, column).median_us))
    across = _Scale([sum(batch.lengths) for batch in races], MARGIN, WIDTH - MARGIN / 2)
    up = _Scale([us for _, _, us in marks], HEIGHT - MARGIN, MARGIN / 2)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Microseconds over tokens">']
    for tick in across.ticks:
        x = across(tick)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{MARGIN / 2}" y2="{HEIGHT - MARGIN}"/>'
                     f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{tick:,}</text>')
    for tick in up.ticks:
        y = up(tick)
        parts.append(f'<line class="axis" x1="{MARGIN}" x2="{WIDTH - MARGIN / 2}" y1="{y:.1f}" y2="{y:.1f}"/>'
                     f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 14}" text-anchor="middle">tokens in the batch</text>'
                 f'<text x="4" y="{MARGIN / 2 - 8}">µs</text>')
    for series, finalist in enumerate(result.findings.finalists):
        colour, name = f"var(--series-{series % COLOURS})", _name(result, finalist)
        own = sorted(((b, us) for s, b, us in marks if s == series), key=lambda mark: sum(mark[0].lengths))
        for sequences in dict.fromkeys(batch.extents.sequences for batch, _ in own):
            points = " ".join(f"{across(sum(b.lengths)):.1f},{up(us):.1f}" for b, us in own if b.extents.sequences == sequences)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{across(sum(b.lengths)):.1f}" cy="{up(us):.1f}" r="4" fill="{colour}">'
            f"<title>{escape(name)}, {escape(batch_name(b.lengths))}: {us:.1f} µs</title></circle>"
            for b, us in own
        ]
    legend = "".join(
        f'<span style="color:var(--series-{series % COLOURS})">●</span> {escape(_name(result, finalist))} &nbsp; '
        for series, finalist in enumerate(result.findings.finalists)
    )
    return "".join(parts) + f"</svg><p>{legend}</p>"


class _Scale:
    """Logarithmic positions of values between two ends, and round values to mark."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        self._low, self._high = math.log2(min(values)) - 0.1, math.log2(max(values)) + 0.1
        self._first, self._last = first, last
        octaves = range(math.ceil(self._low), math.floor(self._high) + 1)
        step = max(1, math.ceil(len(octaves) / 8))
        self.ticks = [2**octave for octave in octaves[::step] if octave >= 0]

    def __call__(self, value: float) -> float:
        share = (math.log2(value) - self._low) / (self._high - self._low)
        return self._first + share * (self._last - self._first)


def _column(result: ProblemResult, batch: Batch, finalist: Finalist) -> int | None:
    if finalist is result.findings.finalists[0]:
        return 0
    candidate, candidates = at_batch(result.space, finalist, batch), result.findings.races[batch].candidates
    return candidates.index(candidate) if candidate in candidates else None


def _name(result: ProblemResult, finalist: Finalist) -> str:
    if finalist is result.findings.finalists[0]:
        return "default"
    split = "" if finalist.rule is None else " with its split"
    return result.space.label(dataclasses.replace(finalist.candidate, split=None)) + split


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already; a cell made by _number() is aligned as one."""
    header = "".join(f"<th>{cell}</th>" for cell in head) if any(head) else ""
    body = "".join(
        "<tr>" + "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><caption>{caption}</caption><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def _number(text: str) -> str:
    return f'<td class="number">{escape(text)}</td>'


def _known(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unknown" if value is None else str(value)


def _extents(extents: Extents) -> str:
    return f"{extents.sequences} x, {extents.chunks} chunks, longest {extents.longest}"
