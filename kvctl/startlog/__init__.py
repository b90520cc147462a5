"""Start-up logs of engines: read, put into kvctl's terms, and explained."""

from kvctl.startlog.explain import explain
from kvctl.startlog.log import StartLog, read_log
from kvctl.startlog.report import LogReport, LogRow, Refused

__all__ = ["LogReport", "LogRow", "Refused", "StartLog", "explain", "read_log"]
