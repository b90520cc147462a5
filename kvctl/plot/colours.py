"""Colours by name, for light and for dark backgrounds.

The first four curves have Okabe and Ito's blue, vermilion, green and purple (2008); the others were chosen
so that all eight stay apart under every kind of colour blindness (Machado et al. 2009) and stand out from
the background by 3:1 (WCAG 2.1, 1.4.11).
"""

from __future__ import annotations

LIGHT = {
    "background": "#ffffff", "text": "#1f2328", "muted": "#59636e", "grid": "#e6e8eb", "axis": "#8c959f",
    "limit": "#59636e", "bad": "#c0392b",
    "curve0": "#0072b2", "curve1": "#d55e00", "curve2": "#009e73", "curve3": "#cc79a7",
    "curve4": "#8424e8", "curve5": "#0095fa", "curve6": "#7a1030", "curve7": "#293585",
}  # fmt: skip

DARK = {
    "background": "#16191d", "text": "#e6e9ec", "muted": "#9aa4af", "grid": "#2a2f36", "axis": "#6b7580",
    "limit": "#aab4be", "bad": "#ff7b72",
    "curve0": "#3fa7e8", "curve1": "#ff8b3d", "curve2": "#2fcf9f", "curve3": "#e08fc0",
    "curve4": "#ffe08a", "curve5": "#bfe6ff", "curve6": "#a0623a", "curve7": "#7d7dff",
}  # fmt: skip
