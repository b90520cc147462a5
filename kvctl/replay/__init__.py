"""Replaying traffic under allocation policies: what memory it takes, and what of that is waste."""

from kvctl.replay.report import PolicyReport, Replay
from kvctl.replay.request import Request
from kvctl.replay.run import replay
from kvctl.replay.setup import Setup

__all__ = ["PolicyReport", "Replay", "Request", "Setup", "replay"]
