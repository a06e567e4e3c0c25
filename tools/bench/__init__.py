"""Benchmarks of single parts, as `kvstrata bench …` runs them."""

from kvstrata.tools.bench.cli import app
from kvstrata.tools.bench.control import ControlReport, run

__all__ = ["ControlReport", "app", "run"]
