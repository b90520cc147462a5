"""Tokens and bytes, read from and written for people."""

from __future__ import annotations

import math
import re

from kvctl.errors import UsageError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
BINARY = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))

_TOKENS = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmM]?)")
_TOKEN_FACTORS = {"": 1, "k": 1024, "m": 1024 * 1024}
MAX_TOKENS = 2**40


def parse_tokens(text: str, *, what: str = "--ctx") -> int:
    """Read "4096", "4k" (4,096) or "1m" (1,048,576) as a number of tokens."""
    match = _TOKENS.fullmatch(_bare(text)) if len(text) <= 40 else None
    if match is None:
        raise UsageError(f"{what}: {text[:40]!r} is not a number of tokens", hint="write 4096, 4k or 1m (k is 1,024)")
    whole, _, decimals = match[1].partition(".")
    scale: int = 10 ** len(decimals)
    number, rest = divmod(int(whole + decimals) * _TOKEN_FACTORS[match[2].lower()], scale)
    if rest:
        raise UsageError(f"{what}: {text!r} is not a whole number of tokens")
    if not 0 <= number <= MAX_TOKENS:
        raise UsageError(f"{what}: {text!r} is out of range", hint=f"at most {MAX_TOKENS:,} tokens")
    return number


_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(?![\d,])")


def _bare(text: str) -> str:
    """Without marks of thousands; any other comma may stand for a decimal point, and stays."""
    text = text.strip().replace("_", "")
    return text.replace(",", "") if _THOUSANDS.match(text) else text


_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)
_BYTE_FACTORS = {
    "": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip


def parse_bytes(text: str, *, what: str) -> int:
    """Read "16GiB" (2^30 each), "16GB" (10^9 each) or plain bytes; a fraction of a byte is dropped."""
    match = _BYTES.fullmatch(_bare(text)) if len(text) <= 40 else None
    factor = _BYTE_FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"{what}: {text[:40]!r} is not an amount of memory", hint="write 16GiB (2^30), 16GB (10^9) or bytes"
        )
    whole, _, decimals = match[1].partition(".")
    count: int = int(whole + decimals) * factor // 10 ** len(decimals)
    if not 0 < count <= 2**60:
        raise UsageError(f"{what}: {text!r} is out of range", hint="from 1 byte to 1024 PiB")
    return count


def parse_token_list(text: str, *, what: str = "--ctx") -> tuple[int, ...]:
    """Read "4k,32k,128k"; order is kept, repeats are dropped."""
    if re.fullmatch(r"\d{1,3}(,\d{3})+", text.strip()):
        whole = text.strip().replace(",", "")
        raise UsageError(
            f"{what}: {text.strip()} could be one number or several",
            hint=f"{what} {whole}, or {what} '{' '.join(text.strip().split(','))}'",
        )
    parts = [part for part in re.split(r"[,\s]+", text.strip()) if part]
    if not parts:
        raise UsageError(f"{what}: empty list", hint="write for example --ctx 4k,32k,128k")
    return tuple(dict.fromkeys(parse_tokens(part, what=what) for part in parts))


def format_bytes(count: int) -> str:
    """Binary units, as GPUs count: 1 GiB is 2^30 bytes."""
    for unit, size in BINARY:
        if count >= size:
            return f"{_number(count / size)} {unit}"
    return f"{count} B"


def _number(value: float) -> str:
    """Four significant digits up to 9,999; whole numbers bare ("40 GiB", not "40.00 GiB")."""
    if value == int(value):
        return f"{int(value):,}"
    digits = 2 if value < 100 else 1
    return f"{value:,.{digits}f}"


def format_seconds(seconds: float) -> str:
    """Three digits: 850 µs, 12.3 ms, 1.25 s, 1,234 s."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:
            count = seconds / size
            digits = max(0, 2 - math.floor(math.log10(count * 1.0005)))
            return f"{count:,.{digits}f} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0 s"


def format_rate(value: float) -> str:
    """A rate, with a digit after the point where it is small: 1,234, 86, 4.3, 0.61."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def format_count(count: int) -> str:
    """Parameters: 72.7B, 134.5M."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}" if count / size < 1000 else f"{count / size:.0f}{unit}"
    return str(count)


def plural(count: int, noun: str) -> str:
    """1 layer, 2 layers."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
