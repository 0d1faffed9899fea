"""Evidence: records, statistics, verdicts, tables, figures, the report. It names no study."""
