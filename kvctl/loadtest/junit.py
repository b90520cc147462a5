"""A load test as JUnit's XML, which CI servers read: a case for each load, objective, promise of a plan, and gate."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from kvctl.loadtest import remarks
from kvctl.loadtest.compare import Comparison, words
from kvctl.loadtest.report import ServeReport, missed
from kvctl.loadtest.run import Outcome
from kvctl.units import format_seconds

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from kvctl.loadtest.promised import Verified

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML may hold: https://www.w3.org/TR/xml/#charsets."""


def junit(report: ServeReport, comparison: Comparison | None) -> bytes:
    """The file: `error` where a load failed or nothing can be told, `failure` where an objective or a gate is missed."""
    suite = _Suite(report)
    for name, one in zip(report.names, report.outcomes, strict=True):
        suite.load(name, one)
        if report.plan.slo is not None and not report.plan.limit:
            suite.objective(name, one)
        if remarks.held_against_design(one) is not None and not report.plan.limit:
            suite.design(name, one)
    if report.limit is not None:
        suite.limit()
    if (verified := report.verified) is not None:
        suite.plan(verified)
    for matched in comparison.loads if comparison is not None else ():
        for check in matched.checks:
            case = suite.case(matched.name, f"{check.gate.words} against {comparison.earlier if comparison else ''}")
            if check.broken is not False:
                suite.bad(case, "error" if check.broken is None else "failure", "regression", words(matched, check))
    if report.interrupted:
        suite.bad(suite.case("run", "complete"), "error", "interrupted", "the run was interrupted")
    return suite.bytes()


class _Suite:
    def __init__(self, report: ServeReport) -> None:
        self.report = report
        server, environment = report.server, report.environment
        self.root = ElementTree.Element("testsuites", {"name": "kvctl serve-test"})
        seconds = sum(one.figures.seconds for one in report.outcomes)
        self.own = ElementTree.SubElement(self.root, "testsuite", {
            "name": _plain(f"kvctl serve-test {report.plan.place.root}"), "time": f"{seconds:.3f}",
            "timestamp": _plain(str(environment.get("time") or "").removesuffix("Z")),
        })  # fmt: skip
        properties = ElementTree.SubElement(self.own, "properties")
        facts = {"kvctl": report.version, **{name: server.get(name) for name in ("engine", "version", "model")}}
        for name, value in facts.items():
            ElementTree.SubElement(properties, "property", {"name": name, "value": _plain(str(value or ""))})
        self.counts = {"tests": 0, "failure": 0, "error": 0}

    def case(self, load: str, name: str, seconds: float = 0.0) -> Element:
        self.counts["tests"] += 1
        return ElementTree.SubElement(self.own, "testcase", {
            "classname": "kvctl.serve-test", "name": _plain(f"{load}: {name}"), "time": f"{seconds:.3f}",
        })  # fmt: skip

    def bad(self, case: Element, kind: str, of: str, message: str) -> None:
        self.counts[kind] += 1
        ElementTree.SubElement(case, kind, {"type": of, "message": _plain(message)}).text = _plain(message)

    def load(self, name: str, one: Outcome) -> None:
        """Whether it was answered."""
        figures = one.figures
        case = self.case(name, "answered", figures.seconds)
        if one.given_up is not None or not figures.good:
            why = one.given_up or "no request was answered"
            said = [
                f"{count:,} {kind}: {'; '.join(figures.words[kind])}" for kind, count in figures.faults.most_common()
            ]
            self.bad(case, "error", one.verdict.kind if one.given_up is None else "given-up", "\n".join([why, *said]))
        lines = [
            f"verdict: {one.verdict.kind}",
            *one.verdict.evidence,
            f"good requests: {figures.good:,} of {figures.count:,}",
        ]
        for time in ("ttft", "tpot", "e2e"):
            if (found := figures.times[time]).count:
                p50, p99 = (format_seconds(found.percentile(of).value / 1e9) for of in (50, 99))
                lines.append(f"{time}: p50 {p50}, p99 {p99}")
        ElementTree.SubElement(case, "system-out").text = _plain("\n".join(lines))

    def objective(self, name: str, one: Outcome) -> None:
        plan = self.report.plan
        assert plan.slo is not None
        case = self.case(name, f"{plan.slo.words}, p{plan.slo_percent:g}")
        if (what := missed(plan, one)) is not None:
            self.bad(case, "failure", "objective", what)

    def design(self, name: str, one: Outcome) -> None:
        """Whether prompts were found in the server's cache as they were meant to be."""
        case = self.case(name, "found in the cache as designed")
        if (what := remarks.misses_design(one, self.report.server)) is not None:
            self.bad(case, "failure", "cache", what)

    def plan(self, found: Verified) -> None:
        """Whether each thing that was promised, and can be told, held."""
        for row in found.rows:
            if row.holds is not None:
                case = self.case("plan", row.name)
                if not row.holds:
                    self.bad(case, "failure", "plan", row.words)

    def limit(self) -> None:
        """Whether the server bears one request at all: what breaks beyond is what was looked for."""
        case = self.case("limit", "at least one request at once")
        found = self.report.limit
        assert found is not None
        if found.borne is None:
            self.bad(case, "failure", "limit", found.why)
        else:
            ElementTree.SubElement(case, "system-out").text = _plain(f"{found.borne:,} at once: {found.why}")

    def bytes(self) -> bytes:
        for element in (self.root, self.own):
            element.set("tests", str(self.counts["tests"]))
            element.set("failures", str(self.counts["failure"]))
            element.set("errors", str(self.counts["error"]))
        ElementTree.indent(self.root)
        return bytes(ElementTree.tostring(self.root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _plain(text: str) -> str:
    """Without what XML cannot hold."""
    return _NOT_XML.sub("\ufffd", text)
