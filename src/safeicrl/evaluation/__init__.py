"""The paper's evaluation: results, statistics, tables, plots."""
