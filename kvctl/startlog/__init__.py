"""Start-up logs of engines: read, put into kvctl's terms, and explained."""

from kvctl.startlog.log import StartLog, read_log

__all__ = ["StartLog", "read_log"]
