"""Colours by name, for light and for dark backgrounds.

The curves follow Okabe and Ito's palette (2008), which people of every colour vision tell
apart, without its yellow and black, and lightened or darkened to stand out on each background.
"""

from __future__ import annotations

LIGHT = {
    "background": "#ffffff", "text": "#1f2328", "muted": "#59636e", "grid": "#e6e8eb", "axis": "#8c959f",
    "limit": "#59636e",
    "curve0": "#0072b2", "curve1": "#d55e00", "curve2": "#009e73", "curve3": "#cc79a7",
    "curve4": "#e69f00", "curve5": "#56b4e9", "curve6": "#7a5c3e", "curve7": "#6e6e6e",
}  # fmt: skip

DARK = {
    "background": "#16191d", "text": "#e6e9ec", "muted": "#9aa4af", "grid": "#2a2f36", "axis": "#6b7580",
    "limit": "#aab4be",
    "curve0": "#3fa7e8", "curve1": "#ff8b3d", "curve2": "#2fcf9f", "curve3": "#e7a1c8",
    "curve4": "#f2c14e", "curve5": "#a5daf7", "curve6": "#c4a27e", "curve7": "#b4b4b4",
}  # fmt: skip
