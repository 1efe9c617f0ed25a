#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Makes of what guests logged the lines of scripts/bench, and of these the report.

bench-report.py insns LOG              the lines of one guest that counted instructions
bench-report.py traffic FILE           the lines of what scenario bench-traffic wrote
bench-report.py rxe FILE               the same, of a guest whose clock counts instructions
bench-report.py static BUILD           what the object code in build/stock says
bench-report.py report DIR             report.md and plots, of the lines and facts that scripts/bench left
bench-report.py check LIMIT LOG        fails if a ratio on the way of a request is above the limit
"""

import os
import re
import statistics
import subprocess
import sys
from xml.sax.saxutils import escape

# On the way of a request. What is not here is done once in a while.
HOT = re.compile(r"(post|complete|steady|whole_way|chain|poll|process)(_|$)")


def die(why):
    sys.exit(f"bench: error: {why}")


def insns(log):
    """{name: {"rust": [instructions an operation], "c": [...]}}, in the order of the log."""
    found = {}
    for line in open(log, encoding="utf-8", errors="replace"):
        m = re.search(r"bench_device: who=(\S+) name=(\S+) ops=(\d+) insns=(-?\d+)$", line.strip())
        if m:
            who, name, ops, count = m.groups()
            found.setdefault(name, {}).setdefault(who, []).append(int(count) / int(ops))
    if not found:
        die(f"{log} has no samples")
    for name, sides in found.items():
        if sorted(sides) != ["c", "rust"]:
            die(f"{log} has {name} of {' and '.join(sides)} only")
    return found


def ratio_lines(found):
    """Yields (name, ratio, line)."""
    for name, sides in found.items():
        rust, c = (statistics.median(sides[who]) for who in ("rust", "c"))
        spread = " ".join(
            f"{who}_range={min(sides[who]):.1f}..{max(sides[who]):.1f}" for who in ("rust", "c")
        )
        if name.startswith("allocs_"):
            yield name, 0, f"bench: name={name} unit=allocs_per_op rust={rust:g} c={c:g}"
            continue
        ratio = rust / c
        yield name, ratio, (
            f"bench: name={name} unit=insn rust={rust:.1f} c={c:.1f} ratio={ratio:.3f}"
            f" samples={len(sides['c'])} {spread}"
        )


def runs(path):
    """{(qps, size, ctx): {pair: {side: fields}}} of what scenario bench-traffic wrote."""
    found, failed = {}, set()
    for line in open(path, encoding="utf-8", errors="replace"):
        if not line.startswith("pair="):
            continue
        f = dict(word.split("=", 1) for word in line.split())
        key = int(f["qps"]), int(f["size"]), f["ctx"]
        if f["status"] != "pass":
            # Why, the log of the guest may say. With the one side goes the other.
            print(f"bench: pair left out, since a run of it did not pass: {line.strip()}")
            failed.add((key, int(f["pair"])))
        found.setdefault(key, {}).setdefault(int(f["pair"]), {})[f["side"]] = f
    for key, number in failed:
        found[key].pop(number)
    found = {key: pairs for key, pairs in found.items() if pairs}
    if not found:
        die(f"{path} has no runs that passed")
    for key, pairs in found.items():
        for number, sides in pairs.items():
            if sorted(sides) != ["c", "rust"]:
                die(f"{path}: {key}: pair {number} has not both sides")
    return found


def compared(pairs, value):
    """The fields of a line: both medians, and the ratio pair by pair."""
    sides = {w: [value(p[w]) for p in pairs.values()] for w in ("rust", "c")}
    ratios = [r / c for r, c in zip(sides["rust"], sides["c"])]
    return (
        f"rust={statistics.median(sides['rust']):.0f} c={statistics.median(sides['c']):.0f}"
        f" ratio={statistics.median(ratios):.3f} pairs={len(ratios)}"
        f" ratio_range={min(ratios):.3f}..{max(ratios):.3f}"
    )


def traffic_lines(found):
    for (qps, size, ctx), pairs in found.items():
        for unit, field in (
            ("ops_per_s", "ops_per_s"),
            ("p50_ns", "lat_p50_ns"),
            ("p99_ns", "lat_p99_ns"),
        ):
            line = compared(pairs, lambda f, field=field: max(int(f[field]), 1))
            yield f"bench: name=traffic_{ctx} qps={qps} size={size} unit={unit} {line}"


def rxe_lines(found):
    for (qps, size, ctx), pairs in found.items():
        line = compared(pairs, lambda f: 1e9 / int(f["ops_per_s"]))
        yield f"bench: name=rxe_{ctx} qps={qps} size={size} unit=insn {line}"


# On the way of a request: the functions of bench_rust.rs, as they are mangled, and of bench_c.c.
FUNCTIONS = {
    "post_send": (r"9post_send\w*4Keep", "post_send"),
    "complete_send": (r"4Keep\w*9send_done", "keep_sent"),
    "steady_send": (r"5Again\w*9send_done", "again_sent"),
}


def function(path, pattern):
    """The disassembly of the first function of a name."""
    text = subprocess.run(["objdump", "-dr", path], capture_output=True, text=True, check=True).stdout
    for block in text.split("\n\n"):
        m = re.match(r"[0-9a-f]+ <(\w+)>:", block.strip())
        if m and not m[1].startswith("__pfx_") and re.search(pattern, m[1]):
            return block
    die(f"{path}: no function like {pattern}")


def static_lines(build):
    for name, (rust, c) in FUNCTIONS.items():
        code = (
            function(f"{build}/rust/bench/bench_rust.o", rust),
            function(f"{build}/rust/bench/bench_c.o", f"^{c}$"),
        )
        for what, pattern in (("locked", r"\tlock "), ("indirect_calls", r"__x86_indirect_thunk")):
            r, c_count = (len(re.findall(pattern, block)) for block in code)
            yield f"bench: name={what}_{name} unit=insn rust={r} c={c_count}"
    sizes = []
    for module in "bench_rust", "bench_c":
        out = subprocess.run(["size", f"{build}/{module}.ko"], capture_output=True, text=True, check=True)
        sizes.append(out.stdout.split("\n")[1].split()[3])
    yield f"bench: name=size unit=bytes rust={sizes[0]} c={sizes[1]}"


def check(limit, log):
    bad = 0
    for name, ratio, line in ratio_lines(insns(log)):
        print(line)
        if name.startswith("allocs_") and "rust=0 " not in line:
            bad += 1
            print(f"bench: error: {name}: in steady state nothing may be allocated")
        if HOT.match(name) and ratio > limit:
            bad += 1
            print(f"bench: error: {name} takes {ratio:.3f} times what C takes, allowed is {limit}")
    if bad:
        sys.exit(1)


def bars(path, title, rows):
    """Two bars a row, of (label, rust, c)."""
    left, width, step = 190, 420, 34
    top = max(max(r, c) for _, r, c in rows)
    out = []
    for i, (label, *values) in enumerate(rows):
        y = 60 + i * step
        out.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>')
        for j, (value, colour) in enumerate(zip(values, ("#b7410e", "#3b6ea5"))):
            w = value / top * width
            out.append(f'<rect x="{left}" y="{y + 12 * j}" width="{w:.1f}" height="11" fill="{colour}"/>')
            out.append(f'<text x="{left + w + 4:.1f}" y="{y + 12 * j + 10}">{value:g}</text>')
    key = '<text x="190" y="46" fill="#b7410e">Rust</text><text x="230" y="46" fill="#3b6ea5">C</text>'
    svg(path, title, 700, 70 + len(rows) * step, [key, *out])


def whiskers(path, title, rows):
    """A dot and its range a row, of (label, middle, least, most): ratios, with a line at 1."""
    left, width, step = 250, 400, 20
    low = min(0.9, *(r[2] for r in rows))
    high = max(1.1, *(r[3] for r in rows))

    def x(value):
        return left + (value - low) / (high - low) * width

    bottom = 56 + len(rows) * step
    out = [
        f'<line x1="{x(1):.1f}" y1="40" x2="{x(1):.1f}" y2="{bottom}" stroke="#888"/>',
        f'<text x="{x(1):.1f}" y="36" text-anchor="middle">1.0</text>',
        f'<text x="{left}" y="{bottom + 14}">{low:.2f}</text>',
        f'<text x="{left + width}" y="{bottom + 14}" text-anchor="end">{high:.2f}</text>',
    ]
    for i, (label, middle, least, most) in enumerate(rows):
        y = 60 + i * step
        out.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{escape(label)}</text>')
        out.append(f'<line x1="{x(least):.1f}" y1="{y}" x2="{x(most):.1f}" y2="{y}" stroke="#b7410e"/>')
        out.append(f'<circle cx="{x(middle):.1f}" cy="{y}" r="4" fill="#b7410e"/>')
        out.append(f'<text x="{left + width + 6}" y="{y + 4}">{middle:.3f}</text>')
    svg(path, title, left + width + 60, bottom + 24, out)


def svg(path, title, width, height, parts):
    with open(path, "w", encoding="utf-8") as f:
        f.write(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            ' font-family="sans-serif" font-size="11">\n'
            f'<rect width="{width}" height="{height}" fill="white"/>\n'
            f'<text x="10" y="20" font-size="14">{escape(title)}</text>\n'
        )
        f.write("\n".join(parts) + "\n</svg>\n")


# Of each part: its title, and what has to be said of its figures.
PARTS = {
    "insns": (
        "Instructions",
        "On Debian's kernel, under QEMU with `-icount shift=0`: its one CPU's time stamp counter advances by"
        " one with each instruction. The device completes requests without moving data; what it costs"
        " itself, and what the RDMA core needs to call a handler that does nothing, is subtracted."
        " Medians of 5 samples of 240 operations, with the range. `post_*`: one request that was posted"
        " before; `first_post`: one that was not, which the queue pair notes (the twin has nothing of the"
        " kind, and so loses what a driver forgets). `complete_*`: from the RDMA core's call of `done` to"
        " its return, with a handler that does nothing. `steady_*`: that, with a handler that posts the"
        " request again. `poll_16`, `process`: a completion of a queue that its owner polls."
        " `whole_way_*`: from one completion to the next, the kernel's part included. `lease_put`,"
        " `private_cq`: taking and giving back a queue, where the crate keeps books that let it take down"
        " what was leaked.",
    ),
    "rxe": (
        "Instructions on rxe",
        "As above, but all that a send of 64 bytes takes on rxe, from one completion to the next: the"
        " exerciser beside its twin, which fill and check each message, and the kernel's own part, which is"
        " most of it. Latency is not a figure of such a guest.",
    ),
    "traffic": (
        "Sends a second, and how long they take",
        "On rxe, on user-mode Linux without debug options, 2 CPUs: the exerciser and its twin in turns, each"
        " on a device of its own. The ratio is of each pair of runs: its median, and its range. Of sends a"
        " second more is better, of times less.",
    ),
    "static": (
        "What the layer does not pay",
        "Read off the object code: instructions that lock the bus and indirect calls in the functions on the way"
        " of a request (with the paths that are seldom taken), and the sizes of the modules that count"
        " instructions. Allocations in steady state are counted by the kernel's trace points, above.",
    ),
}


def fields(line):
    return dict(word.split("=", 1) for word in line.split()[1:])


def table(rows):
    heads = []
    for row in rows:
        heads += [k for k in row if k not in heads]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield "| " + " | ".join(row.get(k, "") for k in heads) + " |"


def plots(part, rows, directory):
    if part == "insns":
        shown = [r for r in rows if HOT.match(r["name"]) and "_workqueue" not in r["name"] and "_unbound" not in r["name"]]
        shown = [r for r in shown if not r["name"].startswith("whole")]
        bars(
            f"{directory}/insns.svg",
            "Instructions an operation",
            [(r["name"], float(r["rust"]), float(r["c"])) for r in shown],
        )
        return ["insns.svg"]
    if part == "traffic":
        names = []
        for unit, title in (
            ("ops_per_s", "Sends a second, Rust / C"),
            ("p50_ns", "Median time of a send, Rust / C"),
            ("p99_ns", "99th percentile of the time of a send, Rust / C"),
        ):
            shown = [
                (
                    f"{r['name'].removeprefix('traffic_')}, {r['qps']} pairs, {r['size']} bytes",
                    float(r["ratio"]),
                    *map(float, r["ratio_range"].split("..")),
                )
                for r in rows
                if r["unit"] == unit
            ]
            whiskers(f"{directory}/traffic-{unit}.svg", title, shown)
            names.append(f"traffic-{unit}.svg")
        return names
    return []


def report(directory):
    facts = open(f"{directory}/facts", encoding="utf-8").read().rstrip()
    out = ["# What the safe layer costs", "", facts, ""]
    for part, (title, about) in PARTS.items():
        out += [f"## {title}", ""]
        path = f"{directory}/{part}/lines"
        if not os.path.exists(path):
            out += [f"Not measured in this run: `make bench PARTS={part}` does.", ""]
            continue
        with open(path, encoding="utf-8") as f:
            lines = f.read().splitlines()
        rows = [fields(line) for line in lines if line.startswith("bench: name=")]
        out += [about, "", *table(rows), ""]
        out += [f"{line}\n" for line in lines if not line.startswith("bench: name=")]
        out += [f"![{title}]({name})\n" for name in plots(part, rows, directory)]
    with open(f"{directory}/report.md", "w", encoding="utf-8") as f:
        f.write("\n".join(out))


def main(args):
    match args:
        case ["insns", log]:
            for _, _, line in ratio_lines(insns(log)):
                print(line)
        case ["traffic", path]:
            print(*traffic_lines(runs(path)), sep="\n")
        case ["rxe", path]:
            print(*rxe_lines(runs(path)), sep="\n")
        case ["static", build]:
            print(*static_lines(build), sep="\n")
        case ["report", directory]:
            report(directory)
        case ["check", limit, log]:
            check(float(limit), log)
        case _:
            sys.exit(__doc__)


main(sys.argv[1:])
