"""The report: the paper's figures and tables from stored results, as one page."""
