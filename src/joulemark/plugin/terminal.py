"""What the terminal shows of a session: a header, a line per case as it ends, and the tables."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from joulemark.plugin.header import header_lines, write_summary

if TYPE_CHECKING:
    from joulemark.plugin.session import BenchSession

_FILES_NAMED = 3
_ENDS = ("call", "???")
"""Phases whose report ends a case; the second is what xdist calls the death of a worker."""


class Terminal:
    """Hooks by which a session speaks."""

    def __init__(self, session: BenchSession) -> None:
        self.session = session
        self._of_pytest: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keep what holds the exit status."""
        self._of_pytest = session

    def pytest_report_header(self) -> list[str]:
        """Which devices, clocks and instruments are in use and what is off and why."""
        if self.session.journal is None:
            return []
        return header_lines(self.session)

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> list[str]:
        """How many cases run beside those of the models that were named: without a path, that may be most of them."""
        session = self.session
        if session.options.models is None or session.sweep is None or session.is_child:
            return []
        from joulemark.plugin.sweep import describe
        from joulemark.report.escape import printable

        named = {describe(one, session.own, session.config.rootpath)[0] for one in session.options.models}
        cases = [(one.nodeid, one.case) for one in session.sweep.plan(items) if one.case is not None]
        files = Counter(nodeid.partition("::")[0] for nodeid, case in cases if case.workload not in named)
        if not files:
            return []
        largest = ", ".join(f"{file} {count}" for file, count in files.most_common(_FILES_NAMED))
        more = ", …" if len(files) > _FILES_NAMED else ""
        line = f"--bench-models: {files.total()} of {len(cases)} cases are of no model that it names, and run too"
        return [f"{line}: {printable(largest)}{more} (name files to leave them out)"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Progress is a line per case, not a dot."""
        if self.session.is_child or report.when not in _ENDS or hasattr(report, "wasxfail"):
            return None
        properties = dict(report.user_properties)
        outcome = "regressed" if "regressed" in properties else str(properties.get("outcome", report.outcome))
        category = report.outcome if not report.passed or outcome == "ok" else outcome
        return category, "", outcome.upper()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the line of the case that has just ended."""
        if self.session.journal is None or not self.session.journal.records or report.when not in _ENDS:
            return
        record = self.session.journal.records[-1]
        reporter = self.session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and record.nodeid == report.nodeid and reporter.verbosity >= 0:
            from joulemark.report.escape import printable

            reporter.ensure_newline()
            reporter.write_line(printable(self.session.journal.status(record)))

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        """Tables, Findings, and where the records are; nothing of a session that was refused: its error says why.

        One that was fine but for a report that cannot be written ends as one of wrong use.
        """
        journal = self.session.journal
        if journal is None or self.session.config.option.collectonly:
            return
        if exitstatus == pytest.ExitCode.USAGE_ERROR and not journal.records:
            return
        if not write_summary(self.session, terminalreporter) and exitstatus == pytest.ExitCode.OK:
            assert self._of_pytest is not None
            self._of_pytest.exitstatus = pytest.ExitCode.USAGE_ERROR
