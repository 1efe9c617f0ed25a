#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Makes of what guests logged the lines of scripts/bench, and of these the report.

bench-report.py insns LOG              the lines of one guest that counted instructions
bench-report.py traffic|growth FILE    the lines of what scenario bench-traffic wrote
bench-report.py rxe FILE               the same, of a guest whose clock counts instructions
bench-report.py user FILE              the lines of what scenario bench-user wrote
bench-report.py static BUILD           what the object code in build/stock says
bench-report.py report DIR GNUPLOT     report.md and plots, of the lines and facts that scripts/bench left;
                                       GNUPLOT is the directory that gnuplot was unpacked into
bench-report.py check LIMIT LOG        fails if a ratio on the way of a request is above the limit
bench-report.py readme REPORT README   fails if README.md gives other figures than the report, and says which
                                       it should give
"""

import itertools
import math
import os
import re
import statistics
import subprocess
import sys

# On the way of a request. What is not here is done once in a while.
HOT = re.compile(r"(post|complete|steady|whole_way|chain|poll|process)(_|$)")
# Of samples that are no instructions: what they count.
UNITS = {"allocs_": "allocs_per_op", "bytes_": "bytes_per_op"}


def die(why):
    sys.exit(f"bench: error: {why}")


def fields(line):
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


# --- lines ----------------------------------------------------------------------------------------


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
        unit = next((unit for prefix, unit in UNITS.items() if name.startswith(prefix)), None)
        if unit:
            yield name, 0, f"bench: name={name} unit={unit} rust={rust:g} c={c:g}"
            continue
        spread = " ".join(
            f"{who}_range={min(sides[who]):.1f}..{max(sides[who]):.1f}" for who in ("rust", "c")
        )
        ratio = rust / c
        yield name, ratio, (
            f"bench: name={name} unit=insn rust={rust:.1f} c={c:.1f} ratio={ratio:.3f}"
            f" samples={len(sides['c'])} {spread}"
        )


def runs(path):
    """{(qps, size, queues, ctx): [{side: fields} of each turn]} of what scenario bench-traffic wrote, and lines
    about runs that did not pass: the turn they are of is missing if it was not made good for by another try."""
    tries, bad, all_sides = {}, [], {}
    count = 0
    for line in open(path, encoding="utf-8", errors="replace"):
        if not line.startswith("turn="):
            continue
        count += 1
        f = fields(line)
        key = int(f["qps"]), int(f["size"]), ("pooled", "private")[int(f["private"])], f["ctx"]
        turn = tries.setdefault(key, {}).setdefault(int(f["turn"]), {})
        turn.setdefault(int(f["try"]), {})[f["side"]] = f
        all_sides[f["side"]] = 0
        if f["status"] != "pass":
            # Why, the log of the guest may say.
            bad.append((f["side"], line.strip()))
    if not count:
        die(f"{path} has no runs")
    found, left_out = {}, 0
    for key, turns in tries.items():
        for attempts in turns.values():
            good = [
                sides
                for sides in attempts.values()
                if len(sides) == len(all_sides) and all(f["status"] == "pass" for f in sides.values())
            ]
            if good:
                found.setdefault(key, []).append(good[-1])
            else:
                left_out += 1
    for side, _ in bad:
        all_sides[side] += 1
    failed = " ".join(f"failed_{side}={number}" for side, number in sorted(all_sides.items()))
    notes = [f"bench: runs={count} {failed} turns_left_out={left_out}"]
    notes += [f"bench: did not pass: {line}" for _, line in bad]
    notes += [
        "bench: no turn passed: qps={} size={} {} {}".format(*key) for key in tries if key not in found
    ]
    return found, notes


def interval(values):
    """The narrowest two of the values, as far from either end, between which the median of all there might
    be lies with at least 95 %, whatever their distribution. None if there are too few."""
    values = sorted(values)
    n = len(values)
    found, outside = None, 0
    for rank in range(n // 2):
        outside += 2 * math.comb(n, rank) / 2**n
        if outside > 0.05:
            break
        found = values[rank], values[n - 1 - rank]
    return found


def ratios_of(pairs, value, sides):
    ours, theirs = sides
    return [value(p[ours]) / value(p[theirs]) for p in pairs]


def compared(pairs, value, sides=("rust", "c")):
    """The fields of a line: both medians, and the ratio turn by turn."""
    rust, c = ([value(p[w]) for p in pairs] for w in sides)
    ratios = ratios_of(pairs, value, sides)
    return (
        f"rust={statistics.median(rust):.0f} c={statistics.median(c):.0f} {spread(ratios)}"
        f" ratio_range={min(ratios):.3f}..{max(ratios):.3f}"
    )


def spread(ratios):
    """The median of ratios, and between what it lies."""
    sure = interval(ratios)
    return (
        f"ratio={statistics.median(ratios):.3f} turns={len(ratios)}"
        f" ratio_95={'{:.3f}..{:.3f}'.format(*sure) if sure else 'unknown'}"
    )


def pairs_of(row):
    """How many pairs of queue pairs it is of, in words."""
    return "1 pair" if row["qps"] == "1" else f"{row['qps']} pairs"


def number(field, factor=1):
    """What takes a field, which is at least 1, out of a run."""
    return lambda f: max(int(f[field]), 1) * factor


# What is compared, and with what: with a completion for each send, with one for several, and both beside
# each other.
COMPARISONS = {"each": ("rust", "c"), "as_one": ("rust_one", "c_one"), "gain": ("rust_one", "c")}


def comparisons(found):
    """Those that there is all of."""
    present = {side for pairs in found.values() for pair in pairs for side in pair}
    return [(about, sides) for about, sides in COMPARISONS.items() if present.issuperset(sides)]


def traffic_lines(path):
    found, notes = runs(path)
    measures = ("ops_per_s", "ops_per_s"), ("p50_ns", "lat_p50_ns"), ("p99_ns", "lat_p99_ns")
    for (unit, field), (about, sides) in itertools.product(measures, comparisons(found)):
        value = number(field)
        medians, above, below = [], 0, 0
        # By how many and how large, over all queues and contexts.
        groups = {}
        for (qps, size, queues, ctx), pairs in found.items():
            line = compared(pairs, value, sides)
            medians.append(float(fields(line)["ratio"]))
            if (sure := fields(line)["ratio_95"]) != "unknown":
                least, most = map(float, sure.split(".."))
                above += least > 1
                below += most < 1
            ops = statistics.median(int(f["ops"]) for pair in pairs for f in pair.values())
            yield (
                f"bench: name={about}_{queues}_{ctx} qps={qps} size={size} ops={ops:.0f} unit={unit} {line}"
            )
            ratios = ratios_of(pairs, value, sides)
            for group in (qps, size), ("any", "any"):
                groups.setdefault(group, []).extend(ratios)
        for (qps, size), ratios in groups.items():
            yield f"bench: name={about} qps={qps} size={size} unit={unit} {spread(ratios)}"
        if medians:
            notes.append(
                f"bench: {about}: medians of {unit}: of_all={len(medians)} least={min(medians):.3f}"
                f" median={statistics.median(medians):.3f} most={max(medians):.3f}"
                f" at_least_1={sum(m >= 1 for m in medians)} surely_above_1={above} surely_below_1={below}"
            )
    yield from notes


def rxe_lines(path):
    found, notes = runs(path)
    for about, sides in comparisons(found):
        for (qps, size, _, ctx), pairs in found.items():
            line = compared(pairs, lambda f: 1e9 / int(f["ops_per_s"]), sides)
            yield f"bench: name=rxe_{about}_{ctx} qps={qps} size={size} unit=insn {line}"
    yield from notes


def growth_lines(path):
    found, notes = runs(path)
    for unit, value in (
        ("slab_kib", number("slab_kib")),
        ("vmalloc_kib", number("vmalloc_kib")),
        ("cqs", number("queues")),
        ("completions_per_s", number("ops_per_s", 2)),
    ):
        for (qps, size, queues, _), pairs in found.items():
            yield f"bench: name=growth_{queues} qps={qps} size={size} unit={unit} {compared(pairs, value)}"
    yield from notes


def user_lines(path):
    found, notes = {}, []
    for line in open(path, encoding="utf-8", errors="replace"):
        if not line.startswith("turn="):
            if line.startswith("perftest: "):
                notes.append(line.rstrip())
            continue
        f = fields(line)
        if f["status"] != "pass":
            notes.append(f"bench: did not pass: {line.strip()}")
            continue
        mode = f["ctx"]
        if f["side"] == "rust":
            mode = ("pooled_", "private_")[int(f["private"])] + mode
            rate, middle = int(f["ops_per_s"]), int(f["lat_p50_ns"])
        else:
            rate, middle = float(f.get("mpps", 0)) * 1e6, float(f.get("typical_us", 0)) * 1e3
        # With one in flight it is about time, else about how many.
        alone = f.get("depth") == "1"
        key = alone, int(f["qps"]), int(f["size"])
        value = middle if alone else rate
        found.setdefault(key, {}).setdefault(f["side"], {}).setdefault(mode, []).append(value)
    for (alone, qps, size), sides in found.items():
        unit, best = ("p50_ns", min) if alone else ("ops_per_s", max)
        chosen = {}
        for side, modes in sides.items():
            medians = {mode: statistics.median(values) for mode, values in modes.items()}
            for mode, value in medians.items():
                yield f"bench: name=user_{side}_{mode} qps={qps} size={size} unit={unit} value={value:.0f}"
            mode = best(medians, key=medians.get)
            chosen[side] = mode, medians[mode]
        if len(chosen) == 2:
            (rust, r), (perftest, p) = chosen["rust"], chosen["perftest"]
            yield (
                f"bench: name=user_best qps={qps} size={size} unit={unit} rust={r:.0f} perftest={p:.0f}"
                f" ratio={r / max(p, 1):.3f} rust_mode={rust} perftest_mode={perftest}"
            )
    yield from notes


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


# --- plots ----------------------------------------------------------------------------------------

RUST, C, OTHER = "'#b7410e'", "'#3b6ea5'", "'#5b8c3a'"


class Plots:
    """Draws into a directory, by the gnuplot that was unpacked into another, and knows what."""

    def __init__(self, directory, gnuplot):
        self.directory = directory
        self.gnuplot = gnuplot
        self.names = []

    def draw(self, name, title, size, commands):
        script = "\n".join(
            [
                f"set terminal svg noenhanced size {size} font 'sans-serif,12' background 'white'",
                f"set output '{name}.svg'",
                f"set title \"{title}\"",
                "set grid",
                *commands,
            ]
        )
        subprocess.run(
            [f"{self.gnuplot}/usr/bin/gnuplot-nox"],
            input=script,
            text=True,
            check=True,
            cwd=self.directory,
            env={**os.environ, "LD_LIBRARY_PATH": f"{self.gnuplot}/usr/lib/x86_64-linux-gnu"},
        )
        self.names.append((title, f"{name}.svg"))

    def bars(self, name, title, rows, keys=("Rust", "C")):
        """Two bars for each of (label, one, other)."""
        self.draw(
            name,
            title,
            "900,480",
            [
                *block("rows", rows),
                "set style data histogram",
                "set style histogram clustered gap 1",
                "set style fill solid",
                "set yrange [0:*]",
                "set xtics rotate by -40",
                "set key top left",
                f"plot $rows using 2:xtic(1) title '{keys[0]}' linecolor rgb {RUST},"
                f" '' using 3 title '{keys[1]}' linecolor rgb {C}",
            ],
        )

    def ranges(self, name, title, series):
        """A dot and its range for each of (label, middle, least, most): ratios, with a line at 1. Of each series
        such rows, with the same labels."""
        commands, plots = [], []
        for i, (about, rows) in enumerate(series.items()):
            commands += block(f"rows{i}", rows)
            plots.append(
                f"$rows{i} using 2:($0+{0.25 * i}):3:4{'' if i else ':ytic(1)'} with xerrorbars pointtype 7"
                f" linecolor rgb {(RUST, C, OTHER)[i]} title '{about}'"
            )
        number = max(map(len, series.values()))
        self.draw(
            name,
            title,
            f"900,{140 + 18 * number}",
            [
                *commands,
                f"set yrange [{number}:-1]",
                "set xrange [0.5<*<0.9:1.1<*<2.5]",
                "set key bottom right",
                "set arrow from 1, graph 0 to 1, graph 1 nohead linecolor rgb 'black' linewidth 2",
                "plot " + ", ".join(plots),
            ],
        )

    def curves(self, name, title, x, y, curves, scale="set logscale x 2"):
        """Lines through (x, y), each (title, colour, dashes, points)."""
        commands, plots = [scale, f"set xlabel '{x}'", f"set ylabel '{y}'", "set key top left", "set yrange [0:*]"], []
        for i, (about, colour, dashes, points) in enumerate(curves):
            commands += block(f"curve{i}", points)
            plots.append(
                f"$curve{i} using 1:2 with linespoints title '{about}' pointtype 7"
                f" dashtype {dashes} linecolor rgb {colour}"
            )
        self.draw(name, title, "900,480", [*commands, "plot " + ", ".join(plots)])


def block(name, rows):
    """A block of data in a script of gnuplot."""
    yield f"${name} << EOD"
    for row in rows:
        yield " ".join(f'"{x}"' if isinstance(x, str) else str(x) for x in row)
    yield "EOD"


def plot_insns(plots, rows):
    shown = [r for r in rows if HOT.match(r["name"]) and not re.search("_workqueue|_unbound|^whole", r["name"])]
    plots.bars("insns", "Instructions an operation", [(r["name"], float(r["rust"]), float(r["c"])) for r in shown])
    leases = [r for r in rows if re.fullmatch(r"lease_\d+", r["name"])]
    if leases:
        curves = [
            (about, colour, 1, [(int(r["name"][6:]), float(r[side])) for r in leases])
            for about, colour, side in (("Rust", RUST, "rust"), ("C", C, "c"))
        ]
        plots.curves("leases", "Instructions of taking a lease, by how many are held", "leases", "instructions", curves)


def plot_traffic(plots, rows):
    about = {
        "each": "a completion for each send",
        "as_one": "one for several sends",
        "gain": "Rust one for several, C for each",
    }
    for unit, title in (
        ("ops_per_s", "Sends a second, Rust / C (more is better)"),
        ("p50_ns", "Median time of a send, Rust / C (less is better)"),
        ("p99_ns", "99th percentile of the time of a send, Rust / C (less is better)"),
    ):
        shown = {}
        for r in rows:
            # Those of one queue and context, not those that sum up.
            kind = next((kind for kind in about if r["name"].startswith(f"{kind}_")), None)
            if r["unit"] == unit and kind:
                where = r["name"].removeprefix(f"{kind}_").replace("_", " ")
                label = f"{where}, {pairs_of(r)}, {r['size']} bytes"
                least_most = r["ratio_range" if r["ratio_95"] == "unknown" else "ratio_95"].split("..")
                shown.setdefault(about[kind], []).append((label, float(r["ratio"]), *map(float, least_most)))
        plots.ranges(f"traffic-{unit}", title, shown)


def plot_growth(plots, rows):
    for unit, title in (
        ("slab_kib", "KiB of slab memory"),
        ("vmalloc_kib", "KiB of vmalloc memory"),
        ("completions_per_s", "Completions a second"),
    ):
        curves = [
            (
                f"{about}, {queues} queues",
                colour,
                dashes,
                [
                    (int(r["qps"]), float(r[side]))
                    for r in rows
                    if r["unit"] == unit and r["name"] == f"growth_{queues}"
                ],
            )
            for about, colour, side in (("Rust", RUST, "rust"), ("C", C, "c"))
            for queues, dashes in (("pooled", 1), ("private", 2))
        ]
        scale = "set logscale x 2" if unit == "completions_per_s" else ""
        curves = [curve for curve in curves if curve[3]]
        plots.curves(f"growth-{unit.removesuffix('_kib')}", title, "pairs of queue pairs", title, curves, scale)


def plot_user(plots, rows):
    for unit, title in (("ops_per_s", "Sends a second"), ("p50_ns", "Nanoseconds of one send alone")):
        shown = [
            (f"{pairs_of(r)}, {r['size']} bytes", float(r["rust"]), float(r["perftest"]))
            for r in rows
            if r["name"] == "user_best" and r["unit"] == unit
        ]
        if shown:
            plots.bars(f"user-{unit}", f"{title}, the best of each", shown, ("cq_exerciser", "perftest"))


# --- the report -----------------------------------------------------------------------------------

# Of each part: its title, what has to be said of its figures, and what draws them.
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
        " what was leaked. `lease_N`: taking a lease while others are held, of each from the N/2-th to the N-th"
        " (3 samples; the pool's 16 queues are there before, and the kernel looks through them in turn)."
        " `put_4096`: giving one of 4096 back. `bytes_lease`: what one of 4096 takes of the heap.",
        plot_insns,
    ),
    "rxe": (
        "Instructions on rxe",
        "As above, but all that a send takes on rxe, from one completion to the next: the"
        " exerciser beside its twin, which fill and check each message, and the kernel's own part, which is"
        " most of it. `each`: both have a completion for each send. `as_one`: both have one for 8 sends. `gain`: the"
        " exerciser has one for 8, its twin one for each, see below. Latency is not a figure of such a guest.",
        None,
    ),
    "traffic": (
        "Sends a second, and how long they take",
        "On rxe, on user-mode Linux without debug options, 2 CPUs: the exerciser and its twin in turns, each"
        " after each of the others as often, on a device of its own. 32 sends are in flight a pair of queue pairs. `ops` is"
        " how many sends a run had, all pairs together: as many as the exerciser, tried before, gets done in a"
        " given time; its twin has as many. The ratio is of the runs of each turn: its median, its range, and the"
        " interval in which the median of all such turns lies with at least 95 %. Where that holds 1, nothing"
        " was found that tells the two sides apart; of so many, one or two don't hold it by chance. Of sends a"
        " second more is better, of times less.\n\n"
        "`each`: both have a completion for each send. `as_one`: both post 8 sends with one call, and ask for one"
        " completion for all of them (`signal=8`); 8 sends wait for the last of them, so each takes longer. `gain`:"
        " the exerciser does that, which types make safe, and its twin has a completion for each, as nvme, iser, srp"
        " and smc have: what does so in C keeps books of its own of what is complete. Without a queue and a context"
        " in its name, a row is of the turns of all of them.\n\n"
        "The network device has an MTU of 9000, so that 4096 bytes are one packet: rxe of Linux 7.3 breaks"
        " messages of several when it sends again. Runs that did not pass are counted below, and shown; all sides"
        " then ran once more, twice at most.",
        plot_traffic,
    ),
    "growth": (
        "Growth",
        "As above, in softirq context, with so many pairs of queue pairs, 32 sends of 64 bytes in flight each."
        " What the guest's kernel had more than before the run, at most: `slab_kib` of slabs that can't be"
        " reclaimed, `vmalloc_kib`, with the module itself, and `cqs`, completion queues on the device (`rdma resource`), with the one"
        " of the kernel's own. Most of the memory is rxe's, the rest the exerciser's and its requests'. Each send"
        " has two completions. What leases cost is above.",
        plot_growth,
    ),
    "user": (
        "Beside user space",
        "perftest on the same kernel, device and MTU: `ib_send_bw` and `ib_send_lat`, a server and a client, with"
        " as many queue pairs, sends in flight and bytes, polling (its default) or sleeping until an event; as a"
        " rule it asks for a completion of one send in many, and neither fills nor looks at its messages. The"
        " exerciser does both, with a completion for each send, in each of its contexts. Shown are medians, and"
        " then the best of each. `p50_ns`, with one in flight: of perftest half of the time to and fro, typical;"
        " of the exerciser the median from the post of a send to its completion, with the acknowledgement.",
        plot_user,
    ),
    "static": (
        "What the layer does not pay",
        "Read off the object code: instructions that lock the bus and indirect calls in the functions on the way"
        " of a request (with the paths that are seldom taken), and the sizes of the modules that count"
        " instructions. Allocations in steady state are counted by the kernel's trace points, above.",
        None,
    ),
}


def table(rows):
    heads = []
    for row in rows:
        heads += [k for k in row if k not in heads]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield "| " + " | ".join(row.get(k, "") for k in heads) + " |"


def tables(rows):
    """One for each set of columns and unit that belong together."""
    kinds = {}
    for row in rows:
        # On the way of a request or not, the columns are the same.
        kind = tuple(row), (row["unit"], row["name"].split("_")[0]) if "qps" in row else ""
        kinds.setdefault(kind, []).append(row)
    for kind in kinds.values():
        yield from table(kind)
        yield ""


def report(directory, gnuplot):
    facts = open(f"{directory}/facts", encoding="utf-8").read().rstrip()
    out = ["# What the safe layer costs", "", facts, ""]
    for part, (title, about, draw) in PARTS.items():
        out += [f"## {title}", ""]
        path = f"{directory}/{part}/lines"
        if not os.path.exists(path):
            out += [f"Not measured yet: `make bench PARTS={part}` does.", ""]
            continue
        with open(path, encoding="utf-8") as f:
            lines = f.read().splitlines()
        with open(f"{directory}/{part}/when", encoding="utf-8") as f:
            when = f.read().rstrip()
        rows = [fields(line) for line in lines if line.startswith("bench: name=")]
        out += [about, "", when, "", *tables(rows)]
        notes = [line for line in lines if not line.startswith("bench: name=")]
        out += ["```text", *notes, "```", ""] if notes else []
        if draw and rows:
            plots = Plots(directory, gnuplot)
            draw(plots, rows)
            out += [f"![{title}]({name})\n" for title, name in plots.names]
    with open(f"{directory}/report.md", "w", encoding="utf-8") as f:
        f.write("\n".join(out).rstrip() + "\n")


# --- README.md ------------------------------------------------------------------------------------


def rows_of(text):
    """The rows of all tables in Markdown, as dictionaries."""
    heads = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else None
        if not cells:
            heads = None
        elif not heads:
            heads = cells
        elif set(cells[0]) != {"-"}:
            yield dict(zip(heads, cells))


# What is shown of the instructions: what to call it, and how to find it.
SHOWN = (
    ("post a send", {"name": "post_send"}),
    ("post a receive", {"name": "post_recv"}),
    ("post 16 sends as a chain, each", {"name": "chain_16"}),
    ("complete one, in softirq context", {"name": "complete_send_softirq"}),
    ("the same, in a worker", {"name": "complete_send_workqueue"}),
    ("complete one, and post it again in the handler", {"name": "steady_send_softirq"}),
    ("poll 16 by hand, each", {"name": "poll_16"}),
    ("all of a send on rxe, 64 bytes", {"name": "rxe_each_softirq", "size": "64"}),
    ("the same, one completion for 8 sends", {"name": "rxe_as_one_softirq", "size": "64"}),
    ("all of a send on rxe, 4096 bytes", {"name": "rxe_each_softirq", "size": "4096"}),
    ("the same, one completion for 8 sends", {"name": "rxe_as_one_softirq", "size": "4096"}),
    ("take a lease, and give it back", {"name": "lease_put"}),
)


def readme_lines(text):
    """The lines that README.md has to have."""
    rows = list(rows_of(text))

    def find(wanted):
        for row in rows:
            if all(row.get(key) == value for key, value in wanted.items()):
                return row
        die(f"the report has no row with {wanted}")

    yield "| instructions | Rust | C |"
    yield "|---|---|---|"
    for about, wanted in SHOWN:
        row = find(wanted)
        yield f"| {about} | {float(row['rust']):.0f} | {float(row['c']):.0f} |"
    yield "| sends a second on rxe | `cq_exerciser` | perftest |"
    yield "|---|---|---|"
    for row in rows:
        if row.get("name") == "user_best" and row["unit"] == "ops_per_s":
            yield f"| {pairs_of(row)} of queue pairs, {row['size']} bytes | {row['rust']} | {row['perftest']} |"
    sums = {
        m[1]: fields(m[2])
        for m in re.finditer(r"bench: (\w+): medians of ops_per_s: (.*)", text)
    }
    if sums.keys() != COMPARISONS.keys():
        die("the report does not sum up sends a second")

    def are(number):
        return {"0": "none is", "1": "1 is"}.get(number, f"{number} are")

    for about in COMPARISONS:
        row = find({"name": about, "qps": "any", "unit": "ops_per_s"})
        least, most = row["ratio_95"].split("..")
        yield (
            f"{row['ratio']} times as many sends a second in the middle of {row['turns']} turns (with 95 %,"
            f" {least} to {most}); of {sums[about]['of_all']} combinations {are(sums[about]['surely_above_1'])} surely above 1, and"
            f" {are(sums[about]['surely_below_1'])} surely below"
        )


def readme(report, path):
    with open(path, encoding="utf-8") as f:
        # A sentence may begin anew on any line.
        have = " ".join(f.read().split())
    with open(report, encoding="utf-8") as f:
        missing = [line for line in readme_lines(f.read()) if line not in have]
    for line in missing:
        print(f"bench: error: {path} doesn't have, as {report} does: {line}")
    if missing:
        sys.exit(1)


def main(args):
    match args:
        case ["insns", log]:
            for _, _, line in ratio_lines(insns(log)):
                print(line)
        case ["traffic", path]:
            print(*traffic_lines(path), sep="\n")
        case ["growth", path]:
            print(*growth_lines(path), sep="\n")
        case ["rxe", path]:
            print(*rxe_lines(path), sep="\n")
        case ["user", path]:
            print(*user_lines(path), sep="\n")
        case ["static", build]:
            print(*static_lines(build), sep="\n")
        case ["report", directory, gnuplot]:
            report(directory, gnuplot)
        case ["check", limit, log]:
            check(float(limit), log)
        case ["readme", report_path, path]:
            readme(report_path, path)
        case _:
            sys.exit(__doc__)


main(sys.argv[1:])
