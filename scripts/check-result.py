#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check-result.py [FILE...]: check results of KVM guests that were measured on other hosts; without FILE all of bench/results/kvm.

A result must be a whole one: of a clean revision, KVM guests, at least five rounds, no other programs on the guests' core, and
figures that agree with each other. For each good file its name in bench/results/kvm is printed. Exit status 1: a file is not
good; 2: wrong usage, or a file that cannot be read.
"""

import json
import re
import sys
from datetime import datetime
from pathlib import Path

KVM = Path(__file__).resolve().parent.parent / "bench/results/kvm"
MIN_ROUNDS = 5
# Machine as viola writes it: processor, cores, memory, kernel; guests.
MACHINE = re.compile(r"(?P<cpu>.+?), cores? .+, Linux (?P<kernel>\S+?); guests: (?P<guests>.+)")
GOAL = re.compile(r"(?P<sign><=|>=) (?P<bound>[0-9.]+)")


def name(result, machine):
    """The file's name in bench/results/kvm."""
    words = [result["name"], result["git"], machine["cpu"], machine["kernel"]]
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", word).strip("_") for word in words) + ".json"


def figures(row):
    """What is wrong with the figures of a row."""
    sides = row["sides"]
    for side, spread in sides.items():
        if not spread["p25"] <= spread["median"] <= spread["p75"]:
            yield f"the median of {side} is not between its quartiles"
    # Benchmarks name the side with viola, and that to which it is compared, each in its own way.
    medians = [spread["median"] for spread in sides.values()]
    ratios = [ours / other for ours in medians for other in medians if other > 0]
    if row.get("ratio") is not None and not any(abs(found - row["ratio"]) <= 0.001 * found for found in ratios):
        yield f"its ratio is {row['ratio']:.4f}, and no two of its medians have that ratio"
    goal = GOAL.fullmatch(row.get("goal") or "")
    if goal and row.get("ratio") is not None:
        bound = float(goal["bound"])
        met = row["ratio"] <= bound if goal["sign"] == "<=" else row["ratio"] >= bound
        if met != row.get("met"):
            yield f"its goal is {row['goal']}, its ratio {row['ratio']:.4f}, and `met` says {row.get('met')}"


def faults(result):
    """What is wrong with a result, one sentence each."""
    if not re.fullmatch(r"[0-9a-f]{10,40}", result["git"]):
        yield f"revision {result['git']}: commit or undo the changes, and measure again"
    machine = MACHINE.fullmatch(result["machine"])
    if not machine:
        yield f"machine `{result['machine']}` does not name processor, cores, kernel and guests"
    elif not machine["guests"].startswith("KVM"):
        yield f"its guests are {machine['guests']}, not KVM's: measure with --guests kvm"
    if result["rounds"] < MIN_ROUNDS:
        yield f"{result['rounds']} rounds, {MIN_ROUNDS} are the least"
    if result.get("disturbed"):
        yield f"disturbed: {result['disturbed']}"
    datetime.fromisoformat(result["date"])
    if not any("stock" in row["sides"] and len(row["sides"]) > 1 for row in result["rows"]):
        yield "no row has stock and another side"
    for row in result["rows"]:
        for fault in figures(row):
            yield f"row `{row['name']}`: {fault}"


def main():
    files = [Path(arg) for arg in sys.argv[1:]]
    if any(str(file).startswith("-") for file in files):
        print(__doc__.splitlines()[0], file=sys.stderr)
        sys.exit(2)
    is_all = not files
    files = files or sorted(KVM.glob("*.json"))
    status = 0
    for file in files:
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            result["name"] = file.name.split("-")[0]
            found = list(faults(result))
        except (OSError, ValueError) as e:
            print(f"check-result: {file}: {e}", file=sys.stderr)
            sys.exit(2)
        except (KeyError, TypeError, AttributeError) as e:
            found = [f"it is no result of viola-lab bench: {type(e).__name__} {e}"]
        if not found:
            wanted = name(result, MACHINE.fullmatch(result["machine"]))
            if is_all and file.name != wanted:
                found = [f"it is to be called {wanted}"]
            elif not is_all:
                print(f"{file}: good; its place is bench/results/kvm/{wanted}")
        for fault in found:
            print(f"check-result: {file}: {fault}", file=sys.stderr)
            status = 1
    if is_all:
        print(f"check-result: {len(files)} results of KVM hosts")
    sys.exit(status)


main()
