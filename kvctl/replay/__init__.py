"""Replaying traffic under allocation policies: what memory it takes, and what of that is waste."""

from kvctl.replay.presets import PRESETS, preset
from kvctl.replay.report import PolicyReport, Replay
from kvctl.replay.request import Request
from kvctl.replay.run import POLICIES, replay
from kvctl.replay.setup import Setup
from kvctl.replay.trace import read_trace

__all__ = ["POLICIES", "PRESETS", "PolicyReport", "Replay", "Request", "Setup", "preset", "read_trace", "replay"]
