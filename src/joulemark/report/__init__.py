"""From stored records to tables for people and programs."""

from joulemark.report.output import check_report_path, render, write_report

__all__ = ["check_report_path", "render", "write_report"]
