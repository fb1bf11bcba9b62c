"""Is it slower? Effects, their uncertainty between processes, verdicts, and how often verdicts err (pure)."""
