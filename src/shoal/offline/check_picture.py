"""The picture of `shoal data check`: how returns and lengths of a recording are spread, and what was found.

    FILE.html    two histograms as SVG, and the findings: no script, no font, no network
    FILE.png     the histograms alone, drawn bit by bit
"""

from __future__ import annotations

import struct
import zlib
from html import escape
from pathlib import Path

import numpy as np

from shoal.errors import ConfigError
from shoal.offline.checking import BARS, RecordingReport
from shoal.offline.demo_folder import replace_file

__all__ = ["check_picture_name", "draw_picture"]

PICTURES = (".html", ".png")
WIDTH, HEIGHT, MARGIN = 480, 220, 30
INK, PAPER, BAR = (60, 60, 60), (255, 255, 255), (66, 105, 208)
GLYPHS = {"0": (7, 5, 5, 5, 7), "1": (2, 6, 2, 2, 7), "2": (7, 1, 7, 4, 7), "3": (7, 1, 7, 1, 7), "4": (5, 5, 7, 1, 1),
          "5": (7, 4, 7, 1, 7), "6": (7, 4, 7, 5, 7), "7": (7, 1, 1, 2, 2), "8": (7, 5, 7, 5, 7), "9": (7, 5, 7, 1, 7),
          "-": (0, 0, 7, 0, 0), ".": (0, 0, 0, 0, 2), "e": (0, 7, 7, 4, 7), "+": (0, 2, 7, 2, 0)}
"""Five rows of three bits."""


def check_picture_name(path: Path) -> None:
    if path.suffix not in PICTURES:
        raise ConfigError(f"--picture {path}: give a name that ends in {' or '.join(PICTURES)}")


def draw_picture(report: RecordingReport, path: Path, about: str) -> None:
    """By the suffix of the name."""
    data = _html(report, about).encode() if path.suffix == ".html" else _png(report)

    def write(draft: Path) -> None:
        draft.write_bytes(data)

    replace_file(path, write)


def _spread(values: list[float] | list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Counts of BARS ranges and their edges."""
    numbers = np.asarray(values, float)
    numbers = numbers[np.isfinite(numbers)]
    return np.histogram(numbers if len(numbers) else np.zeros(1), BARS)


# ---------------------------------------------------------------------------------------------- HTML
def _html(report: RecordingReport, about: str) -> str:
    plots = "\n".join(_svg(name, *_spread(values)) for name, values in (("return", report.returns), ("length", report.lengths)))
    findings = "\n".join(f"<li>{escape(line)}</li>" for line in report.lines()) or "<li>nothing found</li>"
    return (f'<!doctype html><meta charset="utf-8"><title>{escape(about)}</title>\n<body style="font-family:sans-serif">\n'
            f"<h1>{escape(about)}</h1>\n<p>{len(report.returns):,} episodes, {sum(report.lengths):,} steps</p>\n{plots}\n"
            f"<h2>Findings</h2>\n<ul>\n{findings}\n</ul>\n</body>\n")


def _svg(name: str, counts: np.ndarray, edges: np.ndarray) -> str:
    wide, high = (WIDTH - 2 * MARGIN) / BARS, HEIGHT - 2 * MARGIN
    parts = [f'<svg width="{WIDTH}" height="{HEIGHT}" font-size="11"><text x="{MARGIN}" y="16">{name} of episodes</text>']
    for k, count in enumerate(counts.tolist()):
        tall, x = high * count / counts.max(), MARGIN + k * wide
        parts.append(f'<rect x="{x:.1f}" y="{HEIGHT - MARGIN - tall:.1f}" width="{wide - 2:.1f}" height="{tall:.1f}" '
                     f'fill="rgb{BAR}"><title>{edges[k]:.4g} to {edges[k + 1]:.4g}: {count:,}</title></rect>')
    for k in (0, BARS // 2, BARS):
        parts.append(f'<text x="{MARGIN + k * wide:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{edges[k]:.4g}</text>')
    return "".join([*parts, f'<text x="2" y="{MARGIN + 4}">{int(counts.max()):,}</text></svg>'])


# ---------------------------------------------------------------------------------------------- PNG
def _png(report: RecordingReport) -> bytes:
    pixels = np.full((2 * HEIGHT, WIDTH, 3), PAPER, np.uint8)
    for top, values in ((0, report.returns), (HEIGHT, report.lengths)):
        counts, edges = _spread(values)
        _draw(pixels[top : top + HEIGHT], counts, edges)
    rows = np.concatenate([np.zeros((len(pixels), 1), np.uint8), pixels.reshape(len(pixels), -1)], 1)  # each begins with its filter
    header = struct.pack(">2I5B", WIDTH, 2 * HEIGHT, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
                                           for kind, data in chunks)


def _draw(pixels: np.ndarray, counts: np.ndarray, edges: np.ndarray) -> None:
    wide, high, floor = (WIDTH - 2 * MARGIN) // BARS, HEIGHT - 2 * MARGIN, HEIGHT - MARGIN
    for k, count in enumerate(counts.tolist()):
        left = MARGIN + k * wide
        pixels[floor - round(high * count / counts.max()) : floor, left : left + wide - 2] = BAR
    pixels[floor, MARGIN : WIDTH - MARGIN] = INK
    for k in (0, BARS // 2, BARS):
        _write(pixels, f"{edges[k]:.3g}", MARGIN + k * wide, floor + 8)
    _write(pixels, str(int(counts.max())), MARGIN, 8)


def _write(pixels: np.ndarray, text: str, x: int, y: int, size: int = 2) -> None:
    """A number around x, below y."""
    x = max(2, min(x - 2 * size * len(text), WIDTH - 4 * size * len(text) - 2))
    for sign in text:
        for row, bits in enumerate(GLYPHS.get(sign, (0,) * 5)):
            for column in range(3):
                if bits >> (2 - column) & 1:
                    pixels[y + size * row : y + size * (row + 1), x + size * column : x + size * (column + 1)] = INK
        x += 4 * size
