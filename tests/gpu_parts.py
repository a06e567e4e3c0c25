"""What needs a GPU, in parts that each end well inside ten minutes: runs one, or merges them all.

    python tests/gpu_parts.py run correct --out var/gpu     writes var/gpu/correct.json
    python tests/gpu_parts.py merge --out var/gpu           writes var/gpu.json, prints a table

Needs pytest and hypothesis, PYTHONPATH=src and the checkout as working directory. Exit code 0: all
is well, or there is nothing here that could run it; 1: something failed or did not end.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

LIMIT_S = 560.0
"""Of one part."""
ORDER = "thousand_rounds or slow_kernel"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-c", "tests/gpu.ini", "--rootdir=.", "-m", "cuda",
          "-p", "no:cacheprovider"]  # fmt: skip
MARK = re.compile(r"^(@|    )pytest\.mark\.cuda", re.MULTILINE)
CONTROL = re.compile(r"\bmake_small\b")
"""Tests of control: they run on every kind of runtime, a GPU's among them."""


def having(mark: re.Pattern[str], *patterns: str) -> list[str]:
    """Files of the checkout with tests that need a GPU: so the others need not be imported."""
    root = Path(__file__).resolve().parents[1]
    files = sorted(file for pattern in patterns for file in root.glob(pattern))
    return [str(f.relative_to(root)) for f in files if mark.search(f.read_text())]


TESTS: dict[str, list[str]] = {
    "correct": [*having(MARK, "tests/gpu_runtime/test_*.py", "tests/tiers/test_*.py"),
                "-k", f"not ({ORDER})"],
    "control": [f for f in having(CONTROL, "tests/tiers/test_*.py") if "cuda" not in f],
    "order": ["tests/tiers/test_cuda_order.py", "-k", ORDER],
    "model": having(MARK, "tests/gpu_runtime/hf/test_*.py", "tests/tools/test_*.py"),
}  # fmt: skip
"""Part → what pytest runs of the tests that are marked `cuda`."""
SANITIZED = {
    "memcheck": "hits_from_each_tier or (every_type_and_odd_size and bfloat16) or (odd and bytes)",
    "racecheck": "(every_type_and_odd_size and bfloat16) or (odd and bytes)",
}
"""Tool of compute-sanitizer → a short choice of tests: each takes ten times as long, and more."""
SANITIZED_FILES = ["tests/tiers/test_cuda_order.py", "tests/gpu_runtime/test_transfer_cuda.py"]
SANITIZER_EXIT = 86
PARTS = (*TESTS, "sanitize", "bench")


# ── one part ─────────────────────────────────────────────────────────────────────────────────────


def run_part(part: str, out: Path) -> dict[str, Any]:
    started = time.monotonic()
    if part in TESTS:
        found = run_pytest(PYTEST, TESTS[part], LIMIT_S)
    elif part == "sanitize":
        found = run_sanitized()
    else:
        found = run_bench(out / "bench-transfer.json")
    return {"part": part, "seconds": round(time.monotonic() - started, 1), **found, **machine()}


def run_pytest(command: list[str], tests: list[str], limit_s: float) -> dict[str, Any]:
    """Status, counts and failures, from the XML that pytest writes."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "junit.xml"
        code = call([*command, f"--junitxml={xml}", *tests], limit_s)
        counts, failures = read_junit(xml) if xml.exists() else ({}, [])
    if code is None:
        status = "timed out"
    elif code == SANITIZER_EXIT and not failures:
        status, failures = "failed", [{"test": "compute-sanitizer", "message": "found errors"}]
    elif code or counts.get("failed") or counts.get("error"):
        status = "failed"
    else:
        status = "passed" if counts.get("passed") else "skipped"
    return {"status": status, "exit_code": code, "counts": counts, "failures": failures}


def read_junit(xml: Path) -> tuple[dict[str, int], list[dict[str, str]]]:
    counts = dict.fromkeys(("passed", "failed", "error", "skipped"), 0)
    failures = []
    for case in ET.parse(xml).getroot().iter("testcase"):
        outcome = "passed"
        for kind, name in (("skipped", "skipped"), ("failure", "failed"), ("error", "error")):
            if (found := case.find(kind)) is not None:
                outcome = name
                if name != "skipped":
                    test = f"{case.get('classname')}::{case.get('name')}"
                    message = (found.get("message") or found.text or "").strip()[:500]
                    failures.append({"test": test, "message": message})
        counts[outcome] += 1
    return counts, failures


def run_sanitized() -> dict[str, Any]:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        return {"status": "unavailable", "reason": "compute-sanitizer is not installed"}
    results = {}
    for name, choice in SANITIZED.items():
        command = [tool, "--tool", name, "--error-exitcode", str(SANITIZER_EXIT),
                   "--target-processes", "all", *PYTEST]  # fmt: skip
        results[name] = run_pytest(command, [*SANITIZED_FILES, "-k", choice], LIMIT_S / 2)
    states = {result["status"] for result in results.values()}
    status = next(s for s in ("failed", "timed out", "skipped", "passed") if s in states)
    counts = {
        key: sum(result["counts"].get(key, 0) for result in results.values())
        for key in ("passed", "failed", "error", "skipped")
    }
    failures = [failure for result in results.values() for failure in result["failures"]]
    return {"status": status, "counts": counts, "failures": failures, "tools": results}


def run_bench(file: Path) -> dict[str, Any]:
    """`kvstrata bench transfer`; its report goes in whole."""
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "kvstrata.tools.cli", "bench", "transfer", "--json", str(file)]
    code = call(command, LIMIT_S)
    report = json.loads(file.read_text()) if file.exists() else None
    status = "timed out" if code is None else "passed" if code == 0 and report else "failed"
    if code == 2:  # it says that it needs a GPU
        status = "unavailable"
    return {"status": status, "exit_code": code, "report": report}


def call(command: list[str], limit_s: float) -> int | None:
    """The exit code; None when it was killed at the limit."""
    print("+", *command, flush=True)
    path = os.pathsep.join(["src", *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "CI": ""}
    try:
        return subprocess.run(command, env=env, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return None


def machine() -> dict[str, Any]:
    """The device and the versions of what matters."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "numpy", "pytest"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    try:  # in a process of its own: what a broken driver does, it does there
        text = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=60,
            check=True,
        ).stdout  # fmt: skip
        device = json.loads(text)
    except (subprocess.SubprocessError, ValueError) as error:
        device = {"name": "", "error": str(error)}
    versions["cuda"] = device.pop("cuda", "")
    return {"device": device, "versions": versions}


_ASK_TORCH = """
import json, torch
there = torch.cuda.is_available()
name = torch.cuda.get_device_name(0) if there else ""
print(json.dumps({"name": name, "count": torch.cuda.device_count(), "cuda": torch.version.cuda}))
"""


# ── all parts ────────────────────────────────────────────────────────────────────────────────────


def merge(out: Path) -> dict[str, Any]:
    """All parts that have run, in one value; a part that has not is said to be missing."""
    parts = {}
    for part in PARTS:
        file = out / f"{part}.json"
        parts[part] = json.loads(file.read_text()) if file.exists() else {"status": "missing"}
    return {"parts": parts, "ok": all(is_well(found) for found in parts.values())}


def is_well(found: dict[str, Any]) -> bool:
    return found["status"] in ("passed", "skipped", "unavailable")


def table(merged: dict[str, Any]) -> str:
    header = ("part", "status", "passed", "failed", "skipped", "seconds", "device")
    rows = [header]
    for part, found in merged["parts"].items():
        counts = found.get("counts", {})
        failed = counts.get("failed", 0) + counts.get("error", 0)
        numbers = (counts.get("passed", ""), failed if counts else "", counts.get("skipped", ""))
        name = found.get("device", {}).get("name") or "-"
        rows.append(
            (part, found["status"], *map(str, numbers), str(found.get("seconds", "")), name)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)) for r in rows]
    for part, found in merged["parts"].items():
        lines += [f"{part}: {f['test']}: {f['message'][:200]}" for f in found.get("failures", ())]
        if found.get("reason"):
            lines.append(f"{part}: {found['reason']}")
    return "\n".join(line.rstrip() for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("run", "merge"))
    parser.add_argument("part", choices=PARTS, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("var/gpu"))
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    if options.what == "run":
        if options.part is None:
            parser.error("run needs a part")
        found = run_part(options.part, out)
        (out / f"{options.part}.json").write_text(json.dumps(found, indent=2) + "\n")
        print(table({"parts": {options.part: found}}))
        return 0 if is_well(found) else 1
    merged = merge(out)
    Path(f"{out}.json").write_text(json.dumps(merged, indent=2) + "\n")
    print(table(merged))
    return 0 if merged["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
