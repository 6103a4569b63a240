"""Results of runs: tables, plots and report.html."""
