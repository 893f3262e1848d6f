#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""results-pages.py [--check]: write docs/src/results/NAME.md from every bench/results/NAME.json.

The cause of a missed goal is taken from bench/why-NAME.toml if it has the row, otherwise from the JSON file.

--check writes nothing. It fails with exit status 1 when a committed page differs from what its JSON file gives,
when a page is missing, or when a page has no JSON file. Exit status 2: wrong usage, or a file that cannot be read.
"""

import json
import math
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
PAGES = ROOT / "docs/src/results"

# Name of a result: the title of its page, the page of the book that it belongs to, and the command that measures it.
ABOUT = {
    "slices": ("Slices: pings, requests, shares", "slices.md", "make bench-slices"),
    "papers": ("The paper's experiments", "papers-bench.md", "make bench-papers"),
    "auto": ("viola decides", "auto.md", "make bench-auto"),
    "mixed": ("viola decides: roles that change", "auto.md", "make bench-mixed"),
    "scx": ("Slices by sched_ext", "sched-ext.md", "make bench-scx"),
    "scx-fast": ("Slices by sched_ext, 2 ns an instruction", "sched-ext.md", 'make bench-scx ARGS=\'--only "2 ns"\''),
    "turbo": ("Turbo cores", "turbo.md", "make bench-turbo"),
    "backlog": ("Early acknowledgements", "early-ack.md", "make bench-backlog"),
    "vread": ("vread", "vread.md", "make bench-vread"),
    "vread-write": ("vread: writing", "vread.md", 'make bench-vread ARGS=\'--rounds 9 --only "write,append,delete"\''),
    "vpipe": ("vpipe", "vpipe.md", "make bench-vpipe"),
    "vpipe-control": ("vpipe: both sides without the library", "vpipe.md", 'make bench-vpipe ARGS="--control"'),
    "copies": ("vpipe: copies on NVMe and virtio disks", "vpipe.md", "make bench-copies"),
    "lanes": ("Lanes", "lanes.md", "make bench-lanes"),
    "daemon": ("What the daemon costs", "metering.md", "make bench-daemon"),
    "sim": ("Speed of the simulator", "sim.md", "make bench-sim"),
}


class Unusable(Exception):
    """A file that no page can be made of; the text names the file and the reason."""


def number(value):
    """A figure with three significant digits, or with a comma between thousands."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    decimals = max(0, 2 - math.floor(math.log10(float(f"{size:.3g}"))))
    return f"{value:.{decimals}f}"


def ratio(value):
    """1/N below one half, else N times."""
    if value is None:
        return ""
    if 0 < value < 0.5:
        inverse = 1 / value
        return f"1/{inverse:.1f}" if inverse < 9.95 else f"1/{inverse:,.0f}"
    return f"{number(value)}x"


def cell(text):
    return str(text).replace("|", "\\|")


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def side(figures, unit):
    """The median and the quartiles. Counts, which have no unit, need no digits behind the point."""
    if figures is None:
        return ""
    show = number if unit else "{:g}".format
    return f"{show(figures['median'])} ({show(figures['p25'])}..{show(figures['p75'])})"


def explain(name, rows):
    """Take the causes of missed goals from why-NAME.toml, otherwise as the benchmark copied them into the rows."""
    # What explains a row of User Mode Linux guests need not explain that of KVM guests.
    of = name if name.endswith("-kvm") else name.split("-")[0]
    path = ROOT / f"bench/why-{of}.toml"
    causes = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    patterns = [(re.compile(re.escape(key).replace(r"\*", ".*")), cause) for key, cause in sorted(causes.items())]
    for row in rows:
        if row.get("met") is False:
            like = next((cause for pattern, cause in patterns if pattern.fullmatch(row["name"])), row.get("why"))
            row["why"] = causes.get(row["name"], like)


def about(name):
    """Title, page of the book and command of a result."""
    base = name.removesuffix("-kvm")
    if base == name or base not in ABOUT:
        return ABOUT.get(name, (name, None, f"viola-lab bench {name}"))
    title, belongs_to, command = ABOUT[base]
    return f"{title}, KVM guests", belongs_to, f'{command} ARGS="--guests kvm"'


def page(name, result):
    title, belongs_to, command = about(name)
    rows = result["rows"]
    explain(name, rows)
    sides = list(dict.fromkeys(s for row in rows for s in row["sides"]))
    goals = [row for row in rows if row.get("goal")]
    reached = sum(1 for row in goals if row.get("met"))
    unexplained = sum(1 for row in goals if not row.get("met") and not row.get("why"))
    causes = list(dict.fromkeys(row["why"] for row in rows if row.get("why")))

    facts = [
        ["measured by", f"`{command}`"],
        ["revision", f"`{result['git']}`"],
        ["date", cell(result["date"])],
        ["machine", cell(result["machine"])],
        ["rounds", str(result["rounds"])],
        ["goals reached", f"{reached} of {len(goals)}"],
    ]
    if result["git"].endswith("-dirty"):
        facts.append(["note", "the source had changes that were not committed"])
    if unexplained:
        facts.append(["note", f"{unexplained} missed goals have no cause written down"])
    if result.get("disturbed"):
        facts.append(["disturbed", cell(result["disturbed"])])

    lines = []
    for row in rows:
        why = row.get("why")
        met = "" if not row.get("goal") else "yes" if row.get("met") else "**no**"
        lines.append(
            [
                cell(row["name"]),
                cell(row["unit"]),
                *(side(row["sides"].get(s), row["unit"]) for s in sides),
                ratio(row.get("ratio")),
                cell(f"`{row['goal']}`") if row.get("goal") else "",
                met,
                str(causes.index(why) + 1) if why else "",
            ]
        )
    head = ["row", "unit", *(cell(s) for s in sides), "ratio", "goal", "met", "why"]

    text = "<!-- SPDX-License-Identifier: Apache-2.0 -->\n"
    text += f"<!-- Generated by scripts/results-pages.py from bench/results/{name}.json. Do not edit. -->\n"
    text += f"# Results: {title}\n\n"
    if belongs_to:
        text += f"[What these figures mean](../{belongs_to}). "
    text += f"[How each row is measured](../measuring.md#{name.split('-')[0]}). "
    text += "Each side shows its median over the rounds, then p25..p75.\n\n"
    text += table(["", ""], facts) + "\n" + table(head, lines)
    if causes:
        text += "\nWhy (column *why*):\n\n" + "".join(f"{n}. {why}\n" for n, why in enumerate(causes, 1))
    return text


def read(path):
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        return page(path.stem, result)
    except OSError as error:
        raise Unusable(f"cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise Unusable(f"the causes of {path.stem}: not TOML: {error}") from error
    except json.JSONDecodeError as error:
        raise Unusable(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise Unusable(f"{path}: not a result file: {type(error).__name__} {error}; bench/README.md has the keys") from error


def main(arguments):
    if arguments not in ([], ["--check"]):
        raise Unusable("usage: results-pages.py [--check]")
    sources = sorted(RESULTS.glob("*.json"))
    if not sources:
        raise Unusable(f"{RESULTS} has no result file")
    wanted = {f"{source.stem}.md": read(source) for source in sources}
    present = {path.name: path.read_text(encoding="utf-8") for path in PAGES.glob("*.md")}

    if arguments == ["--check"]:
        wrong = sorted(n for n in wanted | present if wanted.get(n) != present.get(n))
        for name in wrong:
            state = "is missing" if name not in present else "has no result file" if name not in wanted else "is out of date"
            print(f"results-pages: docs/src/results/{name} {state}; run scripts/results-pages.py", file=sys.stderr)
        return 1 if wrong else 0

    PAGES.mkdir(parents=True, exist_ok=True)
    for name, text in wanted.items():
        (PAGES / name).write_text(text, encoding="utf-8")
    for name in present.keys() - wanted.keys():
        (PAGES / name).unlink()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Unusable as error:
        print(f"results-pages: {error}", file=sys.stderr)
        sys.exit(2)
