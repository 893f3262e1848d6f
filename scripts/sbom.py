#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""sbom.py PACKAGE FILE: write what a program is made of: a software bill of materials (CycloneDX 1.6, JSON).

PACKAGE is a package of the workspace. The list has every crate that its program contains on Linux, by Cargo.lock, with version,
licence and checksum. Build tools, procedural macros and tests are left out. The same source
gives the same bytes: the file has neither a date nor a serial number.

Exit status 2: wrong usage, or cargo cannot read the workspace.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = "x86_64-unknown-linux-gnu"


def cargo(*words):
    done = subprocess.run(["cargo", *words, "--locked"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"sbom: cargo {words[0]} failed: {done.stderr.strip()}", file=sys.stderr)
        sys.exit(2)
    return done.stdout


def linked(name):
    """Name and version of the crates that the program contains, with the features that this package enables."""
    words = ["tree", "--package", name, "--target", TARGET, "--edges", "normal,no-proc-macro"]
    lines = cargo(*words, "--prefix", "none", "--format", "{p}").splitlines()
    return {(line.split()[0], line.split()[1].removeprefix("v")) for line in lines if line}


def component(package, checksums):
    name, version = package["name"], package["version"]
    is_own = package["source"] is None
    purl = f"pkg:cargo/{name}@{version}"
    entry = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if package["license"]:
        # older crates write / for OR
        entry["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    if (name, version) in checksums:
        entry["hashes"] = [{"alg": "SHA-256", "content": checksums[name, version]}]
    if package["repository"] and not is_own:
        entry["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return entry


def bill(name):
    data = json.loads(cargo("metadata", "--format-version", "1", "--filter-platform", TARGET))
    by_id = {package["id"]: package for package in data["packages"]}
    program = next((id for id in data["workspace_members"] if by_id[id]["name"] == name), None)
    if program is None:
        print(f"sbom: the workspace has no package {name}", file=sys.stderr)
        sys.exit(2)
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())
    checksums = {(p["name"], p["version"]): p["checksum"] for p in lock["package"] if "checksum" in p}
    wanted = linked(name)
    found = {id for id, package in by_id.items() if (package["name"], package["version"]) in wanted}
    components = {id: component(by_id[id], checksums) for id in found}
    needs = {
        node["id"]: sorted({components[dep["pkg"]]["bom-ref"] for dep in node["deps"] if dep["pkg"] in found})
        for node in data["resolve"]["nodes"]
        if node["id"] in found
    }
    others = [entry for id, entry in components.items() if id != program]
    dependencies = [{"ref": components[id]["bom-ref"], "dependsOn": refs} for id, refs in needs.items()]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": components[program] | {"type": "application"}},
        "components": sorted(others, key=lambda entry: entry["bom-ref"]),
        "dependencies": sorted(dependencies, key=lambda entry: entry["ref"]),
    }


def main():
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        print(__doc__.strip(), file=sys.stderr)
        sys.exit(2)
    Path(sys.argv[2]).write_text(json.dumps(bill(sys.argv[1]), indent=1) + "\n")


if __name__ == "__main__":
    main()
