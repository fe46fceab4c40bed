"""EPD-Serve (003): table 5, and figures 8 to 17: all of its deployments, both of its workloads.

openPangu-7B-VL's shape is not published; Qwen2.5-VL-7B has the features of the paper's table 3. Its NPUs are taken
for Ascend 910B3s, by their data sheet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.papers.measure import Deployment, Limits, Load, Row, Rows, markdown, sheet
from epd_serve.plan.evaluate import Evaluator, Goal
from epd_serve.plan.pools import read_fleet
from epd_serve.plan.space import Candidate
from epd_serve.sim.workloads import read_load
from epd_serve.topology import parse_topology

DEVICE, SHAPE, SLOWNESS = "ascend-910b3", "qwen2.5-vl-7b", 4.0
#: Table 5: ShareGPT-4o, 10 requests/s: TTFT and TPOT in ms, attainment, effective tokens/s per NPU.
TABLE_5 = {
    "2EPD": (658.27, 95.56, 0.0215, 13.38),
    "2(E-PD)": (548.32, 62.22, 0.0313, 19.70),
    "EP-D": (5523.82, 27.31, 0.0820, 21.54),
    "(E-P)-D": (2386.85, 28.40, 0.2617, 77.36),
    "(E-D)-P": (651.86, 50.71, 0.2266, 69.18),
    "E-P-D": (557.89, 28.92, 0.9434, 192.70),
}
#: Requests/s in all, that the table's own columns imply: effective tokens/s * NPUs / (64 * attainment) is 19.4,
#: 19.7, 8.2, 9.2, 9.5 and 9.6. So a monolithic NPU had 10 requests/s, one of EP-D 5 and one of E-P-D 3.3.
RATES = {"2EPD": 20, "2(E-PD)": 20, "EP-D": 10, "(E-P)-D": 10, "(E-D)-P": 10, "E-P-D": 10}
#: In vLLM a monolithic instance's tower and language model take turns.
TAKE_TURNS = ("2EPD", "EP-D")
#: Section 4.1: limits where Decode is apart and where Encode is; section 4.4 has the narrow ones.
DECODE_APART = Limits(ttft_ms=2000, tpot_ms=50)
ENCODE_APART = Limits(ttft_ms=2000, tpot_ms=80)
NARROW = Limits(ttft_ms=800, tpot_ms=30)
LIMITS = (DECODE_APART, ENCODE_APART, NARROW)
SHAREGPT, WEB = "sharegpt4o-like", "visualwebinstruct-like"
#: Requests a second and NPU. The paper's go up to 12; by their data sheets NPUs are faster than the paper's, whose
#: deployments are full there: these are at twice as many.
PER_NPU = (4, 12, 24)
HIGHEST, FULL = 12, 24
#: Table 5 at its rates, and at so many times these.
FACTORS = (1.0, 2.5)
#: Seconds of requests in each run.
SECONDS = 16.0
#: TP1 is two instances, so that each deployment has two NPUs.
TP1, TP2 = "2EPD", "EPD@tp2"
FIGURES = (TP1, TP2, "2(E-PD)", "E-PD", "EP-D", "(E-P)-D", "(E-D)-P")


def _deployment(name: str, loads: Sequence[Load]) -> Deployment:
    turns = name in TAKE_TURNS or name == TP2
    if name == TP2:  # two chips that share out each layer are one device
        topology, devices = "EPD", (sheet(SHAPE, DEVICE, 2, turns=turns),)
    else:
        topology = name
        devices = (sheet(SHAPE, DEVICE, turns=turns),) * parse_topology(name).num_devices
    return Deployment(
        name=name, topology=topology, devices=devices, shape=SHAPE, slowness=SLOWNESS, loads=tuple(loads)
    )


def _load(name: str, workload: str, rate: float) -> Load:
    count = round(rate / SLOWNESS * SECONDS)
    return Load(name=name, workload=workload, num_requests=count, rate=rate, limits=LIMITS)


def load_name(workload: str, per_npu: float) -> str:
    return f"{workload} {per_npu:g}/s per NPU"


def full_at(name: str, workload: str) -> float:
    """Requests a second and NPU at which the first NPU is always busy, by the data sheet."""
    count = parse_topology(name).num_devices
    requests = read_load(workload, rate=1.0, count=400, seed=0).requests
    judge = Evaluator(read_fleet(f"emulated:{DEVICE} x {count}", SHAPE), Goal(ttft_s=2.0, tpot_s=0.05), requests)
    return judge.bound(Candidate(line=name, pools=((0, count),))).rate / count


def figures() -> list[Deployment]:
    """Figures 8 to 17: (E-PD) is there twice, as TP1 is."""
    loads = [
        _load(load_name(workload, rate), workload, 2 * rate) for workload in (SHAREGPT, WEB) for rate in PER_NPU
    ]
    return [_deployment(name, loads) for name in FIGURES]


def table5() -> list[Deployment]:
    return [
        _deployment(
            name,
            [_load(f"{factor:g} x", SHAREGPT, factor * RATES[name]) for factor in FACTORS],
        )
        for name in TABLE_5
    ]


def table5_report(rows: Rows) -> str:
    """Each deployment's figures at the paper's rates, and behind them at more, beside the paper's."""
    parts = []
    for factor in FACTORS:
        lines = []
        for name, (ttft, tpot, attained, effective) in TABLE_5.items():
            if (row := rows.get((name, f"{factor:g} x"))) is None:
                continue
            kept = row["attained"][str(DECODE_APART)]
            good = row["effective"][str(DECODE_APART)]
            full = full_at(name, SHAREGPT) * parse_topology(name).num_devices
            lines.append(
                [
                    f"`{name}`",
                    *(f"{row['rate']:g}", f"{full:.1f}"),
                    *(f"{row['ttft_ms']:.0f}", f"{ttft:.0f}"),
                    *(f"{row['tpot_ms']:.1f}", f"{tpot:.1f}"),
                    *(f"{kept:.1%}", f"{attained:.1%}"),
                    *(f"{good:.1f}", f"{effective:.1f}"),
                    f"{row['host_idle']:.0%}",
                ]
            )
        head = ["deployment", "requests/s", "full at", "TTFT ms", "paper", "TPOT ms", "paper", "attained", "paper"]
        head += ["good tokens/s per NPU", "paper", "host idle"]
        parts.append(f"{factor:g} times the paper's rates:\n\n{markdown(head, lines)}")
    return "\n".join(parts)


Value = Callable[[Row], float]


def _change(value: Value, ours: str, other: str) -> Callable[[dict[str, Row]], str]:
    def said(rows: dict[str, Row]) -> str:
        before = value(rows[other])
        return f"{value(rows[ours]) / before - 1:+.1%}" if before else "none before"

    return said


def _first(value: Value, *, lowest: bool) -> Callable[[dict[str, Row]], str]:
    def said(rows: dict[str, Row]) -> str:
        return f"`{(min if lowest else max)(rows, key=lambda name: value(rows[name]))}`"

    return said


def _ttft(row: Row) -> float:
    return float(row["ttft_ms"])


def _tpot(row: Row) -> float:
    return float(row["tpot_ms"])


def _throughput(row: Row) -> float:
    return float(row["throughput"])


def _effective(row: Row) -> float:
    return float(row["effective"][str(DECODE_APART)])


#: What sections 4.3 to 4.7 say of 12 requests/s and NPU with openPangu-7B-VL, and how it is computed.
STATEMENTS: tuple[tuple[str, str, Callable[[dict[str, Row]], str]], ...] = (
    ("throughput of (E-PD) against TP1", "+12.87 to +14.88 %", _change(_throughput, "2(E-PD)", TP1)),
    ("TTFT of (E-PD) against TP1", "-2.7 to -3.25 %", _change(_ttft, "2(E-PD)", TP1)),
    ("TPOT of (E-PD) against TP1", "-69.58 to -70.39 %", _change(_tpot, "2(E-PD)", TP1)),
    ("throughput of E-PD against TP1", "lower", _change(_throughput, "E-PD", TP1)),
    ("throughput of TP2 against TP1", "lowest of all", _change(_throughput, TP2, TP1)),
    ("TPOT of EP-D against TP1", "-79.99 to -93.31 %, any with D apart", _change(_tpot, "EP-D", TP1)),
    ("TPOT of (E-P)-D against TP1", "as above", _change(_tpot, "(E-P)-D", TP1)),
    ("TPOT of (E-D)-P against TP1", "as above", _change(_tpot, "(E-D)-P", TP1)),
    ("TTFT of (E-D)-P against EP-D", "-39.22 to -54.56 %", _change(_ttft, "(E-D)-P", "EP-D")),
    ("TTFT of (E-P)-D against EP-D", "lower, above (E-D)-P", _change(_ttft, "(E-P)-D", "EP-D")),
    (
        "effective throughput of (E-P)-D against EP-D, 2000/50 ms",
        "+57.37 to +69.48 %",
        _change(_effective, "(E-P)-D", "EP-D"),
    ),
    ("lowest TTFT (figure 17)", "`(E-D)-P`", _first(_ttft, lowest=True)),
    ("lowest TPOT (figure 17)", "`EP-D`", _first(_tpot, lowest=True)),
    ("highest throughput (figure 17)", "`2(E-PD)`", _first(_throughput, lowest=False)),
)
#: Section 4.4, ShareGPT-4o at 4 requests/s and NPU within 800/30 ms: attainment, good tokens/s of both NPUs.
NARROW_PAPER = {"EP-D": (0.5957, 294.68), "(E-P)-D": (0.8496, 420.16)}


def figures_report(rows: Rows) -> str:
    def at(workload: str, rate: float) -> dict[str, Row]:
        name = load_name(workload, rate)
        return {line: rows[line, name] for line in FIGURES if (line, name) in rows}

    columns = [at(workload, rate) for rate in (HIGHEST, FULL) for workload in (SHAREGPT, WEB)]
    lines = [
        [text, paper, *(said(one) if len(one) == len(FIGURES) else "-" for one in columns)]
        for text, paper, said in STATEMENTS
    ]
    head = [
        f"{workload.removesuffix('-like')} {rate}/s" for rate in (HIGHEST, FULL) for workload in (SHAREGPT, WEB)
    ]
    parts = [markdown(["statement, requests/s per NPU", "paper, 12/s", *head], lines)]
    narrow = at(SHAREGPT, 4)
    parts.append(
        markdown(
            ["within 800/30 ms, 4/s per NPU", "attained", "paper", "good tokens/s", "paper", "host idle"],
            [
                [
                    f"`{line}`",
                    *(f"{narrow[line]['attained'][str(NARROW)]:.1%}", f"{attained:.1%}"),
                    *(f"{2 * narrow[line]['effective'][str(NARROW)]:.0f}", f"{good:.0f}"),
                    f"{narrow[line]['host_idle']:.0%}",
                ]
                for line, (attained, good) in NARROW_PAPER.items()
                if line in narrow
            ],
        )
    )
    head = ["deployment", "requests/s per NPU", "full at", "TTFT ms", "median", "p90", "TPOT ms", "median", "p90"]
    head += ["tokens/s per NPU", "within 2000/50", "within 2000/80", "good tokens/s per NPU", "host idle"]
    for workload in (SHAREGPT, WEB):
        full = {line: full_at(line, workload) for line in FIGURES}
        lines = [
            [
                f"`{line}`",
                *(f"{rate}", f"{full[line]:.1f}"),
                *(f"{row[f'ttft_ms{part}']:.0f}" for part in ("", "_p50", "_p90")),
                *(f"{row[f'tpot_ms{part}']:.1f}" for part in ("", "_p50", "_p90")),
                f"{row['throughput']:.0f}",
                *(f"{row['attained'][str(limits)]:.0%}" for limits in (DECODE_APART, ENCODE_APART)),
                f"{row['effective'][str(DECODE_APART)]:.0f}",
                f"{row['host_idle']:.0%}",
            ]
            for line in FIGURES
            for rate in PER_NPU
            if (row := rows.get((line, load_name(workload, rate)))) is not None
        ]
        parts.append(f"{workload.removesuffix('-like')}:\n\n{markdown(head, lines)}")
    return "\n".join(parts)
