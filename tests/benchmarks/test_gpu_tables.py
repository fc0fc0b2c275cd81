"""The tables of benchmarks/gpu/gpu.py: of known rows."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.cases import MIB
from benchmarks.gpu.report import markdown, tables


def layer_row(layer: str, over: float, patched: float, limit: int = 8 * MIB) -> dict[str, Any]:
    undivided = {"division": "fast(8)", "predicted": 4.0, "workspace": 0, "seconds": over, "error": 1e-7}
    divided = {"division": "2xfast(4)", "predicted": 3.0, "workspace": 5 * MIB, "seconds": 1.0, "error": 1e-7}
    divided |= {"peak": 32 * MIB}
    entry = {
        "undivided": undivided,
        "divided": divided,
        "capped": 2.0,
        "capped_peak": None,
        "over": {"undivided": over, "stock": 1.5, "capped": 2.0},
    }
    return {
        "unit": {
            "group": "net",
            "layer": layer,
            "precision": "float32",
            "direction": "forward",
            "policy": "powerOfTwo",
        },
        "stock": 1.5,
        "stock_peak": 96 * MIB,
        "patched": {"limit": 64 * MIB, "seconds": 1.0, "over_stock": patched, "division": "2xfast(4)"},
        "limits": {str(limit): entry},
        "needed": {"undivided": 64 * MIB, "divided": 4 * MIB},
        "launches": 10,
        "benchmarking": 3.0,
        "planning": 0.01,
    }


ABOUT = {"device": "a GPU", "torch": "2.13.0"}


def test_summaries_of_known_rows() -> None:
    rows = {f"layers/{name}": layer_row(name, over, patched) for name, over, patched in FIGURES}
    rows["layers/none"] = {
        **layer_row("none", 1.0, 1.0),
        "limits": {
            str(8 * MIB): {
                "undivided": None,
                "divided": {"failed": "no memory", "division": "x(1)", "predicted": 1.0, "workspace": 1},
                "capped": None,
                "capped_failed": "it ended",
                "capped_peak": None,
                "over": {"undivided": None, "stock": None, "capped": None},
            }
        },
        "needed": {"undivided": None, "divided": None},
    }
    rows["iterations/net"] = {
        "unit": {"network": "net", "precision": "tf32", "limit": 64 * MIB},
        "seconds": {"stock": 0.3, "mucudnn": 0.2, "by step": 0.25},
        "peaks": {"stock": 3 * 2**30, "mucudnn": 2**30, "by step": 3 * 2**30},
        "over": {"stock": 1.5, "stock by step": 1.2},
        "failures": {"capped": "out of memory"},
        "benchmarking": 12.0,
        "planning": 0.5,
    }
    rows["costs/host"] = {"unit": {}, "stock": 10.0, "shim": 18.5, "algorithm": "e1", "part": 12.25}
    rows = {key: {"about": ABOUT, **row} for key, row in rows.items()}
    speed, steps, costs, failed, layers = tables(rows, rows=True)
    (row,) = speed.rows
    # Geometric mean of 1, 2 and 4; one layer of four has no plan that ran.
    assert row[:8] == ("powerOfTwo", "float32", "net", "8", "4 of 4", "2.000", "1.000", "4.000")
    assert row[8:] == (*("1.500",) * 3, *("2.000",) * 3, "0.900", "net slow forward")
    assert steps.rows == [
        (
            *("net", "tf32", "64", "300.000", "-", "200.000", "250.000", "1.500", "-", "1.200"),
            *("3.00", "-", "1.00", "3.00", "12.0", "0.5"),
        ),
    ]
    assert [cost for _, cost in costs.rows] == ["8.5", "12.2", "12.0", "0.04"]
    assert failed.rows == [
        ("layers/none", "8 MiB, capped: it ended"),
        ("layers/none", "8 MiB, divided: no memory"),
        ("iterations/net", "capped: out of memory"),
    ]
    assert len(layers.rows) == 4
    assert layers.rows[0][10:14] == ("5.0", "96.0", "-", "32.0")
    for made in tables(rows, rows=True):
        assert {len(made.headings)} == {len(row) for row in made.rows}
        assert made.markdown() in markdown(rows)


FIGURES = (("one", 1.0, 1.0), ("two", 2.0, 1.2), ("slow", 4.0, 0.9))
