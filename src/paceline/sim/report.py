# SPDX-License-Identifier: Apache-2.0
"""Simulated results for people: tables, and the curves of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from paceline.sim.compare import Branches, Cell, Comparison, Setting, split_branches
from paceline.sim.fields import json_text

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from paceline.sim.cluster import RunReport

ITL_MEASURES = ("p50_itl_ms", "p99_itl_ms")
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Told apart by colour-blind readers too (Okabe and Ito's palette)."""
OPEN_CIRCLE: dict[str, Any] = {"markersize": 7, "markerfacecolor": "white", "markeredgewidth": 1.8}


def label(measure: str) -> str:
    """``p99_itl_ms`` as ``P99 ITL``."""
    return " ".join(measure.removesuffix("_ms").upper().split("_"))


def variants(comparison: Comparison) -> list[Setting]:
    """The compared values, in order."""
    return [cell.variant for cell in comparison.cells if cell.at is comparison.cells[0].at]


def comparison_table(comparison: Comparison) -> Table:
    """One line per swept value and measure: each variant simulated, and observed where known, and the change."""
    names = variants(comparison)
    observed = any(cell.observed for cell in comparison.cells)
    title = f"{comparison.scenario.name}: {comparison.vary} = {', '.join(v.text for v in names)}"
    table = _table(title, _caption(comparison))
    table.add_column(_words(comparison.sweep), justify="right")
    table.add_column("ITL\nms")
    for heading in [*(v.text for v in names), *(["change"] if len(names) == 2 else [])]:
        table.add_column(Text(f"{heading}\nsim"), justify="right")
        if observed:
            table.add_column("\nobs", justify="right")
        if observed and heading != "change":
            table.add_column("\nerror", justify="right")
    for row in _by_sweep(comparison):
        for i, measure in enumerate(ITL_MEASURES):
            start = row[0].at.text if i == 0 and row[0].at else ""
            name = label(measure).removesuffix(" ITL")
            table.add_row(start, name, *_figures(row, measure, observed), end_section=measure == ITL_MEASURES[-1])
    return table


def _table(title: str, caption: str | None = None) -> Table:
    return Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD,
                 padding=(0, 1, 0, 0))  # fmt: skip


def _figures(row: Sequence[Cell], measure: str, observed: bool) -> list[str]:
    figures = []
    for cell in row:
        simulated = cell.median(measure)
        figures.append(f"{simulated:.2f}")
        if observed:
            seen = cell.observed.get(measure)
            figures += ["", ""] if seen is None else [f"{seen:.2f}", _percent(simulated, seen)]
    if len(row) == 2:
        figures.append(_percent(row[1].median(measure), row[0].median(measure)))
        if observed:
            before, after = (cell.observed.get(measure) for cell in row)
            figures.append("" if before is None or after is None else _percent(after, before))
    return figures


def _caption(comparison: Comparison) -> str:
    seeds = len(comparison.cells[0].runs)
    lines = [f"sim: simulated, the median of {seeds} run{'s' if seeds > 1 else ''}. ITL is per chunk."]
    if (error := comparison.mean_abs_log_error) is not None:
        count = sum(len(cell.observed) for cell in comparison.cells)
        lines[0] += f"\nobs: {comparison.scenario.observed.source if comparison.scenario.observed else 'observed'}."
        lines.append(f"Mean |ln(sim / obs)| over {count} values: {100 * error:.1f}%.")
    rate = comparison.busy_rank_steps / comparison.wall_s if comparison.wall_s > 0 else 0.0
    lines.append(f"{comparison.wall_s:.1f} s, {rate:,.0f} busy rank-steps per second.")
    return "\n".join(lines)


def runs_table(comparison: Comparison) -> Table:
    """What lies behind the medians: completed requests, acceptance, FULL steps, what missed them, the extreme seeds."""
    table = _table(
        "Behind the medians: least to most over the runs",
        "missed: busy rank-steps that were not uniform, by reason; the median of the runs.",
    )
    for name in (_words(comparison.sweep), "variant"):
        table.add_column(name)
    figures = ("completed", "failed", "acceptance\nlength", "FULL\nsteps", "P99 ITL, ms\nleast (seed)", "\nmost (seed)")
    for name in figures:
        table.add_column(name, justify="right")
    table.add_column("missed\nrank-steps")
    for cell in comparison.cells:
        table.add_row(
            cell.at.text if cell.at else "",
            cell.variant.text,
            _range([float(run.report.completed) for run in cell.runs], ".0f"),
            _range([float(run.report.failed) for run in cell.runs], ".0f"),
            _range(cell.values("acceptance_length"), ".3f"),
            f"{100 * cell.median('full_step_share'):.1f}%",
            *(_extreme(cell, pick) for pick in (0, -1)),
            "\n".join(f"{reason} {count:,.0f}" for reason, count in cell.misses().items()),
        )
    return table


def _extreme(cell: Cell, pick: int) -> str:
    run = sorted(cell.runs, key=lambda run: (run.report.p99_itl_ms, run.index))[pick]
    return f"{run.report.p99_itl_ms:.1f} ({run.report.seed})"


def branches_table(comparison: Comparison, measure: str = "p99_itl_ms") -> Table:
    """Each cell's ``measure`` by seed and, where the values fall apart in two groups, how they divide."""
    table = _table(
        f"{label(measure)} by seed",
        "Two branches: two neighbouring values differ by half or more; the split is their geometric mean.",
    )
    for name in (_words(comparison.sweep), "variant", "ms, in the order of the seeds", "branches"):
        table.add_column(name)
    for cell in comparison.cells:
        values = ", ".join(f"{value:.1f}" for value in cell.values(measure))
        at = cell.at.text if cell.at else ""
        table.add_row(at, cell.variant.text, values, _branch_text(split_branches(cell, measure)), end_section=True)
    return table


def _branch_text(branches: Branches | None) -> str:
    if branches is None:
        return "one"
    b, total = branches, branches.low + branches.high
    lines = [
        f"{b.low} of {total} near {b.low_ms:.1f} ms",
        f"{b.high} of {total} near {b.high_ms:.1f} ms",
        f"split at {b.split_ms:.1f} ms",
    ]
    if b.observed_ms is not None and b.share_like_observed is not None:
        side = "upper" if b.observed_high else "lower"
        lines.append(f"observed {b.observed_ms:.1f} ms: {side} ({100 * b.share_like_observed:.0f}% of the runs)")
    return "\n".join(lines)


def branches_json(comparison: Comparison, measure: str = "p99_itl_ms") -> list[dict[str, Any]]:
    """The same as data: values by seed, and the two branches or null."""
    result = []
    for cell in comparison.cells:
        b = split_branches(cell, measure)
        split = b and {
            "split_ms": b.split_ms,
            "low": {"runs": b.low, "median_ms": b.low_ms},
            "high": {"runs": b.high, "median_ms": b.high_ms},
            "observed_ms": b.observed_ms,
            "share_like_observed": b.share_like_observed,
        }
        at = {comparison.sweep: cell.at.value} if comparison.sweep and cell.at else {}
        values = {str(run.report.seed): getattr(run.report, measure) for run in cell.runs}
        result.append({**at, "variant": cell.variant.text, "measure": measure, "by_seed": values, "branches": split})
    return result


def run_table(name: str, report: RunReport) -> Table:
    """One simulated run."""
    table = _table(f"{name}, seed {report.seed}")
    table.show_header = False
    table.add_column()
    table.add_column(justify="right")
    for measure in (*ITL_MEASURES, "p50_ttft_ms", "p99_ttft_ms"):
        table.add_row(label(measure), f"{getattr(report, measure):.2f} ms")
    table.add_row("completed, failed", f"{report.completed}, {report.failed}")
    table.add_row("acceptance length", f"{report.acceptance_length:.3f}")
    table.add_row("steps run as a FULL graph", f"{100 * report.full_step_share:.1f}%")
    for reason, count in sorted(report.misses.items()):
        table.add_row(f"missed: {reason}", f"{count}")
    table.add_row("busy rank-steps", f"{report.busy_rank_steps:,}")
    table.add_row("simulated time", f"{report.sim_duration_s:.1f} s")
    table.add_row("trace hash", report.trace_hash)
    return table


def save_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write results.json (with every run) and itl.svg into ``folder``, made if needed; the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    results, chart = folder / "results.json", folder / "itl.svg"
    data = {**comparison.to_json(), "runs": comparison.runs_json(), "branches": branches_json(comparison)}
    results.write_text(json_text(data) + "\n", encoding="utf-8")
    save_chart(comparison, chart)
    return [results, chart]


def save_chart(comparison: Comparison, path: Path) -> None:
    """P50 and P99 ITL over the swept key: simulated medians with the range over the seeds, and observed values.

    The file type follows the suffix of ``path`` (.svg, .png, .pdf).
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "paceline",
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(9.0, 4.0), layout="constrained")
        panels = figure.subplots(1, len(ITL_MEASURES))
        for axes, measure in zip(panels, ITL_MEASURES, strict=True):
            _draw_panel(axes, comparison, measure)
        legend = _legend(comparison)
        figure.legend(handles=legend, loc="outside lower center", ncols=min(5, len(legend)), frameon=False)
        figure.suptitle(f"{comparison.scenario.name}: inter-token latency per chunk, by {comparison.vary}", fontsize=12)
        undated = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=undated, dpi=150)


def _draw_panel(axes: Axes, comparison: Comparison, measure: str) -> None:
    rows = _by_sweep(comparison)
    xs, ticks = _positions([row[0].at for row in rows])
    for i in range(len(variants(comparison))):
        cells = [row[i] for row in rows]
        colour = COLOURS[i % len(COLOURS)]
        medians = [cell.median(measure) for cell in cells]
        axes.plot(xs, medians, "-", color=colour, linewidth=2)
        if len(xs) == 1:
            axes.plot(xs, medians, "_", color=colour, markersize=18, markeredgewidth=2)
        if len(cells[0].runs) > 1:
            low, high = [min(c.values(measure)) for c in cells], [max(c.values(measure)) for c in cells]
            axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        seen = [(x, cell.observed[measure]) for x, cell in zip(xs, cells, strict=True) if measure in cell.observed]
        if seen:
            axes.plot(*zip(*seen, strict=True), "o", color=colour, **OPEN_CIRCLE)
    axes.set_title(label(measure), fontsize=11)
    axes.set_xlabel(_axis(comparison.sweep))
    axes.set_ylabel("ms")
    axes.set_xticks(xs, ticks)
    axes.margins(x=0.06)
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)


def _legend(comparison: Comparison) -> list[Artist]:
    """A colour for each variant, and what lines, bands and circles are."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grey, runs = "#555555", len(comparison.cells[0].runs)
    handles: list[Artist] = [
        Patch(color=COLOURS[i % len(COLOURS)], label=variant.text) for i, variant in enumerate(variants(comparison))
    ]
    handles.append(Line2D([], [], color=grey, linewidth=2, label="simulated" if runs == 1 else "simulated, median"))
    if runs > 1:
        handles.append(Patch(color=grey, alpha=0.2, linewidth=0, label=f"range of {runs} runs"))
    if any(cell.observed for cell in comparison.cells):
        handles.append(Line2D([], [], color=grey, linestyle="", marker="o", label="observed", **OPEN_CIRCLE))
    return handles


def _positions(settings: Sequence[Setting | None]) -> tuple[list[float], list[str]]:
    """Where swept values stand on the x axis: numbers at their value, anything else side by side."""
    texts = [s.text if s else "" for s in settings]
    numbers = [float(s.value) for s in settings if s and isinstance(s.value, int | float)]
    return (numbers if len(numbers) == len(texts) else [float(i) for i in range(len(texts))]), texts


def _by_sweep(comparison: Comparison) -> list[list[Cell]]:
    width = len(variants(comparison))
    cells = list(comparison.cells)
    return [cells[i : i + width] for i in range(0, len(cells), width)]


def _words(key: str | None) -> str:
    """The last part of a dotted key, in words."""
    return (key or "").rpartition(".")[2].replace("_", " ")


def _axis(key: str | None) -> str:
    name = _words(key)
    return f"{name} (requests/s)" if name == "request rate" else name


def _percent(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.1f}%" if base else ""


def _range(values: Sequence[float], form: str) -> str:
    low, high = min(values), max(values)
    return f"{low:{form}}" if low == high else f"{low:{form}} to {high:{form}}"
