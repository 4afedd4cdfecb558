"""Results and training logs as pandas tables."""

import json
import sys

import numpy as np
import pytest

from safeicrl import load_metrics
from safeicrl.errors import UserError
from safeicrl.evaluation.results import Results


def found() -> Results:
    """Two tasks at two budgets, three episodes each."""
    costs = np.array([[0, 1, 2], [3, 0, 0], [1, 1, 1], [0, 0, 5.0]])
    meta = {"label": "mine", "budgets_per_task": 2}
    return Results(returns=costs + 1, costs=costs, lengths=costs + 2, budgets=np.array([1.0, 2, 3, 4]), meta=meta)


def test_results_have_a_row_per_episode():
    pytest.importorskip("pandas")
    frame = found().to_dataframe()
    names = ["label", "trial", "task", "episode", "budget", "return", "cost", "length", "over"]
    assert frame.columns.tolist() == names
    assert len(frame) == 12
    assert frame.iloc[2].tolist() == ["mine", 0, 0, 3, 1.0, 3.0, 2.0, 4.0, True]
    assert frame.iloc[6].tolist() == ["mine", 2, 0, 1, 3.0, 2.0, 1.0, 3.0, False]
    assert frame.groupby("task")["over"].sum().tolist() == [1, 2]


def test_a_training_log_has_a_column_per_number(tmp_path):
    pytest.importorskip("pandas")
    lines = [
        {"iteration": 1, "return": 0.5, "over_by_bin": [0.1, None], "both/seeds": [[1, 2], [3, 4]]},
        {"iteration": 1, "eval/total_return": 3.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in (tmp_path, tmp_path / "metrics.jsonl"):
        frame = load_metrics(path)
        assert len(frame) == 2
        assert all(kind.kind in "if" for kind in frame.dtypes)
        assert frame["both/seeds/1/0"][0] == 3
        assert np.isnan(frame["over_by_bin/1"][0])
        assert frame["eval/total_return"][1] == 3.0
    with pytest.raises(UserError, match="no training log at"):
        load_metrics(tmp_path / "none.jsonl")


def test_pandas_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"pandas is not installed: pip install 'safeicrl\[pandas\]'"):
        found().to_dataframe()
